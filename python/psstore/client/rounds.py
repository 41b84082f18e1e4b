"""How a worker's rounds end."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import NamedTuple

from msgspec import Struct

from psstore.client.arguments import number
from psstore.client.context import Context
from psstore.client.norms import Norm
from psstore.client.schema import Hypers, per_group
from psstore.client.writing import Writing
from psstore.errors import BadArgument
from psstore.wire.messages import Refusal


class CommitResult(Struct, frozen=True):
    """How a round ended."""

    round: int
    decision: int
    """Number of the decision that closed it."""
    late: bool
    """True if the round was decided without this worker, whose gradients don't count. Pull, and go on with
    `store.round`."""
    skipped: bool
    """A worker's gradients were not finite, or nobody's were taken: nothing changes in this round."""
    empty: bool = False
    """Why it is skipped: nobody had anything, by the weights, and no gradients are said to be not finite."""
    refused: Refusal | None = None
    """The round was decided without this worker's gradients: their norm is far beyond what is usual, or not finite."""

    @property
    def counts(self) -> bool:
        """Whether this worker's gradients are part of what the round changed."""
        return not (self.late or self.skipped or self.refused)


class Counted(NamedTuple):
    """The tensors that a commit counted by name."""

    named: tuple[str, ...]
    pushed: frozenset[int]
    ids: frozenset[int]

    def is_of(self, named: tuple[str, ...], pushed: frozenset[int]) -> bool:
        """True if these names were counted before, in a round of the same single push."""
        return pushed is self.pushed and named == self.named


class Committing:
    """Commits of one store's worker. Used on the store's loop only; the arguments are explained in operations.py."""

    def __init__(self, context: Context, norm: Norm, writing: Writing) -> None:
        self._context = context
        self._norm = norm
        self._writing = writing
        self._last: Counted | None = None

    async def commit(
        self,
        hypers: Hypers | None,
        *,
        weight: float,
        loss_scale: float,
        non_finite: bool,
        present: Iterable[str] | None,
        average: bool,
        early: bool,
        max_norm: float | None,
        wait_s: float | None,
    ) -> CommitResult:
        context, writing = self._context, self._writing
        if early and present is None:
            raise BadArgument("an early commit promises its pushes: name them with present=")
        if not early:
            await self._need_quiet("commit")
        if context.client.worker.unscaled is not None:
            await self._norm.settle(wait_s)
        counted = writing.pushed if present is None else await self._counted(present, promised=early)
        if early and not writing.rows.unsettled.isdisjoint(counted):
            await writing.settle()
        with writing.rows.promising(counted) if early else nullcontext():
            if early:
                self._begin_early()
            committed = await context.client.worker.commit(
                hypers=per_group(hypers, context.schema.groups()),
                weight=number("weight", weight),
                loss_scale=number("loss_scale", loss_scale),
                non_finite=bool(non_finite),
                present=counted,
                average=bool(average),
                early=bool(early),
                max_norm=None if max_norm is None else number("max_norm", max_norm),
                wait_s=context.patience(wait_s),
            )
        context.coded.committed(counted, loss_scale=loss_scale)
        result = CommitResult(
            round=committed.round,
            decision=committed.decision,
            late=committed.late,
            skipped=committed.skip,
            empty=committed.empty,
            refused=committed.refused,
        )
        if early and committed.late:  # nobody waits for what it has promised
            self._end_early()
        if not early or committed.late:
            writing.round_ended()
            if max_norm is None or not result.counts:
                context.coded.conclude(counts=result.counts)
        return result

    async def finish(self, *, wait_s: float | None) -> None:
        context = self._context
        await self._need_quiet("finish")
        await context.client.worker.finish(wait_s=context.patience(wait_s))
        self._end_early()
        self._writing.round_ended()
        context.coded.conclude(counts=True)

    def _begin_early(self) -> None:
        """Has pushes and pulls from now on be those of an early round."""
        context = self._context
        if context.pace is not None and context.client.worker.num_workers > 1:
            context.pace.begin(context.client.worker.round)
        context.layouts.early = context.sends_all

    def _end_early(self) -> None:
        if self._context.pace is not None:
            self._context.pace.end()
        self._context.layouts.early = False

    async def _need_quiet(self, what: str) -> None:
        await self._writing.looked_up()
        if self._writing.under_way:
            raise BadArgument(f"{what} while {len(self._writing.under_way)} pushes are under way; await them first")

    async def _counted(self, names: Iterable[str], *, promised: bool) -> frozenset[int]:
        """Ids of the tensors that a commit counts."""
        named, pushed = tuple(names), self._writing.pushed
        if not promised and self._last is not None and self._last.is_of(named, pushed):
            return self._last.ids
        tensors = await self._context.schema.find_any(named)
        for tensor in tensors:
            if not promised and tensor.id not in pushed:
                raise BadArgument(f"commit counts on {tensor.spec.name!r}, which was not pushed in this round")
        ids = frozenset(tensor.id for tensor in tensors)
        if not promised:
            self._last = Counted(named, pushed, ids)
        return ids
