"""Pulls of deltas: the store sends what is new since this client's last pull, in the bytes of a codec.

For each slice the store keeps what it has *published*: what everybody has who follows. A delta is the encoded
difference of the value to that, and is added to it there as it is here; what the encoding lost is in the difference of
the next delta. So all followers have the same bits, which tend to the value. Who has not got the published value that
a delta begins at is sent the whole of it, as float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from psstore import _core
from psstore.client.arrays import Array, Bytes, Target
from psstore.client.compression import Floats
from psstore.client.halves import copied_into
from psstore.client.layout import Frame, Layout
from psstore.codec.codecs import payload_bytes
from psstore.errors import BadHeader
from psstore.protocol.client import Transfer
from psstore.protocol.session import Answer
from psstore.types import Tensor, slice_index

WHOLE = _core.DTYPES["float32"]


class Followed:
    """One tensor as published."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.value: Floats = np.zeros(tensor.spec.num_elems, np.float32)
        self.versions: list[int | None] = [None] * len(tensor.shards)
        """Of each slice; None: it is not here yet."""


class Part:
    """One slice of a followed tensor, and which version of it was here when it was asked for."""

    def __init__(self, followed: Followed, index: int, codec: str) -> None:
        begin, end = followed.tensor.bounds(index)
        self.delta_bytes = payload_bytes(codec, end - begin)
        self.whole_bytes = payload_bytes("float32", end - begin)
        self._followed = followed
        self._index = index
        self._value = followed.value[begin:end]
        self._had = followed.versions[index]

    @property
    def ask(self) -> int:
        """The version to ask for: one more than what is here; 0 for any."""
        return 0 if self._had is None else self._had + 1

    def take(self, data: Bytes, dtype: int, version: int) -> None:
        """What came. Of two pulls under way at once the later brings nothing new, or the whole."""
        has = self._followed.versions[self._index]
        if dtype == WHOLE and (has is None or has < version):
            self._value[:] = data.view(np.float32)
        elif dtype != WHOLE and has == self._had:
            delta = np.empty_like(self._value)
            _core.decode_slice(dtype, data, delta)
            self._value += delta
        else:
            return
        self._followed.versions[self._index] = version


class Arrival:
    """What comes of one frame, in memory of its own: a slice may only change as a whole, and once."""

    def __init__(self, frame: Frame, parts: Sequence[Part]) -> None:
        self._frame = frame
        self._parts = parts
        self._pieces: list[Bytes] = []

    def transfer(self) -> Transfer:
        asking = self._frame.table.with_versions([part.ask for part in self._parts])
        return Transfer(self._frame.way, asking, self._make_room)

    def take(self, answer: Answer) -> None:
        table = answer.table
        for part, data, dtype, version in zip(
            self._parts, self._pieces, table.dtypes(), table.versions(), strict=bool(self._pieces)
        ):
            if data.size:
                part.take(data, dtype, version)

    def _make_room(self, table: _core.SliceTable) -> _core.Segments:
        """Raises BadHeader for what was not asked for."""
        asked, came, sizes = self._frame.table.dtypes(), table.dtypes(), table.num_bytes()
        if len(came) != len(asked):
            raise BadHeader(f"a pull of {len(asked)} slices was answered with {len(came)}")
        for part, wanted, dtype, size in zip(self._parts, asked, came, sizes, strict=True):
            expected = {wanted: part.delta_bytes, WHOLE: part.whole_bytes}.get(dtype)
            if size and size != expected:
                raise BadHeader(f"a slice came with {size} bytes of dtype {dtype}, expected {expected}")
        memory = np.empty(sum(sizes), np.uint8)
        self._pieces = [memory[begin:end] for begin, end in pairwise(accumulate(sizes, initial=0))]
        return _core.Segments(self._pieces, writable=True)


class Following:
    """All that one client follows. Used on its loop only."""

    def __init__(self) -> None:
        self._followed: dict[int, Followed] = {}

    def arrivals(self, layout: Layout, codecs: Sequence[str]) -> list[Arrival]:
        """One for each frame of a pull of these tensors, each in its codec."""
        for tensor in layout.tensors:
            if tensor.id not in self._followed:
                self._followed[tensor.id] = Followed(tensor)
        followed = [self._followed[tensor.id] for tensor in layout.tensors]
        return [
            Arrival(
                frame,
                [
                    Part(followed[piece.position], slice_index(key), codecs[piece.position])
                    for piece, key in zip(frame.ranges, frame.table.keys(), strict=True)
                ],
            )
            for frame in layout.frames
        ]

    def deliver(self, tensor: Tensor, target: Target, *, newer_than: int | None) -> Array:
        """The tensor as it was published last, where it is wanted; None if that is no newer, and nothing is written."""
        followed = self._followed[tensor.id]
        if newer_than is not None and all((version or 0) <= newer_than for version in followed.versions):
            return None
        copied_into(followed.value.view(np.uint8), "float32", target)
        return target.result

    def forget(self, tensors: Sequence[Tensor]) -> None:
        """They are gone, or others by now."""
        for tensor in tensors:
            self._followed.pop(tensor.id, None)
