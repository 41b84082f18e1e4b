"""What runs on the machines: workers that train, clients that write key-value tensors, readers that follow."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any, TypeVar

import numpy as np

from psstore import _core
from psstore.checkpoint.handed import pack_handed
from psstore.client.layout import OneVersion
from psstore.client.norms import SquareSums, clip_factor
from psstore.client.row_cache import RowCaches
from psstore.errors import (
    AvailabilityError,
    DeadlineExceeded,
    NotInitialised,
    PsstoreError,
    RankTaken,
    RolledBack,
    TableFull,
    TooManyWorkers,
    TornRound,
    UnknownTensor,
    VersionGone,
    WorkerLost,
)
from psstore.protocol.client import Transfer
from psstore.protocol.holds import Hold
from psstore.protocol.links import GRACE_S
from psstore.protocol.shares import Shares
from psstore.types import Tensor, TensorSpec
from psstore.wire.messages import Exist, Scale
from psstore.wire.ranges import contains, to_ranges

from . import model, rows
from .history import Additions, History, Loss, Read, RowList, RowRead, Seen, Version, Wait, Writes
from .machine import TIMEOUT_S, Machine
from .model import Array
from .plan import Plan
from .world import Future

T = TypeVar("T")

JOIN_WAIT_S = 60.0
COMMIT_WAIT_S = 20.0
FINISH_WAIT_S = 20.0
PULL_WAIT_S = 30.0
BARRIER_WAIT_S = 60.0
READ_S = 3 * TIMEOUT_S
"""Of a reader, who asks for the decisions first."""
ASKS = 7
"""How often a worker asks again before it believes that somebody is lost for good: for two and a half minutes, and who
comes back does so within seconds."""
PATIENCE = 20
"""How often it tries what is refused at once."""
PAUSE_S = 2.0
PROMPT_S = 8.0
"""A pause between two commits, and a few reconnects."""
FIRST_LIE = 2
"""Round from which on a liar lies."""
NUM_WRITES = 6
NUM_SCRATCHES = 4
HASTY_S = 0.3
OK, NOT_MODIFIED = 0, _core.ERROR_CODES["NOT_MODIFIED"]


class Actor:
    """Calls the client, and notes how long each call took."""

    def __init__(self, plan: Plan, machine: Machine, history: History) -> None:
        self.plan = plan
        self.machine = machine
        self.client = machine.client
        self.history = history
        self.ways = self.client.ways

    async def run(self) -> None:
        try:
            await self.act()
            self.history.outcomes[self.machine.name] = "finished"
        except PsstoreError as error:
            self.history.outcomes[self.machine.name] = f"{type(error).__name__}: {error}"
        self.machine.world.say(f"{self.machine.name}: {self.history.outcomes[self.machine.name]}")
        self.machine.close()

    async def act(self) -> None:
        raise NotImplementedError

    async def call(self, what: str, coroutine: Coroutine[Any, Any, T], limit_s: float = TIMEOUT_S) -> T:
        world = self.machine.world
        wait = Wait(self.machine.name, what, world.now, limit_s)
        self.history.waits.append(wait)
        world.say(f"{self.machine.name} {what}")
        try:
            return await coroutine
        finally:
            wait.ended = world.now

    def start(self, call: Callable[[], Coroutine[Any, Any, object]]) -> Future:
        """Runs it beside what the actor does; the future ends as it does."""
        future = self.machine.world.future()

        async def run() -> None:
            try:
                future.set_result(await call())
            except PsstoreError as error:
                future.set_exception(error)

        self.machine.tasks.append(self.machine.world.spawn(self.machine.name, run()))
        return future

    async def insist(self, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Asks again after an error that says 'not yet'."""
        for _ in range(ASKS):
            try:
                return await call()
            except (WorkerLost, DeadlineExceeded) as error:
                self.note(error)
                last = error
                await self.machine.world.sleep(PAUSE_S)
        raise last

    def note(self, error: WorkerLost | DeadlineExceeded) -> None:
        self.machine.world.say(f"{self.machine.name}: {error}")
        told: Mapping[str, Any] = error.details
        if isinstance(error, WorkerLost) and told["rank"] != getattr(self, "rank", None):
            loss = Loss(self.machine.name, told["rank"], told["last_seen_s"], told.get("waited_s"))
            self.history.losses.append(loss)

    async def settle_scale(self, tensors: list[Tensor]) -> None:
        """If the last decision clips: finds out by how much. Whoever was to do it may be dead."""
        decision = self.client.worker.unscaled
        if decision is None or decision.max_norm is None:
            return
        counted = [t for t in tensors if any(contains(member.present, t.id) for member in decision.members)]
        sums = SquareSums(counted, self.ways)
        asked = sums.transfers()
        await self.call("norm", self.client.norm(asked, wait_s=PULL_WAIT_S), PULL_WAIT_S + GRACE_S)
        if max(session.version for session in self.client.sessions) > decision.number:
            return  # the others have gone on without this worker, and no slot waits for it
        factor = clip_factor(sums.norm(), decision.max_norm)
        self.client.worker.set_scale(Scale(decision=decision.number, factor=factor))
        self.history.scales.setdefault(decision.number, set()).add(factor)


