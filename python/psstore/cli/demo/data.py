"""Handwritten digits: scikit-learn's own, which need no download, or MNIST's four IDX files in a directory.

Torch is imported where tensors are made: the command reads MNIST's files before it starts anything.
"""

from __future__ import annotations

import gzip
import math
import zlib
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from psstore.errors import BadArgument

if TYPE_CHECKING:
    import torch

NUM_CLASSES = 10

TEST_SHARE = 0.2
"""Part of scikit-learn's digits to test on: they come without a split."""

MNIST_PIXEL_MAX = 255.0
DIGITS_PIXEL_MAX = 16.0
DIGITS_SIZE = 8

NUM_DIMS = {"train-images": 3, "train-labels": 1, "t10k-images": 3, "t10k-labels": 1}
"""Dimensions of each of MNIST's files (yann.lecun.com/exdb/mnist), by its name."""

UNSIGNED_BYTE = 0x08
"""Type code of their elements."""


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
    import torch

    table = _digits_table()
    pixels = table[:, :-1].reshape(-1, DIGITS_SIZE, DIGITS_SIZE)
    images, labels = _tensors(pixels / DIGITS_PIXEL_MAX, table[:, -1])
    order = torch.from_numpy(np.random.RandomState(0).permutation(len(labels)))
    test, train = order.tensor_split([math.ceil(TEST_SHARE * len(labels))])
    return Digits("scikit-learn digits", images[train], labels[train], images[test], labels[test])


def _digits_table() -> npt.NDArray[np.float64]:
    """A row per image: 64 pixels and its label. Read without importing scikit-learn, which takes each worker as long as
    importing torch."""
    found = find_spec("sklearn")
    assert found is not None, "psstore demo begins only where scikit-learn is"
    assert found.submodule_search_locations is not None
    path = Path(found.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    with gzip.open(path, "rt") as rows:
        return np.loadtxt(rows, delimiter=",")


def mnist(directory: Path) -> Digits:
    files = read_mnist(directory)
    train = _tensors(files["train-images"] / MNIST_PIXEL_MAX, files["train-labels"])
    test = _tensors(files["t10k-images"] / MNIST_PIXEL_MAX, files["t10k-labels"])
    return Digits("MNIST", *train, *test)


def _tensors(images: npt.ArrayLike, labels: npt.ArrayLike) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    pixels = np.asarray(images, dtype=np.float32)[:, np.newaxis]
    return torch.from_numpy(pixels), torch.from_numpy(np.asarray(labels, dtype=np.int64))


def read_mnist(directory: Path) -> dict[str, npt.NDArray[np.uint8]]:
    """All four files as arrays, by their names. Raises BadArgument if one is not there, or is something else."""
    paths = {name: _mnist_path(directory, name, num_dims) for name, num_dims in NUM_DIMS.items()}
    return {name: _idx_array(path, NUM_DIMS[name]) for name, path in paths.items()}


def _mnist_path(directory: Path, name: str, num_dims: int) -> Path:
    """The file 'name-idx3-ubyte', 'name.idx3-ubyte' or either with '.gz'."""
    names = [f"{name}{dash}idx{num_dims}-ubyte{end}" for dash in "-." for end in ("", ".gz")]
    path = next((directory / one for one in names if (directory / one).is_file()), None)
    if path is None:
        raise BadArgument(f"{directory} has none of {', '.join(names)}; --data-dir wants MNIST's four IDX files")
    return path


def _idx_array(path: Path, num_dims: int) -> npt.NDArray[np.uint8]:
    """2 zero bytes | type code | number of dims | size of each dim, 4 bytes big-endian | elements, row by row"""
    content = _content(path)
    header_bytes = 4 + 4 * num_dims
    if content[:4] != bytes((0, 0, UNSIGNED_BYTE, num_dims)) or len(content) < header_bytes:
        raise BadArgument(f"{path} is no IDX file of unsigned bytes in {num_dims} dims")
    shape = tuple(int(size) for size in np.frombuffer(content, ">u4", num_dims, offset=4))
    if len(content) != header_bytes + math.prod(shape):
        raise BadArgument(f"{path} holds {len(content) - header_bytes} elements; its header says {shape}")
    return np.frombuffer(content, np.uint8, offset=header_bytes).reshape(shape)


def _content(path: Path) -> bytes:
    try:
        return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise BadArgument(f"{path} can't be read: {error}") from None
