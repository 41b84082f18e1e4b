"""The fused pass on a GPU gives the processor's bytes: every rule and option, dtype, encoding, number of workers, size
and alignment, with fresh random numbers, poisoned outputs and guards."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from bench.rule_case import Case

from psstore import _core
from tests.gpu.support import (
    CASES,
    REFERENCE,
    Engine,
    Problem,
    answers,
    check_case,
    check_mixed_batch,
    check_squares,
    compare,
    fresh_seed,
    on_a_gpu,
    placed,
    problems_of,
)

pytestmark = on_a_gpu

GPU = Engine("cuda:0")

ADAM = Case("adam", {})


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gpu_takes_every_step_as_the_processor_does(case: Case) -> None:
    check_case(GPU, case)


@pytest.mark.sanitized
def test_gpu_takes_steps_of_all_kinds_in_one_batch() -> None:
    check_mixed_batch(GPU, num_problems=100)


@pytest.mark.sanitized
def test_gpu_sums_squares_as_the_processor_does() -> None:
    check_squares(GPU)


def test_gpu_updates_10_000_slices_at_once() -> None:
    seed = fresh_seed()
    problems = [Problem(ADAM, "float32", 1024, ("float32",) * 2, seed=seed + n, step=2) for n in range(10_000)]
    compare(problems, answers(problems, GPU), answers(problems, REFERENCE))


def test_gpu_updates_with_no_slice_do_nothing() -> None:
    GPU.update(_core.SliceBatch())


def test_gpu_queues_work_side_by_side() -> None:
    """Eight queues with batches of their own, none of which is waited for before all are queued."""
    engines = [Engine("cuda:0") for _ in range(8)]
    problems = [problems_of(CASES[5 * n], seed=fresh_seed()) for n in range(len(engines))]
    queued = [placed(some, engine) for some, engine in zip(problems, engines, strict=True)]
    torch.cuda.synchronize()
    for engine, (_, batch) in zip(engines, queued, strict=True):
        batch.queue_reduce_update(engine.queue)
    for engine, (slices, _), some in zip(engines, queued, problems, strict=True):
        engine.finish()
        compare(some, [one.answer() for one in slices], answers(some, REFERENCE))


def test_gpu_queues_wait_for_each_other_by_fences() -> None:
    """Ten steps of one slice, each on the other one of two queues."""
    queues = [GPU.device.make_queue() for _ in range(2)]
    problem = Problem(Case("sgd", {"momentum": 0.9}), "float32", 5_000_011, ("float32",) * 3, seed=fresh_seed(), step=2)
    (slices, ours), (expected, theirs) = (placed([problem], one) for one in (GPU, REFERENCE))
    torch.cuda.synchronize()
    for step in range(10):
        ours.queue_reduce_update(queues[step % 2])
        queues[1 - step % 2].wait_for(queues[step % 2].record())
        REFERENCE.update(theirs)
    queues[0].record().wait()
    compare([problem], [slices[0].answer()], [expected[0].answer()])


def test_gpu_tables_are_not_written_over_while_a_launch_reads_them() -> None:
    """Hundreds of launches are queued behind one that keeps the device busy, each with other numbers."""
    problems = [Problem(ADAM, "float32", 1000, ("float32",), seed=fresh_seed(), step=2) for _ in range(300)]
    queued = [placed([problem], GPU) for problem in problems]
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.ExternalStream(GPU.queue.stream)):  # type: ignore[no-untyped-call]
        torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
    for _, batch in queued:
        batch.queue_reduce_update(GPU.queue)
    GPU.finish()
    compare(problems, [slices[0].answer() for slices, _ in queued], answers(problems, REFERENCE))


def test_gpu_indexes_beyond_32_bits() -> None:
    """A slice of more than 2^31 elements: its first, its last and those around 2^31 are the processor's."""
    num_elems = (1 << 31) + 12_345
    if torch.cuda.mem_get_info()[0] < 12 * num_elems:
        pytest.skip("needs 26 GB of free memory on the GPU")
    value, gradient = (torch.empty(num_elems, device="cuda").normal_() for _ in range(2))
    windows = [slice(start, start + 4096) for start in (0, (1 << 30) - 2048, (1 << 31) - 2048, num_elems - 4096)]
    before = [(value[window].cpu(), gradient[window].cpu()) for window in windows]
    batch = _core.SliceBatch()
    _add_sgd(batch, value, gradient)
    GPU.update(batch)
    for window, (old, grad) in zip(windows, before, strict=True):
        here = _core.SliceBatch()
        _add_sgd(here, old, grad)
        here.reduce_update()
        np.testing.assert_array_equal(value[window].cpu().numpy(), old.numpy(), strict=True)


def _add_sgd(batch: _core.SliceBatch, value: torch.Tensor, gradient: torch.Tensor) -> None:
    batch.add(
        _core.RULES["sgd"],
        Case("sgd", {}).hyper,
        step=1,
        dtype=_core.DTYPES["float32"],
        num_elems=value.numel(),
        value=value.data_ptr(),
        state={},
        contributions=[(gradient.data_ptr(), _core.DTYPES["float32"], 0.7, 0)],
        divisor=3.0,
    )
