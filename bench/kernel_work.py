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

from bench.parity import Case, state_names
from psstore import _core

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

Work = Callable[[int], object]
"""Takes a step on the slice of that number."""

FLOAT32 = _core.DTYPES["float32"]

INT8_BLOCK = 256

NUMPY_BLOCK = 1 << 14
"""Elements that numpy works on at a time: what it makes on the way stays in the second-level cache."""

READS = {"float32": "float", "bfloat16": "uint16_t", "float16": "uint16_t", "int8": "int8_t"}
"""What the plain loop reads in a contribution's place."""


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
        return self.num_workers * _input_bytes(self.inputs, self.num_elems) / self.num_elems + 8 + 8 * self.num_states

    @property
    def gradients(self) -> list[list[Bytes]]:
        """(worker, slot): as they come over the wire."""
        return _gradients(self.num_workers, self.inputs, self.num_slots, self.num_elems)

    def arrays(self, content: float = 0.5) -> list[Floats]:
        """One for each slice: values before the first step, by default."""
        return [np.full(self.num_elems, content, np.float32) for _ in range(self.num_slots)]

    def states(self) -> dict[str, list[Floats]]:
        """By name, before the first step."""
        return {name: self.arrays(0) for name in state_names(self.case)}


def core_work(task: Task, values: Sequence[Floats]) -> Work:
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
            divisor=float(task.num_workers),
            dtype=FLOAT32,
        )

    return work


def plain_work(task: Task) -> Work:
    """Bytes of contributions that are not elements of int8, its scales, are left out: 1.5 % of them."""
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
    gradients = [[_as_tensors(one, task.inputs) for one in worker] for worker in task.gradients]

    def work(slot: int) -> None:
        parameters[slot].grad = _mean([worker[slot] for worker in gradients])
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


def _mean(gradients: Sequence[tuple[torch.Tensor, ...]]) -> torch.Tensor:
    first, *others = gradients
    if not others and first[0].dtype == torch.float32 and len(first) == 1:
        return first[0]
    total = _decoded(first) if len(first) > 1 else first[0].to(torch.float32, copy=True)
    for other in others:
        total.add_(_decoded(other))
    return total.div_(len(gradients)).view(-1)


def _decoded(gradient: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Halves as they are: torch widens them while it adds."""
    return gradient[0] if len(gradient) == 1 else torch.mul(*gradient)


def _as_tensors(payload: Bytes, inputs: str) -> tuple[torch.Tensor, ...]:
    """The elements; of int8 the codes and the scales, a row for each block."""
    flat = torch.from_numpy(payload)
    if inputs != "int8":
        return (flat.view(getattr(torch, inputs)),)
    num_scales = flat.numel() // (INT8_BLOCK + 4)
    scales, codes = flat[: 4 * num_scales], flat[4 * num_scales :]
    return codes.view(torch.int8).view(-1, INT8_BLOCK), scales.view(torch.float32).view(-1, 1)


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


@lru_cache(maxsize=1)
def _gradients(num_workers: int, inputs: str, num_slots: int, num_elems: int) -> list[list[Bytes]]:
    random = np.random.default_rng(0).standard_normal(num_elems, dtype=np.float32)
    return [
        [_encoded(random + np.float32(slot + worker), inputs) for slot in range(num_slots)]
        for worker in range(num_workers)
    ]


def _input_bytes(inputs: str, num_elems: int) -> int:
    if inputs == "int8":
        return num_elems + 4 * -(-num_elems // INT8_BLOCK)
    return num_elems * (4 if inputs == "float32" else 2)


def _encoded(gradient: Floats, inputs: str) -> Bytes:
    payload = np.empty(_input_bytes(inputs, gradient.size), np.uint8)
    if inputs == "int8":
        _core.encode_slice(_core.DTYPES["int8"], gradient.data, None, payload.data)
    else:
        _core.convert(gradient.data, FLOAT32, payload.data, _core.DTYPES[inputs])
    return payload


def _pointers(arrays: Sequence[npt.NDArray[Any]]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(arrays))(*(array.ctypes.data for array in arrays))


def _compiled(read: str, num_reads: int, num_changed: int) -> Callable[..., None]:
    """plain_loop.c for that mix."""
    source = Path(__file__).with_name("plain_loop.c")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "plain_loop.so"
        mix = [f"-DREAD={read}", f"-DREADS={num_reads}", f"-DCHANGED={num_changed}"]
        flags = ["-O3", "-march=native", "-fopenmp-simd", "-shared", "-fPIC"]
        subprocess.run(["cc", *flags, *mix, "-o", str(library), str(source)], check=True)
        loop: Callable[..., None] = ctypes.CDLL(str(library)).plain_loop
        return loop
