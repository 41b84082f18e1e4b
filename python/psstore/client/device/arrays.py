"""Callers' arrays in the memory of a device: torch's CUDA tensors, CuPy's arrays, whatever has `__dlpack__` or
`__cuda_array_interface__`.

What is under way on a device is ordered by its streams, and which of them the caller works on is known on the caller's
own thread alone. So arrays are looked at there, when a call is made: `seen` puts a fence behind what the caller had
queued by then. Copies wait for it (pinned_transfer.py), and the caller's stream waits for copies that write; the host
waits for neither.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from psstore import _core
from psstore.client.arrays import Array, Floats, check_apart, sendable, torch_dtype
from psstore.errors import BadArgument
from psstore.types import ITEM_BYTES

ON_DEVICE = (2, 13)
"""kDLCUDA and kDLCUDAManaged of `__dlpack_device__`: what other devices there are is main memory, or not ours."""

NO_STREAM = 0
"""Stream that __cuda_array_interface__ does not allow: it could be either of two."""


class OnDevice(NamedTuple):
    """A row-major array without gaps, as its owner's stream will leave it."""

    shape: tuple[int, ...]
    dtype: str
    pointer: int
    num_bytes: int
    device: _core.Device
    ready: _core.Fence | None
    """Once this is done the array may be read and written; None: at once."""
    stream: int | None
    """Its owner's: waits for what is written. None: not known, so that the host has to wait."""
    keep: Any
    """Owner of the memory."""
    result: Array
    """The array that the caller gets."""
    finish: Callable[[], None] | None
    """Call it when the copies are queued and the stream waits for them: copies to where they could not."""


def seen(arrays: Sequence[Array], *, writable: bool = False) -> Sequence[Array]:
    """Returns the arrays, with an `OnDevice` in place of each array in the memory of a device. Call it on the caller's
    thread, where the stream is current that the arrays are made on, or used on. Does not wait for the device.

    `writable`: they are to be written to. Raises DTypeMismatch, BadArgument for arrays on a device that can't be sent.
    """
    if not any(map(_may_be_on_a_device, set(map(type, arrays)))):
        return arrays
    look = _Look(writable)
    return [look.at(array) for array in arrays]


def by_place(arrays: Sequence[Any]) -> dict[_core.Device | None, list[int]]:
    """Positions of the arrays by the device that each is on, as `seen` found; None: in main memory."""
    places: dict[_core.Device | None, list[int]] = {}
    for position, one in enumerate(arrays):
        places.setdefault(one.device if isinstance(one, OnDevice) else None, []).append(position)
    return places


def _may_be_on_a_device(kind: type) -> bool:
    torch = sys.modules.get("torch")
    if torch is not None and issubclass(kind, torch.Tensor):
        return bool(torch.cuda.is_initialized())
    return not issubclass(kind, np.ndarray) and (
        hasattr(kind, "__cuda_array_interface__") or hasattr(kind, "__dlpack_device__")
    )


@cache
def device_at(index: int) -> _core.Device:
    """CUDA's device of that number, opened once. Raises BadArgument in a build without CUDA."""
    return _core.open_device(f"cuda:{index}")


