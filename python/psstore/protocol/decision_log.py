"""The decisions that some shard may lack, as they were made and as clients carry them. Part of the coordinator."""

from __future__ import annotations

from collections import deque
from itertools import islice

from msgspec import Struct

from psstore.protocol.signing import Signer
from psstore.wire.messages import DecisionFact, Signed


class Made(Struct, frozen=True, gc=False):
    """A decision, as it was made and as clients carry it."""

    fact: DecisionFact
    signed: Signed


class DecisionLog:
    """Decisions are numbered from 1 on, without a gap, and dropped once every shard has said to have applied them."""

    def __init__(self, *, signer: Signer, num_shards: int) -> None:
        self.last = 0
        """Number of the last decision."""
        self._signer = signer
        self._kept: deque[Made] = deque()
        self._applied = [0] * num_shards
        """The last decision of which each shard has said so."""
        self._asked: tuple[int, tuple[Signed, ...]] = (0, ())
        """What `since` was last asked for, and answered: workers that are let go together know the same decisions."""

    def restore(self, last: int) -> None:
        """Goes on behind this decision, which every shard has. REQUIRES: there was none."""
        self.last = last
        self._applied = [last] * len(self._applied)
        self._asked = last, ()

    def __len__(self) -> int:
        return len(self._kept)

    def append(self, fact: DecisionFact) -> None:
        """The decision after the last one."""
        signed = self._signer.sign(fact)
        self._asked = self.last, (signed,)  # what those will ask for whom it lets go
        self.last = fact.number
        self._kept.append(Made(fact, signed))

    def since(self, number: int) -> tuple[Signed, ...]:
        """Every kept decision after `number`, in order, as clients carry it."""
        if self._asked[0] != number:
            self._asked = number, tuple([made.signed for made in self.made_since(number)])
        return self._asked[1]

    def made_since(self, number: int) -> list[Made]:
        """Every kept decision after `number`, in order, for this process."""
        known = number - self.last + len(self._kept)
        return list(islice(self._kept, known, None)) if known > 0 else list(self._kept)

    def applied(self, shard: int, decision: int) -> None:
        """A shard has applied this decision and all before it. Nobody needs to carry what all have applied."""
        self._applied[shard] = max(self._applied[shard], decision)
        floor = min(self._applied)
        if self._kept and self._kept[0].fact.number <= floor:
            self._asked = self.last, ()
            while self._kept and self._kept[0].fact.number <= floor:
                self._kept.popleft()
