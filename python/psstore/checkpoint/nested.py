"""What workers hand in: nested plain data with arrays in it, as JSON and a list of arrays. No pickle, either way.

None, bools, integers, floats, texts, bytes, lists, tuples and dicts with such keys come back as they were, arrays as
`PlainArray`. Anything else is refused when it is handed in, not when it is wanted back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple, TypeAlias

from psstore.checkpoint.tensor_file import ITEM_BYTES_OF
from psstore.errors import BadArgument
from psstore.types import is_text

Plain: TypeAlias = Any
"""None, bool, int, float, str, bytes, PlainArray, what has a buffer (numpy's arrays); lists, tuples, dicts of these."""

Tree: TypeAlias = Any
"""What JSON can say: texts, bools, None and most numbers as they are; all else is an object of one key, its kind."""

MAX_DEPTH = 64
"""How deep data may be nested. torch's state dicts have four levels."""

SAFE_INTEGER = 1 << 53
"""Integers from here on are written as text: many readers of JSON take numbers for doubles."""

DTYPE_NAMES: Mapping[str, str] = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8",
    "bool": "BOOL", "complex64": "C64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
"""safetensors' name of a dtype by numpy's and torch's."""

_BY_FORMAT: Mapping[str, str] = {
    "d": "float64", "f": "float32", "e": "float16", "?": "bool", "b": "int8", "B": "uint8", "h": "int16", "H": "uint16",
    "i": "int32", "I": "uint32", "l": "int64", "L": "uint64", "q": "int64", "Q": "uint64", "Zf": "complex64",
}  # fmt: skip
"""dtype by what a buffer says of itself (the struct module's characters, on 64-bit Unix)."""


class PlainArray(NamedTuple):
    """An array without a library. `data` is contiguous, in row-major order; whoever has the array keeps it alive."""

    dtype: str
    """numpy's and torch's name: 'float32'."""
    shape: tuple[int, ...]
    data: memoryview


def flat_bytes(view: memoryview) -> memoryview:
    """The bytes of a contiguous view, not copied. Raises BadArgument for another one."""
    if not view.nbytes:
        return memoryview(b"")
    if not view.c_contiguous:
        raise BadArgument("an array that is to be written is not contiguous in row-major order: hand in a copy of it")
    return view.cast("B")


def as_plain_array(value: object) -> PlainArray:
    """The array of anything that has a buffer. Raises BadArgument for what a checkpoint can't hold."""
    if isinstance(value, PlainArray):
        expected = math.prod(value.shape) * ITEM_BYTES_OF.get(DTYPE_NAMES.get(value.dtype, ""), -1)
        if value.data.nbytes != expected:
            raise BadArgument(
                f"array of {value.dtype} {value.shape} has {value.data.nbytes} bytes; expected {expected}"
                f" of one of {', '.join(DTYPE_NAMES)}"
            )
        return value
    try:
        view = memoryview(value)  # type: ignore[arg-type]
    except ValueError as error:  # numpy's, of dates
        raise BadArgument(str(error)) from None
    dtype = _BY_FORMAT.get(view.format.lstrip("=@<"))
    if dtype is None:
        raise BadArgument(f"array has elements of format {view.format!r}; expected one of {', '.join(DTYPE_NAMES)}")
    return PlainArray(dtype, tuple(view.shape or ()), flat_bytes(view))


def pack(value: Plain, arrays: list[PlainArray]) -> Tree:
    """The tree of a value; its arrays and bytes are appended to `arrays`, not copied. Raises BadArgument that says
    where in the value what can't be held is."""
    return _pack(value, arrays, "")


def unpack(tree: Tree, arrays: Sequence[PlainArray]) -> Plain:
    """The value. Raises ValueError for what `pack` does not make."""
    if not isinstance(tree, dict):
        return tree
    if len(tree) != 1:
        raise ValueError(f"an object with keys {sorted(tree)}")
    ((kind, content),) = tree.items()
    match kind:
        case "list":
            return [unpack(one, arrays) for one in content]
        case "tuple":
            return tuple(unpack(one, arrays) for one in content)
        case "map":
            return {unpack(key, arrays): unpack(one, arrays) for key, one in content}
        case "int":
            return int(content)
        case "float":
            return float(content)
        case "array":
            return arrays[content]
        case "bytes":
            return bytes(arrays[content].data)
    raise ValueError(f"an object of kind {kind!r}")


def _pack(value: Plain, arrays: list[PlainArray], where: str, depth: int = 0, *, is_key: bool = False) -> Tree:
    if depth > MAX_DEPTH:
        raise BadArgument(f"what is handed in is nested more than {MAX_DEPTH} deep, at {where[:200]}")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _text(value, where)
    if isinstance(value, int):
        return int(value) if abs(value) < SAFE_INTEGER else {"int": _digits(int(value), where)}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": repr(float(value))}
    if isinstance(value, bytes):
        return {"bytes": _append(arrays, PlainArray("uint8", (len(value),), memoryview(value)))}
    if isinstance(value, dict):
        return {
            "map": [
                [
                    _pack(key, arrays, f"{where} key {i}", depth + 1, is_key=True),
                    _pack(one, arrays, f"{where}[{key!r}]", depth + 1),
                ]
                for i, (key, one) in enumerate(value.items())
            ]
        }
    if isinstance(value, (list, tuple)) and not isinstance(value, PlainArray):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_pack(one, arrays, f"{where}[{i}]", depth + 1, is_key=is_key) for i, one in enumerate(value)]}
    if is_key:
        return _pack(_python_number(value, where), arrays, where, depth)
    return {"array": _append(arrays, _array_at(value, where))}


def _text(value: str, where: str) -> str:
    """Without the class that it may be of. Raises BadArgument."""
    if not is_text(value):
        raise BadArgument(f"what is handed in has text that UTF-8 can't say{_at(where)}: {value!r:.100}")
    return str.__str__(value)


def _digits(value: int, where: str) -> str:
    try:
        return str(value)
    except ValueError:  # Python's own bound
        raise BadArgument(
            f"what is handed in has an integer of {value.bit_length()} bits{_at(where)}, more than Python writes as"
            " text: hand in its bytes"
        ) from None


def _python_number(key: object, where: str) -> int | float:
    """The number of Python's that is found in a dict where one of numpy's was put. Raises BadArgument for what is none:
    arrays can't be keys again."""
    if isinstance(key, Integral):
        return int(key)
    if isinstance(key, Real) and float(key) == key:
        return float(key)
    raise BadArgument(
        f"what is handed in has a {type(key).__qualname__}{_at(where)}; keys are numbers, texts, bytes, and tuples of"
        " these"
    )


def _append(arrays: list[PlainArray], array: PlainArray) -> int:
    arrays.append(array)
    return len(arrays) - 1


def _array_at(value: object, where: str) -> PlainArray:
    try:
        return as_plain_array(value)
    except TypeError:
        raise BadArgument(
            f"what is handed in has a {type(value).__qualname__}{_at(where)}; a checkpoint holds plain data and arrays"
            " (of torch's tensors: .numpy(), or psstore's PlainArray)"
        ) from None
    except BadArgument as error:
        raise BadArgument(f"what is handed in can't be held{_at(where)}: {error.message}") from None


def _at(where: str) -> str:
    return f" at {where[:200].strip()}" if where else ""
