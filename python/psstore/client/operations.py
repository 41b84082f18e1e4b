"""Every call of a store, written once: coroutines on the store's loop. Store waits for them, AsyncStore awaits them.

What can be checked against the tensors' definitions is checked before anything is sent. Calls that take arrays are
plain functions that make a coroutine: they look at the arrays on the caller's thread, as device_arrays.py needs it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from psstore import _core
from psstore.client.arrays import Array, Source, Target, fresh, source
from psstore.client.coded import Coded
from psstore.client.compression import Floats
from psstore.client.device_arrays import OnDevice, by_place, seen
from psstore.client.layout import Habit, Layout, Layouts, Reply
from psstore.client.near import Neighbours
from psstore.client.norms import SquareSums, clip_factor
from psstore.client.pacing import Pace
from psstore.client.rule_state import Restored, RuleState, parts, restoring, state_name
from psstore.client.schema import Hypers, Schema, as_pushed, as_source, as_target, per_group, spec_for, write_op
from psstore.client.staging import Arrival, Departure, Passages, in_main_memory
from psstore.codec.codecs import Codec, Codecs, codecs_for
from psstore.errors import BadArgument, UnknownKey
from psstore.protocol.client import Client, Transfer
from psstore.protocol.session import Answer
from psstore.types import Tensor, TensorSpec
from psstore.wire.messages import Exist, Scale

_UNPACED = nullcontext()


@dataclass(frozen=True)
class Commit:
    """How a round ended."""

    round: int
    decision: int
    """Number of the decision that closed it."""
    late: bool
    """It was decided without this worker, whose gradients don't count. Pull, and go on with `store.round`."""
    skipped: bool
    """A worker's gradients were not finite: nothing changes in this round."""


