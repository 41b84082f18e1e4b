"""Arrays on a fake device (csrc/device/fake_device.h), as a user's library would have them: made and used on a stream
of the user's, and seen by psstore through an interface only."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from psstore import _core
from psstore.client.device import arrays as device_arrays

Array = np.ndarray[Any, Any]


class Stream:
    """A user's. Nothing on it is done before somebody asks for it."""

    def __init__(self, device: _core.Device) -> None:
        self.device = device
        self.queue = device.make_queue()
        self._pool = _core.PinnedPool(device, max_idle_bytes=1 << 20)
        self._kept: list[object] = []

    def write(self, to: FakeArray, value: Array) -> None:
        """Queues it."""
        self.write_to(to.memory.pointer, value, to.memory)

    def write_to(self, pointer: int, value: Array, owner: object) -> None:
        """Queues it. `owner`: of the memory, which stays for as long as the stream."""
        buffer = self._pool.allocate(value.nbytes)
        np.asarray(memoryview(buffer))[: value.nbytes] = value.reshape(-1).view(np.uint8)
        self.queue.copy_in(buffer, [(0, pointer, value.nbytes)])
        self._kept.append((buffer, owner))

    def read(self, source: FakeArray) -> Array:
        """What is queued after all else finds."""
        num_bytes = source.num_bytes
        buffer = self._pool.allocate(num_bytes)
        self.queue.copy_out(buffer, [(0, source.memory.pointer, num_bytes)])
        self.queue.record().wait()
        return np.asarray(memoryview(buffer))[:num_bytes].copy().view(source.dtype).reshape(source.shape)


def stream_on(device: str, monkeypatch: pytest.MonkeyPatch) -> Stream:
    """On the device that clients find their arrays on from now on."""
    opened = _core.open_device(device)
    monkeypatch.setattr(device_arrays, "device_at", lambda index: opened)
    return Stream(opened)


class FakeArray:
    """Device memory without an interface."""

    def __init__(self, stream: Stream, value: Array) -> None:
        """`value` is written to it on the stream, later."""
        self.stream = stream
        self.shape, self.dtype = value.shape, value.dtype
        self.num_bytes = value.nbytes
        self.memory = _core.DeviceMemory(stream.device, max(1, value.nbytes))
        stream.write(self, value)

    def read(self) -> Array:
        return self.stream.read(self)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0  # kDLCUDA


class DLPack(FakeArray):
    """Only __dlpack__, as JAX's: made by a stand-in for its producer, which orders its stream before the consumer's."""

    def __dlpack__(self, *, stream: int) -> object:
        self.asked_by = stream
        self.stream.device.borrow_queue(stream).wait_for(self.stream.queue.record())
        return capsule(self.memory.pointer, self.shape)


class Interface(FakeArray):
    """CuPy's: __cuda_array_interface__ of version 3. `changed`: what it says otherwise."""

    changed: dict[str, Any]

    def __init__(self, on: Stream, value: Array, **changed: Any) -> None:
        super().__init__(on, value)
        self.changed = changed

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.memory.pointer, False),
            "stream": self.stream.queue.stream,
            **self.changed,
        }


def torch_on(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has torch's tensors in main memory taken for ones on the stream's device, made on that stream. A dense copy of
    one is queued on it: before that is done there are NaNs."""
    dense = torch.Tensor.contiguous

    def contiguous(tensor: torch.Tensor) -> torch.Tensor:
        made = torch.full(tensor.shape, torch.nan)
        stream.write_to(made.data_ptr(), dense(tensor).numpy(), made)
        return made

    monkeypatch.setattr(torch.Tensor, "contiguous", contiguous)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=stream.queue.stream))


class _DLTensor(ctypes.Structure):
    """dlpack.h's, of float32, and a shape to point to."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("num_dims", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("sizes", ctypes.c_int64 * 4),
    )


_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_capsules: list[_DLTensor] = []
"""What capsules point to stays."""


def capsule(pointer: int, shape: tuple[int, ...]) -> object:
    tensor = _DLTensor(data=pointer, device_type=2, num_dims=len(shape), code=2, bits=32, lanes=1)
    tensor.sizes[: len(shape)] = shape
    tensor.shape = ctypes.addressof(tensor) + _DLTensor.sizes.offset
    _capsules.append(tensor)
    return _new_capsule(ctypes.addressof(tensor), b"dltensor", None)
