"""Prints how far the update rules are from torch.optim: the table in docs/update_rules.md.

    python -m tests.kernels.parity [--steps 1000] [--elems 4099] [--dtype float32] [--instruction-set avx2]

For each rule and combination of options one slice is stepped by the core and by torch.optim
(foreach=False, fused=False, CPU) on the same gradients; the figure is the largest distance in units in
the last place of any element of the value and of each state buffer after the last step. 0 is the aim.
test_update_rules.py asserts it, with the same functions.

Twice: against torch as it is installed, and against torch with a square root that is rounded correctly
(docs/update_rules.md says why these differ).
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
from bench.rule_case import Case, Options, state_names

from psstore import _core
from psstore.torch import DelayedNesterov

Array = npt.NDArray[Any]

DTYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "float64": torch.float64}


def _combinations(rule: str, *choices: tuple[Options, ...]) -> Iterator[Case]:
    for chosen in itertools.product(*choices):
        merged: dict[str, float] = {}
        for options in chosen:
            merged |= options
        yield Case(rule, merged)


def all_cases() -> list[Case]:
    """Every rule with every combination of its options; a beta1 or alpha below 0.5 takes lerp's other branch."""
    maximize: tuple[Options, ...] = ({}, {"maximize": 1.0})
    momentum: tuple[Options, ...] = (
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "dampening": 0.3},
        {"momentum": 0.9, "nesterov": 1.0},
    )
    moments: tuple[Options, ...] = ({}, {"beta1": 0.3, "beta2": 0.95})
    amsgrad: tuple[Options, ...] = ({}, {"amsgrad": 1.0})
    accumulator: tuple[Options, ...] = ({}, {"lr_decay": 0.01}, {"initial_accumulator_value": 0.1})
    mean: tuple[Options, ...] = ({}, {"centered": 1.0}, {"centered": 1.0, "alpha": 0.4})
    decay: tuple[Options, ...] = ({}, {"weight_decay": 0.03})
    every: tuple[Options, ...] = ({}, {"every": 1.0}, {"every": 3.0, "momentum": 0.5})
    activation: tuple[Options, ...] = ({}, {"activation": 0.2})
    no_decay: tuple[Options, ...] = ({}, {"weight_decay": 0.0})
    return [
        *_combinations("sgd", momentum, decay, maximize),
        *_combinations("adam", moments, amsgrad, decay, maximize),
        *_combinations("adamw", moments, amsgrad, no_decay, maximize),
        *_combinations("adagrad", accumulator, decay, maximize),
        *_combinations("rmsprop", mean, momentum[:2], decay, maximize),
        *_combinations("delayed_nesterov", every, activation),
    ]


def torch_optimizer(case: Case, parameter: torch.nn.Parameter) -> torch.optim.Optimizer:
    """The same rule by torch, in the form that the core follows: one tensor at a time, unfused."""
    classes: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
        "sgd": torch.optim.SGD,
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "adagrad": torch.optim.Adagrad,
        "rmsprop": torch.optim.RMSprop,
    }
    if case.rule == "delayed_nesterov":
        return DelayedNesterov([parameter], **case.hyper)  # type: ignore[arg-type]
    keywords: dict[str, object] = dict(case.hyper)
    if "beta1" in keywords:
        keywords["betas"] = (keywords.pop("beta1"), keywords.pop("beta2"))
    for flag in {"nesterov", "maximize", "amsgrad", "centered"} & keywords.keys():
        keywords[flag] = bool(keywords[flag])
    if case.rule != "rmsprop":  # which has no fused form to turn off
        keywords["fused"] = False
    return classes[case.rule]([parameter], foreach=False, **keywords)


@contextmanager
def exact_square_root() -> Iterator[None]:
    """Within it, torch's optimizers take the IEEE square root, by numpy, instead of their math library's."""

    def sqrt_(tensor: torch.Tensor) -> torch.Tensor:
        array = tensor.numpy()
        np.sqrt(array, out=array)
        return tensor

    def sqrt(tensor: torch.Tensor) -> torch.Tensor:
        return sqrt_(tensor.clone())

    with mock.patch.object(torch.Tensor, "sqrt", sqrt), mock.patch.object(torch.Tensor, "sqrt_", sqrt_):
        yield


