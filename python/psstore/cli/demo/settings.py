"""What the demo's processes agree on: the command, its workers and the reference run."""

from __future__ import annotations

from enum import Enum

import msgspec

ROUND_IMAGES = 64
"""In a round of all workers together, so that an epoch has as many rounds whatever their number."""

MIN_BATCH_IMAGES = 8

LEARNING_RATE = 0.05
"""Of a round of all workers, at the start; a cosine takes it to zero at the end."""

MOMENTUM = 0.9

LABEL_SMOOTHING = 0.1
"""Takes the test accuracy on scikit-learn's digits from about 98 % to about 99 %."""

DEFAULT_EPOCHS = 20
"""On scikit-learn's digits: 440 rounds of two workers, some seconds on two cores."""


DEFAULT_EVERY = 8
"""Steps from one average to the next: some three averages per epoch of two workers on digits."""


class Strategy(str, Enum):
    """How several workers train one model (docs/choosing.md)."""

    ps = "ps"
    allreduce = "allreduce"
    average = "average"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """One demo run, as each worker gets it in its arguments."""

    num_workers: int
    epochs: int
    strategy: Strategy = Strategy.ps
    every: int = DEFAULT_EVERY
    """Steps from one average to the next."""
    lockstep: bool = True
    """Rounds are decided together; else each worker's gradients are a step of their own."""
    compression: str = "none"
    """How gradients and new values travel: a `Compression` in a word."""
    seed: int = 0
    data_dir: str | None = None
    """Directory with MNIST's IDX files; None: scikit-learn's digits."""
    weights_path: str | None = None
    """Where rank 0 writes the final weights, for comparison."""
    rendezvous_path: str | None = None
    """A file that is not there yet, by which workers without a store find each other."""

    @property
    def batch_images(self) -> int:
        """Per worker and round."""
        return max(MIN_BATCH_IMAGES, ROUND_IMAGES // self.num_workers)

    @property
    def learning_rate(self) -> float:
        """Out of lockstep there are as many steps per round as workers, so each is as much smaller."""
        return LEARNING_RATE if self.lockstep else LEARNING_RATE / self.num_workers


MNIST_EPOCHS = 2
"""60,000 images are 33 times as many."""
