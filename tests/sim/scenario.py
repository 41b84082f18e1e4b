"""One run: servers, machines and actors from a plan, and the disturbances that it asks for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from unittest import mock

from psstore import types
from psstore.client import row_frames
from psstore.partition import slicing
from psstore.protocol import checkpoint_leader, norm_guard, rounds
from psstore.protocol.coordinator import Coordinator
from psstore.protocol.membership import Liveness
from psstore.protocol.roles import Tokens
from psstore.protocol.signing import Signer
from psstore.protocol.welcoming import ShardIdentity
from psstore.server.checkpoint_keeper import CheckpointKeeper
from psstore.server.restoring import restore_from
from psstore.types import Tensor
from psstore.wire import messages, records
from psstore.wire.messages import Role, members_after

from . import model, rows
from .actors import HASTY_S, Actor, Auditor, Curator, Forerunner, Giver, Historian, Reader, Worker, Writer
from .archive import Archive, Archived, SimulatedPlace
from .archivist import Archivist
from .assigner import Assigner
from .elections import LEASE_S, Elections
from .follower import Follower
from .history import History
from .machine import Machine
from .memory import HostMemory
from .network import Network
from .plan import Plan
from .resharder import Resharder
from .server import Mouthpiece, Notary, Server
from .standbys import Standbys
from .world import Task, World

LIMIT_S = 900.0
"""Virtual time after which somebody must be waiting for ever."""

QUIET_S = 1.0
"""How long everything that was sent takes to arrive once the network is calm."""

OUTLIVED = ("RolledBack", "BadSignature")
"""What clients hear of a fall. The second, if they had met some shards before it and others not."""

SomeReader = Reader | Historian | Archivist | Follower
MakeReader = Callable[[Plan, Machine, History], SomeReader]

LINEAGE = "simulated"
SIGNING_KEY = b"simulated signing key"
TOKEN = b"a token of a simulated store"
HEARTBEAT_S = Liveness().heartbeat_s


def restored_identity(cut: Archived | None, *, life: int) -> dict[str, Any]:
    """What a shard says of the store's life."""
    if cut is None:
        return {"store": LINEAGE}
    return {"store": f"{LINEAGE} {life}", "lineage": LINEAGE, "restored": cut.version}


