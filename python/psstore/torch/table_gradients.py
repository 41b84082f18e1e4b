"""TableGradients: what backward has left of an optimizer's tables, on its way to the store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from psstore.client.compression.rows import KeptBack
from psstore.client.store import Store
from psstore.errors import UsageError
from psstore.torch.table_module import TableModule


class TableGradients:
    """The tables that one optimizer trains beside its parameters."""

    def __init__(self, tables: Iterable[TableModule], store: Store) -> None:
        """Raises UsageError for what is no table of that store, or is given twice."""
        self.tables = list(tables)
        names = set()
        for one in self.tables:
            if not isinstance(one, TableModule):
                raise UsageError(
                    f"tables= takes psstore.torch.Embedding and EmbeddingBag modules, not {type(one).__name__}"
                )
            if one.store is not store:
                raise UsageError(f"table {one.table!r} is on another store than the optimizer")
            if one.table in names:
                raise UsageError(f"table {one.table!r} is given twice; share one module between the places that use it")
            names.add(one.table)
        self._store = store
        self._threads = ThreadPoolExecutor(max(1, len(self.tables)), "psstore-prefetch")
        """Which begin when there is something to prefetch."""
        for one in self.tables:
            one.attach(self._threads.submit)
        self._num_sent = [0] * len(self.tables)
        """How many of each table's gradients the round that was committed last has."""

    def push(self, *, loss_scale: float) -> list[str]:
        """Sends what backward passes have left, each table's as one contribution, and returns the tables that have
        any. Those of one row are added in the order of the lookups, as torch has the parts of a sparse gradient.
        `loss_scale`: of the gradients, for codecs."""
        self._await_kept()
        pushed = []
        for index, one in enumerate(self.tables):
            self._num_sent[index] = len(one.left)
            if one.left:
                in_order = sorted(one.left, key=lambda left: left.lookup)
                ids = torch.cat([left.ids for left in in_order])
                gradients = torch.cat([left.gradients for left in in_order])
                codec = one.compression.push
                self._store.push_rows(one.table, ids, gradients, codec=codec, loss_scale=loss_scale)
                pushed.append(one.table)
        return pushed

    def withhold(self) -> None:
        """Sends nothing: all workers skip the round."""
        self._await_kept()
        self._num_sent = [len(one.left) for one in self.tables]

    def _await_kept(self) -> None:
        """Nobody else may read between a commit and the norm of its round, which whoever reads would ask for."""
        for one in self.tables:
            one.await_kept()

    def begin_prefetch(self) -> None:
        """Pulls the rows of the lookups that were announced, in other threads: the step before them is decided."""
        for one in self.tables:
            one.begin_prefetch()

    @property
    def are_finite(self) -> bool:
        """False if a gradient holds NaN or infinity."""
        return all(bool(torch.isfinite(left.gradients).all()) for one in self.tables for left in one.left)

    def hypers(self) -> dict[int, dict[str, float]]:
        """Hyper-parameters of each table's group, as they are now. Raises UsageError if one is missing."""
        return {one.group: one.current_hypers() for one in self.tables}

    def join_groups(self, optimizer: torch.optim.Optimizer) -> None:
        """Gives each table a parameter group of the optimizer, without parameters, for schedulers and state dicts: its
        hyper-parameters are what stands there."""
        known = {group["table"] for group in optimizer.param_groups if "table" in group}
        names: dict[str, Any] = (
            {"param_names": []} if any("param_names" in group for group in optimizer.param_groups) else {}
        )
        for one in self.tables:
            if one.table not in known:
                optimizer.add_param_group({"params": [], "table": one.table, **names, **one.hypers})
        if self.tables:  # an optimizer around another one may have no hooks
            self._follow_groups(optimizer)
            optimizer.register_load_state_dict_post_hook(self._follow_groups)

    def _follow_groups(self, optimizer: torch.optim.Optimizer) -> None:
        """The groups are other dictionaries after a state dict was loaded."""
        groups = {group["table"]: group for group in optimizer.param_groups if "table" in group}
        for one in self.tables:
            if one.table not in groups:
                raise UsageError(
                    f"the state dict has no parameter group of table {one.table!r}: it is of another training"
                )
            one.hypers = groups[one.table]

    def residuals(self) -> dict[str, dict[str, torch.Tensor]]:
        """What this worker's codecs have kept back of rows so far, by table: ids, residuals, ages, as
        `Store.row_residuals` gives them, with signed numbers, which all of torch can handle."""
        held = {one.table: self._store.row_residuals(one.table) for one in self.tables if one.pushes_in_a_codec}
        return {
            table: {
                "ids": torch.from_numpy(kept.ids.view(np.int64)),
                "residuals": torch.from_numpy(kept.residuals),
                "ages": torch.from_numpy(kept.ages.view(np.int32)),
            }
            for table, kept in held.items()
            if kept is not None
        }

    def set_residuals(self, residuals: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Replaces what codecs have kept back of rows; nothing is kept back of tables that are not named."""
        for one in self.tables:
            if not one.pushes_in_a_codec:
                continue
            held = {name: value.cpu().numpy() for name, value in residuals.get(one.table, {}).items()}
            kept = None
            if held:
                kept = KeptBack(held["ids"].view(np.uint64), held["residuals"], held["ages"].view(np.uint32))
            self._store.set_row_residuals(one.table, kept)

    def forget(self) -> None:
        """Drops what was sent: its round is over."""
        for index, one in enumerate(self.tables):
            del one.left[: self._num_sent[index]]
            self._num_sent[index] = 0

    def zero(self) -> None:
        """Drops what there is, as zero_grad() does."""
        for one in self.tables:
            one.left.clear()
