"""Batches for workers that come and go: an epoch has each sample once, whoever took part in it."""

from __future__ import annotations

from collections.abc import Iterator, Sized

import numpy as np
import numpy.typing as npt
import torch

from psstore.client import arguments
from psstore.client.arguments import whole
from psstore.errors import BadArgument, NotAWorker, UsageError
from psstore.protocol.decisions import MIN_WEIGHT
from psstore.protocol.shares import Shares
from psstore.torch.optimizer import DistributedOptimizer


class ElasticSampler(torch.utils.data.Sampler[list[int]]):
    """Gives a DataLoader this worker's batch of each step, of a store that was started with `--workers FEWEST:MOST`.

    >>> sampler = psstore.torch.ElasticSampler(dataset, optimizer, batch_size=32)
    >>> loader = torch.utils.data.DataLoader(dataset, batch_sampler=sampler)
    >>> while sampler.epoch < 10:  # a worker that comes later begins in the middle
    ...     for inputs, targets in loader:
    ...         optimizer.zero_grad()
    ...         loss_of(model(inputs), targets).backward()
    ...         optimizer.step()

    A pass over the loader ends with the epoch, on all workers after the same step. Which samples are whose follows from
    the version of the store and its log of members alone: the same log gives the same order, and a worker that
    comes, or a store that was restored, needs nothing else. What was given to a worker that was lost in its step is
    given again. So each batch is one step of the optimizer, the only one on its store, and is asked for after the step
    before: by a loader without worker processes, which would fetch ahead.

    Where samples can't be shared out evenly, at an epoch's end or with `target_batch`, `optimizer.weight` says so, and
    each sample counts alike. A worker that an epoch's last step has nothing for is given a sample that hardly counts; a
    step of which nobody is left who was given another one is skipped.
    """

    def __init__(
        self,
        dataset: Sized | int,
        optimizer: DistributedOptimizer,
        *,
        batch_size: int | None = None,
        target_batch: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        version: int = 0,
    ) -> None:
        """`dataset`: its size counts. `batch_size`: samples of each worker in a step; `target_batch`: of all of them
        together, instead, however many they are. `seed`: of the order, alike on every worker. `version`: the store's
        before the first epoch. Raises BadArgument, UsageError, NotAWorker."""
        if not isinstance(optimizer, DistributedOptimizer):
            raise UsageError(f"a {type(optimizer).__qualname__} is no psstore.torch.DistributedOptimizer")
        store = optimizer.store
        if store.rank is None:
            raise NotAWorker("this store is not a worker's: connect without role=")
        if store.consistency.mode != "sync" or optimizer.overlap == "eager":
            raise UsageError(
                "ElasticSampler gives out a step's samples when the step before is decided, by all workers: it needs"
                " mode 'sync', and no overlap='eager'"
            )
        self._num_samples = len(dataset) if isinstance(dataset, Sized) else whole("dataset", dataset)
        self._optimizer = optimizer
        self._shuffle = shuffle
        self._seed = whole("seed", seed)
        if self._seed < 0:
            raise BadArgument(f"seed is {seed}; expected an integer from 0 on")
        self._asked = (
            None if batch_size is None else whole("batch_size", batch_size),
            None if target_batch is None else whole("target_batch", target_batch),
            arguments.version("version", version),
        )
        self._shares = self._begin()
        self._given_at = -1
        """The version at which the last batch was given."""
        self._life = optimizer.num_reattached
        """The store's life in which that was."""

    @property
    def epoch(self) -> int:
        """The one that the next step belongs to, from 0 on."""
        return self._now().epoch

    def __iter__(self) -> Iterator[list[int]]:
        epoch = self.epoch
        order = self._order(epoch)
        while self._now().epoch == epoch:
            yield self._batch(order)

    # ---- how ----

    def _begin(self) -> Shares:
        batch_size, target_batch, version = self._asked
        store = self._optimizer.store
        members = () if store.member_log else store.members  # else the log says it, from the first one on
        return Shares(self._num_samples, members, batch_size=batch_size, target_batch=target_batch, version=version)

    def _now(self) -> Shares:
        """Where the store is. It may have gone back, also to where it was, and the step under way is taken again."""
        store, life = self._optimizer.store, self._optimizer.num_reattached
        if life != self._life or self._shares.version > store.version:
            self._shares, self._given_at, self._life = self._begin(), -1, life
        self._shares.advance(store.version, store.member_log)
        return self._shares

    def _batch(self, order: npt.NDArray[np.int64]) -> list[int]:
        shares, store = self._shares, self._optimizer.store
        if store.version == self._given_at:
            raise UsageError(
                f"a second batch was asked for at version {store.version}: each is one step. Use a DataLoader with"
                " num_workers=0, which fetches nothing ahead, and a larger batch_size for several backward passes"
            )
        self._given_at = store.version
        assert store.rank is not None, "it was looked at"
        share = shares.of(store.rank)
        self._optimizer.weight = max(MIN_WEIGHT, len(share) * len(shares.members) / shares.round_size)
        return [int(order[place]) for place in share] or [int(order[0])]

    def _order(self, epoch: int) -> npt.NDArray[np.int64]:
        if not self._shuffle:
            return np.arange(self._num_samples)
        return np.random.default_rng((self._seed, epoch)).permutation(self._num_samples)
