"""Update rules of rows in numpy: what docs/rows.md says that torch and FBGEMM do to a row, rounded as they round."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Hyper = Mapping[str, float]
F32 = np.float32

Step = Callable[[Floats, Floats, Floats, int, Hyper], tuple[Floats, Floats]]
"""(values, state, gradients, number of the step, hyper-parameters) -> values and state, of rows one below the other."""


def multiply_add(a: npt.ArrayLike, b: npt.ArrayLike, c: npt.ArrayLike) -> Floats:
    """Rounds a * b + c once: the product is exact in float64, and the sum rounded to odd there, of which float32
    is what the exact sum would be. Source: Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008."""
    product, addend = np.asarray(a, np.float64) * np.asarray(b, np.float64), np.asarray(c, np.float64)
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    is_even = (total.view(np.int64) & 1) == 0
    odd = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return np.asarray(np.where((error != 0) & is_even, odd, total), F32)


def sgd(values: Floats, state: Floats, gradients: Floats, step: int, hyper: Hyper) -> tuple[Floats, Floats]:
    return multiply_add(gradients, F32(-hyper["lr"]), values), state


def adagrad(values: Floats, sums: Floats, gradients: Floats, step: int, hyper: Hyper) -> tuple[Floats, Floats]:
    sums = sums + gradients * gradients
    direction = gradients / (np.sqrt(sums) + F32(hyper["eps"]))
    lr = F32(-(hyper["lr"] / (1 + (step - 1) * hyper["lr_decay"])))
    return multiply_add(direction, lr, values), sums


def rowwise_adagrad(values: Floats, sums: Floats, gradients: Floats, step: int, hyper: Hyper) -> tuple[Floats, Floats]:
    """Rows have at most 8 elements, of which each is a partial sum of the squares by itself."""
    squares = np.cumsum(gradients.astype(np.float64) ** 2, axis=1)[:, -1:]
    sums = sums + np.asarray(squares / gradients.shape[1], F32)
    factors = -(F32(hyper["lr"]) / (np.sqrt(sums) + F32(hyper["eps"])))
    return multiply_add(gradients, factors, values), sums


def adam(values: Floats, state: Floats, gradients: Floats, step: int, hyper: Hyper) -> tuple[Floats, Floats]:
    mean, square = state[:, : values.shape[1]], state[:, values.shape[1] :]
    mean = (gradients - mean) * F32(1 - hyper["beta1"]) + mean
    square = (gradients * gradients - square) * F32(1 - hyper["beta2"]) + square
    corrections = [1 - hyper[beta] ** step for beta in ("beta1", "beta2")]
    size = F32(-(hyper["lr"] * math.sqrt(corrections[1]) / corrections[0]))
    change: Floats = np.asarray(size * (mean / (np.sqrt(square) + F32(hyper["eps"]))), F32)
    return values + change, np.hstack([mean, square])


STEPS: Mapping[str, Step] = {
    "sparse_sgd": sgd,
    "sparse_adagrad": adagrad,
    "rowwise_adagrad": rowwise_adagrad,
    "sparse_adam": adam,
}


def state_elems(rule: str, dim: int) -> int:
    return {"sparse_sgd": 0, "sparse_adagrad": dim, "rowwise_adagrad": 1, "sparse_adam": 2 * dim}[rule]


def first_state(rule: str, hyper: Hyper) -> float:
    """Of each element of a new row's state."""
    return hyper.get("initial_accumulator_value", 0.0) if "adagrad" in rule else 0.0


TO_COME = -1.0
"""State of a row that was assigned, and begins with the next step, where it is sums of squares."""
