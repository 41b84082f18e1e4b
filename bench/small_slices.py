"""Many small slices, each a tensor: the shard's own apply beside torch's optimizers over a list of as many tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from bench.harness import Took, Turn, last_level_cache_bytes, timed
from bench.kernel_work import optimizer_of
from bench.rule_case import Case, state_names
from psstore import _core

SLICES_PER_FRAME = 1000
"""The wire allows 4096."""

FLOAT32 = _core.DTYPES["float32"]

INCARNATION = 1


@dataclass(frozen=True)
class SmallTask:
    case: Case
    num_workers: int
    num_slices: int
    num_elems: int

    def __str__(self) -> str:
        return f"{self.case}, W = {self.num_workers}, {self.num_slices} × {4 * self.num_elems >> 10} KiB"

    @property
    def num_bytes(self) -> int:
        """As `bytes_per_parameter` of kernel_work.Task."""
        num_passes = self.num_workers + 2 + 2 * len(state_names(self.case))
        return 4 * self.num_elems * self.num_slices * num_passes


def shard_turn(task: SmallTask) -> Turn:
    """Times what a shard does with a decision once all contributions are staged; staging is not timed."""
    shard = _core.Shard(index=1)
    keys = [tensor << _core.SLICE_INDEX_BITS for tensor in range(task.num_slices)]
    for tensor, key in enumerate(keys):
        rule = _core.RULES[task.case.rule]
        shard.define(tensor, dtype=FLOAT32, rule=rule, group=0, zeros=True, slices=[(key, task.num_elems)])
    evict = _evictor()

    def turn() -> Took:
        number = shard.version + 1
        for rank in range(task.num_workers):
            _push(shard, keys, task.num_elems, rank=rank, round=number)
        decision = _decision(task, number)

        def apply() -> None:
            shard.advance(decision)
            shard.settle()

        evict()
        return timed(apply)

    return turn


def torch_turn(task: SmallTask, *, fused: bool) -> Turn:
    """The sums are made in the first worker's gradients, which are what the optimizer reads: nothing is copied."""
    shape = (task.num_slices, task.num_elems)
    workers = [list(torch.randn(shape)) for _ in range(task.num_workers)]
    parameters = [torch.nn.Parameter(torch.zeros(task.num_elems)) for _ in range(task.num_slices)]
    for parameter, gradient in zip(parameters, workers[0], strict=True):
        parameter.grad = gradient
    optimizer = optimizer_of(task.case, parameters, fused=fused)
    evict = _evictor()

    def step() -> None:
        for other in workers[1:]:
            torch._foreach_add_(workers[0], other)
        if task.num_workers > 1:
            torch._foreach_div_(workers[0], task.num_workers)
        optimizer.step()

    def turn() -> Took:
        evict()
        return timed(step)

    return turn


def _decision(task: SmallTask, number: int) -> _core.Decision:
    members = [(rank, INCARNATION, number, 1.0) for rank in range(task.num_workers)]
    return _core.Decision(
        number,
        skip=False,
        divisor=float(task.num_workers),
        members=members,
        hypers={0: task.case.hyper},
        present={rank: [(0, task.num_slices)] for rank in range(task.num_workers)},
    )


def _push(shard: _core.Shard, keys: Sequence[int], num_elems: int, *, rank: int, round: int) -> None:
    for begin in range(0, len(keys), SLICES_PER_FRAME):
        table = _core.SliceTable((key, 4 * num_elems, FLOAT32) for key in keys[begin : begin + SLICES_PER_FRAME])
        head = _core.encode_frame(
            _core.OPS["PUSH"],
            round=round,
            rank=rank,
            incarnation=INCARNATION,
            table=table,
            payload_bytes=table.payload_bytes,
        )
        payload = np.full(table.payload_bytes // 4, rank + 1, np.float32)
        decoder = _core.FrameDecoder()
        decoder.feed(head)
        frame = decoder.next_frame()
        assert frame is not None
        destination = shard.admit(frame)
        assert destination is not None
        decoder.accept(destination)
        decoder.feed(payload.tobytes())
        complete = decoder.next_frame()
        assert complete is not None
        shard.stage(complete)


def _evictor() -> Callable[[], object]:
    """Fills the last-level cache with something else, so that nobody finds there what was just made."""
    filler = np.zeros(2 * last_level_cache_bytes(), np.uint8)
    return lambda: filler.fill(1)