async def nothing() -> None:
    pass


async def ended(reading: Future) -> None:
    """Everything is pushed, so that it can be read."""
    await reading


async def torn(reading: Future) -> None:
    """What was read is there, or will never be."""
    with contextlib.suppress(TornRound):
        await reading


def spoil(gradients: list[Array]) -> None:
    """They are acknowledged, so the memory is ours again: whoever still reads it is caught."""
    for gradient in gradients:
        gradient.fill(np.nan)


class Worker(Actor):
    """Joins, creates, initialises if asked, then trains to the last round. Counts on nobody."""

    def __init__(
        self, plan: Plan, machine: Machine, history: History, *, rank: int, lead_of: Callable[[int], int | None]
    ) -> None:
        super().__init__(plan, machine, history)
        self.rank = rank
        self.lead_of = lead_of
        """How far that rank is from the slowest, if that is to be seen."""
        self.specs = model.specs(plan)
        self.values: list[Array] = [np.empty(spec.num_elems, np.float32) for spec in self.specs]
        self.tensors: list[Tensor] = []
        self.tables: list[Tensor] = []
        self.squares: dict[int, float] = {}
        """What each tensor adds to the square of a contribution's norm, of the last one that it is in."""
        self.shares = Shares(model.NUM_SAMPLES, (), batch_size=model.BATCH_SIZE)

    @property
    def well_connected(self) -> bool:
        return self.plan.partition is None or self.plan.partition[0] != self.rank

    @property
    def life(self) -> int:
        return self.client.identity.incarnation

    async def tell_end(self, version: int) -> None:
        """Each for itself; in rounds of all, the others for the last one as well, which says nothing."""
        for_all = self.plan.mode == "sync" and self.plan.num_workers > 1
        if not for_all or self.rank < self.plan.num_workers - 1:
            await self.insist(lambda: self.call("stop", self.client.worker.stop(version, everyone=for_all)))

    async def act(self) -> None:
        await self.join()
        await self.create()
        await self.settle_scale([*self.tensors, *self.tables])
        await self.pull_first()
        last_round = dict(self.plan.leaves).get(self.rank, self.plan.rounds)
        if self.plan.hands_in:
            await self.hand_in()
        if self.plan.stop_at is not None:
            await self.tell_end(self.plan.stop_at)
        while self.client.worker.round <= last_round and not self.client.worker.stopped:
            await self.train_one_round()
            if self.client.worker.hand_in_wanted:
                await self.hand_in()
        if self.plan.hands_in:
            await self.hand_in()
        if last_round == self.plan.rounds:
            await self.meet()
        await self.call("leave", self.client.worker.leave())

    async def hand_in(self) -> None:
        """The version that this worker has come to, in its own words."""
        await self.insist(
            lambda: self.call("hand in", self.client.worker.hand_in(pack_handed(self.client.carrier.version)))
        )

    async def join(self) -> None:
        """A new life may have to wait until the store believes in the death of the old one."""
        limit_s = JOIN_WAIT_S + GRACE_S if self.plan.is_elastic else TIMEOUT_S
        for _ in range(3 * PATIENCE):
            try:
                join = self.client.worker.join(rank=self.rank, num_workers=self.plan.num_workers, wait_s=JOIN_WAIT_S)
                await self.call("join", join, limit_s)
                return
            except (RankTaken, TooManyWorkers):
                await self.machine.world.sleep(0.5)
        raise RankTaken(f"rank {self.rank} was never free")

    async def create(self) -> None:
        specs = [*self.specs, *rows.specs(self.plan)]
        tensors, mine = await self.call(
            "create", self.client.tensors.create(specs, exist="match", offer=True), 2 * TIMEOUT_S
        )
        self.tensors, self.tables = tensors[: len(self.specs)], tensors[len(self.specs) :]
        if not mine:
            return
        chosen = [tensor for tensor in self.tensors if tensor.id in mine]
        first = [model.noise(tensor.spec.name, size=tensor.spec.num_elems) for tensor in chosen]
        sent = model.transfers(chosen, first, self.ways)
        await self.call("init", self.client.write("INIT", sent))
        await self.call("ready", self.client.tensors.ready(mine))

    async def pull_first(self) -> None:
        """Who is to send the first values may have died: then we are asked to."""
        for _ in range(PATIENCE):
            try:
                await self.pull()
                return
            except NotInitialised:
                await self.create()
        raise NotInitialised("the tensors never got a value")

    async def pull(self) -> None:
        asked = model.transfers(self.tensors, self.values, self.ways, into=True)
        await self.call("pull", self.client.pull(asked, wait_s=PULL_WAIT_S), PULL_WAIT_S + GRACE_S)

    async def train_one_round(self) -> None:
        world, round = self.machine.world, self.client.worker.round
        await world.sleep(world.rng.expovariate(1.0 / self.plan.compute_s[self.rank]))
        absent = [
            tensor.id for tensor in self.tensors if model.is_absent(self.plan, tensor.spec, rank=self.rank, round=round)
        ]
        present = [i for i, tensor in enumerate(self.tensors) if tensor.id not in absent]
        gradients = [
            model.gradient(self.plan, self.tensors[i].spec, self.values[i], rank=self.rank, life=self.life, round=round)
            for i in present
        ]
        cell = (self.rank, self.life, round)
        self.history.pushed.add(cell)
        for i, gradient in zip(present, gradients, strict=True):
            if self.tensors[i].spec.compensation:
                self.history.taken[cell] = self.values[i].copy(), gradient.copy()
            self.squares[self.tensors[i].id] = model.sum_of_squares(gradient)
        if self.plan.is_elastic:
            self.take_share()
        chosen = [self.tensors[i] for i in present]
        sent = model.transfers(chosen, gradients, self.ways)
        for table in self.tables:
            if not model.is_absent(self.plan, table.spec, rank=self.rank, round=round):
                chosen.append(table)
                self.squares[table.id] = rows.sum_of_squares(
                    self.plan, table.spec, rank=self.rank, life=self.life, round=round
                )
                sent += rows.pushed(self.plan, table, self.ways, rank=self.rank, life=self.life, round=round)
        manner = model.manner_of(self.plan, rank=self.rank, round=round)
        train = self.train_early if manner == "early" else self.train_late
        await train(chosen, sent, gradients)

    def take_share(self) -> None:
        """What this worker would train on in the open round."""
        shares, round = self.shares, self.client.worker.round
        shares.advance(round - 1, self.client.worker.member_log)
        assert self.rank in shares.members, f"rank {self.rank} is in round {round}, and is told of {shares.members}"
        self.history.shares[self.rank, self.life, round] = shares.members, shares.epoch, shares.of(self.rank)

    async def train_late(self, tensors: list[Tensor], sent: list[Transfer], gradients: list[Array]) -> None:
        """All that is pushed is committed; but once a liar pushes nothing."""
        round = self.client.worker.round
        if self.plan.liar == self.rank and self.life == 1 and round >= FIRST_LIE and not self.history.lied:
            self.history.lied.add((self.rank, self.life, round))
            sent = []
        try:
            await self.call(f"push {round}", self.client.push(sent))
        except TableFull:  # what was pushed to it does not count, and all else does
            tensors = [tensor for tensor in tensors if not rows.may_be_full(tensor)]
        spoil(gradients)
        await self.commit(tensors)
        await self.settle_scale([*self.tensors, *self.tables])
        if model.pulls_after(self.plan, round):
            await self.pull()

    async def train_early(self, tensors: list[Tensor], sent: list[Transfer], gradients: list[Array]) -> None:
        """The commit goes first, or anywhere between the pushes, and slices are read as they get ready."""
        round, half = self.client.worker.round, self.machine.world.rng.randint(0, len(sent))
        committing = self.start(lambda: self.commit(tensors))
        await self.call(f"push {round}", self.client.push(sent[:half]))
        await committing
        reads = model.pulls_after(self.plan, round)
        reading = self.start(lambda: self.pull() if reads else nothing())
        await self.call(f"push {round}", self.client.push(sent[half:]))
        spoil(gradients)
        limit_s = PROMPT_S if self.well_connected else TIMEOUT_S
        try:
            await self.insist(
                lambda: self.call(
                    f"finish {round}", self.client.worker.finish(wait_s=FINISH_WAIT_S), FINISH_WAIT_S + GRACE_S
                )
            )
        except TornRound:
            await self.call("reading in a torn round", torn(reading), limit_s)
            raise
        await self.call("reading in a finished round", ended(reading), limit_s)

    async def commit(self, tensors: list[Tensor]) -> None:
        """The commit stands while it is asked for again."""
        round = self.client.worker.round
        cell = (self.rank, self.life, round)
        manner = model.manner_of(self.plan, rank=self.rank, round=round)
        present = [tensor.id for tensor in tensors]
        self.history.norms[cell] = to_ranges(present), model.norm(self.plan, [self.squares[one] for one in present])
        self.history.asked_at[cell] = self.machine.world.now
        # Shards are asked first what they have applied, and measured: in peace within the slack that every call has.
        asks_s = 0.0 if self.well_connected else TIMEOUT_S
        committed = await self.insist(
            lambda: self.call(
                f"commit {round}",
                self.client.worker.commit(
                    hypers={**model.HYPERS, **rows.hypers(self.plan)},
                    weight=model.weight_of(self.rank),
                    loss_scale=self.plan.loss_scale,
                    non_finite=model.is_non_finite(self.plan, rank=self.rank, round=round),
                    present=present,
                    average=False,
                    early=manner == "early",
                    max_norm=model.max_norm_of(round) if manner == "clipped" else None,
                    wait_s=COMMIT_WAIT_S,
                ),
                asks_s + COMMIT_WAIT_S + GRACE_S,
            )
        )
        self.history.commits[cell] = committed
        self.history.answered_at[cell] = self.machine.world.now
        if not committed.stop and (lead := self.lead_of(self.rank)) is not None:
            self.history.leads.append(lead)

    async def meet(self) -> None:
        """Before leaving, all meet; whoever is lost by then is not waited for."""
        self.history.barriers_entered[self.rank] = self.machine.world.now
        try:
            await self.call(
                "barrier", self.client.worker.barrier("end", wait_s=BARRIER_WAIT_S), BARRIER_WAIT_S + GRACE_S
            )
            self.history.barriers_passed[self.rank] = self.machine.world.now
        except (WorkerLost, DeadlineExceeded) as error:
            self.note(error)


