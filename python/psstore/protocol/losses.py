"""Who of those that wait knows of which lost worker, so that each is told of a loss once. Part of the coordinator.

Whoever asks again after it was told has chosen to wait for a replacement, or for the lost one to come back: told again
at once, it would ask for ever and wait for nothing.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import NamedTuple

from psstore.protocol.membership import Worker


class Loss(NamedTuple):
    """A worker that speaks again and is lost again is another one."""

    rank: int
    incarnation: int
    last_seen: float


class Told(NamedTuple):
    request: int
    """The request that was told: sent again, after a connection was lost, it gets the same answer."""
    losses: frozenset[Loss]


class Losses:
    """`who`: waits for something, such as a rank for the end of its round."""

    def __init__(self, most: float = math.inf) -> None:
        """`most`: of so many it is known; who was told longest ago is told again if it asks again."""
        self._most = most
        self._told: OrderedDict[Hashable, Told] = OrderedDict()

    def is_news(self, who: Hashable, request: int, lost: Iterable[Worker]) -> bool:
        """True unless `who` was told of all the `lost`, and asks again by another request."""
        told = self._told.get(who)
        return told is None or told.request == request or not _losses(lost) <= told.losses

    def tell(self, who: Hashable, request: int, lost: Iterable[Worker]) -> None:
        self._told[who] = Told(request, _losses(lost))
        self._told.move_to_end(who)
        if len(self._told) > self._most:
            self._told.popitem(last=False)

    def forget(self, who: Hashable) -> None:
        """`who` has what it waited for, or waits no longer."""
        self._told.pop(who, None)


def _losses(workers: Iterable[Worker]) -> frozenset[Loss]:
    return frozenset(Loss(worker.rank, worker.incarnation, worker.last_seen) for worker in workers)
