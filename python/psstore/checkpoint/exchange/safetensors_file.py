"""Model files in safetensors' format, without that library: written as a stream, read by mapping them."""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from psstore import _core
from psstore.checkpoint.exchange.whole_model import AnyArray
from psstore.checkpoint.tensor_file import HEADER_ALIGNMENT, ITEM_BYTES_OF, MAX_HEADER_BYTES, METADATA
from psstore.errors import BadArgument

NUMPY_DTYPES: Mapping[str, str] = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "<i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "<u1", "BOOL": "?",
}  # fmt: skip
"""numpy's dtype by safetensors' name. numpy has none for BF16, which is read as float32."""


BFLOAT16 = np.dtype("V2")
"""numpy has no bfloat16: elements of two bytes that it knows nothing of."""

WRITTEN_DTYPES: Mapping[str, str] = {"float32": "F32", "float64": "F64", "uint64": "U64", BFLOAT16.name: "BF16"}
"""safetensors' dtype by numpy's name, of what a store keeps."""


def write_safetensors(path: Path, arrays: Mapping[str, AnyArray]) -> None:
    """Writes arrays of float32, float64, uint64 and BFLOAT16. Raises OSError."""
    header: dict[str, Any] = {METADATA: {"format": "pt"}}  # transformers reads files that say so
    ordered = sorted(arrays.items(), key=lambda one: -one[1].itemsize)
    begin = 0
    for name, array in ordered:
        dtype = WRITTEN_DTYPES[array.dtype.name]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [begin, begin + array.nbytes]}
        begin += array.nbytes
    text = msgspec.json.encode(header)
    text += b" " * (-(8 + len(text)) % HEADER_ALIGNMENT)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, array in ordered:
            file.write(np.ascontiguousarray(array).data)


def read_safetensors(path: Path) -> dict[str, AnyArray]:
    """The arrays of a file, as they lie in it, in the order of its header. Raises BadArgument for what is no such file,
    OSError."""
    with open(path, "rb") as file:
        size = path.stat().st_size
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise BadArgument(f"{path} is no safetensors file: its header claims {length} bytes, the file has {size}")
        try:
            header = json.loads(file.read(length))
            header.pop(METADATA, None)
            content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))[8 + length :]
            return {name: _array(one, content) for name, one in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise BadArgument(f"{path} is no safetensors file: {error}") from None


def _array(one: Mapping[str, Any], content: memoryview) -> AnyArray:
    dtype, shape, (begin, end) = one["dtype"], tuple(map(int, one["shape"])), one["data_offsets"]
    if not 0 <= begin <= end <= len(content) or end - begin != math.prod(shape) * ITEM_BYTES_OF[dtype]:
        raise ValueError(f"an entry of {dtype} {shape} lies at bytes {begin} to {end} of {len(content)}")
    raw = content[begin:end]
    if dtype == "BF16":
        found = np.empty(shape, np.float32)
        _core.convert(raw, _core.DTYPES["bfloat16"], found, _core.DTYPES["float32"])
        return found
    if dtype not in NUMPY_DTYPES:
        raise ValueError(f"an entry has dtype {dtype}")
    return np.frombuffer(raw, NUMPY_DTYPES[dtype]).reshape(shape)
