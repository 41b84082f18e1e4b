"""What is wrong with a store, as far as its shards' answers tell, and the line that mends it. Looks at answers only:
examining.py asks for them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from psstore.client.store_status import checkpoint_of, shard_of, workers_of
from psstore.server.job_state import names_of, ranks_in
from psstore.text import counted

CLOCK_S = 2.0
"""A clock is off by more than this: logs of several hosts can't be read together."""

FULL = 0.9
"""Share of a bound from which on it is low: what the next burst needs is refused."""

STALE_ROUNDS = 100
"""Rounds between the fastest worker and the slowest of which training seldom gets any good."""

SLOW_S, SLOW_TIMES = 0.02, 5.0
"""A shard is slow that takes so long for a plain answer, and so many times as long as the others do."""

LONE_SLOW_S = 0.25
"""A shard without others to be compared with is slow then."""

LATE_INTERVALS = 3.0
"""A checkpoint is old that so many of its intervals have passed since."""

MIB = float(1 << 20)


class Finding(NamedTuple):
    """Something that is wrong."""

    kind: str
    """In one word, which is always the same for the same fault."""
    what: str
    mend: str
    """What to do: a command, if there is one."""


class ShardAnswers(NamedTuple):
    """What a shard said."""

    shard: int
    address: str
    counters: Mapping[str, int | float | str]
    """The last ones."""
    answer_s: float
    """How long it took to answer: the median of a few times."""
    clock_ahead_s: float
    """By how much its host's clock is ahead of this one's, as far as an answer's way lets it be known."""


class Here(NamedTuple):
    """Where it is asked from."""

    version: str
    """That of psstore."""
    max_files: int
    """Open files that a process may have."""


def diagnose(shards: Sequence[ShardAnswers], here: Here) -> list[Finding]:
    """Everything that is wrong. `shards`: those that answered, in their order."""
    found = [finding for one in shards for finding in (*_of_host(one, here), *_of_memory(one), *_of_standby(one))]
    first = next((one for one in shards if one.shard == 0), None)
    if first is not None:
        found += [*_of_workers(first.counters), *_of_checkpoints(first.counters)]
    return [*found, *_of_speed(shards), *_of_files_here(len(shards), here)]


def _of_host(one: ShardAnswers, here: Here) -> Iterator[Finding]:
    theirs = str(one.counters["psstore"])
    if theirs != here.version:
        yield Finding(
            "versions",
            f"shard {one.shard} runs psstore {theirs}, and here is {here.version}",
            f"pip install psstore=={theirs}, here, or the other one there: the same everywhere",
        )
    if abs(one.clock_ahead_s) > CLOCK_S + one.answer_s:
        ahead = "ahead of" if one.clock_ahead_s > 0 else "behind"
        yield Finding(
            "clock",
            f"the clock of shard {one.shard}'s host is {abs(one.clock_ahead_s):.1f} s {ahead} this one's: their logs"
            " can't be read together",
            "timedatectl set-ntp true, on both hosts",
        )
    granted, asked = int(one.counters["max_connections"]), int(one.counters["max_connections_asked"])
    connections = int(one.counters["connections"])
    if granted < asked:
        yield Finding(
            "files",
            f"shard {one.shard} takes {granted} connections, and not {asked}: its system allows no more open files",
            f"ulimit -n {asked + 1024}, before psstore-server starts there (LimitNOFILE= of a systemd unit)",
        )
    elif connections > FULL * granted:
        yield Finding(
            "connections",
            f"shard {one.shard} has {connections} of the {granted} connections that it takes",
            f"psstore-server --max-connections {2 * granted}",
        )


def _of_memory(one: ShardAnswers) -> Iterator[Finding]:
    shard = shard_of(one.counters)
    if shard.memory_bytes > FULL * shard.max_memory_bytes:
        yield Finding(
            "memory",
            f"shard {one.shard} takes {shard.memory_bytes / MIB:.0f} of the {shard.max_memory_bytes / MIB:.0f} MiB"
            " that it may: what goes beyond is refused with OutOfMemory",
            "psstore-server --max-memory, for all shards of the host, or more --shards on more hosts"
            " (psstore plan --workers N says how much a model needs, and gradients that wait)",
        )


def _of_standby(one: ShardAnswers) -> Iterator[Finding]:
    if int(one.counters["standbys_asked"]) > int(one.counters["standbys"]):
        yield Finding(
            "standby",
            f"no standby of shard {one.shard} may lead: if its process dies now, the shard is lost",
            "look for 'standby' in psstore-server's log: one is started again by itself, and needs as much memory as"
            " its shard",
        )


def _of_workers(counters: Mapping[str, int | float | str]) -> Iterator[Finding]:
    if "torn" in counters:
        yield Finding(
            "torn",
            f"there will be no other step: {counters['torn']}",
            "start the store anew from a checkpoint: psstore-server --restore URL",
        )
    if lost := ranks_in(counters, "ranks_lost"):
        them = "it" if len(lost) == 1 else "each"
        yield Finding(
            "worker",
            f"lost: {names_of(lost)}",
            f"start {them} again with its rank: RANK={min(lost)} python train.py (psstore run --restarts 3 does so by"
            " itself)",
        )
    workers = workers_of(counters)
    if not workers:
        return
    fastest, slowest = max(workers, key=lambda one: one.clock), min(workers, key=lambda one: one.clock)
    if fastest.ahead > STALE_ROUNDS:
        yield Finding(
            "staleness",
            f"rank {fastest.rank} is {fastest.ahead} rounds ahead of rank {slowest.rank}",
            f"psstore-server --mode ssp --staleness 8, or look at what slows rank {slowest.rank} (psstore top)",
        )


def _of_checkpoints(counters: Mapping[str, int | float | str]) -> Iterator[Finding]:
    last = checkpoint_of(counters)
    if last.failure:
        yield Finding(
            "checkpoint",
            f"the last checkpoint came to nothing ({last.failed} so far): {last.failure}",
            "look at its place (space, rights, network), then: psstore checkpoint save ps://HOST:PORT",
        )
    every_s = float(counters["checkpoint_every_s"])
    is_behind = int(counters["decisions"]) > (last.version or 0)
    if every_s and is_behind and not last.failure and last.age_s > LATE_INTERVALS * every_s:
        yield Finding(
            "old checkpoint",
            f"the last checkpoint is {last.age_s:.0f} s old, and there is to be one every {every_s:g} s",
            "look for 'checkpoints' in psstore-server's log; psstore checkpoint save ps://HOST:PORT writes one now",
        )


def _of_speed(shards: Sequence[ShardAnswers]) -> Iterator[Finding]:
    for one in shards:
        others = [other.answer_s for other in shards if other is not one]
        bound_s = max(SLOW_S, SLOW_TIMES * statistics.median(others)) if others else LONE_SLOW_S
        if one.answer_s > bound_s:
            beside = f", the others {1e3 * statistics.median(others):.1f} ms" if others else ""
            yield Finding(
                "slow",
                f"shard {one.shard} at {one.address} takes {1e3 * one.answer_s:.0f} ms for a plain answer{beside}",
                "top, on its host: what else wants its processors? ping it: how far is it?",
            )


def _of_files_here(num_shards: int, here: Here) -> Iterator[Finding]:
    needed = 64 + 8 * num_shards
    if here.max_files < needed:
        yield Finding(
            "files here",
            f"a process may have {here.max_files} open files here, and a worker of {counted(num_shards, 'shard')} needs"
            f" {needed}",
            "ulimit -n 4096, in the shell that starts workers",
        )