class Writer(Actor):
    """ADDs 1 to its own part of a shared tensor, ASSIGNs a count to one of its own, and RESTOREs one that nobody
    trains, and its momentum, to the same count.

    A hasty one gives up soon, and goes on: what it gave up may count or not, but never twice.
    """

    ELEMS = 40

    def __init__(self, plan: Plan, machine: Machine, history: History, *, index: int) -> None:
        super().__init__(plan, machine, history)
        self.index = index

    async def act(self) -> None:
        specs = [
            TensorSpec(name="tally", shape=(self.plan.num_writers, self.ELEMS), rule="add"),
            TensorSpec(name=f"note{self.index}", shape=(self.ELEMS,), rule="assign"),
            TensorSpec(name=f"mark{self.index}", shape=(self.ELEMS,), rule="sgd", group=model.FLOATS),
        ]
        (tally, note, mark), _ = await self.call(
            "create", self.client.tensors.create(specs, exist="match", offer=False), 2 * TIMEOUT_S
        )
        if self.plan.hasty_writers:
            self.client.links.timeout_s = HASTY_S
        mine = np.zeros((self.plan.num_writers, self.ELEMS), np.float32)
        mine[self.index] = 1.0
        for count in range(1, NUM_WRITES + 1):
            await self.machine.world.sleep(self.machine.world.rng.expovariate(4.0))
            await self.write("ADD", tally, mine.ravel())
            counts = np.full(self.ELEMS, count, np.float32)
            await self.write("ASSIGN", note, counts)
            await self.write("RESTORE", mark, counts)
            await self.write("RESTORE", mark, counts, momentum=True)

    async def write(self, op: str, tensor: Tensor, values: Array, *, momentum: bool = False) -> None:
        what = "momentum" if momentum else op
        writes = self.history.writes.setdefault(f"{what} {self.index}", Writes())
        writes.begun += 1
        sent = model.transfers([tensor], [values], self.ways)
        if momentum:
            sent = [model.about_momentum(transfer, steps=writes.begun) for transfer in sent]
        num_requests = 4 if op == "RESTORE" else 1  # it learns and tells decisions first
        try:
            write = self.client.write(op, sent, trained=op == "RESTORE")
            await self.call(op, write, num_requests * self.client.links.timeout_s)
        except RolledBack:
            raise
        except AvailabilityError:
            assert self.plan.hasty_writers, "a patient writer always gets through"
        else:
            writes.acknowledged += 1
            writes.last = writes.begun


