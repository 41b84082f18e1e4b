"""MNIST's four IDX files (yann.lecun.com/exdb/mnist), as arrays. Needs no torch: the command looks before it starts."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from psstore.errors import BadArgument

NUM_DIMS = {"train-images": 3, "train-labels": 1, "t10k-images": 3, "t10k-labels": 1}

UNSIGNED_BYTE = 0x08
"""Type code of their elements."""


def read(directory: Path) -> dict[str, npt.NDArray[np.uint8]]:
    """All four, by their names. Raises BadArgument if one is not there, or is something else."""
    paths = {name: _path(directory, name, num_dims) for name, num_dims in NUM_DIMS.items()}
    return {name: _array(path, NUM_DIMS[name]) for name, path in paths.items()}


def _path(directory: Path, name: str, num_dims: int) -> Path:
    """Of 'name-idx3-ubyte', 'name.idx3-ubyte' or either with '.gz'."""
    names = [f"{name}{dash}idx{num_dims}-ubyte{end}" for dash in "-." for end in ("", ".gz")]
    path = next((directory / one for one in names if (directory / one).is_file()), None)
    if path is None:
        raise BadArgument(f"{directory} has none of {', '.join(names)}; --data-dir wants MNIST's four IDX files")
    return path


def _array(path: Path, num_dims: int) -> npt.NDArray[np.uint8]:
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
