"""How values go to the store: pushes of every kind, and tensors with their first values."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec

from psstore import _core
from psstore.client.arrays import Array, Source, source
from psstore.client.context import Context
from psstore.client.device.arrays import OnDevice, by_place
from psstore.client.device.transfers import EncodedUpload, Upload
from psstore.client.flow_control import FramesInFlight
from psstore.client.layout import Layout, Push
from psstore.client.norms import Norm
from psstore.client.promised_rows import PromisedRows
from psstore.client.schema import as_pushed, as_source, check_encodes, spec_for, write_op
from psstore.codec.codecs import codecs_for
from psstore.errors import BadArgument, OutOfMemory
from psstore.protocol.client import Transfer
from psstore.types import REDUCED_GROUP, Tensor, TensorSpec
from psstore.wire.messages import Exist

Outgoing = Iterable[Transfer] | Upload | EncodedUpload
"""Frames to send: from main memory, or from a device."""


class Writing:
    """The pushes of one store. Used on the store's loop only."""

    def __init__(self, context: Context, norm: Norm) -> None:
        self.num_bytes = 0
        """Payload bytes sent so far."""
        self._pushed: set[frozenset[int]] = set()
        """Ids of the tensors that were pushed in this round, together as they were."""
        self.under_way: set[object] = set()
        """Pushes that were begun and have not ended."""
        self._num_sought = 0
        """Writes whose tensors are looked up: whether one is a push of the round is known then."""
        self._quiet = asyncio.Event()
        """Set when the last push under way has ended, and when tensors were looked up."""
        self.rows = PromisedRows()
        self._context = context
        self._norm = norm

    async def push(self, asked: Push) -> None:
        plan = self._context.layouts.plan(asked.cache_key)
        transfers = plan.layout.transfers_of(asked.values) if plan is not None else None
        if plan is not None and transfers is not None:
            await self.send(plan.op, plan.layout, transfers)
        else:
            await self._push_one_by_one(asked)

    async def settle(self) -> None:
        """Returns when no push is under way, whoever started it. The futures of those that were started tell how they
        ended."""
        await self.looked_up()
        while self.under_way:
            self._quiet.clear()
            await self._quiet.wait()

    async def looked_up(self) -> None:
        """Returns when every push that was started is under way, or over."""
        while self._num_sought:
            self._quiet.clear()
            await self._quiet.wait()

    def sent(self, op: str, layout: Layout) -> None:
        """Notes that PUSH, ASSIGN, ADD or INIT of the layout's tensors is acknowledged."""
        if op == "PUSH":
            self._pushed.add(layout.ids)
        self.num_bytes += layout.num_bytes

    @property
    def pushed(self) -> frozenset[int]:
        """Ids of the tensors that were pushed in this round: of a round of one push the same object in every round."""
        together = tuple(self._pushed)
        return together[0] if len(together) == 1 else frozenset().union(*together)

    def round_ended(self) -> None:
        self._pushed.clear()
        self.rows.round_ended()

    def push_ended(self, push: object) -> None:
        """Notes that a push is no longer under way, however it ended."""
        self.under_way.discard(push)
        if not self.under_way:
            self._quiet.set()

    def push_forgotten(self, push: object) -> None:
        """Notes that a push was cancelled: its arrays are their owners' again."""
        self.push_ended(push)
        self._context.client.keep_cancelled()

    async def send(self, op: str, layout: Layout, transfers: Outgoing) -> None:
        """Sends PUSH, ASSIGN, ADD or INIT of a layout's tensors."""
        client = self._context.client
        with self._context.forgetting_unknown(layout.tensors):
            if op == "PUSH":
                push = self._begin_push()
                try:
                    await self._norm.settle(None)
                    client.worker.need_open("push")  # before anything is forgotten of what was pushed
                    self._context.coded.pushing(layout)
                    turns = self._context.turns
                    if turns is None:
                        await _carried(client.push, transfers)
                    else:
                        await turns.turn(layout.tensors)
                        await _carried(partial(self._push_in_order, turns.flight), transfers)
                finally:
                    self.push_ended(push)
            else:
                await _carried(partial(client.write, op), transfers)
        self.sent(op, layout)

    async def send_rows(self, table: Tensor, transfers: Sequence[Transfer]) -> None:
        """Sends a contribution to all partitions of a table. If it fails, nothing of the table counts in this round,
        not even what was pushed before: some partitions may have the one, and some the other."""
        client = self._context.client
        self._pushed.discard(frozenset((table.id,)))
        with self._context.forgetting_unknown([table]):
            await self._norm.settle(None)
            await self.rows.commit_is_answered()
            self.rows.push_begins(table)
            push = self._begin_push()
            try:
                await client.push(transfers)
            finally:
                self.push_ended(push)
        self.rows.push_is_whole(table)
        self._pushed.add(frozenset((table.id,)))
        self.num_bytes += sum(transfer.table.payload_bytes for transfer in transfers)

    async def assign_rows(self, table: Tensor, transfers: Sequence[Transfer]) -> None:
        """Sends new values of rows, which are there at once."""
        with self._context.forgetting_unknown([table]):
            await self._norm.settle(None)
            await self._context.client.write("ASSIGN", transfers, trained=True)
        self.num_bytes += sum(transfer.table.payload_bytes for transfer in transfers)

    async def _push_in_order(self, frames: FramesInFlight, transfers: Iterable[Transfer]) -> None:
        """Carries out `client.push` in a round that was committed early."""
        client = self._context.client
        client.worker.check_push()
        try:
            futures = await frames.push(client.ask_to_stage, transfers)
        except BaseException:
            client.keep_cancelled()
            raise
        await client.answers(futures)

    def _begin_push(self) -> object:
        """Notes that a push is under way, until `push_ended` is told of the result."""
        push = object()
        self.under_way.add(push)
        return push

    @contextmanager
    def _looking_up(self) -> Iterator[None]:
        """In the block, tensors of a write are looked up."""
        self._num_sought += 1
        try:
            yield
        finally:
            self._num_sought -= 1
            self._quiet.set()

    async def fetched(self, values: Sequence[Array | None]) -> Sequence[Array | None]:
        """Returns the values, with copies in main memory of what is on devices."""
        places = by_place(values)
        if places.keys() <= {None}:
            return values
        fetched = list(values)
        push = self._begin_push()
        try:
            for place, positions in places.items():
                if place is not None:
                    arrays: list[Any] = [fetched[i] for i in positions]
                    copies = await self._context.transfers.out_of(place).fetch(arrays)
                    for position, copy in zip(positions, copies, strict=True):
                        fetched[position] = copy
        finally:
            self.push_ended(push)
        return fetched

    async def _push_one_by_one(self, asked: Push) -> None:
        """Pushes arrays of any kind: each is looked at, and named if it does not fit."""
        context, values = self._context, asked.values
        with self._looking_up():
            tensors = await context.schema.find(asked.names)
        codecs = codecs_for(asked.codec, asked.names)
        chosen: dict[tuple[str, _core.Device | None, bool], tuple[list[Tensor], list[Any], list[Any]]] = {}
        for tensor, value, codec in zip(tensors, values, codecs, strict=True):
            given = as_pushed(tensor.spec, value)
            op = write_op(tensor.spec, asked.op)
            check_encodes(tensor.spec, op, codec)
            place = given.device if isinstance(given, OnDevice) else None
            in_codecs = (codec if place is not None else asked.codec) is not None
            of_op = chosen.setdefault((op, place, in_codecs), ([], [], []))
            of_op[0].append(tensor)
            of_op[1].append(given)
            of_op[2].append(codec)
        await self._first_values([t for (op, *_), (written, *_) in chosen.items() if op != "ASSIGN" for t in written])
        if asked.codec is not None:
            coded = [tensor.id for tensor, codec in zip(tensors, codecs, strict=True) if codec is not None]
            if len(set(coded)) < len(coded):
                raise BadArgument("push_many: a tensor comes twice, and a codec keeps back what it loses of one push")
            await self._norm.settle(None)  # it tells what becomes of the last round's residuals
        for (wire_op, place, in_codecs), (written, sources, encoders) in chosen.items():
            if in_codecs:
                encoded = await self._encoded(wire_op, place, written, sources, encoders, asked.loss_scale)
                await self.send(wire_op, *encoded)
                continue
            layout = await context.layout(written, [one.dtype for one in sources], pull=False, place=place)
            if place is not None:
                await self.send(wire_op, layout, Upload(context.transfers.out_of(place), layout, sources))
                continue
            if len(chosen) == 1:
                context.layouts.note(asked.cache_key, wire_op, layout)
            await self.send(wire_op, layout, layout.transfers([one.data for one in sources]))

    async def _first_values(self, tensors: Sequence[Tensor]) -> None:
        """Waits for first values that others have still to send."""
        push = self._begin_push()
        try:
            await self._context.first_values.arrive(tensors, wait_s=self._context.patience(None))
        finally:
            self.push_ended(push)

    async def _encoded(
        self,
        wire_op: str,
        place: _core.Device | None,
        tensors: Sequence[Tensor],
        values: Sequence[Any],
        codecs: Sequence[Any],
        loss_scale: float | None,
    ) -> tuple[Layout, Iterable[Transfer] | EncodedUpload]:
        """Returns a push in codecs of values that are all on one device: encoded there, or on the CPU if the device has
        no memory for their residuals."""
        coded = self._context.coded
        if wire_op == "PUSH":
            self._context.client.worker.need_open("push")
        push = self._begin_push()
        try:
            if place is not None:
                try:
                    await coded.bring_residuals(tensors, place)
                    return coded.upload(wire_op, tensors, values, codecs, loss_scale=loss_scale)
                except OutOfMemory:
                    values = await self._context.transfers.out_of(place).fetch(values)
            await coded.bring_residuals(tensors, None)
            return coded.transfers(wire_op, tensors, values, codecs, loss_scale=loss_scale)
        finally:
            self.push_ended(push)


