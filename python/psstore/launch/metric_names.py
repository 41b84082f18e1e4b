"""The metrics of a store: their names, which are fixed, and what each is. docs/monitoring.md has the same table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from psstore.client.store_status import (
    ShardStatus,
    TableStatus,
    TransferStatus,
    WorkerStatus,
    checkpoint_of,
    shard_of,
    staleness_of,
    tables_of,
    transfers_of,
    workers_of,
)
from psstore.launch.shard_probe import ToldCounters

Counters = Mapping[str, int | float | str]
Samples = Iterable[tuple[Sequence[str], float]]
"""(values of the labels, value)."""


class ShardAnswer(NamedTuple):
    """What is known of a shard of this host."""

    shard: int
    is_up: bool
    answer_s: float
    counters: Counters | None
    """What it told last; None: it has not been reached."""
    status: ShardStatus | None
    """What it told, as figures."""
    workers: tuple[WorkerStatus, ...]
    """What shard 0 says of workers."""
    transfers: tuple[TransferStatus, ...]
    """What it sees of each worker that has connected."""
    tables: tuple[TableStatus, ...]
    """What it says of tables."""


def answer_of(shard: int, answers: Sequence[ToldCounters], *, is_up: bool) -> ShardAnswer:
    """`is_up`: it has answered lately, if at all."""
    if not answers:
        return ShardAnswer(shard, False, 0.0, None, None, (), (), ())
    counters = answers[-1].counters
    workers = workers_of(counters) if shard == 0 else ()
    return ShardAnswer(
        shard,
        is_up,
        answers[-1].took_s,
        counters,
        shard_of(counters),
        workers,
        transfers_of(counters),
        tables_of([counters]),
    )


class Metric(NamedTuple):
    """One metric. A counter's name ends in _total."""

    name: str
    about: str
    labels: tuple[str, ...]
    samples: Callable[[Sequence[ShardAnswer]], Samples]

    @property
    def is_counter(self) -> bool:
        return self.name.endswith("_total")


def _of_shard(figure: Callable[[Counters], float]) -> Callable[[Sequence[ShardAnswer]], Samples]:
    """A figure of each shard that was reached."""

    def samples(answers: Sequence[ShardAnswer]) -> Samples:
        return [([str(one.shard)], figure(one.counters)) for one in answers if one.counters is not None]

    return samples


def _field(name: str) -> Callable[[Sequence[ShardAnswer]], Samples]:
    """A field of `ShardStatus`."""

    def samples(answers: Sequence[ShardAnswer]) -> Samples:
        return [((str(one.shard),), float(getattr(one.status, name))) for one in answers if one.status is not None]

    return samples


def _of_store(figure: Callable[[Counters], Samples]) -> Callable[[Sequence[ShardAnswer]], Samples]:
    """A figure that shard 0 knows, and the host that it is on shows."""

    def samples(answers: Sequence[ShardAnswer]) -> Iterator[tuple[Sequence[str], float]]:
        for one in answers:
            if one.shard == 0 and one.counters is not None:
                yield from figure(one.counters)

    return samples


def _counter(name: str) -> Callable[[Sequence[ShardAnswer]], Samples]:
    """A counter of shard 0, as it tells it."""
    return _of_store(lambda counters: [((), float(counters.get(name, 0.0)))])


def _num_workers(counters: Counters) -> Samples:
    for state in ("live", "lost", "left"):
        yield (state,), float(len([rank for rank in str(counters[f"ranks_{state}"]).split(",") if rank]))


def _of_workers(name: str) -> Callable[[Sequence[ShardAnswer]], Samples]:
    """A field of `WorkerStatus`."""

    def samples(answers: Sequence[ShardAnswer]) -> Samples:
        return [((str(one.rank),), float(getattr(one, name))) for answer in answers for one in answer.workers]

    return samples


