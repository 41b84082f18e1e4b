"""Which samples each worker takes in which round, where workers come and go.

A round takes the next samples of its epoch and shares them out by rank, in equal parts or nearly so. What was given to
a worker that is absent from the round's decision is taken again, before all others. So an epoch has each sample once,
and all of it follows from the store's log of members: every worker finds the same, whenever it came.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from operator import attrgetter

from psstore.errors import BadArgument
from psstore.wire.messages import Members, members_after


class Shares:
    """How far it is, at one version of the store: `advance` brings it to a later one."""

    def __init__(
        self,
        num_samples: int,
        members: Sequence[int],
        *,
        batch_size: int | None = None,
        target_batch: int | None = None,
        version: int = 0,
    ) -> None:
        """`members`: ranks that take part where there is no log. `batch_size`: samples of each worker in a
        round; `target_batch`: of all together, instead. `version`: the one after which the first epoch begins."""
        if num_samples < 1 or (batch_size is None) == (target_batch is None) or (batch_size or target_batch or 0) < 1:
            raise BadArgument(
                f"{num_samples} samples, batch_size {batch_size}, target_batch {target_batch}: expected at least one"
                " sample, and either of the two to be at least 1"
            )
        self.num_samples = num_samples
        self.members = tuple(members)
        self.version = version
        self.epoch = 0
        self._batch_size = batch_size
        self._target_batch = target_batch
        self._again: list[int] = []
        """Samples of this epoch that were given to somebody who was absent, by their place in it."""
        self._next = 0
        """The first sample of this epoch that nobody was given."""
        self._num_known = 0
        """Entries of the log that count already."""

    @property
    def round_size(self) -> int:
        """Samples of all workers in a round that is not an epoch's last."""
        return self._target_batch or (self._batch_size or 0) * len(self.members)

    def of(self, rank: int) -> list[int]:
        """What that member takes in the round after `version`: places in the epoch's order. Fewer than usual, or none,
        at the end of an epoch."""
        return self._part(self.members.index(rank))

    def advance(self, version: int, log: Sequence[Members]) -> None:
        """Goes on to a version, with the store's log up to there."""
        while True:
            here = self._news(log, self.version)
            if here:
                self.members = members_after(self.members, here)  # their absent ones counted with their round
                self._num_known += len(here)
            if self.version >= version:
                return
            changes_at = log[self._num_known].version if self._num_known < len(log) else version + 1
            if not self._skip(min(version, changes_at - 1) - self.version):
                self._take({rank for one in self._news(log, self.version + 1) for rank in one.absent})

    # ---- how ----

    def _news(self, log: Sequence[Members], version: int) -> Sequence[Members]:
        """What the log has up to that version, and does not count yet."""
        return log[self._num_known : bisect_right(log, version, lo=self._num_known, key=attrgetter("version"))]

    def _skip(self, num_rounds: int) -> bool:
        """Takes so many rounds at once, or as many as are alike. False: none is."""
        num_alike = 0 if self._again else min(num_rounds, (self.num_samples - self._next) // self.round_size)
        self._next += num_alike * self.round_size
        self.version += num_alike
        self._end_epoch()
        return num_alike > 0

    def _take(self, absent: set[int]) -> None:
        """One round, in which these ranks were absent."""
        given = self._num_given
        num_again = min(given, len(self._again))
        missed = [one for rank in sorted(absent) for one in self.of(rank)]
        self._again = missed + self._again[num_again:]
        self._next += given - num_again
        self.version += 1
        self._end_epoch()

    @property
    def _num_given(self) -> int:
        """Samples of the next round."""
        return min(self.round_size, len(self._again) + self.num_samples - self._next)

    def _part(self, index: int) -> list[int]:
        """What the member of that index takes in the next round: of those that are taken again, then of the others."""
        usual, num_larger = divmod(self._num_given, len(self.members))
        begin = index * usual + min(index, num_larger)
        end = begin + usual + (index < num_larger)
        first, last = (self._next + max(0, place - len(self._again)) for place in (begin, end))
        return [*self._again[begin:end], *range(first, last)]

    def _end_epoch(self) -> None:
        if not self._again and self._next == self.num_samples:
            self.epoch, self._next = self.epoch + 1, 0
