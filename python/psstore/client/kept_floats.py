"""Floats that a client keeps of its tensors from call to call, in main memory or on a device: what codecs kept back
(compression.py), and values that are followed (following.py)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from psstore import _core
from psstore.client.device_arrays import OnDevice

Floats = np.ndarray[Any, np.dtype[np.float32]]

ALIGNMENT = 256
"""Bytes, of each in a block: where a device's wide accesses begin."""


class DeviceFloats:
    """On a device, used by the store's transfers alone (pinned_transfer.py). Whoever queues work on them holds them
    until it is done."""

    def __init__(self, device: _core.Device, block: _core.DeviceMemory, offset: int, size: int) -> None:
        self.device = device
        self.pointer = block.pointer + offset
        self.size = size
        self._block = block
        """The device's memory that several share: it is freed with the last of them."""

    @classmethod
    def together(cls, device: _core.Device, sizes: Sequence[int]) -> list[DeviceFloats]:
        """In one block, contents undefined. Raises OutOfMemory."""
        lengths = [-(-4 * size // ALIGNMENT) * ALIGNMENT for size in sizes]
        block = _core.DeviceMemory(device, max(1, sum(lengths)))
        return [
            cls(device, block, offset, size)
            for offset, size in zip(accumulate(lengths[:-1], initial=0), sizes, strict=False)
        ]

    def as_array(self) -> OnDevice:
        """For a pinned transfer to read or to write."""
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
    """None: main memory."""
    return kept.device if isinstance(kept, DeviceFloats) else None