def _of_transfers(
    name: str, of_shards: Callable[[Sequence[float]], float]
) -> Callable[[Sequence[ShardAnswer]], Samples]:
    """A field of `TransferStatus`, by rank: for each rank and shard there would be too many."""

    def samples(answers: Sequence[ShardAnswer]) -> Samples:
        seen: dict[int, list[float]] = {}
        for answer in answers:
            for one in answer.transfers:
                seen.setdefault(one.rank, []).append(getattr(one, name))
        return [((str(rank),), float(of_shards(values))) for rank, values in seen.items()]

    return samples


def _of_tables(name: str) -> Callable[[Sequence[ShardAnswer]], Samples]:
    """A field of `TableStatus`, on each shard."""

    def samples(answers: Sequence[ShardAnswer]) -> Samples:
        return [
            ((str(answer.shard), one.name), float(getattr(one, name))) for answer in answers for one in answer.tables
        ]

    return samples


def _last_checkpoint(counters: Counters) -> Samples:
    version = checkpoint_of(counters).version
    return [] if version is None else [((), float(version))]


def _commits(counters: Counters) -> Samples:
    return [((str(ahead),), float(count)) for ahead, count in staleness_of(counters).items()]


SHARD, RANK, TABLE = ("shard",), ("rank",), ("shard", "table")

