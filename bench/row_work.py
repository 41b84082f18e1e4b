"""What contestants of `rows` do: steps on sets of ids, each of which pulls the rows and trains them by Adagrad."""

from __future__ import annotations

from typing import Any

import numpy as np

from psstore.client.store import Store

DIM = 64
NUM_ROWS = 1_000_000
RATE, EPS = 0.01, 1e-8
HYPERS = {"lr": RATE, "eps": EPS}

FILLED_TOGETHER = 65_536
"""Rows that a step makes of a table that is filled."""

NUM_SETS = 16
"""Sets of ids that steps take in turn, so that the rows of one are not in the cache."""

Floats = np.ndarray[Any, np.dtype[np.float32]]
Ids = np.ndarray[Any, np.dtype[np.uint64]]


def id_sets(num_ids: int, *, num_rows: int, num_sets: int = NUM_SETS) -> list[Ids]:
    """Ids as a batch has them that has so many different ones: the frequent ones in each of them, in any order."""
    generator = np.random.default_rng(1)
    weights = np.arange(1, num_rows + 1) ** -1.05
    bounds = np.cumsum(weights / weights.sum())
    names = generator.permutation(num_rows)
    sets = []
    for _ in range(num_sets):
        ids = np.empty(0, np.int64)
        while len(ids) < num_ids:
            drawn = np.searchsorted(bounds, generator.random(4 * num_ids)).clip(max=num_rows - 1)
            ids = np.unique(np.concatenate([ids, drawn]))
        sets.append(generator.permutation(names[ids])[:num_ids].astype(np.uint64))
    return sets


def gradients_of(num_ids: int) -> Floats:
    return np.random.default_rng(2).standard_normal((num_ids, DIM), dtype=np.float32)


def fill(store: Store, *, num_rows: int, rule: str = "adagrad", dtype: str = "float32") -> None:
    """Has the store have a table "t" with so many rows."""
    store.create_table("t", dim=DIM, rule=rule, dtype=dtype)
    hypers = hypers_of(rule)
    some = np.full((FILLED_TOGETHER, DIM), 1e-3, np.float32)
    for first in range(0, num_rows, len(some)):
        ids = np.arange(first, min(first + len(some), num_rows))
        store.push_rows("t", ids, some[: len(ids)])
        store.commit(hypers)


def hypers_of(rule: str) -> dict[str, float]:
    return {"lr": RATE} if rule == "sgd" else HYPERS
