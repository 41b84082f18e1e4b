"""What a decision says: from the commits of a round to its record. Part of the coordinator."""

from __future__ import annotations

from collections.abc import Sequence

from psstore.errors import BadArgument
from psstore.protocol.membership import Worker
from psstore.types import Consistency
from psstore.wire.messages import Commit, DecisionFact, Member
from psstore.wire.ranges import well_formed

MIN_WEIGHT, MAX_WEIGHT = 1e-18, 1e18
"""Bounds of one contribution's weight: shards multiply in float32, and a sum of many must be a finite divisor there.
The least is that of a worker which has nothing to contribute: where nobody has more, the mean would be of that."""


def check(commit: Commit, consistency: Consistency) -> None:
    """Raises BadArgument for what no decision may say: it is immutable, and shards could not apply it."""
    if not well_formed(commit.present):
        raise BadArgument("commit.present must be ascending, disjoint ranges (first, last) that don't touch")
    if not MIN_WEIGHT <= commit.weight <= MAX_WEIGHT:
        raise BadArgument(f"commit weight is {commit.weight}; it must be from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}")
    least = MIN_WEIGHT if commit.weight > MIN_WEIGHT else 0.0
    if not (commit.loss_scale > 0.0 and least <= weight_of(commit) <= MAX_WEIGHT):
        raise BadArgument(
            f"commit loss_scale is {commit.loss_scale}; it must be positive, and weight / loss_scale"
            f" from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}"
        )
    if commit.early or commit.max_norm is not None:
        _check_particular(commit, consistency)
    if commit.early and consistency.refuse_norm is not None:
        raise BadArgument(
            "an early commit can't be had where contributions are refused by norm, which needs every gradient: start"
            " the store without --refuse-norm, or commit when all is pushed"
        )


def _check_particular(commit: Commit, consistency: Consistency) -> None:
    if commit.max_norm is not None and not commit.max_norm >= 0.0:
        raise BadArgument(f"commit max_norm is {commit.max_norm}; it must be a number that is not negative")
    if commit.early and commit.max_norm is not None:
        raise BadArgument("an early commit can't have max_norm: the norm needs every gradient; give up one of them")
    if not waits_for_all(consistency):
        raise BadArgument(
            f"{'an early commit' if commit.early else 'max_norm'} needs every worker in every round: start the store"
            f" with --mode sync (its quorum is {consistency.quorum} of {consistency.num_workers} workers, its staleness"
            f" {consistency.staleness})"
        )


def waits_for_all(consistency: Consistency) -> bool:
    return consistency.lockstep and consistency.quorum == consistency.num_workers


def weight_of(commit: Commit) -> float:
    """The factor of the commit's contribution in the sum."""
    return commit.weight / commit.loss_scale


def make(
    number: int,
    workers: Sequence[Worker],
    commits: Sequence[Commit],
    hypers: dict[int, dict[str, float]],
    *,
    skip: bool = False,
) -> DecisionFact:
    """The record of a round. Workers and their commits are in rank order, which is the order of reduction; what is
    said once for all is said by the first. `skip`: nothing is to change, whatever they say."""
    members = []
    divisor, early, scaled, counts = 0.0, False, False, False
    for worker, commit in zip(workers, commits, strict=True):
        members.append(
            Member(
                rank=worker.rank,
                incarnation=worker.incarnation,
                round=commit.round,
                weight=weight_of(commit),
                present=commit.present,
            )
        )
        divisor += commit.weight
        counts = counts or commit.weight > MIN_WEIGHT
        skip = skip or commit.non_finite
        early = early or commit.early
        scaled = scaled or commit.loss_scale != 1.0
    skip = skip or not counts
    first = commits[0]
    return DecisionFact(
        number=number,
        members=tuple(members),
        divisor=divisor if first.average else 1.0,
        skip=skip,
        hypers=hypers,
        early=early,
        max_norm=None if skip else first.max_norm,
        average=first.average,
        loss_scales=tuple([commit.loss_scale for commit in commits]) if scaled else (),
    )