GIVEN = TensorSpec(name="given", shape=(60,), rule="add", zeros=False)
"""What has no value until it is given one, slice by slice."""


class Forerunner(Actor):
    """ADDs 1 to slices that may have no value yet, several at once. What it is told of each is what became of it."""

    async def act(self) -> None:
        (given,), _ = await self.call(
            "create", self.client.tensors.create([GIVEN], exist="match", offer=False), 2 * TIMEOUT_S
        )
        for _ in range(NUM_WRITES):
            await self.machine.world.sleep(self.machine.world.rng.expovariate(4.0))
            array = np.ones(GIVEN.num_elems, np.float32)
            sent = enumerate(model.singly(given, array, self.ways, into=False))
            adding = [(index, self.start(partial(self.add, one))) for index, one in sent]
            for index, added in adding:
                await self.conclude(index, added)

    async def add(self, transfer: Transfer) -> None:
        await self.call("ADD", self.client.write("ADD", [transfer]))

    async def conclude(self, index: int, added: Future) -> None:
        additions = self.history.additions.setdefault(index, Additions())
        additions.begun += 1
        try:
            await added
            additions.applied += 1
        except NotInitialised:
            additions.refused += 1


class Giver(Actor):
    """Gives what has no value its zeros, one slice after the other."""

    async def act(self) -> None:
        (given,), _ = await self.call(
            "create", self.client.tensors.create([GIVEN], exist="match", offer=False), 2 * TIMEOUT_S
        )
        for transfer in model.singly(given, np.zeros(GIVEN.num_elems, np.float32), self.ways, into=False):
            await self.machine.world.sleep(self.machine.world.rng.expovariate(2.0))
            await self.call("init", self.client.write("INIT", [transfer]))