async def _carried(send: Callable[[Iterable[Transfer]], Coroutine[Any, Any, None]], transfers: Outgoing) -> None:
    if isinstance(transfers, Upload | EncodedUpload):
        await transfers.sent(send)
    else:
        await send(transfers)


class Creating:
    """Creates tensors. Used on the store's loop only; the arguments are explained in operations.py."""

    def __init__(self, context: Context, writing: Writing) -> None:
        self._context = context
        self._writing = writing

    async def create(
        self,
        name: str,
        value: Array | None,
        *,
        shape: Sequence[int] | None,
        dtype: str | None,
        rule: str,
        group: int,
        reduction: str,
        trim: int,
        compensation: float,
        exist: Exist,
    ) -> None:
        (fetched,) = await self._writing.fetched([value])
        given = None if fetched is None else source(fetched, dtype=dtype or "float32")
        spec = spec_for(
            name,
            given,
            shape=shape,
            dtype=dtype,
            rule=rule,
            group=group,
            reduction=reduction,
            trim=trim,
            compensation=compensation,
        )
        await self._create([spec], [given], exist=exist, offer=True)

    async def create_many(
        self, specs: Sequence[TensorSpec], values: Sequence[Array | None], *, exist: Exist, offer: bool
    ) -> None:
        if len(values) != len(specs):
            raise BadArgument(f"create_many: {len(specs)} specs and {len(values)} values; give one for each, or None")
        for spec in specs:
            if not isinstance(spec, TensorSpec):
                raise BadArgument(f"create_many: expected psstore.types.TensorSpec, got {spec!r}")
            spec.check()
        sources = [
            None if value is None else as_source("create", spec, value)
            for spec, value in zip(specs, await self._writing.fetched(values), strict=True)
        ]
        asked = [
            spec if value is None else msgspec.structs.replace(spec, zeros=False)
            for spec, value in zip(specs, sources, strict=True)
        ]
        if offer:
            for spec, given in zip(asked, sources, strict=True):
                if given is None and not spec.zeros:
                    raise BadArgument(
                        f"create {spec.name!r}: zeros=False needs a value (or offer=False, if others send it)"
                    )
        await self._create(asked, sources, exist=exist, offer=offer)

    async def create_published(self, names: Sequence[str], values: Sequence[Array]) -> None:
        """Tensors that decisions set to what workers publish, unless they are there; with these first values."""
        sources = [source(value, dtype="float32") for value in await self._writing.fetched(values)]
        specs = [
            spec_for(name, value, shape=None, dtype=None, rule="reduce", group=REDUCED_GROUP)
            for name, value in zip(names, sources, strict=True)
        ]
        await self._create(specs, sources, exist="match", offer=True)

    async def _create(
        self, specs: Sequence[TensorSpec], sources: Sequence[Source | None], *, exist: Exist, offer: bool
    ) -> None:
        context = self._context
        tensors, ours = await context.client.tensors.create(specs, exist=exist, offer=offer)
        context.schema.learn(tensors)
        initial = [(tensor, value) for tensor, value in zip(tensors, sources, strict=True) if tensor.id in ours]
        if initial:
            await self.send_first(
                [tensor for tensor, _ in initial], [value for _, value in initial if value is not None]
            )
            await context.client.tensors.ready([tensor.id for tensor, _ in initial])
            context.first_values.note(tensor.id for tensor, _ in initial)

    async def send_first(self, tensors: Sequence[Tensor], sources: Sequence[Source]) -> None:
        """Sends first values, which count where there are none yet."""
        layout = self._context.layouts.of(tensors, [one.dtype for one in sources], pull=False)
        await self._writing.send("INIT", layout, layout.transfers([one.data for one in sources]))
