"""Pushes and pulls in codecs: what operations.py does with arrays, done with fewer bytes.

Residuals are in compression.py, deltas in following.py; here is when they change.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

from psstore.client.arrays import Array, Source, Target
from psstore.client.compression import Compression, Encoder, Floats
from psstore.client.following import Following
from psstore.client.halves import received_as
from psstore.client.layout import Layout, Layouts
from psstore.client.schema import check_decodes, check_encodes
from psstore.codec.codecs import Codec, is_dtype
from psstore.protocol.client import Transfer
from psstore.protocol.session import Answer
from psstore.types import Tensor, slice_index


class Reader(Protocol):
    """Who pulls what is not coded."""

    async def receive(self, layout: Layout, transfers: Sequence[Transfer], wait_s: float | None) -> list[Answer]:
        """Carries out the transfers of a pull."""

    async def pull_into(
        self, layout: Layout, targets: Sequence[Target], newer_than: int | None, wait_s: float | None
    ) -> list[Array]:
        """A pull without deltas."""


class Coded:
    """Of one client. Runs on its loop."""

    def __init__(self, layouts: Layouts) -> None:
        self._layouts = layouts
        self._compression = Compression()
        self._following = Following()
        self._open: tuple[Collection[int], float] | None = None
        """Ids of the tensors that count in a round that was committed, and its loss scale, until it is known whether
        the round counts."""

    # ---- pushes ----

    def transfers(
        self,
        op: str,
        tensors: Sequence[Tensor],
        sources: Sequence[Source],
        codecs: Sequence[Codec | None],
        *,
        loss_scale: float | None,
    ) -> tuple[Layout, Iterator[Transfer]]:
        """What is to be sent: each frame is encoded when it is asked for, while the one before is on its way. Raises
        DTypeMismatch, BadArgument; no residual has changed then."""
        for tensor, codec in zip(tensors, codecs, strict=True):
            check_encodes(tensor.spec, op, codec)
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
            None if codec is None else self._compression.encoder(tensor, value, codec, loss_scale=loss_scale)
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
        if op == "ADD":
            self._settle_at_once(layout.tensors, encoders)

    def _settle_at_once(self, tensors: Sequence[Tensor], encoders: Sequence[Encoder | None]) -> None:
        for tensor, encoder in zip(tensors, encoders, strict=True):
            if encoder is not None:
                self._compression.settle_at_once(tensor)

    @property
    def has_pending(self) -> bool:
        """What was encoded in this round is to be dropped by `pushing`."""
        return self._compression.has_pending

    def pushing(self, layout: Layout) -> None:
        """These contributions go out now. What is sent as it is takes the place of what was encoded in the same round,
        and lacks nothing."""
        if self._compression.has_pending:
            for tensor, encoding in zip(layout.tensors, layout.dtypes, strict=True):
                if is_dtype(encoding):
                    self._compression.drop_pending(tensor)

    # ---- rounds ----

    def committed(self, counted: Collection[int], *, loss_scale: float) -> None:
        """A round has ended, in which the contributions to these tensors count, should it count at all."""
        self._open = counted, loss_scale

    def conclude(self, *, counts: bool) -> None:
        """That is known now."""
        if self._open is not None:
            counted, loss_scale = self._open
            self._compression.settle(counted if counts else (), loss_scale=loss_scale)
            self._open = None

    def residuals(self, tensors: Sequence[Tensor]) -> dict[str, Floats]:
        return self._compression.read(tensors)

    def set_residuals(self, tensors: Sequence[Tensor], values: Sequence[Source | None]) -> None:
        self._compression.write(tensors, values)

    def forget(self, tensors: Sequence[Tensor]) -> None:
        """They are gone, or others by now."""
        self._compression.forget(tensors)
        self._following.forget(tensors)

    # ---- pulls ----

    async def pull(
        self,
        reader: Reader,
        tensors: Sequence[Tensor],
        targets: Sequence[Target],
        codecs: Sequence[Codec | None],
        newer_than: int | None,
        wait_s: float | None,
    ) -> list[Array]:
        """Deltas, and at the same time what comes whole. Raises DTypeMismatch, BadArgument, RuleMismatch, before it
        sends anything."""
        for tensor, codec in zip(tensors, codecs, strict=True):
            check_decodes(tensor.spec, codec)
        followed = {i: codec.name for i, codec in enumerate(codecs) if codec is not None and codec.follows}
        whole = [i for i in range(len(tensors)) if i not in followed]
        pulled = await asyncio.gather(
            self._pull_whole(
                reader,
                [tensors[i] for i in whole],
                [received_as(codecs[i], targets[i]) for i in whole],
                newer_than,
                wait_s,
            ),
            self._pull_deltas(
                reader,
                [tensors[i] for i in followed],
                [targets[i] for i in followed],
                list(followed.values()),
                newer_than,
                wait_s,
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
        targets: Sequence[Target],
        newer_than: int | None,
        wait_s: float | None,
    ) -> list[Array]:
        layout = self._layouts.of(tensors, [target.dtype for target in targets], pull=True)
        return await reader.pull_into(layout, targets, newer_than, wait_s)

    async def _pull_deltas(
        self,
        reader: Reader,
        tensors: Sequence[Tensor],
        targets: Sequence[Target],
        codecs: Sequence[str],
        newer_than: int | None,
        wait_s: float | None,
    ) -> list[Array]:
        layout = self._layouts.of(tensors, codecs, pull=True)
        arrivals = self._following.arrivals(layout, codecs)
        answers = await reader.receive(layout, [arrival.transfer() for arrival in arrivals], wait_s)
        for arrival, answer in zip(arrivals, answers, strict=True):
            arrival.take(answer)
        return [
            self._following.deliver(tensor, target, newer_than=newer_than)
            for tensor, target in zip(tensors, targets, strict=True)
        ]
