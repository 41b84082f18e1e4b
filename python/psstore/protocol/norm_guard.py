"""Which contributions are refused: those that are not finite, or whose norm is far beyond the last ones that counted.
Part of the coordinator.

A contribution is compared with others to the same tensors: fragments of a model that take turns differ in size. What
every shard has measured decides, and not the worker's word. Contributions of one round are held against the rounds
before it, so that the order in which they come changes nothing.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from statistics import median

from psstore.errors import BadArgument, BadSignature
from psstore.protocol.membership import Worker
from psstore.protocol.signing import Signer
from psstore.wire.messages import Commit, MeasuredFact, Refusal
from psstore.wire.ranges import Ranges

KEPT = 32
"""Norms that the median is of: what the last few rounds of a handful of learners bring. It follows a norm that
shrinks as training goes on, and three learners that go astray together are outvoted for five rounds."""

FEWEST = 8
"""With fewer, nothing is refused but what is not finite: of a few norms one that is astray may be the median."""

MOST_SETS = 256
"""Sets of tensors whose norms are kept: more than a model has fragments. The one that has had no round for longest is
forgotten, so that a worker which names others in each round costs no memory."""


class NormGuard:
    """The last norms that counted, by the tensors that they are of."""

    def __init__(self, ratio: float | None, *, signer: Signer, num_shards: int) -> None:
        """`ratio`: how many times the median a norm may be; None: nothing is refused."""
        self.ratio = ratio
        self.num_refused: dict[int, int] = {}
        """Rank -> contributions that were refused."""
        self.latest: dict[int, Refusal] = {}
        """Why the last one of the rank was."""
        self.admitted: OrderedDict[Ranges, list[float]] = OrderedDict()
        """The tensors that are used least come first."""
        self._signer = signer
        self._num_shards = num_shards

    def restore(self, norms: Iterable[tuple[Ranges, Iterable[float]]], num_refused: Mapping[int, int]) -> None:
        """Goes on from what another one had admitted and refused."""
        self.admitted = OrderedDict((present, list(of)) for present, of in norms)
        self.num_refused = dict(num_refused)

    def measured(self, worker: Worker, commit: Commit) -> float | None:
        """The norm of what the worker has pushed, as all shards say; None: nothing is to be held against others.
        Raises BadArgument for a commit that does not bring that, BadSignature for what no shard has said."""
        if self.ratio is None or not commit.present or commit.non_finite:
            return None
        facts = [self._signer.open(one) for one in commit.measured]
        squares: dict[int, float] = {}
        for fact in facts:
            if not isinstance(fact, MeasuredFact):
                raise BadSignature("COMMIT carries as measured what no shard says of a contribution")
            of = (fact.rank, fact.incarnation, fact.round, fact.present)
            if of == (worker.rank, worker.incarnation, commit.round, commit.present):
                squares[fact.shard] = fact.squares
        if len(squares) < self._num_shards:
            raise BadArgument(
                f"rank {worker.rank} ends round {commit.round} with the norm of its gradient on {len(squares)} of"
                f" {self._num_shards} shards; this store refuses by norm: ask every shard to ATTEST the round and"
                " what is present in it, and bring all that they say"
            )
        return math.sqrt(sum(squares[shard] for shard in sorted(squares))) / commit.loss_scale

    def judge(self, rank: int, present: Ranges, norm: float | None) -> Refusal | None:
        """Why a contribution to these tensors is refused; None: it counts."""
        if self.ratio is None or norm is None:
            return None
        before = self.admitted.get(present, ())
        usual = median(before) if len(before) >= FEWEST else None
        limit = self.ratio * usual if usual else None
        if math.isfinite(norm) and (limit is None or norm <= limit):
            return None
        return Refusal(rank=rank, norm=norm, median=usual, limit=limit)

    def admit(self, norms: Iterable[tuple[Ranges, float | None]]) -> None:
        """These contributions count."""
        if self.ratio is None:
            return
        for present, norm in norms:
            if norm is None:
                continue
            kept = self.admitted.setdefault(present, [])
            kept.append(norm)
            del kept[:-KEPT]
            self.admitted.move_to_end(present)
            if len(self.admitted) > MOST_SETS:
                self.admitted.popitem(last=False)

    def refused(self, refusals: Iterable[Refusal]) -> None:
        """These contributions do not."""
        for one in refusals:
            self.num_refused[one.rank] = self.num_refused.get(one.rank, 0) + 1
            self.latest[one.rank] = one
