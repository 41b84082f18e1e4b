"""What a seed means: the sizes of a run, its mode, and what goes wrong in it."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Literal

from msgspec import structs

from psstore.types import ADAPTIVE, Consistency

MODES = ("sync", "backup", "ssp", "async")


@dataclass(frozen=True)
class Death:
    """One life of a worker ends when it has sent `after_frames`, and the next begins `replaced_after_s` later."""

    rank: int
    after_frames: int
    replaced_after_s: float | None
    """None: never."""


@dataclass(frozen=True)
class ShardDeath:
    """A shard's leader dies as soon as its standby may lead, or the standby, so long after the last such death."""

    shard: int
    after_s: float
    of_standby: bool
    noticed_after_s: float


@dataclass(frozen=True)
class Silence:
    """A host of a shard is not heard of, so long after the last such silence began, and nobody knows why."""

    shard: int
    of_leader: bool
    kind: Literal["stands still", "wakes up alone", "is cut off", "loses the other", "dies", "retires"]
    """Its processes stand still; and don't hear of the other host for a while when they go on; it reaches no other
    host, but clients; only that of the same shard it does not reach; it dies; the standby there is told to end, and
    before it has the leader stands still."""
    after_s: float
    for_s: float


@dataclass(frozen=True)
class Plan:
    """One run. Equal plans give equal runs."""

    seed: int
    flavour: int
    """Which rounds lack gradients, are not finite or end without a pull: the training's own, not what goes wrong."""
    mode: str
    num_workers: int
    num_shards: int
    num_channels: int
    """Connections side by side of each client to each shard."""
    rounds: int
    staleness: int
    latency_s: float
    compute_s: tuple[float, ...]
    """Mean time of a step, per rank: one may be slow."""
    break_chance: float
    """That a frame breaks its connection."""
    late_s: float
    """How late the last bytes of a broken connection may be."""
    deaths: tuple[Death, ...]
    leaves: tuple[tuple[int, int], ...]
    """(rank, round): that worker is content before the end."""
    liar: int | None
    """A rank whose first life commits a round of which it has pushed nothing; a next life follows."""
    partition: tuple[int, float] | None
    """(rank, for how long): that worker loses every connection and gets no new one for so long."""
    mute_heartbeats: bool
    rejoin_s: float
    """How long the others wait for a lost worker's next life before they hear of it."""
    early: bool
    """Some rounds are committed early, by some or all workers."""
    clipped: bool
    """Some rounds are clipped by their global norm."""
    loss_scale: float
    """Gradients are pushed so many times too large; a power of two, so that nothing is rounded otherwise."""
    with_token: bool
    lazy_shards: bool
    num_writers: int
    hasty_writers: bool
    with_curator: bool
    num_readers: int
    num_historians: int
    """Readers of whole versions."""
    num_archivists: int
    """Who leads checkpoints."""
    gather_s: float
    """How long a checkpoint waits for what workers hand in."""
    hands_in: bool
    """Workers hand in for their next lives."""
    stop_at: int | None
    """The version at which workers have training end."""
    grace_s: float = 0.0
    """How long a round that has its quorum waits for the others; ADAPTIVE: as long as it pays."""
    drops_lost: bool = False
    """Where rounds are a quorum's: a worker that is given up is no part of it any more."""
    tables: tuple[tuple[str, str], ...] = ()
    """(rule, bounds) of each table whose rows workers push beside tensors; rows.BOUNDS has the bounds."""
    narrow_tables: tuple[bool, ...] = ()
    """Which of them keep rows in bfloat16."""
    assigns_rows: bool = False
    """Somebody assigns rows of tables that have room for all."""
    keeps_rows: bool = False
    """Readers keep the rows that they read."""
    full_every: int = 1
    """Of so many checkpoints one has all rows, and the others what has changed since."""
    keep: int = 1
    """So many checkpoints stay, and their bases."""
    arrivals_s: tuple[float, ...] = ()
    """Workers come and go: when each begins, by rank. Empty: their number is fixed, and all begin at once."""
    reshards: tuple[tuple[float, int], ...] = ()
    """(so long after the start or the last one, number): the store goes on with so many shards."""
    shard_deaths: tuple[ShardDeath, ...] = ()
    """Every shard has a standby, and some die."""
    silences: tuple[Silence, ...] = ()
    """Every shard has a standby on another host, and shards vote on who leads."""
    num_followers: int = 0
    """Readers that go from version to version by what has changed."""
    num_forerunners: int = 0
    """Clients that add to what has no value yet, and are refused."""
    shares_memory: bool = False
    """All processes run on one host, and clients push through shared memory, where standbys see it."""
    refuse_norm: float | None = None
    """Some contributions are astray, and refused if their norm is more than so many times the usual."""
    compensates: bool = True
    """Gradients of the first tensor are compensated outside lockstep: not by shards on devices."""
    falls: tuple[float, ...] = ()
    """All shards die, so long after the first checkpoint or the last fall, and begin again from the last one."""

    def __post_init__(self) -> None:
        assert all(round < self.rounds for _, round in self.leaves), (
            f"{self.leaves}, and the last round is {self.rounds}"
        )

    @property
    def loses_holds(self) -> bool:
        """What shards hold for a checkpoint may go, and not by a fault of who asked for it."""
        return bool(self.shard_deaths or self.silences or self.reshards or self.assigns_rows)

    @property
    def drops(self) -> bool:
        """Workers that are given up are done without."""
        return self.is_elastic or self.drops_lost

    @property
    def is_elastic(self) -> bool:
        return bool(self.arrivals_s)

    @property
    def consistency(self) -> Consistency:
        fixed = Consistency.of_mode(
            self.mode, num_workers=self.num_workers, staleness=self.staleness, grace_s=self.grace_s
        )
        terms = structs.replace(fixed, refuse_norm=self.refuse_norm)
        return structs.replace(terms, fewest=1) if self.is_elastic else terms

    @property
    def disturbed(self) -> bool:
        """Who takes part differs from the fault-free run, so that values may differ too."""
        return bool(self.deaths or self.leaves or self.liar is not None or self.is_elastic)

    @property
    def is_restless(self) -> bool:
        """Who is there changes for other reasons than that training begins and ends, or the store itself changes."""
        goes = self.disturbed or self.partition is not None or self.mute_heartbeats
        return bool(goes or self.falls or self.reshards or self.shard_deaths or self.silences)

    @property
    def is_missed(self) -> bool:
        """A worker is gone for good, and others wait for it."""
        return not self.is_elastic and any(death.replaced_after_s is None for death in self.deaths)

    @property
    def unsteady(self) -> set[int]:
        """Ranks that may not be there all the time."""
        if self.silences:  # who looks for shard 0 for long is taken for lost
            return set(range(self.num_workers))
        cut_off = () if self.partition is None else (self.partition[0],)
        lying = () if self.liar is None else (self.liar,)
        return {*cut_off, *lying, *(death.rank for death in self.deaths), *(rank for rank, _ in self.leaves)}

    def undisturbed(self) -> Plan:
        """The same training, with nothing going wrong, on one shard and without what must make no difference."""
        return replace(
            self,
            seed=0,
            num_shards=1,
            num_channels=1,
            latency_s=0.001,
            compute_s=(0.1,) * self.num_workers,
            break_chance=0.0,
            deaths=(),
            leaves=(),
            liar=None,
            partition=None,
            mute_heartbeats=False,
            rejoin_s=0.0,
            early=False,
            loss_scale=1.0,
            with_token=False,
            lazy_shards=False,
            num_writers=0,
            hasty_writers=False,
            with_curator=False,
            assigns_rows=False,
            num_readers=0,
            num_historians=0,
            num_archivists=0,
            gather_s=0.0,
            hands_in=False,
            falls=(),
            reshards=(),
            shard_deaths=(),
            silences=(),
            num_followers=0,
            num_forerunners=0,
        )


