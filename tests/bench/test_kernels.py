"""The kernels' bench: that its contestants do the same work. Nothing here looks at how long anything took."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from bench import encoders
from bench.harness import Series
from bench.kernel_inputs import READS
from bench.kernel_work import Task, core_work, numpy_work, plain_work, torch_work
from bench.kernels import CASES, OURS, measure_small, row, small_row
from bench.rule_case import Case
from bench.small_slices import SmallTask

SGD_CASES = [case for case in CASES if case.rule == "sgd"]
"""Adam's first steps depend on their number, which the contestants do not share."""


@pytest.mark.parametrize("inputs", READS)
@pytest.mark.parametrize("case", SGD_CASES, ids=str)
def test_contestants_come_to_the_same_values(case: Case, inputs: str) -> None:
    task = Task(case, num_workers=3, inputs=inputs, num_threads=1, num_slots=2, num_elems=1024)
    ours, *others = (task.arrays() for _ in range(4 if inputs == "float32" else 3))
    core_work(task, ours)(1)
    torch_work(task, others[0], fused=True)(1)
    torch_work(task, others[1], fused=False)(1)
    if inputs == "float32":
        numpy_work(task, others[2])(1)
    for other in others:
        np.testing.assert_allclose(other, ours, rtol=1e-6)
    assert not np.array_equal(ours[1], task.arrays()[1])


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_the_plain_loop_runs_on_every_dtype() -> None:
    for inputs in READS:
        task = Task(CASES[-1], num_workers=2, inputs=inputs, num_threads=1, num_slots=1, num_elems=1024)
        plain_work(task)(0)


def test_small_slices_are_measured_in_a_shard() -> None:
    task = SmallTask(CASES[-1], num_workers=2, num_slices=3, num_elems=256)
    threads = torch.get_num_threads()
    found = measure_small(task, rounds=1)
    torch.set_num_threads(threads)
    assert small_row(task, found)[:3] == ["adam()", "2", "1 KiB"]
    assert task.num_bytes == 3 * 256 * 4 * (2 + 2 + 2 * 2)


@pytest.mark.parametrize("encoding", ["int8", "sign", "topk"])
def test_encoders_lose_the_same(encoding: str) -> None:
    task = encoders.EncoderTask(encoding, num_slots=2, num_elems=1024)
    ours, torchs = task.residuals(), task.residuals()
    for _ in range(2):
        encoders.core_work(task, task.sources(), ours)(1)
        encoders.torch_work(task, task.sources(), torchs)(1)
    np.testing.assert_allclose(ours, torchs, rtol=1e-4, atol=1e-6)
    assert ours[1].any()


@pytest.mark.parametrize("encoding", ["bfloat16", "int8", "sign", "topk"])
def test_encoders_are_measured(encoding: str) -> None:
    task = encoders.EncoderTask(encoding, num_slots=2, num_elems=1024)
    threads = torch.get_num_threads()
    found = encoders.measure(task, rounds=1)
    torch.set_num_threads(threads)
    assert encoders.row(task, found)[0] == encoding


def test_a_row_tells_how_many_times_as_fast() -> None:
    task = Task(CASES[0], num_workers=4, inputs="float32", num_threads=1, num_slots=1, num_elems=250_000)
    found = {OURS: Series((0.001, 0.002, 0.003), (0.002, 0.003, 0.004)), "plain loop": Series((0.001,), (0.001,))}
    ours = "12.0 (8.00–24.0)"
    assert row(task, found) == ["sgd()", "4", "float32", "1", "24", ours, 24.0, 0.5, None, None, None, 0.125]