class CoreOptimizer:
    """The core's rule on one slice, with its state in numpy arrays under torch's names."""

    def __init__(self, case: Case, value: Array, instruction_set: str | None = None) -> None:
        self.value = value
        self.state: dict[str, Array] = {}
        self._case = case
        self._instruction_set = instruction_set
        self._step = 0

    def step(self, grad: Array) -> None:
        self._step += 1
        names = state_names(self._case)
        first = {name: name not in self.state for name in names}
        for name in names:
            self.state.setdefault(name, np.full_like(self.value, np.nan))  # must not be read
        dtype = _core.DTYPES[str(self.value.dtype)]
        _core.reduce_update(
            _core.RULES[self._case.rule],
            self._case.hyper,
            step=self._step,
            value=self.value.data,
            state={name: buffer.data for name, buffer in self.state.items()},
            contributions=[(grad.data, dtype, 1.0)],
            divisor=1.0,
            dtype=dtype,
            first=first,
            instruction_set=self._instruction_set,
        )


def ulp_distance(left: Array, right: Array) -> int:
    """The largest number of representable values between two elements; NaN is at distance 0 of NaN."""
    left, right = (np.atleast_1d(array).ravel() for array in (left, right))
    both_nan = np.isnan(left) & np.isnan(right)
    if (np.isnan(left) != np.isnan(right)).any():
        return int(np.iinfo(np.int64).max)
    return int(np.where(both_nan, 0, np.abs(_ordinal(left) - _ordinal(right))).max(initial=0))


def _ordinal(array: Array) -> npt.NDArray[np.int64]:
    """Where each element stands among all numbers of its dtype; -0 is next to +0, at distance 1."""
    bits = array.view(f"i{array.itemsize}").astype(np.int64)
    top = np.int64(np.iinfo(f"i{array.itemsize}").min)
    return np.where(bits < 0, top - bits - 1, bits)


def gradients(num_elems: int, steps: int, dtype: str, *, seed: int = 0) -> Iterator[Array]:
    """Normal, of a scale that each element keeps within a decade or two; one in 50 is zero."""
    random = np.random.default_rng(seed)
    scale = 10.0 ** random.uniform(-6, 2, num_elems)
    for _ in range(steps):
        grad = random.standard_normal(num_elems) * scale
        grad[random.random(num_elems) < 0.02] = 0.0
        yield grad.astype(dtype)


def trajectories(
    case: Case,
    value: Array,
    grads: Iterable[Array],
    *,
    instruction_set: str | None = None,
) -> dict[str, tuple[Array, Array]]:
    """Steps both from `value`; (ours, torch's) per buffer at the end: 'value' and the state's names."""
    parameter = torch.nn.Parameter(torch.from_numpy(value.copy()))
    theirs = torch_optimizer(case, parameter)
    ours = CoreOptimizer(case, value.copy(), instruction_set)
    for grad in grads:
        parameter.grad = torch.from_numpy(grad.copy())
        theirs.step()
        ours.step(grad)
    state = {name: (ours.state[name], theirs.state[parameter][name].numpy()) for name in ours.state}
    return {"value": (ours.value, parameter.detach().numpy()), **state}


def distances(
    case: Case,
    value: Array,
    grads: Iterable[Array],
    *,
    instruction_set: str | None = None,
) -> dict[str, int]:
    """The largest distance in ulp of each buffer at the end of `trajectories`."""
    pairs = trajectories(case, value, grads, instruction_set=instruction_set)
    return {name: ulp_distance(*pair) for name, pair in pairs.items()}


def table_row(case: Case, value: Array, *, steps: int, instruction_set: str | None) -> str:
    def grads() -> Iterator[Array]:
        return gradients(value.size, steps, str(value.dtype))

    with exact_square_root():
        exact = distances(case, value, grads(), instruction_set=instruction_set)
    ours, theirs = trajectories(case, value, grads(), instruction_set=instruction_set)["value"]
    options = ", ".join(f"{name}={number:g}" for name, number in case.options.items()) or "none"
    buffers = ", ".join(f"{name} {ulp}" for name, ulp in exact.items())
    installed = f"{ulp_distance(ours, theirs)} ulp, {np.abs(ours - theirs).max():.1e}"
    return f"| {case.rule} | {options} | {buffers} | {installed} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--elems", type=int, default=4099)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    parser.add_argument("--instruction-set", choices=_core.instruction_sets(), default=None)
    args = parser.parse_args()

    ours = args.instruction_set or _core.instruction_sets()[0]
    capability = torch.backends.cpu.get_cpu_capability()
    print(f"psstore ({ours}) and torch {torch.__version__} ({capability}), {args.dtype}, {args.elems} elements,")
    print(f"after {args.steps} steps: largest distance of any element\n")
    print("| rule | options that differ from torch's | torch, exact square root: ulp | torch as installed: value |")
    print("|---|---|---|---|")
    value = np.random.default_rng(1).standard_normal(args.elems).astype(args.dtype)
    for case in all_cases():
        print(table_row(case, value, steps=args.steps, instruction_set=args.instruction_set), flush=True)


if __name__ == "__main__":
    main()
