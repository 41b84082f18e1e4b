"""Rules of rows in numpy: what torch, FBGEMM and TensorFlow do to rows, rounded as docs/update_rules.md has it."""

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


def momentum(values: Floats, buffer: Floats, gradients: Floats, step: int, hyper: Hyper) -> tuple[Floats, Floats]:
    factor = F32(hyper["momentum"])
    share = F32(1 - hyper["dampening"])
    buffer = gradients if step == 1 else multiply_add(gradients, share, buffer * factor)
    direction = multiply_add(buffer, factor, gradients) if hyper["nesterov"] else buffer
    return multiply_add(direction, F32(-hyper["lr"]), values), buffer


def ftrl(values: Floats, state: Floats, gradients: Floats, step: int, hyper: Hyper) -> tuple[Floats, Floats]:
    assert hyper["lr_power"] == -0.5, "its square root is rounded as the store's"
    sums, linear = state[:, : values.shape[1]], state[:, values.shape[1] :]
    lr, l1 = F32(hyper["lr"]), F32(hyper["l1"])
    roots = np.sqrt(sums)
    sums = sums + gradients * gradients
    shrunk = gradients + F32(2 * hyper["l2_shrinkage"]) * values
    linear = np.asarray(linear + (shrunk - (np.sqrt(sums) - roots) / lr * values), F32)
    denominator = np.sqrt(sums) / lr + F32(2 * hyper["l2"] + hyper["beta"] / hyper["lr"])
    beyond_l1 = np.clip(linear, -l1, l1) - linear
    stepped = np.divide(beyond_l1, denominator, out=np.zeros_like(values), where=denominator != 0)
    return np.asarray(stepped, F32), np.hstack([sums, linear])


STEPS: Mapping[str, Step] = {
    "sparse_sgd": sgd,
    "sparse_adagrad": adagrad,
    "rowwise_adagrad": rowwise_adagrad,
    "sparse_adam": adam,
    "sparse_momentum": momentum,
    "ftrl": ftrl,
}

TO_COME = -1.0
"""Sums of squares of a row that was assigned, and begin with the next step."""


def num_sums(rule: str, dim: int) -> int:
    """Elements of a row's state that are sums of squares: the first."""
    return {"sparse_adagrad": dim, "rowwise_adagrad": 1, "ftrl": dim}.get(rule, 0)


def new_state(rule: str, dim: int, first_sum: float) -> Floats:
    """State that begins: sums of squares as the hyper-parameters say, all else with zeros."""
    num_zeros = {"sparse_adam": 2 * dim, "sparse_momentum": dim, "ftrl": dim}.get(rule, 0)
    return np.array([first_sum] * num_sums(rule, dim) + [0.0] * num_zeros, F32)


def assigned_state(rule: str, dim: int) -> Floats:
    return new_state(rule, dim, TO_COME)