def falling_plan_of(seed: int, mode: str | None = None) -> Plan:
    """A plan in which the store goes back to checkpoints, and little else goes wrong: whoever is gone for good by then
    is missing in the next life."""
    rng = random.Random(f"falls {seed}")
    plan = plan_of(seed, mode)
    return replace(
        plan,
        deaths=(),
        leaves=(),
        liar=None,
        partition=None,
        mute_heartbeats=False,
        num_writers=0,
        with_curator=False,
        num_archivists=max(1, plan.num_archivists),
        stop_at=None,
        rounds=plan.rounds + 6,
        compute_s=tuple(min(1.0, max(0.5, seconds)) for seconds in plan.compute_s),
        falls=tuple(rng.expovariate(1.0) for _ in range(rng.choice((1, 2, 3)))),
    )


def resharding_plan_of(seed: int, mode: str | None = None) -> Plan:
    """A plan in which the store goes on with other numbers of shards, and little else goes wrong."""
    rng = random.Random(f"reshards {seed}")
    reshards = tuple((rng.expovariate(1.0), rng.choice((1, 2, 3, 5))) for _ in range(rng.choice((1, 2, 3))))
    plan = falling_plan_of(seed, mode)
    return replace(
        plan,
        falls=(),
        reshards=reshards,
        num_writers=plan_of(seed, mode).num_writers,
        break_chance=min(plan.break_chance, 0.02),
    )


