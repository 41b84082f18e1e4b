"""What a worker hands in, as bytes on the wire: the tree and the arrays of nested.py in MessagePack."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from psstore.checkpoint.nested import Plain, PlainArray, as_plain_array, pack, unpack
from psstore.checkpoint.tensor_file import NOT_DECODED
from psstore.errors import BadArgument


class Handed(NamedTuple):
    """What a rank has handed in last."""

    version: int
    """The decision that it had come to."""
    state: Plain
    """Arrays are `PlainArray`s."""


class _Packed(msgspec.Struct, frozen=True, array_like=True):
    tree: Any
    arrays: list[tuple[str, tuple[int, ...], memoryview]]
    """dtype, shape, elements in row-major order."""


def pack_handed(value: Plain) -> bytes:
    """Raises BadArgument that says where in the value what can't be held is."""
    arrays: list[PlainArray] = []
    tree = pack(value, arrays)
    return msgspec.msgpack.encode(_Packed(tree, [(one.dtype, one.shape, one.data) for one in arrays]))


def unpack_handed(packed: bytes) -> Plain:
    """The value; its arrays lie in these bytes. Raises BadArgument for bytes that `pack_handed` does not make."""
    try:
        handed = msgspec.msgpack.decode(packed, type=_Packed)
        arrays = [as_plain_array(PlainArray(dtype, shape, data)) for dtype, shape, data in handed.arrays]
        return unpack(handed.tree, arrays)
    except (ValueError, TypeError, LookupError, *NOT_DECODED) as error:
        raise BadArgument(f"what was handed in can't be made out: {error}") from None
