"""How a store is, from the counters of its shards: what `psstore status`, `top` and `doctor` say, and `/metrics` shows.

The one place that knows which counter is which figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from psstore.client.store import Store
from psstore.types import Consistency

CONNECT_S = 3.0
"""How long to try to reach a store that somebody only looks at."""

Counters = Mapping[str, int | float | str]
"""What STATS tells of one shard."""


class ShardStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One shard. Bytes and counts that grow do so from the start of the process that leads."""

    shard: int
    version: int
    """Decisions that it has applied."""
    value_bytes: int
    state_bytes: int
    rows: int
    """Rows of tables."""
    rows_evicted: int
    """Rows that made room for others, or whose time was over."""
    rows_refused: int
    """Contributions to ids that stayed without a row."""
    staged_bytes: int
    """Contributions that wait for their decision."""
    kept_bytes: int
    """Older versions that snapshots read."""
    base_bytes: int
    """Older values that workers were sent, from where their gradients are compensated."""
    memory_bytes: int
    """All that it takes, of the host's memory or its device's."""
    max_memory_bytes: int
    received_bytes: int
    """Bytes of values that were pushed or written, as they travel, also through shared memory."""
    sent_bytes: int
    """Bytes of values that were pulled, likewise."""
    connections: int
    requests_waiting: int
    """Control requests whose answer is owed: commits and barriers that wait for others, and the like."""
    process: int
    """Its id on its host: of the process that leads."""
    led_before: int
    """How many processes led it before, and died."""
    standbys: int
    """How many may lead at once."""
    standby_lag: int
    """Changes that a standby has been sent and has not answered."""
    processor_s: float
    """Processor time of the process that leads; 0 of a store inside a program."""


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One worker that trains."""

    rank: int
    clock: int
    """The last round that it has committed and that is decided."""
    ahead: int
    """Rounds by which it is ahead of the slowest."""
    waited_s: float
    """How long its commits have waited for others, all together: the one that they wait for has the least."""
    silent_s: float = 0.0
    """Since something was heard of it, its heartbeat included."""
    refused: int = 0
    """Contributions of its rank that were refused by their norm."""


class TransferStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One worker as one shard sees it. At a moment it does one of three things there, of several the first, or none."""

    rank: int
    shard: int
    pushed_bytes: int
    """Values only, as they travel, also through shared memory."""
    pulled_bytes: int
    push_s: float
    """How long gradients of its were arriving, all together. Through shared memory they are there at once."""
    pull_s: float
    """How long values were on their way to it."""
    waited_s: float
    """How long its reads have waited for what others have yet to do."""


class CheckpointStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoints of this life of the store."""

    version: int | None
    """Version of the last one; None: none was written."""
    age_s: float
    """Since the last one; if there is none, since this life of the store began."""
    written: int
    failed: int
    failure: str = ""
    """Why the last attempt came to nothing; '': it did not."""


class TableStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One table of rows: on all shards, or on one."""

    name: str
    rows: int
    row_bytes: int
    """Bytes of their records: ids, values and state."""
    rows_evicted: int
    rows_refused: int


class StoreStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A store."""

    mode: str
    num_workers: int
    fewest: int | None
    """Workers come and go, and no step is of fewer; None: their number is fixed."""
    version: int
    """The last decision."""
    tensors: int
    live: tuple[int, ...]
    """Ranks of the workers that train."""
    absent: tuple[int, ...]
    """Ranks that have not come yet, where each is expected."""
    lost: tuple[int, ...]
    left: tuple[int, ...]
    workers: tuple[WorkerStatus, ...]
    """Workers that train, by rank."""
    transfers: tuple[TransferStatus, ...]
    """What each shard sees of them."""
    staleness: dict[int, int]
    """Rounds by which a worker was ahead of the slowest -> commits that were answered so; of 2 and 3 together at 2, of
    4 to 7 at 4, and so on."""
    commits_waiting: int
    waited_for: str = ""
    """Which workers the others wait for at this moment, each with where it is; '': nobody waits."""
    torn: str = ""
    """Why there will be no other version; '': nothing is in the way."""
    restored: int | None
    """The version that this life of the store began with; None: it began empty."""
    checkpoint: CheckpointStatus
    shards: tuple[ShardStatus, ...]
    tables: tuple[TableStatus, ...]
    """Tables by name; of more than 64 those that were created first."""

    @property
    def slowest(self) -> WorkerStatus | None:
        """Who the others wait for: of those that have committed the fewest rounds, who has waited least. None: fewer
        than two train."""
        ordered = sorted(self.workers, key=lambda one: (one.clock, one.waited_s))
        return ordered[0] if len(ordered) > 1 else None


def look_at(store: Store) -> StoreStatus:
    """Asks all shards. Raises as `Store.stats`."""
    told, consistency = store.stats(), store.consistency
    return status_of(told, consistency, num_workers=store.num_workers, restored=store.restored)


def status_of(
    shards: Sequence[Counters],
    consistency: Consistency,
    *,
    num_workers: int | None = None,
    restored: int | None = None,
) -> StoreStatus:
    """From what shards told, shard 0 first. `num_workers`: of a store whose workers come and go, those that take part
    (default: the most)."""
    first = shards[0]
    live, lost, left = (_ranks(first[f"ranks_{state}"]) for state in ("live", "lost", "left"))
    expected = () if consistency.elastic else range(consistency.num_workers)
    return StoreStatus(
        mode=consistency.mode,
        num_workers=consistency.num_workers if num_workers is None else num_workers,
        fewest=consistency.fewest,
        version=int(first["version"]),
        tensors=int(first["tensors"]),
        live=live,
        absent=tuple(sorted({*expected}.difference(live, lost, left))),
        lost=lost,
        left=left,
        workers=workers_of(first),
        transfers=tuple(one for counters in shards for one in transfers_of(counters) if one.rank in live),
        staleness=staleness_of(first),
        commits_waiting=int(first["commits_waiting"]),
        waited_for=str(first.get("waited_for", "")),
        torn=str(first.get("torn", "")),
        restored=restored,
        checkpoint=checkpoint_of(first),
        shards=tuple(map(shard_of, shards)),
        tables=tables_of(shards),
    )


def shard_of(counters: Counters) -> ShardStatus:
    counts = {name: int(counters[name]) for name in ShardStatus.__struct_fields__ if name != "processor_s"}
    return ShardStatus(**counts, processor_s=float(counters.get("processor_s", 0.0)))


def tables_of(shards: Sequence[Counters]) -> tuple[TableStatus, ...]:
    """Tables on these shards, by name."""
    figures = [name for name in TableStatus.__struct_fields__ if name != "name"]
    tables = sorted({counter.removeprefix("rows/") for one in shards for counter in one if counter.startswith("rows/")})
    return tuple(
        TableStatus(
            name=table, **{figure: sum(int(one.get(f"{figure}/{table}", 0)) for one in shards) for figure in figures}
        )
        for table in tables
    )


def workers_of(counters: Counters) -> tuple[WorkerStatus, ...]:
    """From shard 0's counters."""
    clocks, waits = _by_rank(counters["rank_clocks"]), _by_rank(counters["rank_waits_s"])
    silences, refusals = _by_rank(counters["rank_silences_s"]), _by_rank(counters.get("rank_refusals", ""))
    slowest = min(clocks.values(), default=0.0)
    return tuple(
        WorkerStatus(
            rank=rank,
            clock=int(clock),
            ahead=int(clock - slowest),
            waited_s=waits.get(rank, 0.0),
            silent_s=silences.get(rank, 0.0),
            refused=int(refusals.get(rank, 0)),
        )
        for rank, clock in sorted(clocks.items())
    )


def transfers_of(counters: Counters) -> tuple[TransferStatus, ...]:
    """From one shard's counters, by rank."""
    names = ("rank_pushed_bytes", "rank_pulled_bytes", "rank_push_s", "rank_pull_s", "rank_read_waits_s")
    pushed, pulled, push_s, pull_s, waited_s = (_by_rank(counters[name]) for name in names)
    return tuple(
        TransferStatus(
            rank=rank,
            shard=int(counters["shard"]),
            pushed_bytes=int(pushed[rank]),
            pulled_bytes=int(pulled[rank]),
            push_s=push_s.get(rank, 0.0),
            pull_s=pull_s.get(rank, 0.0),
            waited_s=waited_s.get(rank, 0.0),
        )
        for rank in sorted(pushed)
    )


def staleness_of(counters: Counters) -> dict[int, int]:
    """From shard 0's counters, as `StoreStatus.staleness`."""
    return {ahead: int(count) for ahead, count in _by_rank(counters["staleness"]).items()}


def checkpoint_of(counters: Counters) -> CheckpointStatus:
    """From shard 0's counters."""
    version = int(counters.get("checkpoint", -1))
    return CheckpointStatus(
        version=version if version >= 0 else None,
        age_s=float(counters.get("checkpoint_age_s", 0.0)),
        written=int(counters.get("checkpoints_written", 0)),
        failed=int(counters.get("checkpoints_failed", 0)),
        failure=str(counters.get("checkpoint_failure", "")),
    )


def _ranks(told: int | float | str) -> tuple[int, ...]:
    return tuple(int(rank) for rank in str(told).split(",") if rank)


def _by_rank(told: int | float | str) -> dict[int, float]:
    """From '0:12,2:11'."""
    pairs = (one.partition(":") for one in str(told).split(",") if one)
    return {int(rank): float(value) for rank, _, value in pairs}
