"""Callers' arrays as flat memory: numpy, torch (only if the caller uses it), or numbers and lists.

A contiguous array in main memory is used where it lies. Everything else costs one copy, made here, but for what lies
on a CUDA device: see device/arrays.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from psstore import _core
from psstore.errors import BadArgument, DTypeMismatch
from psstore.types import ITEM_BYTES

Array = Any
"""A numpy array, a torch tensor, an array on a CUDA device, a number or a (nested) list of numbers."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
"""Flat memory. No memoryview, which the garbage collector counts: there are thousands in a step of many parameters."""

Floats = np.ndarray[Any, np.dtype[np.float32]]


class Source(NamedTuple):
    """Values to send."""

    shape: tuple[int, ...]
    dtype: str
    data: Bytes
    """Their bytes, flat."""


class Target(NamedTuple):
    """Memory to receive into."""

    shape: tuple[int, ...]
    dtype: str
    data: Bytes
    result: Array
    """The array that the caller gets."""
    finish: Callable[[], None] | None
    """Call it when all is received: copies to where `data` could not lie."""


def source(value: Array, *, dtype: str) -> Source:
    """Returns the bytes of a value, by reference where it is possible. Numbers and lists become `dtype`."""
    if isinstance(value, Source):
        return value
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        tensor = value.detach()
        _check_dense(tensor)
        if not tensor.is_cpu:
            _wait_for_device(tensor)
            tensor = tensor.cpu()
        dense = tensor.resolve_neg().contiguous()
        return Source(tuple(tensor.shape), torch_dtype(tensor.dtype), _torch_bytes(dense))
    array = value if isinstance(value, np.ndarray) else _array_of(value, dtype)
    _check_unmasked(array)
    return Source(array.shape, _numpy_dtype(array), _numpy_bytes(np.ascontiguousarray(array)))


def target(out: Array) -> Target:
    """Returns the memory of `out`; temporary memory if it is not contiguous or not in main memory."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(out, torch.Tensor):
        tensor = out.detach()
        _check_dense(tensor)
        shape, dtype = tuple(tensor.shape), torch_dtype(tensor.dtype)
        if tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg():
            return Target(shape, dtype, _torch_bytes(tensor), out, None)
        check_apart(shape, tensor.stride())
        aside = torch.empty(shape, dtype=tensor.dtype, device="cpu")
        return Target(shape, dtype, _torch_bytes(aside), out, lambda: _copy(aside, tensor))
    if not isinstance(out, np.ndarray):
        raise BadArgument(
            f"out= takes numpy arrays, torch tensors and arrays on a CUDA device, not {type(out).__name__}"
        )
    _check_unmasked(out)
    if not out.flags.writeable:
        raise BadArgument("out= is a read-only array; give one that can be written to")
    dtype = _numpy_dtype(out)
    if out.flags.c_contiguous and out.dtype.isnative:
        return Target(out.shape, dtype, _numpy_bytes(out), out, None)
    check_apart(out.shape, out.strides, item=out.itemsize)
    temporary = np.empty(out.shape, dtype=out.dtype.newbyteorder("="))
    return Target(out.shape, dtype, _numpy_bytes(temporary), out, lambda: np.copyto(out, temporary))


def fresh(shape: tuple[int, ...], dtype: str) -> Target:
    """Returns a new numpy array as a target."""
    if dtype == "bfloat16":
        raise BadArgument("numpy has no bfloat16; pull it into a torch tensor with out=, or pull float32")
    array = np.empty(shape, dtype=dtype)
    return Target(shape, dtype, _numpy_bytes(array), array, None)


def has_overlaps(shape: Sequence[int], strides: Sequence[int], *, item: int = 1) -> bool:
    """Whether elements share memory, as expand(), broadcast_to() and as_strided() may have them do, so that they can't
    be written. `item`: the size of one, in what `strides` count."""
    if 0 in shape:
        return False
    span = 0  # from the first to the last element, without that itself, in the dimensions so far
    for stride, size in sorted((abs(stride), size) for size, stride in zip(shape, strides, strict=True) if size > 1):
        if stride < span + item:
            return stride < item or _have_entwined_overlaps(shape, strides, item)
        span += stride * (size - 1)
    return False


def _have_entwined_overlaps(shape: Sequence[int], strides: Sequence[int], item: int) -> bool:
    """Looks at each element, where one dimension's lie between another's."""
    places = np.zeros(1, np.int64)
    for size, stride in zip(shape, strides, strict=True):
        places = np.add.outer(places, stride * np.arange(size)).ravel()
    return bool((np.diff(np.sort(places)) < item).any())


def check_apart(shape: Sequence[int], strides: Sequence[int], *, item: int = 1) -> None:
    """Raises BadArgument for memory that can't be received into."""
    if has_overlaps(shape, strides, item=item):
        raise BadArgument(
            f"out= is an array of shape {tuple(shape)} whose elements share memory, as an expanded one's: give one that"
            " has memory for each, as its clone() or copy()"
        )


