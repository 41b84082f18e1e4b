"""Pushes and pulls in codecs: what operations.py does with arrays, done with fewer bytes.

Residuals are in push.py, those of rows in rows.py, deltas in delta.py; here is when they change.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from psstore import _core
from psstore.client.arrays import Array, Floats, Source, Target, copied_into
from psstore.client.compression.delta import Following, delivered
from psstore.client.compression.push import Residuals
from psstore.client.compression.rows import RowFeedback
from psstore.client.device.arrays import OnDevice
from psstore.client.device.transfers import EncodedUpload, FollowedDownload, Transfers
from psstore.client.layout import Layout, Layouts
from psstore.codec.codecs import Codec, is_dtype
from psstore.errors import OutOfMemory
from psstore.protocol.client import Transfer
from psstore.protocol.requests import Answer
from psstore.types import ITEM_BYTES, Tensor, slice_index


class Reader(Protocol):
    """Carries out pulls: psstore.client.reading's, which is above this folder."""

    async def receive(
        self, layout: Layout, transfers: Sequence[Transfer] | FollowedDownload, wait_s: float | None
    ) -> list[Answer]:
        """Carries out the transfers of a pull."""

    async def pull_into(
        self, layout: Layout, targets: Sequence[Target | OnDevice], newer_than: int | None, wait_s: float | None
    ) -> list[Array]:
        """Pulls without deltas."""


