"""The contestants of `gpu`'s steps: sum W gradients, divide, apply the rule, all in device memory.

Each has a value and states of its own; the gradients are the same memory for all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from bench.gpu_timing import Bench, Launch
from bench.kernel_work import optimizer_of
from bench.rule_case import Case, state_names
from psstore import _core

SLICE_ELEMS = 1 << 18
"""1 MiB of floats: four slices of the store's."""

ITEM_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Task:
    case: Case
    num_workers: int
    inputs: str
    """The dtype of the gradients: float32, or bfloat16 with a bfloat16 shadow of the value, as in mixed precision."""
    num_elems: int
    slice_elems: int = SLICE_ELEMS

    def __str__(self) -> str:
        return f"{self.case}, W = {self.num_workers}, {self.inputs}"

    @property
    def has_shadow(self) -> bool:
        return self.inputs == "bfloat16"

    @property
    def bytes_per_parameter(self) -> int:
        """Gradients, value and states read once, value and states written once, and the shadow."""
        states = len(state_names(self.case))
        return self.num_workers * ITEM_BYTES[self.inputs] + 8 + 8 * states + (2 if self.has_shadow else 0)

    @property
    def num_bytes(self) -> int:
        return self.bytes_per_parameter * self.num_elems


def gradients(bench: Bench, task: Task) -> torch.Tensor:
    """(num_workers, num_elems)"""
    dtype = getattr(torch, task.inputs)
    rows = torch.empty(task.num_workers, task.num_elems, dtype=dtype, device=bench.torch_device)
    for rank, row in enumerate(rows):
        row.copy_(bench.random(task.num_elems, seed=rank))
    return rows


def fused_pass(bench: Bench, task: Task, grads: torch.Tensor) -> Launch:
    """Ours: one batch of all slices, one pass."""
    value = bench.zeros(task.num_elems)
    states = {name: bench.zeros(task.num_elems) for name in state_names(task.case)}
    shadow = bench.empty(task.num_elems, torch.bfloat16) if task.has_shadow else None
    batch = _core.SliceBatch()
    for begin in range(0, task.num_elems, task.slice_elems):
        part = slice(begin, min(begin + task.slice_elems, task.num_elems))
        batch.add(
            _core.RULES[task.case.rule],
            task.case.hyper,
            step=2,
            dtype=_core.DTYPES["float32"],
            num_elems=part.stop - part.start,
            value=value[part].data_ptr(),
            state={name: state[part].data_ptr() for name, state in states.items()},
            contributions=[(row[part].data_ptr(), _core.DTYPES[task.inputs], 1.0, 0) for row in grads],
            divisor=float(task.num_workers),
            shadow=0 if shadow is None else shadow[part].data_ptr(),
        )

    def launch() -> object:
        batch.queue_reduce_update(bench.queue)
        return value, states, shadow, grads  # which the batch knows by their addresses alone

    return launch


def adds_and_fused(bench: Bench, task: Task, grads: torch.Tensor) -> Launch:
    """Copy, add, update: what a store does that sums each gradient as it comes, then torch's fused optimizer."""
    return _torch_launch(bench, task, grads, _added)


def mean_and_fused(bench: Bench, task: Task, grads: torch.Tensor) -> Launch:
    """torch at its best: one kernel for the mean of all rows, then its fused optimizer."""
    return _torch_launch(bench, task, grads, _averaged)


Reduce = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""The mean of the rows of the first, made in the second."""


def _torch_launch(bench: Bench, task: Task, grads: torch.Tensor, reduced: Reduce) -> Launch:
    parameter = torch.nn.Parameter(bench.zeros(task.num_elems))
    optimizer = optimizer_of(task.case, [parameter], fused=True)
    total = bench.empty(task.num_elems)
    shadow = bench.empty(task.num_elems, torch.bfloat16) if task.has_shadow else None
    as_it_is = task.num_workers == 1 and grads.dtype == parameter.dtype

    def launch() -> None:
        parameter.grad = grads[0] if as_it_is else reduced(grads, total)
        optimizer.step()
        if shadow is not None:
            shadow.copy_(parameter.detach())

    return launch


def _added(grads: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    total.copy_(grads[0])
    for row in grads[1:]:
        total.add_(row)
    return total.div_(len(grads)) if len(grads) > 1 else total


def _averaged(grads: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    return torch.mean(grads, dim=0, dtype=total.dtype, out=total)


def copy(bench: Bench, num_bytes: int) -> Launch:
    """The limit: reads as many bytes as it writes, `num_bytes` together."""
    source, destination = (bench.zeros(num_bytes // 2, torch.uint8) for _ in range(2))
    source.random_(256)
    return lambda: destination.copy_(source)


# ---- many small slices ----


def fused_over_list(bench: Bench, task: Task, grads: torch.Tensor) -> Launch:
    """torch's fused optimizer over a tensor for each slice; the sums are made in the first worker's gradients."""
    parameters = [torch.nn.Parameter(part) for part in bench.zeros(task.num_elems).view(-1, task.slice_elems)]
    workers = [list(row.view(-1, task.slice_elems)) for row in grads.clone()]
    for parameter, gradient in zip(parameters, workers[0], strict=True):
        parameter.grad = gradient
    optimizer = optimizer_of(task.case, parameters, fused=True)

    def launch() -> None:
        for other in workers[1:]:
            torch._foreach_add_(workers[0], other)
        if task.num_workers > 1:
            torch._foreach_div_(workers[0], task.num_workers)
        optimizer.step()

    return launch
