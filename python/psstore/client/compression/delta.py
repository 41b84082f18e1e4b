"""Pulls of deltas: the store sends what is new since this client's last pull, in the bytes of a codec.

For each slice the store keeps what it has *published*: what everybody has who follows. A delta is the encoded
difference of the value to that, and is added to it there as it is here; what the encoding lost is in the difference of
the next delta. So all followers have the same bits, which tend to the value. Who has not got the published value that
a delta begins at is sent the whole of it, as float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from psstore import _core
from psstore.client.arrays import Array, Bytes, Target, copied_into
from psstore.client.device.arrays import DeviceFloats, Kept
from psstore.client.layout import Frame, Layout
from psstore.codec.codecs import payload_bytes
from psstore.errors import BadHeader
from psstore.protocol.client import Transfer
from psstore.protocol.requests import Answer
from psstore.types import Tensor, slice_index

WHOLE = _core.DTYPES["float32"]


class Followed:
    """A tensor as it was published last."""

    def __init__(self, tensor: Tensor, value: Kept) -> None:
        """`value`: memory for the tensor."""
        self.tensor = tensor
        self.value = value
        self.versions: list[int | None] = [None] * len(tensor.shards)
        """The version of each slice; None: no value of it came yet."""

    def is_newer(self, than: int | None) -> bool:
        return than is None or any((version or 0) > than for version in self.versions)


class FollowedSlice:
    """A slice of a followed tensor, and the version of it that was here when it was asked for."""

    def __init__(self, followed: Followed, index: int, codec: str) -> None:
        self._begin, self._end = followed.tensor.bounds(index)
        self.delta_bytes = payload_bytes(codec, self._end - self._begin)
        self.whole_bytes = payload_bytes("float32", self._end - self._begin)
        self._followed = followed
        self._index = index
        self._had = followed.versions[index]

    @property
    def ask(self) -> int:
        """The version to ask for: one more than what is here; 0 for any."""
        return 0 if self._had is None else self._had + 1

    def is_news(self, dtype: int, version: int) -> bool:
        """True if what came is to be taken. Of two pulls under way at once the later brings nothing new, or the
        whole."""
        has = self._followed.versions[self._index]
        return (has is None or has < version) if dtype == WHOLE else has == self._had

    def take(self, data: Bytes, dtype: int) -> None:
        """Takes the slice, in main memory."""
        value = self._followed.value
        assert not isinstance(value, DeviceFloats), "it is followed in main memory"
        if dtype == WHOLE:
            value[self._begin : self._end] = data.view(np.float32)
        else:
            delta = np.empty(self._end - self._begin, np.float32)
            _core.decode_slice(dtype, data, delta)
            value[self._begin : self._end] += delta

    def step(self, offset: int, dtype: int) -> tuple[int, int, int, int, int]:
        """Returns what `Queue.decode_in` takes to decode the slice on its device, from that offset of a buffer."""
        value = self._followed.value
        assert isinstance(value, DeviceFloats), "it is followed on a device"
        return dtype, self._end - self._begin, offset, value.pointer + 4 * self._begin, WHOLE

    def taken(self, version: int) -> None:
        """Notes the version that is here now."""
        self._followed.versions[self._index] = version


class ReceivedSlice(NamedTuple):
    """A slice that came and is to be taken."""

    part: FollowedSlice
    offset: int
    """Where its bytes begin in the received frame's memory."""
    num_bytes: int
    dtype: int
    version: int