def standby_plan_of(seed: int, mode: str | None = None) -> Plan:
    """A plan in which every shard has a standby, and leaders die under whatever else goes wrong."""
    rng = random.Random(f"standbys {seed}")
    plan = plan_of(seed, mode)
    deaths = tuple(
        ShardDeath(
            shard=rng.choice((0, rng.randrange(plan.num_shards))),
            after_s=rng.choice((0.0, rng.expovariate(2.0), rng.expovariate(0.5))),
            of_standby=rng.random() < 0.2,
            noticed_after_s=rng.choice((0.01, 0.3)),
        )
        for _ in range(rng.choice((1, 2, 4, 8)))
    )
    return replace(plan, shard_deaths=deaths)


def sharing_plan_of(seed: int, mode: str | None = None) -> Plan:
    """A plan in which every shard has a standby that sees what clients push through shared memory."""
    return replace(standby_plan_of(seed, mode), shares_memory=True)


def refusing_plan_of(seed: int, mode: str | None = None) -> Plan:
    """A plan in which plain writes are refused, under whatever else goes wrong; every other one has standbys."""
    plan = (standby_plan_of if seed % 2 else plan_of)(seed, mode)
    num_forerunners = random.Random(f"forerunners {seed}").choice((1, 2, 3))
    return replace(plan, num_forerunners=num_forerunners, break_chance=max(plan.break_chance, 0.02))


