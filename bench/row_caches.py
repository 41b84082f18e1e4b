"""Rows that a client keeps: what travels of the next batch, and how long that takes, with a cache and without.

Batches are of 4,096 ids, each once, of a zipf(1.05) distribution, and none comes twice; over TCP. Three who pull them:
a reader of a store that nobody trains, one of a store in which a worker trains a batch of its own between two pulls,
and a worker that trains its batch and then pulls the next one, which it has pulled before the step, too, if it has a
cache: what is measured is what comes after the step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import cycle, pairwise

from bench.harness import Series, Took, Turn, alternate, timed
from bench.report import Cell
from bench.row_work import NUM_ROWS, Ids, gradients_of, id_sets
from psstore.client.store import Store

CACHES_MIB = (0, 16, 64)
"""Of which a row of 64 takes 292 bytes; 0: none."""

NUM_IDS = 4096

Before = Callable[[Ids, Ids], None]

HEADERS = (
    "who pulls",
    "cache, MiB",
    "bytes a row",
    "of those without",
    "client's CPU time, × without",
    "time, × without",
)


@dataclass(frozen=True)
class Cached:
    """What the pulls of somebody took with each cache, and the bytes of a row."""

    who: str
    series: dict[str, Series]
    row_bytes: dict[str, float]


class _Puller:
    """Pulls batch after batch, each once."""

    def __init__(self, store: Store, sets: Sequence[Ids], before: Before) -> None:
        """`before`: done with this batch and the next one, before that is pulled."""
        self.num_bytes = self.num_rows = 0
        self._store = store
        self._sets = pairwise(sets)
        self._before = before

    def __call__(self) -> Took:
        ids, following = next(self._sets)
        self._before(ids, following)
        sent = _sent_bytes(self._store)
        took = timed(lambda: self._store.pull_rows("t", following))
        self.num_bytes += _sent_bytes(self._store) - sent
        self.num_rows += len(following)
        return took

    def forget(self) -> None:
        self.num_bytes = self.num_rows = 0


def _sent_bytes(store: Store) -> int:
    return sum(int(one["sent_bytes"]) for one in store.stats())


def cached(
    begin: Callable[[], AbstractContextManager[tuple[Store, Store]]], hypers: Mapping[str, float], *, rounds: int
) -> list[Cached]:
    """`begin`: a worker of a store with the table, and a reader of it."""
    sets = id_sets(NUM_IDS, num_rows=NUM_ROWS, num_sets=2 * rounds + 1)
    found = []
    for who, before_of in PULLERS.items():
        with contextlib.ExitStack() as ends:
            pullers = {}
            for mib in CACHES_MIB:
                worker, reader = ends.enter_context(begin())
                puller = worker if who == WORKER else reader
                puller.cache_rows("t", mib << 20)
                pullers[str(mib)] = _Puller(puller, sets, before_of(_Trainer(worker, sets, hypers), mib > 0))
            found.append(_measured(who, pullers, rounds))
    return found


def _measured(who: str, pullers: Mapping[str, _Puller], rounds: int) -> Cached:
    """As many pulls fill the caches before."""
    turns: dict[str, Turn] = dict(pullers)
    alternate(turns, warm_up=rounds - 1, rounds=1, progress=f"{who}: caches are filled")
    for puller in pullers.values():
        puller.forget()
    series = alternate(turns, warm_up=0, rounds=rounds, progress=who)
    return Cached(who, series, {name: one.num_bytes / one.num_rows for name, one in pullers.items()})


class _Trainer:
    """The worker of a store."""

    def __init__(self, store: Store, sets: Sequence[Ids], hypers: Mapping[str, float]) -> None:
        self.store = store
        self.others = cycle(reversed(sets))
        """Batches of its own."""
        self._gradients = gradients_of(NUM_IDS)
        self._hypers = hypers

    def train(self, ids: Ids) -> None:
        self.store.push_rows("t", ids, self._gradients)
        self.store.commit(self._hypers)


def _nothing(trainer: _Trainer, has_cache: bool) -> Before:
    return lambda ids, following: None


def _training(trainer: _Trainer, has_cache: bool) -> Before:
    return lambda ids, following: trainer.train(next(trainer.others))


def _own_training(trainer: _Trainer, has_cache: bool) -> Before:
    def before(ids: Ids, following: Ids) -> None:
        if has_cache:
            trainer.store.pull_rows("t", following)
        trainer.train(ids)

    return before


WORKER = "worker, the next batch"

PULLERS: Mapping[str, Callable[[_Trainer, bool], Before]] = {
    "reader, nobody trains": _nothing,
    "reader, a worker trains": _training,
    WORKER: _own_training,
}
"""Who pulls -> what is done before each pull, with a cache and without."""


def rows_of(found: Cached) -> list[list[Cell]]:
    plain_bytes, plain = found.row_bytes["0"], found.series["0"]
    rows: list[list[Cell]] = []
    for name, one in found.series.items():
        num_bytes = found.row_bytes[name]
        ratios = [num_bytes / plain_bytes, one.cpu_s / plain.cpu_s, one.median / plain.median]
        rows.append([found.who, name, f"{num_bytes:.0f}", *ratios])
    return rows
