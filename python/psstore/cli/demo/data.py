"""Handwritten digits: scikit-learn's own, which need no download, or MNIST's files in a directory."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from psstore.cli.demo import mnist_files

NUM_CLASSES = 10

TEST_SHARE = 0.2
"""Of scikit-learn's digits, which come without a split."""

MNIST_PIXEL_MAX = 255.0
DIGITS_PIXEL_MAX = 16.0


class Digits(NamedTuple):
    """Images are (num_images, 1, height, width) fp32 in [0, 1]; labels are int64."""

    name: str
    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor

    @property
    def image_size(self) -> int:
        return int(self.train_images.shape[-1])


def load(data_dir: str | None) -> Digits:
    """Raises BadArgument if a directory lacks a file or holds something else under its name."""
    return scikit_learn_digits() if data_dir is None else mnist(Path(data_dir))


def scikit_learn_digits() -> Digits:
    """1,797 images of 8x8 by 43 people (UCI 'Optical Recognition of Handwritten Digits'), split by a fixed seed."""
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    found = load_digits()
    images, labels = _tensors(found.images / DIGITS_PIXEL_MAX, found.target)
    order = torch.from_numpy(np.random.RandomState(0).permutation(len(labels)))
    test, train = order.tensor_split([math.ceil(TEST_SHARE * len(labels))])
    return Digits("scikit-learn digits", images[train], labels[train], images[test], labels[test])


def mnist(directory: Path) -> Digits:
    files = mnist_files.read(directory)
    train = _tensors(files["train-images"] / MNIST_PIXEL_MAX, files["train-labels"])
    test = _tensors(files["t10k-images"] / MNIST_PIXEL_MAX, files["t10k-labels"])
    return Digits("MNIST", *train, *test)


def _tensors(images: npt.ArrayLike, labels: npt.ArrayLike) -> tuple[torch.Tensor, torch.Tensor]:
    pixels = np.asarray(images, dtype=np.float32)[:, np.newaxis]
    return torch.from_numpy(pixels), torch.from_numpy(np.asarray(labels, dtype=np.int64))
