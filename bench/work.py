"""What contestants of `dense` have to do: move gradients to the parameters, take an SGD step, and move these back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bench.harness import Rotation
from psstore import _core
from psstore.cli.model_shapes import Shape, gpt2, resnet50
from psstore.hyper import HYPER_DEFAULTS

Floats = npt.NDArray[np.float32]

LEARNING_RATE = 1e-3

SGD = {"lr": LEARNING_RATE}


@dataclass(frozen=True)
class Work:
    """One of the subject's cases; a round of it pushes all tensors, steps, and pulls all."""

    title: str
    shapes: Mapping[str, Shape]
    num_workers: int

    @property
    def num_elems(self) -> int:
        return sum(int(np.prod(shape)) for shape in self.shapes.values())

    @property
    def num_bytes(self) -> int:
        """In one direction, of one worker."""
        return 4 * self.num_elems

    @property
    def round_bytes(self) -> int:
        """In both directions, of all workers."""
        return 2 * self.num_bytes * self.num_workers


def one_large(num_workers: int) -> Work:
    return Work("one tensor of 100 MiB", {"w": (25 << 20,)}, num_workers)


def resnet(num_workers: int) -> Work:
    return Work("ResNet-50, 161 tensors", resnet50(), num_workers)


def gpt2_small(num_workers: int) -> Work:
    return Work("GPT-2, 148 tensors", gpt2(), num_workers)


def many_small(num_workers: int) -> Work:
    return Work("1,000 tensors of 4 KiB", {f"t{index}": (1024,) for index in range(1000)}, num_workers)


@dataclass(frozen=True)
class Tensors:
    """One set of gradients, and memory for the parameters that come back."""

    gradients: dict[str, Floats]
    parameters: dict[str, Floats]

    @property
    def last(self) -> float:
        """The last parameter's last element."""
        return float(list(self.parameters.values())[-1].flat[-1])


def tensors(work: Work, rank: int) -> Rotation[Tensors]:
    """A worker's, each in memory of its own."""
    return Rotation(lambda index: _tensors(work, _gradient(work, rank, seed=index)), num_bytes=2 * work.num_bytes)


def flat_tensors(work: Work, rank: int) -> Rotation[tuple[Floats, Floats]]:
    """The same as one array of gradients and one of parameters."""
    return Rotation(
        lambda index: (_gradient(work, rank, seed=index), memory(work.num_elems)),
        num_bytes=2 * work.num_bytes,
    )


def views(work: Work, flat: Floats) -> dict[str, Floats]:
    """The tensors that lie in `flat` one after the other."""
    ends = np.cumsum([int(np.prod(shape)) for shape in work.shapes.values()])
    parts = np.split(flat, ends[:-1])
    return {name: part.reshape(shape) for part, (name, shape) in zip(parts, work.shapes.items(), strict=True)}


def expected_last(work: Work, rounds: int) -> float:
    """What the last element is after so many rounds: everybody's gradient is rank + 1 there, and the mean counts."""
    return -LEARNING_RATE * rounds * (work.num_workers + 1) / 2


def memory(shape: Shape | int) -> Floats:
    """Zeros whose pages are there: the first write to those of np.zeros would wait for the kernel to find them."""
    return np.full(shape, 0, np.float32)


def _tensors(work: Work, gradient: Floats) -> Tensors:
    gradients = {name: part.copy() for name, part in views(work, gradient).items()}
    return Tensors(gradients, {name: memory(part.shape) for name, part in gradients.items()})


def _gradient(work: Work, rank: int, *, seed: int) -> Floats:
    gradient = np.random.default_rng([rank, seed]).standard_normal(work.num_elems, dtype=np.float32)
    gradient[-1] = rank + 1
    return gradient


def sgd(value: Floats, gradients: Sequence[Floats]) -> None:
    """Steps by the mean of the gradients, in one pass: the store's own kernel, without a store."""
    float32 = _core.DTYPES["float32"]
    _core.reduce_update(
        _core.RULES["sgd"],
        _HYPER,
        step=1,
        value=value.data,
        state={},
        contributions=[(gradient.data, float32, 1.0) for gradient in gradients],
        divisor=float(len(gradients)),
        dtype=float32,
        scale=1.0,
    )


_HYPER = {**HYPER_DEFAULTS["sgd"], **SGD}
