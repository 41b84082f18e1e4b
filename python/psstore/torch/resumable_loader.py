"""A data loader that is taken up in the middle of an epoch: the same order, the same batch next, and the same random
numbers while it is made."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader

from psstore.torch.worker_state import host_random, put_back_host_random

KEPT = 4
"""Batches that may be fetched ahead of those that a loop has used, and still be taken back."""


class ResumableLoader:
    """Iterates over a loader, and knows its place in it.

    >>> batches = psstore.torch.ResumableLoader(DataLoader(data, batch_size=32, shuffle=True))
    >>> endless = itertools.chain.from_iterable(itertools.repeat(batches))
    >>> for step in psstore.torch.session(optimizer, state={"batches": batches}):
    ...     loss = loss_of(model, next(endless))

    What shuffles draws from random states, torch's own or those of the loader's and the sampler's generators, at the
    beginning of an epoch: that is remembered, and an epoch taken up begins with it again. The batches that were used
    are then left out: a plain DataLoader with a sampler only counts over their indices, of any other iterable they
    are fetched and dropped. What had been fetched and not used is fetched with the random states that it was fetched
    with, and else what comes next with those that there were.
    Not taken up: random numbers that worker processes of a DataLoader draw in an epoch begun before.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._num_given = 0
        """In this epoch; 0 between two."""
        self._at_epoch: dict[str, Any] | None = None
        """Random states as this epoch began; None between two."""
        self._before: deque[dict[str, Any]] = deque(maxlen=KEPT)
        """Random states before each of the last batches was fetched, the newest last."""
        self._is_exhausted = False
        """Whether this epoch has no other batch."""
        self._place: dict[str, Any] | None = None
        """Where the next epoch is to begin, if not at its beginning."""
        self._num_loads = 0
        """How often it was placed elsewhere, which an epoch under way follows."""

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        """Whatever else the loader has: its dataset, its sampler."""
        if name == "loader":  # before __init__, as when it is copied
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        """Draws no random number before the first batch is asked for."""
        num_loads = self._num_loads
        place, self._place = self._place, None
        iterator = self._begin() if place is None else self._take_up(place)
        ahead = [] if place is None else place["before"][1:]
        while True:
            if num_loads != self._num_loads:  # as when the store went back, and this with it
                if self._place is None:
                    return
                num_loads, place, self._place = self._num_loads, self._place, None
                iterator, ahead = self._take_up(place), place["before"][1:]
            if ahead and place is not None and self._num_given > place["given"]:
                put_back_host_random(ahead.pop(0))
            self._before.append(host_random())
            try:
                batch = next(iterator)
            except StopIteration:
                self._before.pop()
                self._is_exhausted = True
                return
            self._num_given += 1
            yield batch

    # ---- its place, for whoever saves it ----

    def state_dict(self, *, num_unused: int = 0) -> dict[str, Any]:
        """`num_unused`: of the batches that it has given, those that are to be given again."""
        if self._place is not None:
            return self._place
        now = {"given": None, "now": _loader_state(self.loader)}
        if self._at_epoch is None or num_unused > self._num_given or (self._is_exhausted and not num_unused):
            return now
        before = list(self._before)[-num_unused:] if num_unused else [host_random()]
        return {**now, "given": self._num_given - num_unused, "before": before, "epoch": self._at_epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._forget()
        self._num_loads += 1
        _put_back_loader(self.loader, state["now"])
        self._place = state if state["given"] is not None else None

    def begin_anew(self) -> None:
        """The next epoch is a new one, and not the rest of that whose place was loaded."""
        self._place = None

    # ---- how ----

    def _forget(self) -> None:
        self._num_given, self._at_epoch, self._place, self._is_exhausted = 0, None, None, False
        self._before.clear()

    def _begin(self) -> Iterator[Any]:
        self._forget()
        self._at_epoch = {"random": host_random(), "loader": _loader_state(self.loader)}
        return iter(self.loader)

    def _take_up(self, place: dict[str, Any]) -> Iterator[Any]:
        self._forget()
        self._num_given, self._at_epoch = place["given"], place["epoch"]
        put_back_host_random(place["epoch"]["random"])
        _put_back_loader(self.loader, place["epoch"]["loader"])
        return _behind(self.loader, place["given"], place["before"][0])


def _behind(loader: Iterable[Any], count: int, random: dict[str, Any]) -> Iterator[Any]:
    """Over a loader's batches but the first so many, with these random states once those are left out."""
    if count and type(loader) is DataLoader and loader.batch_sampler is not None and not _is_stream(loader):
        return iter(_with_batch_sampler(loader, _Rest(loader.batch_sampler, count, random)))
    iterator = iter(loader)
    if count:
        next(islice(iterator, count - 1, None), None)
        put_back_host_random(random)
    return iterator


class _Rest:
    """What a sampler of batches has after the first so many. The order is drawn when the first index is asked for, as
    it is without this, and the random states are put back right after it."""

    def __init__(self, batches: Iterable[list[Any]], count: int, random: dict[str, Any]) -> None:
        self._batches = batches
        self._count = count
        self._random = random

    def __iter__(self) -> Iterator[list[Any]]:
        iterator = iter(self._batches)
        next(islice(iterator, self._count - 1, None), None)
        put_back_host_random(self._random)
        yield from iterator


def _is_stream(loader: DataLoader[Any]) -> bool:
    return isinstance(loader.dataset, torch.utils.data.IterableDataset)


ALIKE = (
    "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator",
    "prefetch_factor", "pin_memory_device", "in_order",
)  # fmt: skip
"""What a DataLoader with another sampler of batches has in common with the first, by the names of its arguments."""


def _with_batch_sampler(loader: DataLoader[Any], batches: Iterable[list[Any]]) -> DataLoader[Any]:
    alike = {name: getattr(loader, name) for name in ALIKE if hasattr(loader, name)}
    return DataLoader(loader.dataset, batch_sampler=batches, **alike)


def _loader_state(loader: Any) -> dict[str, Any]:
    """States of its generators; and its own count of epochs, where it has one, as Accelerate's have."""
    states = {name: generator.get_state() for name, generator in _generators(loader).items()}
    return {"generators": states, "iteration": getattr(loader, "iteration", None)}


def _put_back_loader(loader: Any, state: dict[str, Any]) -> None:
    generators = _generators(loader)
    for name in state["generators"].keys() & generators.keys():
        generators[name].set_state(state["generators"][name])
    if state["iteration"] is not None and hasattr(loader, "iteration"):
        loader.iteration = state["iteration"]


def _generators(loader: Any) -> dict[str, torch.Generator]:
    holders = {
        "loader": loader,
        "sampler": getattr(loader, "sampler", None),
        "batches": getattr(getattr(loader, "batch_sampler", None), "sampler", None),
    }
    found = {name: getattr(holder, "generator", None) for name, holder in holders.items()}
    return {name: one for name, one in found.items() if isinstance(one, torch.Generator)}