class Scenario:
    """Build, then `run()`."""

    def __init__(self, plan: Plan, *, trace: Callable[[str], None] | None = None) -> None:
        self.plan = plan
        self.world = World(("run", plan.seed))
        self.world.trace = trace
        self.network = Network(self.world, plan.latency_s, break_chance=plan.break_chance, late_s=plan.late_s)
        self.history = History()
        self.token = TOKEN if plan.with_token else None
        self.archive = Archive(
            lambda decision: {one.name: self.history.last_assigned(one.name, decision) for one in rows.specs(plan)}
        )
        self.num_shards = plan.num_shards
        self.memory = HostMemory() if plan.shares_memory else None
        self._never_waits = plan.mode == "async"
        self._begin(None)
        self.readers: list[SomeReader | Assigner] = []
        """Who goes on until training is over."""
        self._reader_names: set[str] = set()
        """Theirs, as they are asked for after every event."""
        self.machines: dict[int, Machine] = {}
        """The machine of each rank's present life."""
        self.num_resharders = self.num_reshards = 0
        self.actors: list[Actor] = []
        self.pending: set[str] = set()
        """Actors that are to come to an end by themselves."""
        self.on_fall: Callable[[], None] = lambda: None
        """Called before the history of what never was is forgotten."""
        self.on_reshard: Callable[[Archived, Mapping[str, Tensor]], None] = lambda cut, tensors: None
        """Called with what the store goes on from, and its tensors by name as they were placed."""

    def _begin(self, cut: Archived | None) -> None:
        """A life of the store: from nothing, or from a checkpoint."""
        life = f"{len(self.history.falls)}"
        self.key = SIGNING_KEY + life.encode()
        before = self.notary.decisions if cut is not None else []
        self.notary: Notary = Notary(self.world, self.key, before[: cut.version if cut is not None else 0])
        self.servers = [self._server(shard, cut) for shard in range(self.num_shards)]

    def make_server(self, shard: int) -> Server:
        """A process for it, in which nothing has happened yet."""
        return self._server(shard, None)

    def _server(self, shard: int, cut: Archived | None) -> Server:
        identity = ShardIdentity(
            **restored_identity(cut, life=len(self.history.falls)),
            shard=shard,
            addresses=tuple((f"sim://{i}",) for i in range(self.num_shards)),
            consistency=self.plan.consistency,
            heartbeat_s=HEARTBEAT_S,
            tokens=Tokens.single(self.token),
        )
        signer = Mouthpiece(self.notary, self.key) if shard == 0 else Signer(self.key)
        coordinator = self._coordinator(signer) if shard == 0 else None
        place = self._place() if shard == 0 else None
        server = Server(
            self.world,
            identity=identity,
            signer=signer,
            coordinator=coordinator,
            keeper=None if coordinator is None else self._keeper(coordinator, place),
            place=place,
            archive=self.archive,
            lazy=self.plan.lazy_shards,
            notes_rows=self.plan.full_every > 1,
            lease_s=LEASE_S if self.plan.silences else math.inf,
            memory=self.memory,
        )
        if cut is not None:
            service = server.service
            restore_from(
                cut,  # type: ignore[arg-type]
                service.facts,
                service.coordinator,
                index=shard,
                num_shards=self.num_shards,
                goes_on=True,
            )
            server.shard.applied = list(range(1, cut.version + 1))
        return server

    def _coordinator(self, signer: Signer) -> Coordinator:
        plan = self.plan
        return Coordinator(
            consistency=plan.consistency,
            liveness=Liveness(rejoin_s=plan.rejoin_s, lost="drop" if plan.drops else "fail"),
            num_shards=self.num_shards,
            signer=signer,
        )

    def _keeper(self, coordinator: Coordinator, place: SimulatedPlace | None) -> CheckpointKeeper:
        return CheckpointKeeper(
            coordinator,
            num_shards=self.num_shards,
            signer=Signer(self.key),
            lineage=LINEAGE,
            own=place,
            open_place=lambda url, at: self._place(),
            any_place=False,
            now=lambda: self.world.now,
        )

    def _place(self) -> SimulatedPlace:
        return SimulatedPlace(self.world, self.archive, keep=self.plan.keep, full_every=self.plan.full_every)

    @property
    def coordinator(self) -> Coordinator:
        """Where it leads."""
        coordinator = self.servers[0].service.coordinator
        assert coordinator is not None
        return coordinator

    # ---- the run ----

    def run(self) -> History:
        """The history, ready to be checked."""
        try:
            self._run()
            self._record()
        finally:
            for actor in self.actors:
                actor.machine.forget()
        return self.history

    def _run(self) -> None:
        plan = self.plan
        with (
            mock.patch.object(slicing, "SLICE_BYTES", model.SLICE_BYTES),
            mock.patch.object(types, "PARTITION_BITS", rows.PARTITION_BITS),
            mock.patch.object(row_frames, "FRAME_BYTES", rows.FRAME_BYTES),
            mock.patch.object(rounds, "ATTEST_EVERY", 2),
            mock.patch.object(norm_guard, "KEPT", model.NORMS_KEPT),
            mock.patch.object(norm_guard, "FEWEST", model.FEWEST_NORMS),
            mock.patch.object(messages, "HANDED_PIECE_BYTES", 2),
            mock.patch.object(records, "PART_BYTES", 256),
            mock.patch.object(
                checkpoint_leader,
                "CHECKPOINT_ATTEMPTS",
                3 if plan.shard_deaths or plan.silences or plan.reshards else 1,
            ),
        ):
            for rank in range(plan.num_workers):
                self._start_worker_after(plan.arrivals_s[rank] if plan.is_elastic else 0.0, rank, life=1)
            for index in range(plan.num_writers):
                machine = self._machine(f"writer {index}", "client")
                self._start(Writer(plan, machine, self.history, index=index))
            if plan.assigns_rows:
                self._start_assigner()
            for index in range(plan.num_forerunners):
                self._start(Forerunner(plan, self._machine(f"forerunner {index}", "client"), self.history))
            if plan.num_forerunners:
                self._start(Giver(plan, self._machine("giver", "client"), self.history))
            if plan.with_curator:
                self._start(Curator(plan, self._machine("curator", "client"), self.history))
            numbers: dict[type[SomeReader], int] = {
                Reader: plan.num_readers,
                Historian: plan.num_historians,
                Archivist: plan.num_archivists,
                Follower: plan.num_followers,
            }
            for kind, number in numbers.items():
                for index in range(number):
                    self._start_reader(kind, f"{kind.__name__.lower()} {index}")
            self._schedule_partitions()
            self._schedule_falls(list(plan.falls))
            self._schedule_reshards(list(plan.reshards))
            if plan.shard_deaths:
                self.standbys = Standbys(self)
            if plan.silences:
                self.elections = Elections(self)
            self.world.run(until=self._is_trained, limit_s=LIMIT_S)
            self.network.break_chance = 0.0
            for reader in self.readers:
                reader.stopped = True
            self._start_auditor()
            self.world.run(until=lambda: not self.pending, limit_s=2 * LIMIT_S)
            self.world.run(until=lambda: False, limit_s=self.world.now + QUIET_S)

    def _is_trained(self) -> bool:
        """Looked at after every event."""
        if self._never_waits:
            assert self.coordinator.rounds.next_wake() is None, "asynchronous, and yet a commit waits"
        return self.pending <= self._reader_names

    def _start_auditor(self) -> None:
        """The network is calm from now on."""
        machine = self._machine("auditor", "worker")
        machine.start_heartbeats(self.servers[0], HEARTBEAT_S)
        self._start(Auditor(self.plan, machine, self.history, rank=0, lead_of=self._lead_of))

    def _record(self) -> None:
        history = self.history
        history.archived = self.archive.checkpoints
        if self.plan.silences:
            history.standby_differences = self.elections.differences()
        if self.plan.shard_deaths:
            history.standby_differences = self.standbys.differences()
        history.torn = self.coordinator.rounds.torn
        history.unfinished = sorted(self.pending)
        history.decisions = self.notary.decisions
        history.decided_at = self.notary.decided_at
        history.applied = [server.shard.applied for server in self.servers]
        history.max_staleness = self.coordinator.rounds.max_staleness
        history.num_slots = sum(server.shard.core.stats()["slots"] for server in self.servers)
        history.num_duplicates = sum(server.shard.core.stats()["duplicates"] for server in self.servers)
        for tensor in history.tensors.values():
            states = [
                self.servers[shard].shard.core.state(tensor.key(index)) for index, shard in enumerate(tensor.shards)
            ]
            if rows.is_table(tensor):
                history.rows[tensor.spec.name] = states
                continue
            history.values[tensor.spec.name] = b"".join(state.get("value", b"") for state in states)
            history.states[tensor.spec.name] = tuple(
                part for state in states for name, part in sorted(state.items()) if name != "value"
            )

    # ---- who takes part ----

    def _machine(self, name: str, role: Role, network: Network | None = None) -> Machine:
        return Machine(
            network or self.network,
            self.servers,
            name=name,
            role=role,
            token=self.token,
            num_channels=self.plan.num_channels,
            has_two_hosts=bool(self.plan.silences),
        )

    def _start(self, actor: Actor) -> Task:
        name = actor.machine.name
        self.actors.append(actor)
        self.pending.add(name)

        async def act() -> None:
            await actor.run()
            if isinstance(actor, Worker) and actor.history.outcomes[name].startswith("MissingContribution"):
                self._start_worker(actor.rank, life=len(self.plan.deaths) + 2)
            if actor.history is not self.history or actor.history.outcomes[name].startswith(OUTLIVED):
                self._outlived_a_fall(actor)
            self.pending.discard(name)

        task = self.world.spawn(name, act())

        def died() -> None:
            task.kill()
            self.pending.discard(name)

        actor.machine.when_killed = died
        return task

    def _start_reader(self, make: MakeReader, name: str) -> None:
        reader = make(self.plan, self._machine(name, "client"), self.history)
        self._start_until_trained(reader)

    def _start_assigner(self) -> None:
        machine = self._machine("assigner", "client")
        assigner = Assigner(self.plan, machine, self.history, num_decided=lambda: len(self.notary.decisions))
        self._start_until_trained(assigner)

    def _start_until_trained(self, reader: SomeReader | Assigner) -> None:
        self.readers.append(reader)
        self._reader_names.add(reader.machine.name)
        self._start(reader)

    def _start_worker_after(self, delay_s: float, rank: int, *, life: int) -> None:
        if not delay_s:
            self._start_worker(rank, life=life)
            return
        self.pending.add(f"worker {rank}.{life}")
        self.world.after(delay_s, lambda: self._start_worker(rank, life=life))

    def _start_worker(self, rank: int, *, life: int) -> None:
        machine = self._machine(f"worker {rank}.{life}", "worker")
        self.machines[rank] = machine
        if not self.plan.mute_heartbeats:
            machine.start_heartbeats(self.servers[0], HEARTBEAT_S)
        self._start(Worker(self.plan, machine, self.history, rank=rank, lead_of=self._lead_of))
        deaths = [death for death in self.plan.deaths if death.rank == rank]
        if life > len(deaths):
            return
        death = deaths[life - 1]
        machine.frames_to_live = death.after_frames
        if death.replaced_after_s is not None:
            after_s = death.replaced_after_s
            died = machine.when_killed

            def replace() -> None:
                self._start_worker_after(after_s, rank, life=life + 1)
                died()

            machine.when_killed = replace

    # ---- what is seen from above ----

    def _lead_of(self, rank: int) -> int | None:
        """How far a worker that is let go is from the slowest of those that were there all the time."""
        steady = [r for r in range(self.plan.num_workers) if r not in self.plan.unsteady and r not in self.history.done]
        if not steady or self.plan.mute_heartbeats:
            return None
        return self._clock(rank) - min(self._clock(one) for one in steady)

    def _clock(self, rank: int) -> int:
        rounds = [m.round for decision in self.notary.decisions for m in decision.members if m.rank == rank]
        return rounds[-1] if rounds else 0

    # ---- what goes wrong ----

    def _schedule_falls(self, delays: list[float]) -> None:
        """The next one after so long, as soon as there is a checkpoint."""
        if delays:
            self.world.after(delays[0], lambda: self._fall(delays))

    def _fall(self, delays: list[float]) -> None:
        """All shards die. They begin again from the last checkpoint, and clients find them at the same addresses."""
        if any(reader.stopped for reader in self.readers):
            return  # training is over
        if not self.archive.there:
            self.world.after(0.2, lambda: self._fall(delays))
            return
        cut = self.archive.there[max(self.archive.there)]
        self.world.say(f"the store falls, back to version {cut.version}")
        self._begin_again(cut, keeps_writes=False)
        self._schedule_falls(delays[1:])

    def _schedule_reshards(self, planned: list[tuple[float, int]]) -> None:
        """The next one after so long."""
        if planned:
            self.world.after(planned[0][0], lambda: self._try_to_reshard(planned))

    def _try_to_reshard(self, planned: list[tuple[float, int]]) -> None:
        if any(reader.stopped for reader in self.readers):
            return  # training is over
        # It runs beside the shards, where no connection breaks, but it may die.
        name, began = f"resharder {self.num_resharders}", self.world.now
        self.num_resharders += 1

        def written(version: int) -> None:
            self.history.standstills.append((began, self.world.now))
            self._reshard(version, planned[0][1])
            self._schedule_reshards(planned[1:])

        def came_to_nothing() -> None:
            self.history.standstills.append((began, self.world.now))
            for server in self.servers:
                server.not_resharded()
            self._schedule_reshards(planned)  # somebody asks again

        machine = self._machine(
            name, "resharder", Network(self.world, self.plan.latency_s, break_chance=0.0, late_s=0.0)
        )
        for server in self.servers:
            server.service.standstill.allow(machine.identity.client)
        self._start(Resharder(self.plan, machine, self.history, written=written, came_to_nothing=came_to_nothing))
        if self.world.rng.random() < 0.3:
            machine.frames_to_live = self.world.rng.randint(0, 60)
            died = machine.when_killed

            def noticed() -> None:
                died()
                self.world.after(0.1, came_to_nothing)

            machine.when_killed = noticed

    def _reshard(self, version: int, num_shards: int) -> None:
        """All shards end. Others, another number, begin with what is written, which is all that anybody was told."""
        cut = self.archive.there[version]
        self.world.say(f"the store goes on with {num_shards} shards from version {version} on")
        assert self.history.acknowledged <= version, f"{self.history.acknowledged} was told, {version} is written"
        if self.plan.mode == "sync" and self.plan.gather_s:
            missing = {rank for rank in self._handing_in() if rank not in cut.ranks}
            assert not missing, f"what ranks {missing} hand in as of version {version} is not written"
        self.on_reshard(cut, {tensor.spec.name: tensor for tensor in self.coordinator.schemas.tensors})
        self.num_shards = num_shards
        self.num_reshards += 1
        self._begin_again(cut, keeps_writes=True)

    def _handing_in(self) -> list[int]:
        """Ranks whose present life hands in."""
        workers, handed = self.coordinator.membership.workers, self.coordinator.rounds.hand_ins.of
        lives = {rank: worker.incarnation for rank, worker in workers.items()}
        return [rank for rank, one in handed.items() if lives.get(rank) == one.incarnation]

    def _begin_again(self, cut: Archived, *, keeps_writes: bool) -> None:
        for server in self.servers:
            server.kill()
        self.history.decisions = self.notary.decisions
        self.history.tensors = {tensor.spec.name: tensor for tensor in self.coordinator.schemas.tensors}
        self.on_fall()
        self.history.fall(cut.version, keeps_writes=keeps_writes)
        ended = [actor for actor in self.actors if actor.machine.name not in self.pending]
        for actor in self.actors:
            if actor not in ended and actor.machine.has_met_the_store:
                actor.history = History()  # what it does from here on never was
        self._begin(cut)
        self.history.there_before[cut.version] = members_after((), self.coordinator.roster.log)
        for actor in self.actors:
            actor.machine.move(self.servers)
        for actor in ended:  # as whoever starts workers does for those whose last steps were undone
            if isinstance(actor, Worker) and actor.machine is self.machines[actor.rank]:
                self._start_worker(actor.rank, life=self._lives(actor.rank) + 1)

    def _lives(self, rank: int) -> int:
        return sum(isinstance(actor, Worker) and actor.rank == rank for actor in self.actors)

    def _outlived_a_fall(self, actor: Actor) -> None:
        """It has ended, and goes on as another client of the store as it is."""
        name = actor.machine.name
        outcome = actor.history.outcomes.pop(name)
        if not outcome.startswith((*OUTLIVED, "finished")):
            self.history.outcomes[name] = outcome
        if isinstance(actor, Worker):
            self._start_worker(actor.rank, life=self._lives(actor.rank) + 1)
        elif isinstance(actor, SomeReader) and not actor.stopped:
            again: MakeReader = type(actor)
            if isinstance(actor, Follower) and outcome.startswith("RolledBack"):
                again = partial(Follower, copies=actor.copies)
            if isinstance(actor, Reader):
                again = partial(Reader, caches=actor.caches)
            self._start_reader(again, f"{name}'")

    def _schedule_partitions(self) -> None:
        rng = self.world.rng
        if self.plan.partition is not None:
            rank, for_s = self.plan.partition
            self.world.after(rng.uniform(0.0, 3.0), lambda: self._cut_off(self.machines.get(rank), for_s))
        if self.plan.hasty_writers:
            for actor in self.actors:
                if isinstance(actor, Writer):
                    cut_off = partial(self._cut_off, actor.machine, 4 * HASTY_S)
                    self.world.after(rng.uniform(0.0, 2.0), cut_off)

    def _cut_off(self, machine: Machine | None, for_s: float) -> None:
        """Every connection breaks, and for so long there is no new one. None: it is not there yet."""
        if machine is None:
            return
        self.world.say(f"{machine.name} is cut off for {for_s:g} s")
        machine.partitioned_until = self.world.now + for_s
        for connection in list(machine.connections):
            connection.break_off()