class _Look:
    """A look at the arrays of one call, with one fence for those on one stream that nothing was queued between."""

    def __init__(self, writable: bool) -> None:
        self._writable = writable
        self._fences: dict[tuple[str, int], _core.Fence] = {}
        self._streams: dict[Any, int] = {}
        """torch's current ones, by its devices."""

    def at(self, array: Array) -> Array:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(array, torch.Tensor):
            # A class derived from them may mean something else by its memory.
            plain = type(array) in (torch.Tensor, torch.nn.Parameter) and array.layout is torch.strided
            return self._tensor(torch, array) if plain and array.is_cuda else array
        interface = getattr(array, "__cuda_array_interface__", None)
        speaks_dlpack = hasattr(array, "__dlpack__") and not isinstance(array, np.ndarray)
        if interface is not None and ("stream" in interface or not speaks_dlpack):
            return self._interface(array, interface)
        if speaks_dlpack and array.__dlpack_device__()[0] in ON_DEVICE:
            return self._dlpack(array)
        return array

    def _tensor(self, torch: Any, given: Any) -> OnDevice:
        tensor = given.detach()
        place, finish = tensor, None
        device = device_at(tensor.device.index)
        stream = self._streams.get(tensor.device)
        if stream is None:
            stream = self._streams[tensor.device] = torch.cuda.current_stream(tensor.device).cuda_stream
        if not tensor.is_contiguous() or tensor.is_neg():
            if self._writable:
                check_apart(tensor.shape, tensor.stride())
                place = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
                finish = _copying(torch, place, tensor)
            else:
                place = tensor.resolve_neg().contiguous()
                # The copy is queued behind the fence that arrays before it have.
                self._fences.pop((device.name, stream), None)
        return OnDevice(
            shape=tuple(tensor.shape),
            dtype=torch_dtype(tensor.dtype),
            pointer=place.data_ptr(),
            num_bytes=place.nbytes,
            device=device,
            ready=self._fence(device, stream),
            stream=stream,
            keep=place,
            result=given,
            finish=finish,
        )

    def _interface(self, array: Array, interface: dict[str, Any]) -> OnDevice:
        """https://nvidia.github.io/numba-cuda/user/cuda_array_interface.html, version 3; before it, no stream."""
        pointer, read_only = interface["data"]
        shape, dtype = tuple(interface["shape"]), np.dtype(interface["typestr"])
        stream = interface.get("stream")
        if stream == NO_STREAM:
            raise BadArgument("an array says stream 0 in its __cuda_array_interface__, which that does not allow")
        if interface.get("mask") is not None:
            raise BadArgument("an array has a mask in its __cuda_array_interface__; send the values alone")
        if read_only and self._writable:
            raise BadArgument("out= is a read-only array; give one that can be written to")
        strides = interface.get("strides")
        if strides is not None and not _row_major(shape, [stride // dtype.itemsize for stride in strides]):
            raise _has_gaps()
        device = device_at(_index_of(array, pointer))
        return OnDevice(
            shape=shape,
            dtype=sendable(dtype.name if dtype.isnative else dtype.str, convert="array.astype"),
            pointer=pointer or 0,
            num_bytes=int(np.prod(shape, dtype=np.int64)) * dtype.itemsize,
            device=device,
            ready=None if stream is None else self._fence(device, stream),
            stream=stream,
            keep=array,
            result=array,
            finish=None,
        )

    def _dlpack(self, array: Array) -> OnDevice:
        """The producer orders its own stream before ours (https://data-apis.org/array-api, __dlpack__): one of ours
        that has nothing else to do, and then a fence."""
        device = device_at(array.__dlpack_device__()[1])
        capsule, ready = _handed_over(array, device)
        pointer, sizes, dtype, row_major = _core.dlpack_array(capsule)
        if not row_major:
            raise _has_gaps()
        sent = sendable(dtype, convert="array.astype")
        return OnDevice(
            shape=tuple(sizes),
            dtype=sent,
            pointer=pointer,
            num_bytes=int(np.prod(sizes, dtype=np.int64)) * ITEM_BYTES[sent],
            device=device,
            ready=ready,
            stream=None,
            keep=capsule,
            result=array,
            finish=None,
        )

    def _fence(self, device: _core.Device, stream: int) -> _core.Fence:
        key = (device.name, stream)
        if key not in self._fences:
            self._fences[key] = device.borrow_queue(stream).record()
        return self._fences[key]


ALIGNMENT = 256
"""Bytes that the floats in a block are aligned to: where a device's wide accesses begin."""


class DeviceFloats:
    """Floats on a device that a client keeps of a tensor from call to call: what codecs kept back, or a value that is
    followed. Used by the store's transfers alone (pinned_transfer.py), which hold them until queued work is done."""

    def __init__(self, device: _core.Device, block: _core.DeviceMemory, offset: int, size: int) -> None:
        self.device = device
        self.pointer = block.pointer + offset
        self.size = size
        self._block = block
        """Memory of the device that several share: it is freed with the last of them."""

    @classmethod
    def together(cls, device: _core.Device, sizes: Sequence[int]) -> list[DeviceFloats]:
        """Returns floats of these sizes in one block, contents undefined. Raises OutOfMemory."""
        lengths = [-(-4 * size // ALIGNMENT) * ALIGNMENT for size in sizes]
        block = _core.DeviceMemory(device, max(1, sum(lengths)))
        return [
            cls(device, block, offset, size)
            for offset, size in zip(accumulate(lengths[:-1], initial=0), sizes, strict=False)
        ]

    def as_array(self) -> OnDevice:
        """Returns the floats as an array, for a pinned transfer to read or to write."""
        return OnDevice(
            shape=(self.size,),
            dtype="float32",
            pointer=self.pointer,
            num_bytes=4 * self.size,
            device=self.device,
            ready=None,
            stream=None,
            keep=self,
            result=None,
            finish=None,
        )


Kept = Floats | DeviceFloats


def place_of(kept: Kept) -> _core.Device | None:
    """Returns the device that floats are on; None: main memory."""
    return kept.device if isinstance(kept, DeviceFloats) else None


_handing_over = threading.Lock()


@cache
def _reception(device: _core.Device) -> _core.Queue:
    return device.make_queue()


def _handed_over(array: Array, device: _core.Device) -> tuple[Any, _core.Fence]:
    """Its capsule, and when its memory may be used."""
    with _handing_over:  # a queue is for one thread at a time
        queue = _reception(device)
        return array.__dlpack__(stream=queue.stream), queue.record()


def _copying(torch: Any, place: Any, tensor: Any) -> Callable[[], None]:
    """Copies between two places on a device, on the stream that is current now."""
    stream = torch.cuda.current_stream(tensor.device)

    def copy() -> None:
        with torch.cuda.stream(stream):
            tensor.copy_(place)

    return copy


def _index_of(array: Array, pointer: int) -> int:
    """Index of the device whose memory this is."""
    if hasattr(array, "__dlpack_device__"):
        return int(array.__dlpack_device__()[1])
    return _core.cuda_device_of(pointer)


def _row_major(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Strides in elements. A dimension of size 1 may have any, and so may all of an array without elements."""
    expected = 1
    dense = True
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        dense = dense and (size == 1 or stride == expected)
        expected *= size
    return dense or 0 in shape


def _has_gaps() -> BadArgument:
    return BadArgument("an array on a device has gaps between its rows: copy it first, as cupy.ascontiguousarray does")