class Operations:
    """The calls of one store. Runs on the loop of `client`'s driver, and nowhere else."""

    def __init__(self, client: Client, *, wait_s: float, pace: Pace | None = None) -> None:
        """`pace`: of pushes over links that workers share."""
        self.client = client
        self.bytes_pushed = 0
        self.bytes_pulled = 0
        self._wait_s = wait_s
        self._schema = Schema(client)
        self._layouts = Layouts(len(client.sessions))
        self._pushed: set[int] = set()
        """Ids of the tensors that were pushed in this round."""
        self.pushing: set[object] = set()
        """Pushes under way."""
        self._quiet = asyncio.Event()
        """Set when the last of them has ended."""
        self._pulled: dict[str, Layout] = {}
        """By name: in what it was pulled last."""
        self._latest: Layout | None = None
        """The last pull of all."""
        self._coded = Coded(self._layouts, receive=self._receive, pull_into=self._pull_into)
        self._passages = Passages(Neighbours(client))
        self._pace = pace

    # ---- tensors ----

    def create(
        self,
        name: str,
        value: Array | None = None,
        *,
        shape: Sequence[int] | None = None,
        dtype: str | None = None,
        rule: str = "assign",
        group: int = 0,
        exist: Exist = "match",
    ) -> Coroutine[Any, Any, None]:
        """Creates a tensor with this first value, or of this shape with zeros.

        `dtype`: what it is stored as, 'float32' or 'float64' (default: the value's, float32 for half precision).
        `rule`: 'assign' or 'add' for plain storage, an update rule ('sgd', 'adam', …) for training.
        `group`: parameter group, whose hyper-parameters a commit names.
        `exist`: for a tensor of that name that is there already: 'match' keeps it and its value if shape, dtype,
        rule and group are the same; 'error' raises TensorExists; 'overwrite' replaces it.

        Raises ShapeMismatch, DTypeMismatch, RuleMismatch, TensorExists, BadArgument; nothing is created then.
        """
        given = None if value is None else seen([value])[0]
        return self._create_one(name, given, shape=shape, dtype=dtype, rule=rule, group=group, exist=exist)

    def create_many(
        self,
        specs: Sequence[TensorSpec],
        values: Sequence[Array | None] | None = None,
        *,
        exist: Exist = "match",
        offer: bool = True,
    ) -> Coroutine[Any, Any, None]:
        """Creates many tensors in one round trip; all or, if one can't be, none.

        `values`: the first value of each spec; None: zeros, as its `zeros` must say then.
        `offer`: False: the values are somebody else's to send. A later pull waits for them.
        """
        given: Sequence[Array | None] = [None] * len(specs) if values is None else seen(list(values))
        return self._create_all(specs, given, exist=exist, offer=offer)

    async def describe(self, name: str) -> Tensor:
        """The tensor's shape, dtype, rule and group (`.spec`) and where its slices live. Raises UnknownTensor."""
        return await self._schema.refresh(name)

    async def keys(self) -> list[str]:
        """Names of all tensors."""
        return await self.client.keys()

    async def drop(self, name: str) -> None:
        """Forgets a tensor, on every shard. Raises UnknownTensor."""
        tensors = await self._schema.find([name])
        await self.client.drop([name])
        self._schema.forget(name)
        self._coded.forget(tensors)

    # ---- writing ----

    def push(
        self,
        name: str,
        value: Array,
        *,
        op: str | None = None,
        codec: str | None = None,
        loss_scale: float | None = None,
    ) -> Coroutine[Any, Any, None]:
        """Sends `value` to the tensor; returns when the store has it.

        A tensor with a training rule takes it as this worker's gradient for the current round: it counts when the
        round is committed, and pushing again before that replaces it. A plain tensor changes at once and exactly
        once: 'assign' tensors are set, 'add' tensors are added to; `op='add'` adds to an 'assign' tensor.

        `value`: an array of the tensor's shape, of its dtype or, for float32 tensors, of half precision; numbers and
        lists are converted. It must stay as it is until the call returns. One that is contiguous and in main memory
        is not copied. One on a CUDA device (a torch tensor, a CuPy array, whatever has `__dlpack__` or
        `__cuda_array_interface__`) is sent as it will be when what is queued on its stream now is done.
        `codec`: send fewer bytes: 'bf16', 'fp16', 'int8', 'sign', 'topk:0.01' (docs/compression.md), of gradients and
        of what is added, to float32 tensors. What the codec loses is kept here, and added to the tensor's next push in
        a codec, once per round: see `residuals`.
        `loss_scale`: of a gradient, if it is not that of the round before: what was kept back is brought to it.

        Raises UnknownTensor, ShapeMismatch, DTypeMismatch, RuleMismatch before anything is sent.
        """
        return self._push_many((name,), seen([value]), op, codec, loss_scale)

    def push_many(
        self,
        items: Mapping[str, Array] | Iterable[tuple[str, Array]],
        *,
        op: str | None = None,
        codec: Codecs | None = None,
        loss_scale: float | None = None,
    ) -> Coroutine[Any, Any, None]:
        """`push` for many tensors, packed into few frames. All are checked before anything is sent. `codec`: of all,
        or a mapping that names it for some."""
        names, values = _columns(items)
        return self._push_many(names, seen(values), op, codec, loss_scale)

    async def settle(self) -> None:
        """Returns when no push is under way, whoever started it. The futures of those that were started tell how they
        ended."""
        while self.pushing:
            self._quiet.clear()
            await self._quiet.wait()

    async def commit(
        self,
        hypers: Hypers | None = None,
        *,
        weight: float = 1.0,
        loss_scale: float = 1.0,
        non_finite: bool = False,
        present: Iterable[str] | None = None,
        average: bool = True,
        early: bool = False,
        max_norm: float | None = None,
        wait_s: float | None = None,
    ) -> Commit:
        """Ends this worker's round; returns when the store has decided it and its staleness lets this worker go on.

        `hypers`: hyper-parameters, {'lr': 0.1} for all parameter groups or {group: {'lr': 0.1}}. What is not named
        keeps its last value, or torch's default. In a round of several workers the lowest rank's count.
        `weight`: this worker's share, such as its number of samples. `average`: divide by the sum of the weights.
        `loss_scale`: the pushed gradients are so many times the real ones, as in mixed precision; the store divides.
        `non_finite`: the gradients hold NaN or infinity: the round is skipped for all.
        `present`: the tensors whose contributions count (default: all that were pushed in this round). The others
        count as zero; one that nobody has stays as it is.
        `early`: the commit goes before the pushes of `present`, which is a promise then, and `finish` ends the round.
        Each slice takes the step when its last contribution arrives. The price: should a worker be lost before its
        `finish`, the round can be neither done nor undone, and everybody gets TornRound. Needs mode 'sync'.
        `max_norm`: clip the global norm of the reduced gradient to this: the step is taken once `global_norm` was
        called, which a pull does if need be. Needs mode 'sync'.
        `wait_s`: how long to wait for other workers (default: the store's).

        Raises WorkerLost, naming who, or DeadlineExceeded: the commit stands, and committing again waits on.
        Raises BadHyper, BadArgument; nothing is committed then.
        """
        if early and present is None:
            raise BadArgument("an early commit promises its pushes: name them with present=")
        if self.pushing and not early:
            raise BadArgument(f"commit while {len(self.pushing)} pushes are under way; await them first")
        await self._settle_norm(wait_s)
        counted = self._pushed if present is None else await self._counted(present, promised=early)
        if early and self._pace is not None and self.client.num_workers > 1:
            self._pace.begin(self.client.round)
        committed = await self.client.commit(
            hypers=per_group(hypers, self._schema.groups()),
            weight=weight,
            loss_scale=loss_scale,
            non_finite=non_finite,
            present=counted,
            average=average,
            early=early,
            max_norm=max_norm,
            wait_s=self.patience(wait_s),
        )
        self._coded.committed(counted, loss_scale=loss_scale)
        if not early:
            self._pushed = set()
            if max_norm is None or committed.late or committed.skip:
                self._coded.conclude(counts=not committed.late and not committed.skip)
        return Commit(round=committed.round, decision=committed.decision, late=committed.late, skipped=committed.skip)

    async def finish(self, *, wait_s: float | None = None) -> None:
        """Ends a round that was committed early, after its pushes; returns when every worker has pushed all that it
        promised. Raises TornRound if one can't any more, DeadlineExceeded: calling it again waits on."""
        if self.pushing:
            raise BadArgument(f"finish while {len(self.pushing)} pushes are under way; await them first")
        await self.client.finish(wait_s=self.patience(wait_s))
        if self._pace is not None:
            self._pace.end()
        self._pushed = set()
        self._coded.conclude(counts=True)

    async def global_norm(self, *, wait_s: float | None = None) -> float:
        """After a commit with `max_norm`: the 2-norm of the reduced gradient over all its tensors, before it is
        clipped. One round trip to the shards. If it is not finite, the round is skipped.

        Each slice's sum of squares is float64, and they are added in the order of their keys: every worker gets the
        same bits, whatever the number of shards."""
        decision = self.client.unscaled
        if decision is None or decision.max_norm is None:
            raise BadArgument("there is no norm to ask for: commit with max_norm= first, and ask once")
        tensors = await self._schema.within(member.present for member in decision.members)
        sums = SquareSums(tensors, num_shards=len(self.client.sessions))
        await self.client.norm(sums.transfers(), wait_s=self.patience(wait_s))
        norm = sums.norm()
        self.client.set_scale(Scale(decision=decision.number, factor=clip_factor(norm, decision.max_norm)))
        self._coded.conclude(counts=math.isfinite(norm))
        return norm

    # ---- what codecs kept back ----

    async def residuals(self, names: Sequence[str]) -> dict[str, Floats]:
        """What the codecs of this worker's pushes lost so far, of the tensors that have any: for a checkpoint. Copies,
        as of the last round that is over, in units of gradients without a loss scale."""
        return self._coded.residuals(await self._schema.find(names))

    async def set_residuals(self, values: Mapping[str, Array | None]) -> None:
        """Takes them over, as from a checkpoint, between rounds; None: the tensor has lost nothing. Raises
        ShapeMismatch, DTypeMismatch; then nothing has changed."""
        tensors = await self._schema.find(list(values))
        given = [
            None if value is None else as_source("set_residuals", tensor.spec, value)
            for tensor, value in zip(tensors, values.values(), strict=True)
        ]
        self._coded.set_residuals(tensors, given)

    # ---- reading ----

    def pull(
        self,
        name: str,
        *,
        out: Array | None = None,
        if_newer_than: int | None = None,
        dtype: str | None = None,
        codec: str | None = None,
        wait_s: float | None = None,
    ) -> Coroutine[Any, Any, Array]:
        """The tensor's value, with at least this worker's last round in it; waits for a first value if there is none.

        `out`: a numpy array or torch tensor of the tensor's shape to receive into, and to return. Contiguous memory
        is written straight from the socket. Else the result is a new numpy array. Into one on a CUDA device the value
        is copied in the order of its stream, as of the call: what is queued there afterwards finds it, and the host
        may be ahead of that (an array that does not say its stream holds the value on return).
        `dtype`: a float32 tensor may travel as 'float16' or 'bfloat16' (default: what `out` is, or as stored).
        `codec`: have a float32 tensor in fewer bytes. 'bf16', 'fp16': it travels so, whatever `out` is. 'int8', 'sign',
        for training rules: the difference to what this client had by its last such pull, so that the value is near the
        store's own, and all who pull so have the same (docs/compression.md). Keeps a copy of the value here.
        `if_newer_than`: a version, as `version_of(name)` gave it: None is returned if the value is no newer, and
        none of its bytes are sent.
        `wait_s`: how long to wait (default: the store's).

        Raises UnknownTensor, ShapeMismatch, DTypeMismatch before anything is sent; NotInitialised, DeadlineExceeded,
        which leave `out` undefined.
        """
        places = None if out is None else seen([out], writable=True)

        async def work() -> Array:
            return (await self._pull_many((name,), places, if_newer_than, dtype, codec, wait_s))[0]

        return work()

    def pull_many(
        self,
        names: Sequence[str],
        *,
        out: Sequence[Array] | None = None,
        if_newer_than: int | None = None,
        dtype: str | None = None,
        codec: Codecs | None = None,
        wait_s: float | None = None,
    ) -> Coroutine[Any, Any, list[Array]]:
        """`pull` for many tensors, in few frames. The results are in the order of `names`. `codec`: of all, or a
        mapping that names it for some."""
        places = None if out is None else seen(list(out), writable=True)
        return self._pull_many(tuple(names), places, if_newer_than, dtype, codec, wait_s)

    def version_of(self, name: str) -> int:
        """The version of the tensor as it was last pulled here; 0 if it was not. For training rules the number of
        the decision that changed it last, else a count of its changes."""
        if name not in self._pulled:
            return 0
        layout = self._pulled[name]
        return layout.version(layout.answers, name)

    # ---- rule state ----

    async def pull_state(self, names: Sequence[str], *, wait_s: float | None = None) -> list[RuleState]:
        """What the update rules keep for these tensors: momenta and the like, and the number of steps taken."""
        tensors = await self._schema.find(names)
        found: list[RuleState] = [RuleState(0, {}) for _ in tensors]
        for part, positions in parts(tensors):
            chosen = [tensors[i] for i in positions]
            targets = [fresh(tensor.spec.shape, tensor.spec.dtype) for tensor in chosen]
            layout = Layout(
                chosen,
                [tensor.spec.dtype for tensor in chosen],
                num_shards=len(self.client.sessions),
                pull=True,
                part=part,
            )
            await self._settle_norm(wait_s)
            answers = await self._read(layout.transfers([one.data for one in targets]), wait_s)
            missing = layout.absent(answers)
            for position, i in enumerate(positions):
                name = state_name(tensors[i], part)
                held = {} if position in missing else {name: targets[position].result}
                steps = layout.version(answers, tensors[i].spec.name)
                found[i] = RuleState(max(steps, found[i].steps), {**found[i].buffers, **held})
        return found

    async def restore(self, items: Mapping[str, Restored]) -> None:
        """Sets values and rule state of tensors that are trained, at once and exactly once, as from a checkpoint.

        Not a step: in a round, contributions that wait go on waiting. Raises ShapeMismatch, DTypeMismatch,
        RuleMismatch, BadArgument before anything is sent.
        """
        tensors = await self._schema.find(list(items))
        transfers = list(restoring(tensors, list(items.values()), num_shards=len(self.client.sessions)))
        with self.forgetting_unknown(tensors):
            await self.client.write("RESTORE", transfers)
        self.bytes_pushed += sum(transfer.table.payload_bytes for transfer in transfers)

    # ---- the group ----

    async def barrier(self, name: str = "", *, wait_s: float | None = None) -> None:
        """Returns when every worker has called it with this name. Raises WorkerLost, DeadlineExceeded."""
        await self.client.barrier(name, wait_s=self.patience(wait_s))

    async def leave(self) -> None:
        """This worker is done: the others no longer wait for it. Reading and plain writing still work."""
        await self.client.leave()

    async def stats(self) -> list[dict[str, int | float | str]]:
        """Counters of each shard, in their order."""
        return await self.client.stats()

    # ---- for calls that go past the loop: see lane.py ----

    def habit(self, what: str, how: Hashable, names: tuple[str, ...]) -> Habit | None:
        """What such a call came to the last time, if it was of late."""
        return self._layouts.habit(self._call(what, how, names))

    def patience(self, wait_s: float | None) -> float:
        return self._wait_s if wait_s is None else wait_s

    @property
    def holds_back(self) -> bool:
        """Pushes have to do with what a codec has kept back."""
        return self._coded.has_pending

    @property
    def takes_turns(self) -> bool:
        """Pushes and pulls go when it is theirs, and not at once."""
        return self._pace is not None and self._pace.is_on

    def sent(self, op: str, layout: Layout) -> None:
        """PUSH, ASSIGN, ADD or INIT of the layout's tensors is acknowledged."""
        if op == "PUSH":
            self._pushed.update(layout.ids)
        self.bytes_pushed += layout.num_bytes

    def push_ended(self, push: object) -> None:
        """It is under way no longer, however it ended."""
        self.pushing.discard(push)
        if not self.pushing:
            self._quiet.set()

    def received(self, layout: Layout, answers: Sequence[Reply]) -> None:
        """The layout's tensors were pulled, all of them."""
        self.bytes_pulled += layout.num_bytes
        self._note_pulled(layout, answers)

    @contextmanager
    def forgetting_unknown(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """A shard that does not know a slice: somebody dropped or overwrote the tensor. It is looked up next time."""
        try:
            yield
        except UnknownKey:
            for tensor in tensors:
                self._schema.forget(tensor.spec.name)
            self._coded.forget(tensors)
            raise

    # ---- how ----

    async def _create_one(
        self,
        name: str,
        value: Array | None,
        *,
        shape: Sequence[int] | None,
        dtype: str | None,
        rule: str,
        group: int,
        exist: Exist,
    ) -> None:
        (fetched,) = await self._fetched([value])
        given = None if fetched is None else source(fetched, dtype=dtype or "float32")
        spec = spec_for(name, given, shape=shape, dtype=dtype, rule=rule, group=group)
        await self._create([spec], [given], exist=exist, offer=True)

    async def _create_all(
        self, specs: Sequence[TensorSpec], values: Sequence[Array | None], *, exist: Exist, offer: bool
    ) -> None:
        if len(values) != len(specs):
            raise BadArgument(f"create_many: {len(specs)} specs and {len(values)} values; give one for each, or None")
        for spec in specs:
            spec.check()
        sources = [
            None if value is None else as_source("create", spec, value)
            for spec, value in zip(specs, await self._fetched(values), strict=True)
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

    async def _create(
        self, specs: Sequence[TensorSpec], sources: Sequence[Source | None], *, exist: Exist, offer: bool
    ) -> None:
        tensors, ours = await self.client.create(specs, exist=exist, offer=offer)
        self._schema.learn(tensors)
        initial = [(tensor, value) for tensor, value in zip(tensors, sources, strict=True) if tensor.id in ours]
        if initial:
            given = [value for _, value in initial if value is not None]
            layout = self._layouts.of([tensor for tensor, _ in initial], [one.dtype for one in given], pull=False)
            await self._send("INIT", layout, layout.transfers([one.data for one in given]))
            await self.client.ready([tensor.id for tensor, _ in initial])

    def _call(self, what: str, how: Hashable, names: tuple[str, ...]) -> Hashable:
        """All by which a call may come to something else than another one, but for the kinds of its arrays."""
        return self._schema.edition, what, how, names

    async def _push_many(
        self,
        names: tuple[str, ...],
        values: Sequence[Array],
        op: str | None,
        codec: Codecs | None,
        loss_scale: float | None,
    ) -> None:
        habit = self.habit("push", op, names) if codec is None else None
        transfers = habit.layout.transfers_of(values) if habit is not None else None
        if habit is not None and transfers is not None:
            await self._send(habit.op, habit.layout, transfers)
        else:
            await self._push_one_by_one(names, values, op, codec, loss_scale)

    async def _push_one_by_one(
        self,
        names: tuple[str, ...],
        values: Sequence[Array],
        op: str | None,
        codec: Codecs | None,
        loss_scale: float | None,
    ) -> None:
        """`push_many` of arrays of any kind: each is looked at, and named if it does not fit."""
        tensors = await self._schema.find(names)
        codecs = codecs_for(codec, names)
        if codec is not None:
            values = await self._fetched(values)  # they are encoded on the CPU
        chosen: dict[tuple[str, _core.Device | None], tuple[list[Tensor], list[Any], list[Codec | None]]] = {}
        for tensor, value, encoder in zip(tensors, values, codecs, strict=True):
            given = as_pushed(tensor.spec, value)
            place = given.device if isinstance(given, OnDevice) else None
            of_op = chosen.setdefault((write_op(tensor.spec, op), place), ([], [], []))
            of_op[0].append(tensor)
            of_op[1].append(given)
            of_op[2].append(encoder)
        if codec is not None:
            await self._settle_norm(None)  # it tells what becomes of the last round's residuals
        for (wire_op, place), (written, sources, encoders) in chosen.items():
            if codec is not None:
                coded = self._coded.transfers(wire_op, written, sources, encoders, loss_scale=loss_scale)
                await self._send(wire_op, *coded)
                continue
            layout = self._layouts.of(written, [one.dtype for one in sources], pull=False)
            if place is not None:
                await self._send(wire_op, layout, Departure(self._passages.out_of(place), layout, sources))
                continue
            if len(chosen) == 1:
                self._layouts.note(self._call("push", op, names), wire_op, layout)
            await self._send(wire_op, layout, layout.transfers([one.data for one in sources]))

    async def _send(self, op: str, layout: Layout, transfers: Iterable[Transfer] | Departure) -> None:
        """PUSH, ASSIGN, ADD or INIT of a layout's tensors."""
        with self.forgetting_unknown(layout.tensors):
            if op == "PUSH":
                await self._settle_norm(None)
                self._coded.pushing(layout)
                push = self._begin_push()
                try:
                    if self._pace is not None and self._pace.is_on:
                        await self._pace.turn(layout.tensors)
                    await _carried(self.client.push, transfers)
                finally:
                    self.push_ended(push)
            else:
                await _carried(partial(self.client.write, op), transfers)
        self.sent(op, layout)

    def _begin_push(self) -> object:
        """Until `push_ended` is told of the result, a push is under way."""
        push = object()
        self.pushing.add(push)
        return push

    async def _fetched(self, values: Sequence[Array | None]) -> Sequence[Array | None]:
        """The same, with copies in main memory of what is on devices."""
        places = by_place(values)
        if places.keys() <= {None}:
            return values
        fetched = list(values)
        push = self._begin_push()
        try:
            for place, positions in places.items():
                if place is not None:
                    arrays: list[Any] = [fetched[i] for i in positions]
                    copies = await self._passages.out_of(place).fetch(arrays)
                    for position, copy in zip(positions, copies, strict=True):
                        fetched[position] = copy
        finally:
            self.push_ended(push)
        return fetched

    async def _pull_many(
        self,
        names: tuple[str, ...],
        out: Sequence[Array] | None,
        if_newer_than: int | None,
        dtype: str | None,
        codec: Codecs | None,
        wait_s: float | None,
    ) -> list[Array]:
        habit = self.habit("pull", (dtype, out is None), names) if codec is None else None
        if habit is None:
            return await self._pull_one_by_one(names, out, if_newer_than, dtype, codec, wait_s)
        layout = habit.layout
        results = layout.fresh() if out is None else list(out)
        transfers = layout.transfers_of(results, newer_than=if_newer_than)
        if transfers is None:
            return await self._pull_one_by_one(names, out, if_newer_than, dtype, codec, wait_s)
        answers = await self._receive(layout, transfers, wait_s)
        unchanged, torn = layout.unchanged(answers) if if_newer_than is not None else (set(), [])
        if torn:
            chosen = tuple(names[i] for i in torn)
            await self._pull_many(chosen, [results[i] for i in torn], None, None, None, wait_s)
        return [None if i in unchanged else result for i, result in enumerate(results)] if unchanged else results

    async def _pull_one_by_one(
        self,
        names: tuple[str, ...],
        out: Sequence[Array] | None,
        if_newer_than: int | None,
        dtype: str | None,
        codec: Codecs | None,
        wait_s: float | None,
    ) -> list[Array]:
        """`pull_many` into arrays of any kind: each is looked at, and named if it does not fit."""
        tensors = await self._schema.find(names)
        if out is not None and len(out) != len(names):
            raise BadArgument(f"pull_many: {len(names)} names and {len(out)} arrays in out=; give one for each")
        targets = [as_target(tensor.spec, None if out is None else out[i], dtype) for i, tensor in enumerate(tensors)]
        if codec is not None:
            return await self._pull_coded(tensors, targets, codecs_for(codec, names), if_newer_than, wait_s)
        results: dict[int, Array] = {}
        for place, positions in by_place(targets).items():
            layout = self._layouts.of([tensors[i] for i in positions], [targets[i].dtype for i in positions], pull=True)
            if place is None and len(positions) == len(targets):
                self._layouts.note(self._call("pull", (dtype, out is None), names), "PULL", layout)
            pulled = await self._pull_into(layout, [targets[i] for i in positions], if_newer_than, wait_s)
            results.update(zip(positions, pulled, strict=True))
        return [results[i] for i in range(len(targets))]

    async def _pull_coded(
        self,
        tensors: Sequence[Tensor],
        targets: Sequence[Target | OnDevice],
        codecs: Sequence[Codec | None],
        newer_than: int | None,
        wait_s: float | None,
    ) -> list[Array]:
        """What comes in codecs is decoded on the CPU, and goes to devices from there."""
        landing = [in_main_memory(one) if isinstance(one, OnDevice) else one for one in targets]
        results = await self._coded.pull(tensors, landing, codecs, newer_than, wait_s)
        for place, positions in by_place(targets).items():
            if place is not None:
                came = [i for i in positions if results[i] is not None]
                arrays: list[Any] = [targets[i] for i in came]
                await self._passages.into(place).deliver([landing[i].data for i in came], arrays)
                _finish(arrays)
        return results

    async def _pull_into(
        self, layout: Layout, targets: Sequence[Target | OnDevice], newer_than: int | None, wait_s: float | None
    ) -> list[Array]:
        """All in main memory, or all on one device."""
        answers = await self._pull(layout, targets, newer_than, wait_s)
        unchanged, torn = layout.unchanged(answers) if newer_than is not None else (set(), [])
        if torn:
            chosen = [targets[i] for i in torn]
            tensors = [layout.tensors[i] for i in torn]
            whole = self._layouts.of(tensors, [receiver.dtype for receiver in chosen], pull=True)
            await self._pull(whole, chosen, None, wait_s)
        _finish([receiver for i, receiver in enumerate(targets) if i not in unchanged])
        return [None if i in unchanged else receiver.result for i, receiver in enumerate(targets)]

    async def _pull(
        self, layout: Layout, targets: Sequence[Any], newer_than: int | None, wait_s: float | None
    ) -> list[Answer]:
        if targets and isinstance(targets[0], OnDevice):
            passage = self._passages.into(targets[0].device)
            return await self._receive(layout, Arrival(passage, layout, targets, newer_than), wait_s)
        transfers = layout.transfers([receiver.data for receiver in targets], newer_than=newer_than)
        return await self._receive(layout, transfers, wait_s)

    async def _receive(
        self, layout: Layout, transfers: Sequence[Transfer] | Arrival, wait_s: float | None
    ) -> list[Answer]:
        await self._settle_norm(wait_s)
        pace = self._pace if self._pace is not None and self._pace.is_on else None
        with self.forgetting_unknown(layout.tensors), _UNPACED if pace is None else pace.reading(layout.ids):
            if pace is not None:
                await pace.follow(layout.ids)
            if isinstance(transfers, Arrival):
                answers = await transfers.received(lambda some: self._read(some, wait_s))
            else:
                answers = await self._read(transfers, wait_s)
        self._note_pulled(layout, answers)
        return answers

    def _note_pulled(self, layout: Layout, answers: Sequence[Reply]) -> None:
        layout.answers = answers
        if layout is not self._latest:
            self._pulled.update(dict.fromkeys(layout.names, layout))
            self._latest = layout

    async def _read(self, transfers: Sequence[Transfer], wait_s: float | None) -> list[Answer]:
        answers = await self.client.pull(transfers, wait_s=self.patience(wait_s))
        self.bytes_pulled += sum(answer.table.payload_bytes for answer in answers)
        return answers

    async def _settle_norm(self, wait_s: float | None) -> None:
        """Nothing can follow a clipped round before its norm is known: a worker that joins anew may have to ask."""
        if self.client.unscaled is not None:
            await self.global_norm(wait_s=wait_s)

    async def _counted(self, names: Iterable[str], *, promised: bool) -> set[int]:
        """Ids of the tensors that a commit counts."""
        tensors = await self._schema.find(list(names))
        for tensor in tensors:
            if not promised and tensor.id not in self._pushed:
                raise BadArgument(f"commit counts on {tensor.spec.name!r}, which was not pushed in this round")
        return {tensor.id for tensor in tensors}


def _finish(targets: Iterable[Target | OnDevice]) -> None:
    for receiver in targets:
        if receiver.finish is not None:
            receiver.finish()


async def _carried(
    send: Callable[[Iterable[Transfer]], Coroutine[Any, Any, None]], transfers: Iterable[Transfer] | Departure
) -> None:
    await (transfers.sent(send) if isinstance(transfers, Departure) else send(transfers))


def _columns(items: Mapping[str, Array] | Iterable[tuple[str, Array]]) -> tuple[tuple[str, ...], list[Array]]:
    """Names and arrays."""
    if isinstance(items, Mapping):
        return tuple(items), list(items.values())
    pairs = list(items)
    return tuple([name for name, _ in pairs]), [value for _, value in pairs]