METRICS: tuple[Metric, ...] = (
    Metric(
        "psstore_decisions_total",
        "Decisions: steps of the model, which is its version",
        (),
        _counter("decisions"),
    ),
    Metric("psstore_tensors", "Tensors that the store has", (), _counter("tensors")),
    Metric("psstore_commits_waiting", "Commits whose answer waits for other workers", (), _counter("commits_waiting")),
    Metric(
        "psstore_torn",
        "1: a round was torn, and there will be no other decision",
        (),
        _of_store(lambda counters: [((), float("torn" in counters))]),
    ),
    Metric("psstore_workers", "Workers that train, are lost, or have left", ("state",), _of_store(_num_workers)),
    Metric("psstore_worker_rounds", "Rounds that a worker has done", RANK, _of_workers("clock")),
    Metric("psstore_worker_staleness", "Rounds by which a worker is ahead of the slowest", RANK, _of_workers("ahead")),
    Metric(
        "psstore_worker_wait_seconds_total",
        "Seconds that a worker's commits have waited for others: who is waited for has the least",
        RANK,
        _of_workers("waited_s"),
    ),
    Metric(
        "psstore_worker_refused_total",
        "Contributions of a worker's rank that were refused by their norm",
        RANK,
        _of_workers("refused"),
    ),
    Metric(
        "psstore_worker_silent_seconds",
        "Seconds since something was heard of a worker, its heartbeat included",
        RANK,
        _of_workers("silent_s"),
    ),
    Metric(
        "psstore_worker_pushed_bytes_total",
        "Bytes of values that a worker pushed or wrote, as they travel, also through shared memory",
        RANK,
        _of_transfers("pushed_bytes", sum),
    ),
    Metric(
        "psstore_worker_pulled_bytes_total",
        "Bytes of values that a worker pulled, likewise",
        RANK,
        _of_transfers("pulled_bytes", sum),
    ),
    Metric(
        "psstore_worker_push_seconds_total",
        "Seconds in which gradients of a worker were arriving, at the shard where they took longest",
        RANK,
        _of_transfers("push_s", max),
    ),
    Metric(
        "psstore_worker_pull_seconds_total",
        "Seconds in which values were on their way to a worker, likewise",
        RANK,
        _of_transfers("pull_s", max),
    ),
    Metric(
        "psstore_worker_read_wait_seconds_total",
        "Seconds that a worker's reads have waited for what others have yet to do, likewise",
        RANK,
        _of_transfers("waited_s", max),
    ),
    Metric(
        "psstore_commits_total",
        "Commits answered to workers that were so many rounds ahead of the slowest: 2 is 2 and 3, 4 is 4 to 7, …",
        ("ahead",),
        _of_store(_commits),
    ),
    Metric(
        "psstore_checkpoint_version", "Version of the last checkpoint of this life", (), _of_store(_last_checkpoint)
    ),
    Metric(
        "psstore_checkpoint_age_seconds",
        "Seconds since the last checkpoint, or since this life of the store began",
        (),
        _counter("checkpoint_age_s"),
    ),
    Metric("psstore_checkpoints_written_total", "Checkpoints written", (), _counter("checkpoints_written")),
    Metric("psstore_checkpoints_failed_total", "Attempts that came to nothing", (), _counter("checkpoints_failed")),
    Metric(
        "psstore_shard_up",
        "1: the shard has answered within the last 5 seconds",
        SHARD,
        lambda answers: [([str(one.shard)], float(one.is_up)) for one in answers],
    ),
    Metric(
        "psstore_shard_answer_seconds",
        "Seconds that the shard's last answer took: how busy its event loop is",
        SHARD,
        lambda answers: [([str(one.shard)], one.answer_s) for one in answers if one.counters is not None],
    ),
    Metric("psstore_shard_version", "Decisions that the shard has applied", SHARD, _field("version")),
    Metric(
        "psstore_shard_received_bytes_total",
        "Bytes of values pushed or written, as they travel, also through shared memory",
        SHARD,
        _field("received_bytes"),
    ),
    Metric("psstore_shard_sent_bytes_total", "Bytes of values pulled, likewise", SHARD, _field("sent_bytes")),
    Metric("psstore_shard_value_bytes", "Bytes of parameters", SHARD, _field("value_bytes")),
    Metric("psstore_shard_state_bytes", "Bytes of momenta and other state", SHARD, _field("state_bytes")),
    Metric("psstore_shard_rows", "Rows of tables", SHARD, _field("rows")),
    Metric("psstore_shard_rows_evicted_total", "Rows that made room for others", SHARD, _field("rows_evicted")),
    Metric(
        "psstore_shard_rows_refused_total",
        "Contributions to ids that stayed without a row",
        SHARD,
        _field("rows_refused"),
    ),
    Metric("psstore_table_rows", "Rows of one table", TABLE, _of_tables("rows")),
    Metric("psstore_table_row_bytes", "Bytes of its rows, with ids and state", TABLE, _of_tables("row_bytes")),
    Metric("psstore_table_rows_evicted_total", "Its rows that made room for others", TABLE, _of_tables("rows_evicted")),
    Metric(
        "psstore_table_rows_refused_total",
        "Contributions to its ids that stayed without a row",
        TABLE,
        _of_tables("rows_refused"),
    ),
    Metric(
        "psstore_shard_staged_bytes", "Bytes of gradients that wait for their decision", SHARD, _field("staged_bytes")
    ),
    Metric("psstore_shard_kept_bytes", "Bytes of older versions that snapshots read", SHARD, _field("kept_bytes")),
    Metric("psstore_shard_base_bytes", "Bytes of older values that workers were sent", SHARD, _field("base_bytes")),
    Metric("psstore_shard_memory_bytes", "All that the shard takes", SHARD, _field("memory_bytes")),
    Metric("psstore_shard_max_memory_bytes", "What it may take", SHARD, _field("max_memory_bytes")),
    Metric("psstore_shard_connections", "Open connections", SHARD, _field("connections")),
    Metric(
        "psstore_shard_requests_waiting",
        "Control requests whose answer is owed: commits, barriers and the like",
        SHARD,
        _field("requests_waiting"),
    ),
    Metric(
        "psstore_shard_processor_seconds_total",
        "Processor seconds of the process that leads",
        SHARD,
        _of_shard(lambda counters: float(counters["processor_s"])),
    ),
    Metric("psstore_shard_standbys", "Standbys that may lead at once", SHARD, _field("standbys")),
    Metric(
        "psstore_shard_standby_lag",
        "Changes that a standby was sent and has not answered",
        SHARD,
        _field("standby_lag"),
    ),
    Metric(
        "psstore_shard_failovers_total",
        "How many processes led the shard before, and died",
        SHARD,
        _field("led_before"),
    ),
)