class Curator(Actor):
    """Creates, overwrites and drops tensors of its own. Each request changes something, so none may happen twice."""

    async def act(self) -> None:
        for index in range(NUM_SCRATCHES):
            await self.machine.world.sleep(self.machine.world.rng.expovariate(4.0))
            name = f"scratch{index}"
            await self.create(TensorSpec(name=name, shape=(30,), rule="sgd"), "error")
            await self.create(TensorSpec(name=name, shape=(50,), rule="sgd"), "overwrite")
            if index % 2:
                await self.call("drop", self.client.tensors.drop([name]), 2 * TIMEOUT_S)

    async def create(self, spec: TensorSpec, exist: Exist) -> None:
        await self.call("create", self.client.tensors.create([spec], exist=exist, offer=False), 2 * TIMEOUT_S)


class Reader(Actor):
    """Pulls everything, again and again, asking only for what is newer than what it has."""

    def __init__(self, plan: Plan, machine: Machine, history: History, *, caches: RowCaches | None = None) -> None:
        """`caches`: what it kept of rows of the store that has gone back."""
        super().__init__(plan, machine, history)
        self._keeps = random.Random(f"kept rows {plan.seed} {machine.name}")
        self.caches = caches or RowCaches()
        self.stopped = False

    async def act(self) -> None:
        versions: dict[int, int] = {}
        while not self.stopped:
            await self.machine.world.sleep(self.machine.world.rng.expovariate(3.0))
            try:
                tensors = await self.call("describe", self.client.tensors.describe(None), 2 * TIMEOUT_S)
                await self.read([t for t in tensors if model.is_counter(t.spec)], versions)
                for table in filter(rows.is_table, tensors):
                    await self.read_rows(table)
            except RolledBack:
                raise
            except (NotInitialised, UnknownTensor, AvailabilityError) as error:
                self.machine.world.say(f"{self.machine.name}: {error}")

    async def read(self, tensors: list[Tensor], versions: dict[int, int]) -> None:
        arrays: list[Array] = [np.full(tensor.spec.num_elems, np.nan, np.float32) for tensor in tensors]
        asked = []
        for transfer in model.transfers(tensors, arrays, self.ways, into=True):
            newer = [versions.get(key, 0) for key in transfer.table.keys()]
            asked.append(transfer._replace(table=transfer.table.with_versions(newer)))
        acknowledged = self.history.acknowledged
        answers = await self.call("pull", self.client.pull(asked, wait_s=0.0), READ_S)
        by_id = {tensor.id: (tensor, array) for tensor, array in zip(tensors, arrays, strict=True)}
        for answer in answers:
            table = answer.table
            for key, version, status in zip(table.keys(), table.versions(), table.statuses(), strict=True):
                if status == OK:
                    assert version + 1 >= versions.get(key, 0), "a slice went back in time"
                    versions[key] = version + 1
                    tensor, array = by_id[key >> _core.SLICE_INDEX_BITS]
                    begin, end = tensor.bounds(key & (1 << _core.SLICE_INDEX_BITS) - 1)
                    data = array[begin:end].tobytes()
                    self.history.reads.append(Read(self.machine.name, tensor.spec.name, begin, end, version, data))
                else:
                    assert status == NOT_MODIFIED, f"status {status} of key {key}"
                name = by_id[key >> _core.SLICE_INDEX_BITS][0].spec.name
                self.history.seen.append(Seen(self.machine.name, name, versions.get(key, 1) - 1, acknowledged))

    async def read_rows(self, table: Tensor) -> None:
        asked, name = self.asked_rows(table), table.spec.name
        least = self.history.last_assigned(name)
        answers = await self.call("pull rows", self.client.pull_rows(asked.transfers, wait_s=0.0), READ_S)
        for version, values in asked.read(answers):
            self.history.row_reads.append(RowRead(self.machine.name, name, version, values, least))

    def asked_rows(self, table: Tensor) -> rows.AskedRows:
        """All rows; or, of what is kept, now all and now some."""
        if not self.plan.keeps_rows:
            return rows.AskedRows(table, self.ways)
        draw = self._keeps
        if self.caches.of(table, "float32") is None:
            self.caches.keep(table, "float32", draw.choice((200, 1000, 10_000)))
        ids = rows.ALL_IDS
        if draw.random() < 0.5:
            ids = np.array(draw.sample(range(rows.NUM_IDS), draw.randrange(1, rows.NUM_IDS)), np.uint64)
        return rows.AskedRows(table, self.ways, ids, self.caches.of(table, "float32"))


