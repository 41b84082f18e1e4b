"""TableGradients: what backward has left of an optimizer's tables, on its way to the store.

A hook on each table's anchor is called when a backward pass is done with all lookups of the table, and pushes what they
have left while the pass is still at the layers before them, as gradients.py does for parameters. What counts is what
`complete()` finds: where more has been left since the push, all of it is pushed again, which replaces the first.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from psstore.client.compression.rows import KeptBack
from psstore.client.store import Store
from psstore.errors import StoreClosed, UsageError
from psstore.torch.change_detection import GradientSnapshot
from psstore.torch.early_pushes import EarlyPushes, hook, pushes_during_backward, remove
from psstore.torch.table_module import Bearing, RowGradients, TableModule


class _Sent(NamedTuple):
    """A push of a table that was begun while backward ran."""

    round: int
    loss_scale: float
    snapshots: Sequence[GradientSnapshot]
    """Each lookup's gradients, in the order in which they were left."""
    done: Future[None]

    def begins(self, left: Sequence[RowGradients]) -> bool:
        """Whether what is left now was begun by what was sent, and not anew."""
        return bool(left) and self.snapshots[0].gradient is left[0].gradients

    def has_all(self, left: Sequence[RowGradients]) -> bool:
        """Whether it is what is left now."""
        return _are_unchanged(self.snapshots, left)

    @property
    def has_failed(self) -> bool:
        return self.done.cancelled() or self.done.exception() is not None


class TableGradients(EarlyPushes):
    """The tables that one optimizer trains beside its parameters."""

    def __init__(self, tables: Iterable[TableModule], store: Store, *, bearing: Bearing = nullcontext) -> None:
        """`bearing`: what rows are looked up within. Raises UsageError for what is no table of that store, or is given
        twice."""
        super().__init__()
        if not isinstance(tables, Iterable):
            raise UsageError(f"tables= takes several modules, as in a list, not a {type(tables).__name__}")
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
            one.attach(self._threads.submit, bearing)
        self._num_sent = [0] * len(self.tables)
        """How many of each table's gradients the round that was committed last has."""
        self._completed: list[list[GradientSnapshot]] = [[] for _ in self.tables]
        """Each table's gradients as the last `complete` or `withhold` saw them."""
        self._hooks: dict[str, list[RemovableHandle]] = {one.table: [] for one in self.tables}
        """By table: one for each that is pushed while backward runs."""
        weakref.finalize(self, remove, *self._hooks.values())
        self._lock = threading.Lock()
        """Orders the hooks; guards what was sent."""
        self._sent: dict[str, _Sent] = {}
        """Each table's last push that was begun by a hook."""

    def watch(self, *, overlap: str) -> None:
        """Pushes while backward runs from now on, where dense gradients in main memory are: see `Gradients`."""
        self.retire()
        self._sent.clear()
        if pushes_during_backward(overlap, self._store, from_memory=True):
            for one in self.tables:
                self._hooks[one.table].append(hook(weakref.WeakMethod(self._on_left), one.table, one.anchor))

    def retire(self) -> None:
        """Stops pushing while backward runs."""
        remove(*self._hooks.values())

    def complete(self, *, loss_scale: float) -> list[str]:
        """Pushes what backward passes have left and the store does not have yet, each table's as one contribution, and
        blocks until it has all of it. Returns the tables that have any. `loss_scale`: of the gradients, for codecs."""
        self._await_kept()
        self._await_sent()
        self._loss_scale = loss_scale
        self._completed = [_snapshots(one.left, round=self._store.round) for one in self.tables]
        present = []
        for index, one in enumerate(self.tables):
            self._num_sent[index] = len(one.left)
            if one.left:
                if not self._has(one):
                    self._push(one)
                present.append(one.table)
        return present

    def unchanged(self) -> bool:
        """Whether what is left is what the last `complete` or `withhold` has seen."""
        return all(_are_unchanged(seen, one.left) for one, seen in zip(self.tables, self._completed, strict=True))

    def withhold(self) -> None:
        """Has nothing count of what there is: all workers skip the round."""
        self._await_kept()
        self._await_sent()
        self._completed = [_snapshots(one.left, round=self._store.round) for one in self.tables]
        self._num_sent = [len(one.left) for one in self.tables]

    def _on_left(self, table: str, anchor: torch.Tensor) -> None:
        """Called by the hooks, when a backward pass has left what it leaves of a table. Does not raise a transport
        error in backward: `complete` pushes again, and raises it."""
        index, one = next((index, one) for index, one in enumerate(self.tables) if one.table == table)
        round = self._store.round
        with self._lock:
            left, sent = one.left[self._num_sent[index] :], self._sent.get(table)
            if self._no_sync_depth or not left or not all(each.gradients.is_cpu for each in left):
                return  # to copy from a device, backward would wait for what it has queued there
            if sent is not None and (not sent.done.done() or (sent.round == round and sent.begins(left))):
                return  # gradients accumulate: to send them each time would be in vain
            with suppress(StoreClosed):
                snapshots = _snapshots(left, round=round)
                self._sent[table] = _Sent(round, self._loss_scale, snapshots, self._start_push(one, left))

    def _push(self, one: TableModule) -> None:
        """Pushes all that is left of a table, and notes so: a step that is taken again does not push it again."""
        snapshots = _snapshots(one.left, round=self._store.round)
        done = self._start_push(one, one.left)
        with self._lock:
            self._sent[one.table] = _Sent(self._store.round, self._loss_scale, snapshots, done)
        done.result()

    def _start_push(self, one: TableModule, left: Sequence[RowGradients]) -> Future[None]:
        """Gradients of one row are added in the order of the lookups, as torch has the parts of a sparse gradient."""
        in_order = sorted(left, key=lambda each: each.lookup)
        ids = torch.cat([each.ids for each in in_order])
        gradients = torch.cat([each.gradients for each in in_order])
        return self._store.start_push_rows(
            one.table, ids, gradients, codec=one.compression.push, loss_scale=self._loss_scale
        )

    def _has(self, one: TableModule) -> bool:
        """Whether the store has what is left of a table. Stops pushing it early where that was in vain."""
        with self._lock:
            sent = self._sent.get(one.table)
        if sent is None or sent.round != self._store.round or not sent.begins(one.left):
            return False
        if not sent.has_all(one.left):
            remove(self._hooks[one.table])
            return False
        return not sent.has_failed and (sent.loss_scale == self._loss_scale or not one.pushes_in_a_codec)

    def _await_sent(self) -> None:
        """Blocks until pushes that hooks have begun are over, however they end."""
        wait([sent.done for sent in self._sent.values()])

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
        with self._lock:  # some may be of the next round already, where this one's end had failed before
            self._sent = {table: sent for table, sent in self._sent.items() if sent.round == self._store.round}

    def zero(self) -> None:
        """Drops what there is, as zero_grad() does."""
        for index, one in enumerate(self.tables):
            one.left.clear()
            self._num_sent[index] = 0


def _snapshots(left: Sequence[RowGradients], *, round: int) -> list[GradientSnapshot]:
    return [GradientSnapshot.of(one.gradients, round=round) for one in left]


def _are_unchanged(snapshots: Sequence[GradientSnapshot], left: Sequence[RowGradients]) -> bool:
    """Whether these are of what is left now."""
    return len(snapshots) == len(left) and all(
        seen.is_unchanged(one.gradients) for seen, one in zip(snapshots, left, strict=True)
    )
