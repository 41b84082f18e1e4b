"""How rows of bfloat16 are rounded, by the words of docs/rows.md: by lots of Philox4x32-10, in numpy."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float32]
Words: TypeAlias = NDArray[np.uint32]

LOTS_KEY = 0xB5297A4D3F84D5B5
"""What the table's seed is combined with."""

LOTS_TOGETHER = 8
MOST_TOGETHER = 512
"""Columns that one call of the generator has lots for, and calls for the longest row."""

NO_NUMBER = 0x7FC0


def philox(key: int, low: int, high: NDArray[np.uint64]) -> Words:
    """Four words of each counter, (counters, 4)."""
    c = [np.full(high.shape, low & 0xFFFFFFFF, np.uint64), np.full(high.shape, low >> 32, np.uint64)]
    c += [high & np.uint64(0xFFFFFFFF), high >> np.uint64(32)]
    k = [np.uint64(key & 0xFFFFFFFF), np.uint64(key >> 32)]
    mask, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    for _ in range(10):
        first, second = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [second >> half ^ c[1] ^ k[0], second & mask, first >> half ^ c[3] ^ k[1], first & mask]
        k = [k[0] + np.uint64(0x9E3779B9) & mask, k[1] + np.uint64(0xBB67AE85) & mask]
    return np.stack(c, axis=-1).astype(np.uint32)


def rounded(values: Floats, *, seed: int, number: int, decision: int) -> Floats:
    """What a step of that row in that decision leaves of the values that it computed."""
    begin = decision * MOST_TOGETHER
    calls = np.arange(begin, begin + -(-values.size // LOTS_TOGETHER), dtype=np.uint64)
    lots = philox(seed ^ LOTS_KEY, number, calls).astype("<u4").view("<u2").reshape(-1)[: values.size]
    return _widened(_without_nan(values, values.view(np.uint32).astype(np.uint64) + lots))


def nearest(values: Floats) -> Floats:
    """Ties go to even, as torch's Tensor.to."""
    bits = values.view(np.uint32).astype(np.uint64)
    return _widened(_without_nan(values, bits + 0x7FFF + (bits >> np.uint64(16) & np.uint64(1))))


def halves(values: Floats) -> NDArray[np.uint16]:
    """The bits of values that bfloat16 can say."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def _without_nan(values: Floats, bits: NDArray[np.uint64]) -> NDArray[Any]:
    return np.where(np.isnan(values), NO_NUMBER, bits >> np.uint64(16))


def _widened(bits: NDArray[Any]) -> Floats:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
