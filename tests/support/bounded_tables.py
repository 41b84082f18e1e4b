"""Tables with every kind of bound, trained at random beside their models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from psstore.client.store import Store
from psstore.client.store_status import TableStatus, tables_of
from psstore.errors import TableFull
from tests.support.row_model import TableModel

DIM = 2
MOST_ID = 6000
F32 = np.float32

BOUNDS: dict[str, dict[str, Any]] = {
    "lru": {"max_rows": 64 * 8, "evict": "lru"},
    "lfu": {"max_rows": 64 * 8 + 63, "evict": "lfu"},
    "ttl": {"evict": "ttl:17"},
    "ttl-bounded": {"max_rows": 64 * 5, "evict": "ttl:40"},
    "full": {"max_rows": 64 * 12},
    "after": {"max_rows": 64 * 8, "evict": "lru", "admit": "after:3"},
    "lot": {"max_rows": 64 * 20, "admit": "probability:0.25"},
    "tiny": {"max_rows": 64, "evict": "lru"},
    "wide": {"max_rows": 64 * 33, "evict": "lru"},
}
"""Name of a table -> its bounds. 64 partitions have a few rows each, so that all of it happens within some steps; in
the widest one several rows go at once."""


class BoundedTables:
    """Those tables of one store, trained by one worker or several that commit together."""

    def __init__(self, store: Store) -> None:
        """Creates them."""
        self.models: dict[str, TableModel] = {}
        for group, (name, bounds) in enumerate(BOUNDS.items()):
            store.create_table(name, dim=DIM, rule="sgd", init="constant(1)", seed=3, group=group, **bounds)
            rows = store.describe(name).spec.rows
            assert rows is not None
            self.models[name] = TableModel(rows)
        self._draw = np.random.default_rng(5)
        self.num_full = 0

    def push(self, workers: Sequence[Store]) -> dict[str, list[dict[int, Any]]]:
        """Pushes to all tables, of each worker; what is new to a full one is refused."""
        given: dict[str, list[dict[int, Any]]] = {name: [] for name in self.models}
        for name, model in self.models.items():
            for worker in workers:
                push = self._rows()
                if model.takes(push):
                    worker.push_rows(name, list(push), np.array(list(push.values()), F32))
                    given[name].append(push)
                else:
                    self.num_full += 1
                    with pytest.raises(TableFull, match=f"{name!r} is full: it may have {model.spec.max_rows} rows"):
                        worker.push_rows(name, list(push), np.array(list(push.values()), F32))
        return given

    def decided(self, given: dict[str, list[dict[int, Any]]], *, num_members: int = 1) -> None:
        """Takes the step that a commit of what was pushed has decided."""
        for name, model in self.models.items():
            if given[name]:
                model.step(given[name], divisor=num_members)
            else:
                model.skip()

    def step(self, store: Store) -> None:
        given = self.push([store])
        store.commit({"lr": 1.0})
        self.decided(given)

    def assign(self, store: Store) -> None:
        for name, model in self.models.items():
            rows = dict(list(self._rows().items())[::5])
            ids, values = list(rows), np.array(list(rows.values()), F32)
            if model.assign(rows):
                store.assign_rows(name, ids, values)
            else:
                with pytest.raises(TableFull):
                    store.assign_rows(name, ids, values)

    def train(self, store: Store, num_steps: int) -> None:
        for number in range(num_steps):
            self.step(store)
            if number % 7 == 3:
                self.assign(store)
            if number % 11 == 5:
                store.push_rows("lru", [1], np.ones((1, DIM), F32))
                store.commit({"lr": 1.0}, non_finite=True)  # a skip
                for model in self.models.values():
                    model.skip()

    def check(self, store: Store) -> None:
        """The store has the rows of the models, and no others."""
        for name, model in self.models.items():
            assert_array_equal(store.keys(name), np.array(model.keys(), np.uint64), err_msg=name)
            ids = range(MOST_ID)
            assert_array_equal(store.pull_rows(name, ids), model.pull(ids), err_msg=name)

    def check_counts(self, store: Store) -> None:
        """Those of each table, and of all of them."""
        stats = store.stats()
        expected = [self._status(name) for name in sorted(self.models)]
        assert list(tables_of(stats)) == expected
        for counter in ("rows", "row_bytes", "rows_evicted", "rows_refused"):
            of_all = sum(int(one[counter]) for one in stats)
            assert of_all == sum(getattr(table, counter) for table in expected), counter

    def _status(self, name: str) -> TableStatus:
        model = self.models[name]
        records = [model.record(number, row) for one in model.partitions for number, row in one.rows.items()]
        return TableStatus(
            name=name,
            rows=len(records),
            row_bytes=sum(map(len, records)),
            rows_evicted=model.evicted,
            rows_refused=model.refused,
        )

    def _rows(self) -> dict[int, Any]:
        """Few ids come often, and many seldom."""
        ids = np.unique((MOST_ID * self._draw.random(150) ** 2).astype(int))
        values = 2 * self._draw.integers(-8, 8, (len(ids), DIM)).astype(F32)
        return dict(zip(ids.tolist(), values, strict=True))