class Historian(Actor):
    """Reads whole versions, again and again: piece by piece, while others train on."""

    def __init__(self, plan: Plan, machine: Machine, history: History) -> None:
        super().__init__(plan, machine, history)
        self.stopped = False

    async def act(self) -> None:
        while not self.stopped:
            await self.machine.world.sleep(self.machine.world.rng.expovariate(1.5))
            try:
                tensors = await self.call("describe", self.client.tensors.describe(None), 2 * TIMEOUT_S)
                read = self.read_at_once if self.machine.world.rng.random() < 0.5 else self.read
                tables = [tensor for tensor in tensors if rows.is_table(tensor)]
                await read(tables + [tensor for tensor in tensors if model.is_counter(tensor.spec)])
            except VersionGone as error:
                self.history.gone.append(f"{self.machine.name}: {error}")
            except RolledBack:
                raise
            except (NotInitialised, UnknownTensor, AvailabilityError) as error:
                self.machine.world.say(f"{self.machine.name}: {error}")

    async def read_at_once(self, tensors: list[Tensor]) -> None:
        """All in one pull, which counts if it is of one version by itself."""
        tensors = [tensor for tensor in tensors if not rows.is_table(tensor)]
        acknowledged = self.history.acknowledged
        arrays: list[Array] = [np.full(tensor.spec.num_elems, np.nan, np.float32) for tensor in tensors]
        asked = model.transfers(tensors, arrays, self.ways, into=True)
        answers = await self.call("pull", self.client.pull(asked, wait_s=0.0), READ_S)
        is_whole = OneVersion()
        is_whole.heard(answers)
        if is_whole and answers:
            values = {tensor.spec.name: array.tobytes() for tensor, array in zip(tensors, arrays, strict=True)}
            self.history.versions.append(Version(self.machine.name, answers[0].version, acknowledged, values))

    async def read(self, tensors: list[Tensor]) -> None:
        acknowledged, rng = self.history.acknowledged, self.machine.world.rng
        hold = await self.call("hold", self.client.holds.hold(state=rng.random() < 0.5, wait_s=1.0), READ_S)
        values: dict[str, bytes] = {}
        try:
            for tensor in tensors:
                await self.machine.world.sleep(rng.expovariate(2.0))
                if rows.is_table(tensor):
                    await self.read_table(tensor, hold)
                    continue
                array: Array = np.full(tensor.spec.num_elems, np.nan, np.float32)
                asked = model.transfers([tensor], [array], self.ways, into=True)
                await self.call("pull_held", self.client.pull_held(hold, asked, wait_s=1.0), READ_S)
                values[tensor.spec.name] = array.tobytes()
        finally:
            self.client.holds.free(hold.reader)
        self.history.versions.append(Version(self.machine.name, hold.version, acknowledged, values))

    async def read_table(self, table: Tensor, hold: Hold) -> None:
        """All rows, and then the list of their records."""
        asked, listed = rows.AskedRows(table, self.ways), rows.ListedRows(table, self.ways)
        pulling = self.client.pull_rows(asked.transfers, wait_s=1.0, hold=hold)
        values: dict[int, bytes] = {}
        for _, of_some in asked.read(await self.call("pull rows", pulling, READ_S)):
            values |= of_some
        who, name = self.machine.name, table.spec.name
        self.history.row_reads.append(RowRead(who, name, hold.version, values))
        await self.machine.world.sleep(self.machine.world.rng.expovariate(2.0))
        await self.call("list rows", self.client.list_rows(hold, listed.transfers, wait_s=1.0), READ_S)
        self.history.row_lists.append(RowList(who, name, hold.version, tuple(listed.records()), values))


