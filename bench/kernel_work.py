"""One step on one slice, as each contestant of `kernels` takes it: sum the workers' gradients, divide, apply the rule.

All read the same gradients, and have states of their own; `values` are a slice each, and are changed in place.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bench.kernel_inputs import READS, Add, Bytes, Floats, Read, adding, gradients, payload_bytes
from bench.rule_case import Case, state_names
from psstore import _core

Work = Callable[[int], object]
"""Takes a step on the slice of that number."""

FLOAT32 = _core.DTYPES["float32"]

NUMPY_BLOCK = 1 << 14
"""Elements that numpy works on at a time: what it makes on the way stays in the second-level cache."""


@dataclass(frozen=True)
class Task:
    """What is measured."""

    case: Case
    num_workers: int
    inputs: str
    """The dtype of the gradients."""
    num_threads: int
    num_slots: int
    num_elems: int

    def __str__(self) -> str:
        return f"{self.case}, W = {self.num_workers}, {self.inputs}, {self.num_threads} threads"

    @property
    def num_states(self) -> int:
        return len(state_names(self.case))

    @property
    def bytes_per_parameter(self) -> float:
        """DESIGN: contributions are read, value and states read and written."""
        return self.num_workers * payload_bytes(self.inputs, self.num_elems) / self.num_elems + 8 + 8 * self.num_states

    @property
    def gradients(self) -> list[list[Bytes]]:
        """(worker, slot): as they come over the wire."""
        return gradients(self.num_workers, self.inputs, self.num_slots, self.num_elems)

    def arrays(self, content: float = 0.5) -> list[Floats]:
        """One for each slice: values before the first step, by default."""
        return [np.full(self.num_elems, content, np.float32) for _ in range(self.num_slots)]

    def states(self) -> dict[str, list[Floats]]:
        """By name, before the first step."""
        return {name: self.arrays(0) for name in state_names(self.case)}


def core_work(
    task: Task, values: Sequence[Floats], *, dropped: int | None = None, bases: Sequence[Floats] | None = None
) -> Work:
    """`dropped`: the workers are sorted by element, and so many left out at either end; None: all are summed.
    `bases`: the values from where gradients are compensated."""
    gradients = task.gradients
    states = task.states()

    def work(slot: int) -> None:
        _core.reduce_update(
            _core.RULES[task.case.rule],
            task.case.hyper,
            step=2,
            value=values[slot].data,
            state={name: arrays[slot].data for name, arrays in states.items()},
            contributions=[(worker[slot].data, _core.DTYPES[task.inputs], 1.0) for worker in gradients],
            divisor=float(task.num_workers - 2 * (dropped or 0)),
            dtype=FLOAT32,
            sorts=None if dropped is None else (0, dropped),
            base=None if bases is None else bases[slot].data,
            compensation=0.0 if bases is None else 0.04,
        )

    return work


def plain_work(task: Task) -> Work:
    loop = _compiled(READS[task.inputs], task.num_workers, 1 + task.num_states)
    changed = [task.arrays() for _ in range(1 + task.num_states)]

    def work(slot: int) -> None:
        reads = _pointers([worker[slot] for worker in task.gradients])
        loop(reads, _pointers([array[slot] for array in changed]), ctypes.c_int64(task.num_elems))

    return work


def torch_work(task: Task, values: Sequence[Floats], *, fused: bool) -> Work:
    """One optimizer for each slice, so that the sum is in the cache still when it is applied: its best setting."""
    parameters = [torch.nn.Parameter(torch.from_numpy(value)) for value in values]
    optimizers = [optimizer_of(task.case, [parameter], fused=fused) for parameter in parameters]
    add = [[adding(task.inputs, one, task.num_elems) for one in worker] for worker in task.gradients]
    sole = task.num_workers == 1 and task.inputs == "float32"
    views = [torch.from_numpy(one.view(np.float32)) for one in task.gradients[0]] if sole else []

    def work(slot: int) -> None:
        parameters[slot].grad = views[slot] if sole else _mean([worker[slot] for worker in add])
        optimizers[slot].step()

    return work


def numpy_work(task: Task, values: Sequence[Floats]) -> Work:
    states = list(task.states().values())
    block = min(NUMPY_BLOCK, task.num_elems)
    total, spare = np.empty(block, np.float32), np.empty(block, np.float32)
    steps: dict[int, Callable[..., None]] = {0: _numpy_sgd, 1: _numpy_momentum, 2: _numpy_adam}
    step = steps[task.num_states]

    def work(slot: int) -> None:
        floats = [worker[slot].view(np.float32) for worker in task.gradients]
        for begin in range(0, task.num_elems, block):
            part = slice(begin, begin + block)
            np.divide(floats[0][part], task.num_workers, out=total)
            for one in floats[1:]:
                total[:] += np.divide(one[part], task.num_workers, out=spare)
            step(values[slot][part], total, spare, *(state[slot][part] for state in states))

    return work


def optimizer_of(case: Case, parameters: list[torch.nn.Parameter], *, fused: bool) -> torch.optim.Optimizer:
    if case.rule == "sgd":
        momentum = case.hyper["momentum"]
        return torch.optim.SGD(parameters, lr=1e-3, momentum=momentum, fused=fused, foreach=not fused)
    return torch.optim.Adam(parameters, fused=fused, foreach=not fused)


def _mean(adds: Sequence[Add]) -> torch.Tensor:
    total = None
    for add in adds:
        total = add(total)
    assert total is not None
    return total.div_(len(adds))


def _numpy_sgd(value: Floats, gradient: Floats, spare: Floats) -> None:
    value -= np.multiply(gradient, np.float32(1e-3), out=spare)


def _numpy_momentum(value: Floats, gradient: Floats, spare: Floats, momentum_buffer: Floats) -> None:
    momentum_buffer *= np.float32(0.9)
    momentum_buffer += gradient
    _numpy_sgd(value, momentum_buffer, spare)


def _numpy_adam(value: Floats, gradient: Floats, spare: Floats, exp_avg: Floats, exp_avg_sq: Floats) -> None:
    exp_avg += np.multiply(np.subtract(gradient, exp_avg, out=spare), np.float32(0.1), out=spare)
    exp_avg_sq *= np.float32(0.999)
    exp_avg_sq += np.multiply(np.multiply(gradient, gradient, out=spare), np.float32(0.001), out=spare)
    np.add(np.sqrt(exp_avg_sq, out=spare), np.float32(1e-8), out=spare)
    value -= np.multiply(np.divide(exp_avg, spare, out=spare), np.float32(1e-3), out=spare)


def _pointers(arrays: Sequence[npt.NDArray[Any]]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(arrays))(*(array.ctypes.data for array in arrays))


@lru_cache
def _compiled(read: Read, num_reads: int, num_changed: int) -> Callable[..., None]:
    """plain_loop.c for that mix."""
    return compiled("plain_loop", READ=read.c_type, ELEMS=read.elems, READS=num_reads, CHANGED=num_changed)


def compiled(name: str, **macros: str | int) -> Callable[..., Any]:
    """The function of that name in a C file of that name."""
    source = Path(__file__).with_name(f"{name}.c")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / f"{name}.so"
        defined = [f"-D{macro}={value}" for macro, value in macros.items()]
        flags = ["-O3", "-march=native", "-fopenmp-simd", "-shared", "-fPIC"]
        subprocess.run(["cc", *flags, *defined, "-o", str(library), str(source)], check=True)
        loop: Callable[..., Any] = getattr(ctypes.CDLL(str(library)), name)
        return loop
