"""LearnerStep: the worker trains alone, and shares what has become of one fragment of its parameters every few steps.

DiLoCo (Douillard et al., arXiv:2311.08105, algorithm 1): the store's optimizer takes a step with the mean of the
workers' pseudo-gradients. Fragments take turns, overlapped with further steps, as in streaming DiLoCo
(arXiv:2501.18512, algorithm 2); whose turn it is follows from the number of the round, which all workers of it know.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from psstore.errors import UsageError
from psstore.torch.agreement import agree
from psstore.torch.exchange import Exchange
from psstore.torch.fragments import Fragment, cut
from psstore.torch.gradient_step import Hypers
from psstore.torch.local_step import LocalStep
from psstore.torch.param_groups import check_hyper, has_rule, hyper_of, rule_of
from psstore.torch.parameters import Trained
from psstore.torch.training import Overflow, Training, create_tensors, split_trained
from psstore.torch.warnings import quoted

Weight = float | Literal["tokens"]
"""A worker's share in the mean: a number, or whatever it has counted since its last contribution to the fragment."""


@dataclass(frozen=True, kw_only=True)
class Learning:
    """How learners train together."""

    outer: torch.optim.Optimizer
    """What the store steps with: its class, and the hyper-parameters of its first group as they are then."""
    every: int
    fragments: int
    delay: int
    merge: float
    weight: Weight

    def check(self) -> None:
        """Raises UsageError."""
        if not 1 <= self.fragments <= self.every:
            raise UsageError(
                f"every is {self.every} and fragments {self.fragments}; each fragment has a round in so many steps, and"
                " a step at most one: expected 1 <= fragments <= every"
            )
        if not 0 <= self.delay <= self.every // self.fragments:
            raise UsageError(
                f"delay is {self.delay}; a round's values are there before the next round begins:"
                f" expected 0 to every/fragments, which is {self.every // self.fragments}"
            )
        if not 0.0 < self.merge <= 1.0:
            raise UsageError(f"merge is {self.merge}; it is the share of the new values: more than 0, and at most 1")
        if isinstance(self.weight, str) and self.weight != "tokens":
            raise UsageError(f"weight is {self.weight!r}; expected a number, or 'tokens'")
        if not has_rule(self.outer):
            raise UsageError(f"the store has no rule for {type(self.outer).__qualname__}, and takes the outer step")
        hypers = [hyper_of(self.rule, group) for group in self.outer.param_groups]
        if any(one != hypers[0] for one in hypers):
            raise UsageError(
                "the outer optimizer's groups have other hyper-parameters than its first: give it one group"
            )

    @property
    def rule(self) -> str:
        return rule_of(self.outer, self.outer.param_groups[0])

    def hyper(self) -> dict[str, float]:
        """The outer optimizer's, as they are now."""
        return hyper_of(self.rule, self.outer.param_groups[0])

    def agreed(self) -> dict[str, float]:
        """What all learners have to have alike."""
        group = self.outer.param_groups[0]
        begun = hyper_of(self.rule, {**group, "lr": group.get("initial_lr", group["lr"])})
        return {
            "every": self.every,
            "fragments": self.fragments,
            "weight by tokens": self.weight == "tokens",
            **{f"the outer optimizer's {name}": value for name, value in begun.items()},
        }


@dataclass(kw_only=True)
class Round:
    """One that this worker takes part in and whose values are not merged yet."""

    exchange: Exchange
    due: int
    """The step in which they are merged."""
    news: dict[int, list[torch.Tensor]]
    """Values that have come, by the number of their fragment."""