class Auditor(Worker):
    """Joins when all is over and carries what the last workers could not: then every shard is at the end.

    It does not leave: that might let the last commits of dead workers become a decision. In a torn store it can't
    join, and reads what there is."""

    async def act(self) -> None:
        try:
            await self.join()
        except TornRound as error:
            self.machine.world.say(f"{self.machine.name}: {error}")
        tensors = await self.call("describe", self.client.tensors.describe(None), 2 * TIMEOUT_S)
        self.history.tensors = {tensor.spec.name: tensor for tensor in tensors}
        if self.client.worker.joined:
            await self.carry_on(tensors)
        else:
            await self.look_around(tensors)

    async def carry_on(self, tensors: list[Tensor]) -> None:
        await self.settle_scale(tensors)
        ready = [tensor for tensor in tensors if tensor.spec.zeros and not rows.is_table(tensor)]
        arrays = [np.empty(tensor.spec.num_elems, np.float32) for tensor in ready]
        asked = model.transfers(ready, arrays, self.ways, into=True)
        last = self.client.sessions[0].decisions.last
        await self.call("pull", self.client.pull(asked, at_least=last, wait_s=PULL_WAIT_S), PULL_WAIT_S + GRACE_S)

    async def look_around(self, tensors: list[Tensor]) -> None:
        for tensor in filter(lambda tensor: model.is_counter(tensor.spec), tensors):
            array = np.full(tensor.spec.num_elems, np.nan, np.float32)
            for index, transfer in enumerate(model.singly(tensor, array, self.ways)):
                try:
                    (answer,) = await self.call("pull", self.client.pull([transfer], wait_s=0.0), TIMEOUT_S)
                except DeadlineExceeded:
                    self.history.unapplied.append((tensor.spec.name, index))
                    continue
                begin, end = tensor.bounds(index)
                (version,) = answer.table.versions()
                data = array[begin:end].tobytes()
                self.history.reads.append(Read(self.machine.name, tensor.spec.name, begin, end, version, data))