def sendable(dtype: str, *, convert: str) -> str:
    """The dtype. Raises DTypeMismatch, which names the way to `convert`, if arrays of it are no values here."""
    if dtype not in ITEM_BYTES:
        raise DTypeMismatch(
            f"an array of dtype {dtype} can't be stored or sent; use one of {', '.join(ITEM_BYTES)} ({convert})"
        )
    return dtype


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


# ---- numpy ----------------------------------------------------------------------------------------


def _array_of(value: Array, dtype: str) -> np.ndarray[Any, Any]:
    """The array of what is none: in a dtype of its own, or else in this one. Raises BadArgument for what is not made of
    numbers: numpy makes NaN of None, and a number of '1'."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError) as error:
        raise _no_numbers(value, str(error)) from None
    if hasattr(value, "dtype") or hasattr(value, "__array__"):
        return array
    if array.dtype.kind not in "biuf":
        raise _no_numbers(value, f"numpy makes {array.dtype.name} of it")
    return array.astype(dtype)


def _no_numbers(value: Array, why: str) -> BadArgument:
    return BadArgument(
        f"a value of type {type(value).__name__} is no array of numbers ({why}): expected a numpy array, a torch"
        " tensor, a number, or lists of numbers, all of one length"
    )


def _numpy_dtype(array: np.ndarray[Any, Any]) -> str:
    return sendable(array.dtype.name, convert="array.astype")


def is_masked(value: object) -> bool:
    """Whether it says of some of its elements that they are none."""
    return type(value) is not np.ndarray and bool(np.ma.is_masked(value))


def _check_unmasked(array: np.ndarray[Any, Any]) -> None:
    """Raises BadArgument for an array that says of some of its elements that they are none."""
    if is_masked(array):
        raise BadArgument(
            "an array with masked elements can't be sent, nor pulled into: say what they are, as its filled(0) does"
        )


def _numpy_bytes(array: np.ndarray[Any, Any]) -> Bytes:
    native = array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
    return np.asarray(native).reshape(-1).view(np.uint8)


# ---- torch ----------------------------------------------------------------------------------------


@cache
def torch_dtype(dtype: Any) -> str:
    return sendable(str(dtype).removeprefix("torch."), convert="tensor.to")


def _check_dense(tensor: Any) -> None:
    """Raises BadArgument for a tensor that has not each of its elements in memory."""
    torch = sys.modules["torch"]
    if tensor.is_nested or tensor.layout is not torch.strided:
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise BadArgument(
            f"a {kind} tensor can't be stored or sent: make it dense, as tensor.to_dense() does; rows go by push_rows"
        )
    if tensor.is_meta or (tensor.is_cpu and tensor.numel() > 0 and tensor.data_ptr() == 0):
        where = "on the meta device" if tensor.is_meta else "whose memory was freed, or of zeros without any"
        raise BadArgument(f"a tensor {where} has no elements to store or send: give one that has memory")


def _copy(aside: Any, tensor: Any) -> None:
    """Copies to a tensor, after what the caller has queued on its device and before what will be."""
    if tensor.device.type != "cpu":
        _wait_for_device(tensor)
    tensor.copy_(aside)
    if tensor.device.type != "cpu":
        _wait_for_device(tensor)


def _wait_for_device(tensor: Any) -> None:
    """Waits for all streams of the tensor's device: the caller's current one is not known on this thread."""
    getattr(sys.modules["torch"], tensor.device.type).synchronize(tensor.device)


def _torch_bytes(tensor: Any) -> Bytes:
    """The view keeps the tensor's memory alive. numpy has no bfloat16: it sees integers."""
    torch = sys.modules["torch"]
    return _numpy_bytes((tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor).numpy())
