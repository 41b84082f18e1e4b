"""The decisions that a client carries from the coordinator to the shards, and the scale of the last one."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from psstore import _core
from psstore.wire.messages import DecisionFact, Scale, Signed, decode_fact, encode_decisions, is_clipped


class DecisionCache:
    """A run of consecutive decisions, kept until every shard is known to have applied them."""

    def __init__(self, num_shards: int = 1) -> None:
        self.carried = _core.CarriedDecisions(weakref.WeakMethod(self._news))
        """What sessions ask when they say something to a shard."""
        self.scale: Scale | None = None
        """The last decision's scale, once it is known here."""
        self.unscaled: DecisionFact | None = None
        """The last decision, if the shards wait for a scale that is not known here."""
        self._log: tuple[int, tuple[Signed, ...]] = (1, ())
        """Number of the oldest decision kept, and those kept. Replaced as a whole: `since` may be called while another
        thread changes it, and tells of every decision up to what `last` was before."""
        self._versions = [0] * num_shards

    @property
    def last(self) -> int:
        """Number of the last decision known."""
        return self.carried.last

    def resize(self, num_shards: int) -> None:
        """The number of shards became known."""
        self._versions += [0] * (num_shards - len(self._versions))

    @property
    def floor(self) -> int:
        """Every shard is known to have applied this decision."""
        return min(self._versions)

    def learn(self, last: int, decisions: Sequence[Signed]) -> None:
        """`decisions` are those up to `last`, in order; known ones among them are skipped."""
        known = self.last
        if last <= known:
            return
        first, (oldest, kept) = last - len(decisions) + 1, self._log
        self.scale, self.carried.is_scaled = None, False
        if first > known + 1 or not kept:
            self._log = first, tuple(decisions)
        else:
            self._log = oldest, (*kept, *decisions[known + 1 - first :])
        self.carried.last = last
        latest = decode_fact(decisions[-1].blob) if decisions and is_clipped(decisions[-1].blob) else None
        self.unscaled = latest if isinstance(latest, DecisionFact) else None

    def set_scale(self, scale: Scale) -> None:
        """Ignored if it is of an earlier decision: that one every shard has applied."""
        if scale.decision == self.last:
            self.scale, self.unscaled = scale, None
            self.carried.is_scaled = True

    def heard(self, shard: int, version: int) -> None:
        """A shard told its version."""
        self._versions[shard] = max(self._versions[shard], version)
        oldest, kept = self._log
        spare = self.floor - oldest + 1
        if spare > 0:
            self._log = oldest + spare, kept[spare:]

    def since(self, number: int) -> tuple[Signed, ...]:
        """Every kept decision after `number`."""
        oldest, kept = self._log
        return kept[max(0, number + 1 - oldest) :]

    def _news(self, told: int) -> tuple[int, bytes, int, float | None]:
        """What a shard is to hear that was told the decisions up to `told`: the last of the others and their encoding,
        the decision whose scale is known and that scale."""
        decisions = self.since(told)
        scaled, factor = (0, None) if self.scale is None else (self.scale.decision, self.scale.factor)
        return self.carried.last if decisions else 0, encode_decisions(decisions), scaled, factor