class Coded:
    """The pushes and pulls of one client in codecs. Runs on the client's loop."""

    def __init__(self, layouts: Layouts, transfers: Transfers) -> None:
        self._layouts = layouts
        self._transfers = transfers
        self._residuals = Residuals()
        self.rows = RowFeedback()
        self._following = Following()
        self._open: tuple[Collection[int], float] | None = None
        """Ids of the tensors that count in a round that was committed, and its loss scale, until it is known whether
        the round counts."""

    # ---- pushes ----

    async def bring_residuals(self, tensors: Sequence[Tensor], place: _core.Device | None) -> None:
        """Moves residuals to the device that encodes these tensors now; None: to main memory. Raises OutOfMemory, with
        nothing changed."""
        while residuals := self._residuals.elsewhere(tensors, place):
            settled = [residual.settled for residual in residuals if residual.settled is not None]
            brought = await self._transfers.brought(settled, place)
            for residual, was, now in zip(residuals, settled, brought, strict=True):
                if residual.settled is was:
                    residual.settled = now

    def upload(
        self,
        op: str,
        tensors: Sequence[Tensor],
        arrays: Sequence[OnDevice],
        codecs: Sequence[Codec],
        *,
        loss_scale: float | None,
    ) -> tuple[Layout, EncodedUpload]:
        """Returns a push of arrays on one device, which encodes them. REQUIRES: their residuals are there. Raises
        OutOfMemory; no residual has changed then."""
        layout = self._layouts.of(tensors, [codec.name for codec in codecs], pull=False)
        encoders = self._residuals.device_encoders(layout.tensors, arrays, codecs, loss_scale=loss_scale)
        pinned = self._transfers.out_of(arrays[0].device)
        ended = partial(self._ended, op, layout.tensors)
        return layout, EncodedUpload(pinned, layout, arrays, encoders, ended)

    def transfers(
        self,
        op: str,
        tensors: Sequence[Tensor],
        sources: Sequence[Source],
        codecs: Sequence[Codec | None],
        *,
        loss_scale: float | None,
    ) -> tuple[Layout, Iterator[Transfer]]:
        """Returns the frames of a push from main memory: each is encoded when it is asked for, while the one before is
        on its way. REQUIRES: their residuals are there."""
        encodings = [value.dtype if codec is None else codec.name for value, codec in zip(sources, codecs, strict=True)]
        layout = self._layouts.of(tensors, encodings, pull=False)
        return layout, self._encoded(op, layout, sources, codecs, loss_scale)

    def _encoded(
        self,
        op: str,
        layout: Layout,
        sources: Sequence[Source],
        codecs: Sequence[Codec | None],
        loss_scale: float | None,
    ) -> Iterator[Transfer]:
        encoders = [
            None if codec is None else self._residuals.encoder(tensor, value, codec, loss_scale=loss_scale)
            for tensor, value, codec in zip(layout.tensors, sources, codecs, strict=True)
        ]
        memories = [
            value.data if encoder is None else encoder.payload for value, encoder in zip(sources, encoders, strict=True)
        ]
        for frame, transfer in zip(layout.frames, layout.transfers(memories), strict=True):
            for piece, key in zip(frame.ranges, frame.table.keys(), strict=True):
                encoder = encoders[piece.position]
                if encoder is not None:
                    encoder.encode(slice_index(key), encoder.payload[piece.begin : piece.end])
            yield transfer
        self._ended(
            op, [tensor for tensor, encoder in zip(layout.tensors, encoders, strict=True) if encoder is not None]
        )

    def _ended(self, op: str, tensors: Sequence[Tensor]) -> None:
        """Notes that all slices of these tensors are encoded."""
        if op == "ADD":
            for tensor in tensors:
                self._residuals.settle_at_once(tensor)

    @property
    def has_pending(self) -> bool:
        """True if something was encoded in this round, which `pushing` may have to drop."""
        return self._residuals.has_pending

    def pushing(self, layout: Layout) -> None:
        """Notes that a layout's contributions go out now. One that is sent as it is takes the place of one that was
        encoded in the same round, and leaves no residual."""
        if self._residuals.has_pending:
            for tensor, encoding in zip(layout.tensors, layout.dtypes, strict=True):
                if is_dtype(encoding):
                    self._residuals.drop_pending(tensor)

    # ---- rounds ----

    def committed(self, counted: Collection[int], *, loss_scale: float) -> None:
        """Notes the end of a round, in which contributions to these tensors count if the round does."""
        self._open = counted, loss_scale

    def conclude(self, *, counts: bool) -> None:
        """Notes whether the committed round counts."""
        if self._open is not None:
            counted, loss_scale = self._open
            self._residuals.settle(counted if counts else (), loss_scale=loss_scale)
            self.rows.settle(counted if counts else (), loss_scale=loss_scale)
            self._open = None

    async def residuals(self, tensors: Sequence[Tensor]) -> dict[str, Floats]:
        """Copies of what is settled, by name, of the tensors that have any; in units of real gradients."""
        settled = self._residuals.settled(tensors)
        values = await self._transfers.brought([value for _, value, _ in settled], None)
        return {
            tensor.spec.name: (value / np.float32(loss_scale)).reshape(tensor.spec.shape)
            for (tensor, _, loss_scale), value in zip(settled, values, strict=True)
            if isinstance(value, np.ndarray)
        }

    def set_residuals(self, tensors: Sequence[Tensor], values: Sequence[Source | None]) -> None:
        self._residuals.write(tensors, values)

    def forget(self, tensors: Sequence[Tensor]) -> None:
        """Drops the state of tensors that are gone, or were made anew."""
        self._residuals.forget(tensors)
        self.rows.forget(tensors)
        self._following.forget(tensors)

    # ---- pulls ----

    async def pull(
        self,
        reader: Reader,
        tensors: Sequence[Tensor],
        targets: Sequence[Any],
        codecs: Sequence[Codec | None],
        newer_than: int | None,
        wait_s: float | None,
        *,
        place: _core.Device | None,
    ) -> list[Array]:
        """Pulls into targets that are all on one device, or all in main memory: deltas, and at the same time what comes
        whole."""
        followed = {i: codec.name for i, codec in enumerate(codecs) if codec is not None and codec.follows}
        whole = [i for i in range(len(tensors)) if i not in followed]
        pulled = await asyncio.gather(
            self._pull_whole(
                reader,
                [tensors[i] for i in whole],
                [targets[i] for i in whole],
                [codecs[i] for i in whole],
                newer_than,
                wait_s,
                place,
            ),
            self._pull_deltas(
                reader,
                [tensors[i] for i in followed],
                [targets[i] for i in followed],
                list(followed.values()),
                newer_than,
                wait_s,
                place,
            ),
            return_exceptions=True,
        )
        results: dict[int, Array] = {}
        for positions, values in zip((whole, followed), pulled, strict=True):
            if isinstance(values, BaseException):
                raise values
            results.update(zip(positions, values, strict=True))
        return [results[i] for i in range(len(tensors))]

    async def _pull_whole(
        self,
        reader: Reader,
        tensors: Sequence[Tensor],
        targets: Sequence[Any],
        codecs: Sequence[Codec | None],
        newer_than: int | None,
        wait_s: float | None,
        place: _core.Device | None,
    ) -> list[Array]:
        """Pulls values. Half precision for float32 arrays on a device is converted there: such values can't be read
        where they lie."""
        dtypes = [target.dtype if codec is None else codec.dtype for target, codec in zip(targets, codecs, strict=True)]
        near = frozenset[int]()
        if place is None:
            targets = [_received_as(codec, target) for codec, target in zip(codecs, targets, strict=True)]
            dtypes = [target.dtype for target in targets]
        elif dtypes == [target.dtype for target in targets]:
            near = await self._transfers.near(place)
        layout = self._layouts.of(tensors, dtypes, pull=True, near=near)
        return await reader.pull_into(layout, targets, newer_than, wait_s)

    async def _pull_deltas(
        self,
        reader: Reader,
        tensors: Sequence[Tensor],
        targets: Sequence[Any],
        codecs: Sequence[str],
        newer_than: int | None,
        wait_s: float | None,
        place: _core.Device | None,
    ) -> list[Array]:
        """Pulls deltas, which are followed where the targets are, or in main memory if a device has no room."""
        layout = self._layouts.of(tensors, codecs, pull=True)
        pinned = None if place is None else self._transfers.into(place)
        on_device = pinned is not None
        try:
            followed = self._following.followed(tensors, place)
        except OutOfMemory:
            followed = self._following.followed(tensors, None)
            on_device = False
        frames = self._following.frames(layout, codecs, followed)
        if pinned is not None and on_device:
            await reader.receive(layout, FollowedDownload(pinned, frames), wait_s)
        else:
            answers = await reader.receive(layout, [frame.transfer() for frame in frames], wait_s)
            for frame, answer in zip(frames, answers, strict=True):
                frame.take(answer)
        newer = [i for i, one in enumerate(followed) if one.is_newer(newer_than)]
        if pinned is None:
            for i in newer:
                delivered(followed[i], targets[i])
        else:
            await pinned.give_out([followed[i].value for i in newer], [targets[i] for i in newer])
        return [targets[i].result if i in newer else None for i in range(len(targets))]


def _received_as(codec: Codec | None, target: Target) -> Target:
    """The target, or one that receives in half precision if the codec is that."""
    if codec is None or not codec.is_half or target.dtype == codec.dtype:
        return target
    dtype = codec.dtype
    num_elems = target.data.nbytes // ITEM_BYTES[target.dtype]
    aside = np.empty(num_elems * ITEM_BYTES[dtype], np.uint8)
    return target._replace(dtype=dtype, data=aside, finish=lambda: copied_into(aside, dtype, target))
