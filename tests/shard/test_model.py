"""A shard against docs/table.md in plain Python: any calls in any order give the answers and values that it says.

One round is one decision here, and both ranks are members of each: what the coordinator makes of quorum = all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from psstore import _core, errors
from tests.shard.frames import Restored, decision, define, floats, key_of, norms, pull, push, restore

RANKS = (0, 1)
TENSORS = (1, 2)
Present = Mapping[int, frozenset[int]]
"""Rank -> tensors that it has a gradient for."""

ranks = st.sampled_from(RANKS)
tensors = st.sampled_from(TENSORS)
numbers = st.integers(-8, 8).map(float)
subsets = st.frozensets(tensors)


@dataclass
class Slot:
    value: float = 0.0
    version: int = 0
    staged: dict[int, tuple[int, float]] = field(default_factory=dict)
    """Rank -> round and gradient."""
    held: bool = False
    squares: float | None = None


@dataclass
class Model:
    slots: dict[int, Slot] = field(default_factory=lambda: {tensor: Slot() for tensor in TENSORS})
    version: int = 0
    present: Present = field(default_factory=dict)
    early: bool = False
    lacks_scale: bool = False

    def counted(self, tensor: int) -> list[int]:
        return [rank for rank in RANKS if tensor in self.present.get(rank, ())]

    def complete(self, tensor: int) -> bool:
        return self.here(tensor) == self.counted(tensor)

    def push(self, rank: int, tensor: int, round_: int, gradient: float) -> int:
        slot = self.slots[tensor]
        counts = slot.held and rank in self.counted(tensor)
        staged_round = slot.staged.get(rank, (0, 0))[0]
        if round_ > self.version and counts:
            return errors.RoundOutOfOrder.code
        awaited = self.early and counts and round_ == self.version and staged_round != round_
        if awaited or (round_ > self.version and round_ >= staged_round):
            slot.staged[rank] = (round_, gradient)
        if awaited and self.complete(tensor):
            self.settle(tensor, 1.0)
        return errors.OK

    def advance(self, present: Present, *, early: bool, needs_scale: bool, skip: bool) -> type[Exception] | None:
        if self.lacks_scale and any(slot.held for slot in self.slots.values()):
            return errors.DecisionGap
        for tensor, slot in self.slots.items():
            if slot.held:
                self.settle(tensor, 1.0)
        following = Model(self.slots, self.version + 1, present, early and not skip, needs_scale and not skip)
        self.__dict__.update(following.__dict__)
        for tensor, slot in self.slots.items():
            slot.squares = self.sum(tensor) ** 2 if self.lacks_scale and self.here(tensor) else None
            slot.held = bool(self.counted(tensor)) if self.lacks_scale else early and not self.complete(tensor)
            slot.held = slot.held and not skip
            if not slot.held:
                self.settle(tensor, None if skip else 1.0)
        return None

    def set_scale(self, number: int, factor: float | None) -> None:
        if number != self.version or not self.lacks_scale:
            return
        self.lacks_scale = False
        for tensor, slot in self.slots.items():
            if slot.held:
                self.settle(tensor, factor)

    def restore(self, tensor: int, value: float) -> int:
        slot = self.slots[tensor]
        if slot.held:
            return errors.NOT_APPLIED
        slot.value, slot.version = value, max(slot.version, self.version) + 1
        return errors.OK

    def here(self, tensor: int) -> list[int]:
        """Ranks that count, and have pushed."""
        staged = self.slots[tensor].staged
        return [rank for rank in self.counted(tensor) if staged.get(rank, (0, 0))[0] == self.version]

    def sum(self, tensor: int) -> float:
        return sum(self.slots[tensor].staged[rank][1] for rank in self.here(tensor))

    def settle(self, tensor: int, factor: float | None) -> None:
        """SGD with lr 1. Factor None: a skip."""
        slot = self.slots[tensor]
        if factor is not None and self.here(tensor):
            slot.value -= self.sum(tensor) * factor
            slot.version = max(self.version, slot.version + 1)
        slot.held = False
        slot.staged = {rank: entry for rank, entry in slot.staged.items() if entry[0] > self.version}


class Comparison(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.shard = _core.Shard(index=0, num_stripes=2)
        self.num_writes = 0
        for tensor in TENSORS:
            define(self.shard, tensor, 1)

    @rule(rank=ranks, tensor=tensors, ahead=st.integers(-1, 2), gradient=numbers)
    def push(self, rank: int, tensor: int, ahead: int, gradient: float) -> None:
        round_ = max(self.model.version + ahead, 1)  # rounds begin with 1
        (answer,) = push(self.shard, {key_of(tensor): floats(gradient)}, rank=rank, round=round_)
        assert answer.status == self.model.push(rank, tensor, round_, gradient)

    @rule(gradients=st.lists(numbers, min_size=4, max_size=4))
    def push_what_the_next_decision_may_count_on(self, gradients: list[float]) -> None:
        for rank in RANKS:
            for tensor in TENSORS:
                self.push(rank, tensor, 1, gradients[2 * rank + tensor - 1])

    @rule(present=st.fixed_dictionaries(dict.fromkeys(RANKS, subsets)), kind=st.sampled_from(["early", "scale", ""]))
    def advance(self, present: Present, kind: str) -> None:
        self.decide(present, early=kind == "early", needs_scale=kind == "scale", skip=False)

    @rule(early=st.booleans())
    def skip(self, early: bool) -> None:
        self.decide(dict.fromkeys(RANKS, frozenset(TENSORS)), early=early, needs_scale=not early, skip=True)

    def decide(self, present: Present, *, early: bool, needs_scale: bool, skip: bool) -> None:
        number = self.model.version + 1
        made = decision(
            number,
            [(rank, 1, number, 1.0) for rank in RANKS],
            present={rank: [(tensor, tensor) for tensor in sorted(present[rank])] for rank in RANKS},
            early=early,
            needs_scale=needs_scale,
            skip=skip,
        )
        error = self.model.advance(present, early=early, needs_scale=needs_scale, skip=skip)
        if error is None:
            self.shard.advance(made)
        else:
            with pytest.raises(error):
                self.shard.advance(made)

    @rule(ahead=st.integers(-1, 1), factor=st.sampled_from([None, 0.0, 0.25, 1.0]))
    def set_scale(self, ahead: int, factor: float | None) -> None:
        number = max(self.model.version + ahead, 0)
        self.model.set_scale(number, factor)
        self.shard.set_scale(number, factor)

    @rule(tensor=tensors, value=numbers)
    def restore(self, tensor: int, value: float) -> None:
        self.num_writes += 1
        (answer,) = restore(self.shard, [Restored(key_of(tensor), 0, floats(value))], sequence=self.num_writes)
        assert answer.status == self.model.restore(tensor, value)

    @rule(max_slots=st.integers(-1, 2))
    def settle(self, max_slots: int) -> None:
        done = self.shard.settle(max_slots)
        assert done or max_slots >= 0

    @rule(tensor=tensors)
    def norm(self, tensor: int) -> None:
        squares = self.model.slots[tensor].squares
        assert norms(self.shard, [key_of(tensor)])[1] == ([] if squares is None else [squares])

    @rule(tensor=tensors, newer_by=st.integers(0, 2))
    def pull(self, tensor: int, newer_by: int) -> None:
        slot = self.model.slots[tensor]
        pulled = pull(self.shard, [key_of(tensor)], versions=[slot.version + newer_by])
        (answer,) = pulled.answers
        expected = errors.NOT_APPLIED if slot.held else errors.NOT_MODIFIED if newer_by else errors.OK
        assert (answer.status, answer.version) == (expected, slot.version)
        if expected == errors.OK:
            assert bytes(pulled.pieces[0]) == floats(slot.value).tobytes()

    @invariant()
    def counts_agree(self) -> None:
        assert self.shard.version == self.model.version
        assert self.shard.stats()["held_slots"] == sum(slot.held for slot in self.model.slots.values())

    def teardown(self) -> None:
        """Nothing stays staged but what is to come, or is waited with."""
        self.shard.settle()
        staged = sum(len(slot.staged) for slot in self.model.slots.values())
        assert self.shard.stats()["staged_bytes"] == 4 * staged
        for tensor in TENSORS:
            self.pull(tensor, 0)


Comparison.TestCase.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
test_a_shard_does_what_its_document_says = Comparison.TestCase
