"""Many pieces between a device and the host, checked as gpu_support.py checks kernels."""

from __future__ import annotations

import numpy as np

from psstore import _core
from tests.gpu.support import OFFSETS, Engine, Place, fresh_seed

Pieces = list[tuple[int, int, int]]


def check_pieces(engine: Engine, num_pieces: int, *, most_bytes: int) -> None:
    """Scattered over a device and gathered again, every byte is where it belongs, and nothing else was written."""
    seed = fresh_seed()
    random = np.random.default_rng(seed)
    pool = _core.PinnedPool(engine.device, max_idle_bytes=0)
    for offset in OFFSETS:
        sizes = random.integers(1, most_bytes + 1, num_pieces)
        gaps = random.integers(0, 40, num_pieces)
        content = random.integers(0, 256, int(sizes.sum()), np.uint8)
        place = Place(engine, int((sizes + gaps).sum()), offset=offset)
        pieces = _pieces(place.address, sizes, gaps, random)
        expected = np.full(int((sizes + gaps).sum()), 0xFF, np.uint8)
        for begin, pointer, size in pieces:
            expected[pointer - place.address :][:size] = content[begin : begin + size]
        there, back = pool.allocate(content.size), pool.allocate(content.size)
        np.asarray(memoryview(there))[: content.size] = content
        engine.finish_torch()
        engine.queue.copy_in(there, pieces)
        engine.queue.copy_out(back, pieces)
        engine.finish()
        assert (place.get() == expected).all(), f"scattered, seed {seed}, offset {offset}"
        assert (np.asarray(memoryview(back))[: content.size] == content).all(), f"gathered, seed {seed}"


def _pieces(
    address: int, sizes: np.ndarray[tuple[int], np.dtype[np.int64]], gaps: np.ndarray[tuple[int], np.dtype[np.int64]],
    random: np.random.Generator,
) -> Pieces:  # fmt: skip
    """One after the other on the host; on the device in any order, with gaps between."""
    places = {}
    for index in random.permutation(sizes.size).tolist():
        places[index] = address
        address += int(sizes[index] + gaps[index])
    begins = np.cumsum(sizes) - sizes
    return [(int(begins[i]), places[i], int(sizes[i])) for i in range(sizes.size)]
