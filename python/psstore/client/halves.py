"""Float32 on this side, half precision on the wire."""

from __future__ import annotations

import numpy as np

from psstore import _core
from psstore.client.arrays import Bytes, Target
from psstore.codec.codecs import Codec
from psstore.types import ITEM_BYTES


def converted(data: Bytes, dtype: str, to_dtype: str) -> Bytes:
    """Converts elements to another dtype, in new memory."""
    out = np.empty(data.nbytes // ITEM_BYTES[dtype] * ITEM_BYTES[to_dtype], np.uint8)
    _core.convert(data, _core.DTYPES[dtype], out, _core.DTYPES[to_dtype])
    return out


def copied_into(data: Bytes, dtype: str, target: Target) -> None:
    """Writes the elements to where the target is, in its dtype."""
    _core.convert(data, _core.DTYPES[dtype], target.data, _core.DTYPES[target.dtype])
    if target.finish is not None:
        target.finish()


def received_as(codec: Codec | None, target: Target) -> Target:
    """The target, or one that receives in half precision if the codec is that."""
    if codec is None or not codec.is_half or target.dtype == codec.dtype:
        return target
    dtype = codec.dtype
    num_elems = target.data.nbytes // ITEM_BYTES[target.dtype]
    aside = np.empty(num_elems * ITEM_BYTES[dtype], np.uint8)
    return target._replace(dtype=dtype, data=aside, finish=lambda: copied_into(aside, dtype, target))