def guarded_plan_of(seed: int, mode: str | None = None) -> Plan:
    """A plan in which contributions are astray, and are to be refused: where nothing else happens, where shards have
    standbys, where the store goes back, or where its shards change."""
    plan = (plan_of, standby_plan_of, falling_plan_of, resharding_plan_of)[seed // len(MODES) % 4](seed, mode)
    return replace(plan, refuse_norm=1000.0, rounds=plan.rounds + 4, early=False, liar=None)


def following_plan_of(seed: int, mode: str | None = None) -> Plan:
    """A plan in which readers follow, where shards have standbys, where the store goes back, or neither."""
    plan = (plan_of, standby_plan_of, falling_plan_of)[seed % 3](seed, mode)
    rng = random.Random(f"followers {seed}")
    return replace(plan, num_followers=rng.choice((1, 2, 3)), rounds=plan.rounds + rng.choice((0, 8)))


def voting_plan_of(seed: int, mode: str | None = None) -> Plan:
    """A plan in which hosts fall silent under whatever else goes wrong, and shards vote on who leads."""
    rng = random.Random(f"silences {seed}")
    plan = plan_of(seed, mode)
    num_shards = rng.choice((2, 2, 3, 5))
    plan = replace(plan, num_shards=num_shards, liar=None, break_chance=min(plan.break_chance, 0.02))
    if rng.random() < 0.4:  # a leader goes on that was just replaced, and finds what readers have asked it meanwhile
        stop = Silence(0, of_leader=True, kind="wakes up alone", after_s=0.0, for_s=rng.uniform(3.5, 6.0))
        return replace(
            plan, silences=(stop,), num_readers=2, rounds=12, latency_s=0.0005, late_s=4.0, partition=None, stop_at=None
        )
    silences = tuple(
        Silence(
            shard=rng.choice((0, rng.randrange(num_shards))),
            of_leader=rng.random() < 0.7,
            kind=rng.choice(("stands still", "wakes up alone", "is cut off", "loses the other", "dies")),
            after_s=rng.choice((0.0, rng.expovariate(1.0), rng.expovariate(0.2))),
            for_s=rng.choice((0.5, rng.uniform(3.0, 6.0), rng.uniform(3.0, 6.0), 12.0, 600.0)),
        )
        for _ in range(rng.choice((1, 2, 4)))
    )
    rng = random.Random(f"retires {seed}")
    if rng.random() < 0.5:
        at, for_s = rng.randrange(len(silences) + 1), rng.choice((0.1, rng.uniform(3.0, 6.0)))
        retires = Silence(silences[0].shard, of_leader=False, kind="retires", after_s=rng.random(), for_s=for_s)
        silences = (*silences[:at], retires, *silences[at:])
    rng = random.Random(f"long steps {seed}")
    if rng.random() < 0.1:  # a worker asks for nothing until long after another process leads
        at, for_s = rng.randrange(plan.num_workers), rng.uniform(8.0, 12.0)
        compute_s = tuple(for_s if rank == at else 0.1 for rank in range(plan.num_workers))
        plan = replace(plan, deaths=(), partition=None, mute_heartbeats=False, break_chance=0.0, num_historians=0)
        rounds = min(plan.rounds, 4)
        leaves = tuple((rank, round) for rank, round in plan.leaves if round < rounds)
        plan = replace(plan, compute_s=compute_s, rounds=rounds, leaves=leaves, drops_lost=True, rejoin_s=1.0)
        silences = (Silence(0, of_leader=True, kind="is cut off", after_s=rng.uniform(0.0, 5.0), for_s=600.0),)
    return replace(plan, silences=silences)


def elastic_plan_of(seed: int, mode: str | None = None) -> Plan:
    """A plan in which workers come when they like, and those that are gone are done without."""
    rng = random.Random(f"elastic {seed}")
    plan = plan_of(seed, "sync")
    num_workers = rng.choice((2, 3, 4, 5))
    rounds = plan.rounds + rng.randint(2, 6)
    compute_s = [rng.choice((0.1, 0.4))] * num_workers
    compute_s[rng.randrange(num_workers)] *= rng.choice((1.0, 5.0))
    return replace(
        plan,
        num_workers=num_workers,
        rounds=rounds,
        compute_s=tuple(compute_s),
        deaths=tuple(_death(rng, num_workers) for _ in range(rng.choice((0, 1, 2, 3)))),
        leaves=tuple((rank, rng.randrange(1, rounds)) for rank in range(num_workers) if rng.random() < 0.25),
        liar=None,
        partition=(rng.randrange(num_workers), rng.choice((1.0, 5.0, 15.0, 20.0))) if rng.random() < 0.4 else None,
        stop_at=None,
        arrivals_s=tuple(rng.choice((0.0, rng.uniform(0.0, 4.0))) for _ in range(num_workers)),
    )


def returning_plan_of(seed: int, mode: str | None = None) -> Plan:
    """A plan in which workers come when they like, and are there again when the store goes back, or on with another
    number of shards."""
    rng = random.Random(f"returns {seed}")
    num_workers = rng.choice((2, 3, 4))
    plan = (falling_plan_of, resharding_plan_of)[seed % 2](seed, "sync")
    return replace(
        plan,
        num_workers=num_workers,
        compute_s=tuple(rng.choice((0.5, 1.0)) for _ in range(num_workers)),
        arrivals_s=tuple(rng.choice((0.0, rng.uniform(0.0, 4.0))) for _ in range(num_workers)),
    )


def plan_of(seed: int, mode: str | None = None) -> Plan:
    """The plan that a seed stands for. Modes take turns unless one is named."""
    rng = random.Random(f"plan {seed}")
    chosen = mode or MODES[seed % len(MODES)]
    num_workers = rng.choice((1, 2, 2, 3, 3, 4)) if chosen != "backup" else rng.choice((3, 4))
    compute_s = [rng.choice((0.01, 0.1, 0.4))] * num_workers
    if rng.random() < 0.5:
        compute_s[rng.randrange(num_workers)] *= 10.0
    deaths = tuple(_death(rng, num_workers) for _ in range(rng.choice((0, 0, 1, 1, 2))))
    leaver, rounds = rng.randrange(num_workers), rng.randint(3, 8)
    lies = random.Random(f"lies {seed}")
    archives = random.Random(f"archives {seed}")
    waits_for_all = chosen == "sync" or num_workers == 1
    manners = random.Random(f"manners {seed}")
    early = manners.random() < 0.5 and waits_for_all
    if early and manners.random() < 0.4:  # in the middle of something, for which another one keeps it waiting
        dying = manners.randrange(num_workers)
        deaths += (Death(dying, manners.randint(15, 90), manners.choice((0.1, 1.0, None, None))),)
        compute_s[dying - 1] = 4.0
    return Plan(
        seed=seed,
        flavour=rng.randrange(6),
        mode=chosen,
        num_workers=num_workers,
        num_shards=rng.choice((1, 2, 3, 5)),
        rounds=rounds,
        staleness=rng.randint(1, 3),
        latency_s=rng.choice((0.0005, 0.005, 0.05)),
        compute_s=tuple(compute_s),
        break_chance=rng.choice((0.0, 0.02, 0.05, 0.08)),
        late_s=rng.choice((0.0, 0.5, 4.0)),
        deaths=deaths,
        leaves=((leaver, rng.randrange(1, rounds)),) if rng.random() < 0.15 else (),
        liar=lies.randrange(num_workers) if lies.random() < 0.15 and not early else None,
        partition=(rng.randrange(num_workers), rng.choice((1.0, 5.0, 15.0))) if rng.random() < 0.3 else None,
        mute_heartbeats=rng.random() < 0.2,
        rejoin_s=random.Random(f"rejoins {seed}").choice((0.0, 0.0, 4.0, 12.0)),
        early=early,
        clipped=manners.random() < 0.5 and waits_for_all,
        loss_scale=manners.choice((1.0, 1024.0)),
        with_token=rng.random() < 0.5,
        lazy_shards=rng.random() < 0.5,
        num_writers=rng.randint(0, 2),
        hasty_writers=rng.random() < 0.5,
        with_curator=rng.random() < 0.5,
        num_readers=rng.randint(0, 2),
        num_historians=random.Random(f"historians {seed}").randint(0, 2),
        num_archivists=archives.randint(0, 2),
        gather_s=archives.choice((0.0, 60.0)),
        hands_in=archives.random() < 0.7,
        stop_at=archives.randint(1, rounds * (num_workers if chosen in ("ssp", "async") else 1))
        if archives.random() < 0.3
        else None,
        num_channels=manners.choice((1, 1, 2, 3)),
        grace_s=_grace_s(seed) if chosen == "backup" else 0.0,
        drops_lost=chosen == "backup" and random.Random(f"drops {seed}").random() < 0.5,
    )


def _grace_s(seed: int) -> float:
    fixed_s = random.Random(f"graces {seed}").choice((0.0, 0.1, 3.0))
    return ADAPTIVE if random.Random(f"adaptive graces {seed}").random() < 0.3 else fixed_s


def _death(rng: random.Random, num_workers: int) -> Death:
    return Death(
        rank=rng.randrange(num_workers),
        after_frames=rng.randint(0, rng.choice((30, 80))),
        replaced_after_s=rng.choice((0.1, 1.0, 6.0, None)),
    )


ROW_RULES = ("sgd", "adagrad", "rowwise_adagrad", "adam", "momentum", "ftrl")
ROW_BOUNDS = ("open", "open", "open", "lru", "lfu", "ttl", "ttl-bounded", "full", "after", "lot")


def with_rows(plan: Plan) -> Plan:
    """The plan, and workers train one table or two as well; where rounds are early, none whose pushes may be refused,
    which others would wait for."""
    rng = random.Random(f"rows {plan.seed}")
    choices = [one for one in ROW_BOUNDS if not (plan.early and one == "full")]
    tables = tuple((rng.choice(ROW_RULES), rng.choice(choices)) for _ in range(rng.choice((1, 1, 2))))
    assigns = any(bounds == "open" for _, bounds in tables) and rng.random() < 0.7
    widths = random.Random(f"widths of rows {plan.seed}")
    narrow = tuple(widths.random() < 0.4 for _ in tables)
    keeps = random.Random(f"kept rows {plan.seed}").random() < 0.5
    deltas = random.Random(f"deltas {plan.seed}")
    full_every = deltas.choice((1, 2, 4))
    if full_every > 1:  # training goes on for as long as several checkpoints take
        compute_s = tuple(max(0.5, seconds) for seconds in plan.compute_s)
        plan = replace(plan, num_archivists=1, rounds=plan.rounds + 4, compute_s=compute_s)
    return replace(
        plan,
        tables=tables,
        narrow_tables=narrow,
        assigns_rows=assigns,
        keeps_rows=keeps,
        full_every=full_every,
        keep=deltas.choice((1, 2, 3)),
    )