class ReceivedFrame:
    """The answer to one frame, in memory of its own: a slice may only change as a whole, and once."""

    def __init__(self, frame: Frame, parts: Sequence[FollowedSlice]) -> None:
        self.num_bytes = 0
        """Bytes that came."""
        self._frame = frame
        self._parts = parts
        self._given: Bytes | None = None
        self._memory = np.empty(0, np.uint8)
        self._sizes: Sequence[int] = ()

    @property
    def most_bytes(self) -> int:
        """Bytes that may come."""
        return sum(part.whole_bytes for part in self._parts)

    def transfer(self, memory: Bytes | None = None) -> Transfer:
        """Returns the request. `memory`: for `most_bytes`; None: it is made for what comes, when the answer is
        there."""
        self._given = memory
        asking = self._frame.table.with_versions([part.ask for part in self._parts])
        return Transfer(self._frame.way, asking, self._make_room)

    def news(self, answer: Answer) -> list[ReceivedSlice]:
        table = answer.table
        offsets = accumulate(self._sizes, initial=0)
        return [
            ReceivedSlice(part, offset, size, dtype, version)
            for part, offset, size, dtype, version in zip(
                self._parts, offsets, self._sizes, table.dtypes(), table.versions(), strict=False
            )
            if size and part.is_news(dtype, version)
        ]

    def decode(self, answer: Answer, decode: Callable[[list[tuple[int, int, int, int, int]]], None]) -> None:
        """Takes what came on a device: `decode` is told of it, as `Queue.decode_in` takes it."""
        news = self.news(answer)
        decode([one.part.step(one.offset, one.dtype) for one in news])
        for one in news:
            one.part.taken(one.version)

    def take(self, answer: Answer) -> None:
        """Takes what came, in main memory."""
        for part, offset, size, dtype, version in self.news(answer):
            part.take(self._memory[offset : offset + size], dtype)
            part.taken(version)

    def _make_room(self, table: _core.SliceTable) -> _core.Segments:
        """Raises BadHeader for what was not asked for."""
        asked, came, sizes = self._frame.table.dtypes(), table.dtypes(), table.num_bytes()
        if len(came) != len(asked):
            raise BadHeader(f"a pull of {len(asked)} slices was answered with {len(came)}")
        for part, wanted, dtype, size in zip(self._parts, asked, came, sizes, strict=True):
            expected = {wanted: part.delta_bytes, WHOLE: part.whole_bytes}.get(dtype)
            if size and size != expected:
                raise BadHeader(f"a slice came with {size} bytes of dtype {dtype}, expected {expected}")
        self.num_bytes = sum(sizes)
        self._sizes = sizes
        self._memory = np.empty(self.num_bytes, np.uint8) if self._given is None else self._given[: self.num_bytes]
        pieces = [self._memory[begin:end] for begin, end in pairwise(accumulate(sizes, initial=0))]
        return _core.Segments(pieces, writable=True)


class Following:
    """The tensors that one client follows. Used on its loop only."""

    def __init__(self) -> None:
        self._followed: dict[tuple[int, _core.Device | None], Followed] = {}
        """Followed tensors, by id and the device that they are on; None: main memory."""

    def followed(self, tensors: Sequence[Tensor], place: _core.Device | None) -> list[Followed]:
        """Returns these tensors as followed there, from now on if not before. Raises OutOfMemory; nothing has changed
        then."""
        new = {tensor.id: tensor for tensor in tensors if (tensor.id, place) not in self._followed}
        sizes = [tensor.spec.num_elems for tensor in new.values()]
        values: Sequence[Kept]
        if place is None:
            values = [np.zeros(size, np.float32) for size in sizes]
        else:
            values = DeviceFloats.together(place, sizes) if sizes else []
        for tensor, value in zip(new.values(), values, strict=True):
            self._followed[tensor.id, place] = Followed(tensor, value)
        return [self._followed[tensor.id, place] for tensor in tensors]

    def frames(self, layout: Layout, codecs: Sequence[str], followed: Sequence[Followed]) -> list[ReceivedFrame]:
        """Returns what receives the frames of a pull of these tensors, each in its codec."""
        return [
            ReceivedFrame(
                frame,
                [
                    FollowedSlice(followed[piece.position], slice_index(key), codecs[piece.position])
                    for piece, key in zip(frame.ranges, frame.table.keys(), strict=True)
                ],
            )
            for frame in layout.frames
        ]

    def forget(self, tensors: Sequence[Tensor]) -> None:
        """Stops following tensors that are gone, or were made anew."""
        gone = {tensor.id for tensor in tensors}
        self._followed = {key: one for key, one in self._followed.items() if key[0] not in gone}


def delivered(followed: Followed, target: Target) -> Array:
    """The tensor as it was published last, where it is wanted in main memory."""
    assert not isinstance(followed.value, DeviceFloats), "it is followed in main memory"
    copied_into(followed.value.view(np.uint8), "float32", target)
    return target.result
