"""Values for tests of codecs, and what a codec makes of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from psstore import _core
from psstore.codec.codecs import parse
from psstore.partition.slicing import SLICE_BYTES

Floats = np.ndarray[Any, np.dtype[np.float32]]

SLICE_ELEMS = SLICE_BYTES // 4
N = SLICE_ELEMS + 300
"""Two slices, and blocks that are not full."""


def values(seed: int, num_elems: int = N) -> Floats:
    return np.random.default_rng(seed).standard_normal(num_elems, dtype=np.float32)


def said(codec_name: str, values: Floats) -> Floats:
    """What the codec makes of the values, slice by slice."""
    codec = parse(codec_name)
    assert codec is not None
    out = np.empty_like(values)
    for begin in range(0, values.size, SLICE_ELEMS):
        part = values[begin : begin + SLICE_ELEMS]
        if codec.is_half:
            half = np.empty(2 * part.size, np.uint8)
            _core.convert(part, _core.DTYPES["float32"], half, _core.DTYPES[codec.dtype])
            _core.convert(half, _core.DTYPES[codec.dtype], out[begin : begin + part.size], _core.DTYPES["float32"])
            continue
        payload = np.empty(codec.num_bytes(part.size), np.uint8)
        _core.encode_slice(_core.DTYPES[codec.dtype], part, None, payload, codec.num_kept(part.size))
        _core.decode_slice(_core.DTYPES[codec.dtype], payload, out[begin : begin + part.size])
    return out
