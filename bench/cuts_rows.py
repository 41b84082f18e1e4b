"""Who trains a table of rows while `cuts` has a checkpoint of it written."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import cycle

import numpy as np

import psstore
from bench.cuts_user import Step, Trainer
from bench.row_work import DIM, HYPERS, fill, gradients_of, id_sets
from psstore.types import ID_BYTES


@dataclass(frozen=True)
class RowCase:
    """A table of so many rows, with Adagrad's sums, of which a step trains so many."""

    num_rows: int
    num_ids: int

    def __str__(self) -> str:
        return f"{self.num_rows:,} rows × {DIM}, {self.num_ids:,} a step"

    @property
    def written_bytes(self) -> int:
        return self.num_rows * (ID_BYTES + 2 * 4 * DIM)


class RowTrainer(Trainer):
    """Pulls, pushes and commits rows of a zipf(1.05) distribution."""

    def __init__(self, store: psstore.Store, case: RowCase) -> None:
        super().__init__(store)
        self._case = case
        self._sets = cycle(id_sets(case.num_ids, num_rows=case.num_rows))
        self._gradients = gradients_of(case.num_ids)
        self._out = np.zeros_like(self._gradients)

    def create(self) -> None:
        fill(self.store, num_rows=self._case.num_rows)

    def step(self) -> Step:
        ids = next(self._sets)
        begin = time.perf_counter()
        self.store.pull_rows("t", ids, out=self._out)
        self.store.push_rows("t", ids, self._gradients)
        pushed = time.perf_counter()
        self.store.commit(HYPERS)
        committed = time.perf_counter()
        return Step(committed - begin, committed - pushed)