class LearnerStep(LocalStep):
    """Steps the wrapped optimizer; `fragments` times in `every` steps, a round is begun whose contribution is a pseudo-
    gradient, and `delay` steps after that its values are merged."""

    def __init__(self, training: Training, learning: Learning) -> None:
        if training.has_parts:
            raise UsageError("DiLoCo is for workers with whole models so far, and these have parts of tensors")
        if not training.store.consistency.lockstep:
            mode = training.store.consistency.mode
            raise UsageError(
                f"DiLoCo makes a round of several learners' steps, and in mode {mode!r} each worker's is one: start the"
                " store with --mode sync, or with --quorum and --grace-s"
            )
        super().__init__(training)
        self._learning = learning
        self._fragments: list[Fragment] = []
        self._steps = 0
        """How many this worker has taken, in all."""
        self._counted = 0.0
        """Tokens that this worker has counted, in all."""
        self._merged = 0
        """The last decision whose values are merged."""
        self._round: Round | None = None
        self._push_codecs: dict[str, str] = {}
        self._pull_codecs: dict[str, str] = {}

    def add(self, trained: Sequence[Trained]) -> None:
        training, learning = self._training, self._learning
        if self._fragments:
            raise UsageError(
                f"{quoted([one.name for one in trained])} came to be trained after the fragments were cut: make the"
                " DiLoCo optimizer anew, on all learners"
            )
        dtypes = {one.parameter.dtype for one in trained}
        check_hyper(learning.rule, learning.hyper(), group=0, dtypes=dtypes)
        fragments = cut(trained, learning.fragments)
        chosen = {one.name: training.compression_of(one) for one in trained}
        specs = [one.spec(learning.rule, group=training.first_group) for one in trained]
        create_tensors(training, specs, [one.parameter.detach() for one in trained])
        agree(training, learning.agreed())
        self._push_codecs = {name: one.push for name, one in chosen.items() if one.push != "none"}
        self._pull_codecs = {name: one.pull for name, one in chosen.items() if one.pull != "none"}
        self._fragments = fragments
        self._take_whole()
        split_trained(training, trained)

    def retire(self) -> None:
        """Another optimizer takes over: what is under way is nobody's."""
        self._round = None

    def count(self, tokens: float) -> None:
        """Adds to what the next contributions weigh."""
        self._counted += tokens

    @property
    def shares_next(self) -> bool:
        return self._is_due(self._steps + 1)

    def step(self, overflow: Overflow) -> bool:
        """Steps this worker alone, merges what has become of a round, and begins the next one if it is due."""
        stepped = super().step(overflow)
        self._steps += 1
        self._merge_if_due(self._steps)
        if self._is_due(self._steps):
            self._begin()
            self._merge_if_due(self._steps)
        return stepped

    def residuals(self) -> Mapping[torch.Tensor, torch.Tensor]:
        held = self._training.store.residuals(list(self._push_codecs)) if self._push_codecs else {}
        owners = {one.name: one.owner for one in self._training.trained}
        return {owners[name]: torch.from_numpy(value) for name, value in held.items()}

    def set_residuals(self, residuals: Mapping[torch.Tensor, torch.Tensor]) -> None:
        if self._push_codecs:
            owners = {one.name: one.owner for one in self._training.trained}
            self._training.store.set_residuals({name: residuals.get(owners[name]) for name in self._push_codecs})

    def progress(self) -> dict[str, Any]:
        """Where this worker is, beside parameters and the wrapped optimizer's state."""
        return {
            "steps": self._steps,
            "counted": self._counted,
            "weighed_at": [fragment.weighed_at for fragment in self._fragments],
        }

    def set_progress(self, progress: Mapping[str, Any]) -> None:
        """Goes on from where another one was."""
        self._steps, self._counted = int(progress["steps"]), float(progress["counted"])
        for fragment, weighed_at in zip(self._fragments, progress["weighed_at"], strict=True):
            fragment.weighed_at = float(weighed_at)

    def publish(self) -> None:
        self._merge_if_due(math.inf)
        self._training.publish()
        self._take_whole()

    def synchronize(self) -> None:
        """The parameters are the store's newest values, with the round in them that is under way here. There is no
        further one: without new steps, the outer optimizer's momentum alone would move the values."""
        self._merge_if_due(math.inf)
        self._take_whole()

    # ---- how ----

    def _is_due(self, step: int) -> bool:
        """Whether a round begins with this step: evenly spread, and after `every` steps each fragment had one."""
        every, fragments = self._learning.every, self._learning.fragments
        return step * fragments // every > (step - 1) * fragments // every

    def _begin(self) -> None:
        """Begins a round with this worker's part. Raises UsageError; then nothing has begun."""
        store, learning = self._training.store, self._learning
        self._catch_up()
        number = self._fragment_of(store.round)
        fragment = self._fragments[number]
        gradients = fragment.pseudo_gradient()
        weight = self._weight_of(fragment)
        hypers: Hypers = {self._training.first_group: learning.hyper()}
        news: dict[int, list[torch.Tensor]] = {}
        exchange = Exchange(
            lambda: store.push_many(zip(fragment.names, gradients, strict=True), codec=self._push_codecs or None),
            lambda: store.commit(hypers, weight=weight, present=fragment.names),
            lambda: self._pull_news(news),
        )
        fragment.weighed_at = self._counted
        self._round = Round(exchange=exchange, due=self._steps + learning.delay, news=news)
        if learning.delay:
            exchange.start()

    def _merge_if_due(self, step: float) -> None:
        """Merges what a round has brought, if it is due. Raises the store's errors; then the round goes on, and is
        merged in a later step."""
        if self._round is None or step < self._round.due:
            return
        self._round.exchange.finish()
        for number, values in self._round.news.items():
            self._fragments[number].merge(values, share=self._learning.merge)
        self._round = None

    def _pull_news(self, news: dict[int, list[torch.Tensor]]) -> None:
        """Pulls the fragments that rounds were about since the last time: the one of this worker's round, and where
        rounds do without late workers also those that it has missed."""
        last = self._training.store.version
        missed = range(max(self._merged + 1, last - len(self._fragments) + 1), last + 1)
        for number in sorted({self._fragment_of(round) for round in missed}):
            news[number] = self._pull(self._fragments[number])
        self._merged = last

    def _catch_up(self) -> None:
        """Goes on to the open round, where rounds are closed without late workers: what came for an older one would not
        count."""
        store = self._training.store
        if store.consistency.mode == "sync":
            return
        store.pull_many([self._smallest], if_newer_than=store.version)  # asks what was decided
        if store.version >= store.round:
            store.commit(present=[])

    @property
    def _smallest(self) -> str:
        """The tensor of the fewest elements: of one without any, no shard would be asked."""
        return min(self._training.trained, key=lambda one: one.parameter.numel() or math.inf).name

    def _fragment_of(self, round: int) -> int:
        return (round - 1) % len(self._fragments)

    def _weight_of(self, fragment: Fragment) -> float:
        if self._learning.weight != "tokens":
            return self._training.weight
        weight = self._counted - fragment.weighed_at
        if weight <= 0:
            raise UsageError(
                "weight='tokens', and none were counted since this worker's last round: call"
                " optimizer.count(number of tokens) with each batch"
            )
        return weight

    def _pull(self, fragment: Fragment) -> list[torch.Tensor]:
        values = fragment.empty()
        self._training.store.pull_many(fragment.names, out=values, codec=self._pull_codecs or None)
        return values

    def _take_whole(self) -> None:
        """The parameters are the store's newest values."""
        self._merged = self._training.store.version  # what is decided meanwhile will be pulled again
        for fragment in self._fragments:
            fragment.merge(self._pull(fragment), share=1.0)
            fragment.weighed_at = self._counted
