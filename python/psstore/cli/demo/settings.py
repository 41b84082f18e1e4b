"""What the demo's processes agree on: the command, its workers and the reference run."""

from __future__ import annotations

import msgspec

BATCH_IMAGES = 32
"""Per worker and round."""

LEARNING_RATE = 0.05
"""At the start; a cosine takes it to zero at the end."""

MOMENTUM = 0.9

LABEL_SMOOTHING = 0.1
"""Takes the test accuracy on scikit-learn's digits from about 98 % to about 99 %."""

DEFAULT_EPOCHS = 20
"""On scikit-learn's digits: 440 rounds of two workers, some seconds on two cores."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """One demo run, as each worker gets it in its arguments."""

    num_workers: int
    epochs: int
    seed: int = 0
    data_dir: str | None = None
    """Directory with MNIST's IDX files; None: scikit-learn's digits."""
    weights_path: str | None = None
    """Where rank 0 writes the final weights, for comparison."""


MNIST_EPOCHS = 2
"""60,000 images are 33 times as many."""
