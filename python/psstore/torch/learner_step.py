"""LearnerStep: the worker trains alone, and shares what has become of one fragment of its parameters every few steps.

DiLoCo (Douillard et al., arXiv:2311.08105, algorithm 1): the store's optimizer takes a step with the mean of the
workers' pseudo-gradients. Fragments take turns, overlapped with further steps, as in streaming DiLoCo
(arXiv:2501.18512, algorithm 2); whose turn it is follows from the number of the round, which all workers of it know
(turns.py). In modes async and ssp each contribution is a step of its own, to the values that are there then, and rounds
are each worker's: asynchronous local SGD (Liu et al., arXiv:2401.09135).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from psstore.client import arguments
from psstore.client.rounds import CommitResult
from psstore.client.rule_state import Restored
from psstore.errors import UsageError
from psstore.torch.agreement import agree
from psstore.torch.exchange import Exchange
from psstore.torch.fragments import Fragment, cut
from psstore.torch.gradient_step import Hypers
from psstore.torch.learner_processes import LearnerProcesses, SharedTensor
from psstore.torch.local_step import LocalStep
from psstore.torch.param_groups import (
    GradientOptions,
    check_hyper,
    check_rule_stays,
    has_rule,
    hyper_of,
    rule_of,
    with_gradient_options,
)
from psstore.torch.parameters import Trained
from psstore.torch.training import Overflow, Training, create_tensors, split_trained
from psstore.torch.turns import SCHEME, fragment_of, fragments_since
from psstore.torch.warnings import quoted, tell_of_refusal
from psstore.types import TensorSpec

Weight = float | Literal["tokens"]
"""A worker's share in the mean: a number, or whatever it has counted since its last contribution to the fragment."""


@dataclass(frozen=True, kw_only=True)
class Learning:
    """How learners train together."""

    outer: torch.optim.Optimizer
    """What the store steps with: its class, its first group's hyper-parameters as they are then, and the reduction that
    the group has at first."""
    every: int
    fragments: int
    delay: int
    merge: float
    weight: Weight

    def check(self) -> None:
        """Raises UsageError."""
        for what, steps in (("every", self.every), ("fragments", self.fragments), ("delay", self.delay)):
            arguments.whole(what, steps)
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
        if not 0.0 < arguments.number("merge", self.merge) <= 1.0:
            raise UsageError(f"merge is {self.merge}; it is the share of the new values: more than 0, and at most 1")
        if not isinstance(self.weight, str):
            arguments.number("weight", self.weight)
        elif self.weight != "tokens":
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
            "scheme of turns": SCHEME,
            **{f"the outer optimizer's {name}": value for name, value in begun.items()},
        }


@dataclass(kw_only=True)
class Round:
    """One that this worker takes part in and whose values are not merged yet."""

    exchange: Exchange
    own: int
    """The number of the fragment that it is about."""
    weighed_at: float
    """That of the fragment, before this worker's contribution."""
    due: int
    """The step in which they are merged."""
    news: dict[int, list[torch.Tensor]]
    """Values that have come, by the number of their fragment."""
    ended: list[CommitResult]
    """How it was decided, once it is: on the leader."""


class LearnerStep(LocalStep):
    """Steps the wrapped optimizer; `fragments` times in `every` steps, a round is begun whose contribution is a pseudo-
    gradient, and `delay` steps after that its values are merged."""

    def __init__(self, training: Training, learning: Learning, processes: LearnerProcesses) -> None:
        """`processes`: this worker's. Its leader alone uses the store of `training`."""
        super().__init__(training)
        self._learning = learning
        self._processes = processes
        self.refusal: UsageError | None = None
        """What the next round is refused with, in all processes: the leader has found it."""
        training.has_whole_names = True
        self._is_shared = processes.ask(self._has_shared_rounds)
        """Whether a round is that of several workers; else each one's contribution is a step of its own."""
        self._fragments: list[Fragment] = []
        self._counted = 0.0
        """Tokens that this worker has counted, in all."""
        self._merged = 0
        """The last decision whose values are merged."""
        self._round: Round | None = None
        self._options = GradientOptions.of(learning.outer.param_groups[0])
        self._rule = learning.rule
        """The rule that the store's tensors have for good."""
        self._owners: dict[str, torch.Tensor] = {}
        """The parameters, by the whole tensors' names."""
        self._smallest = ""
        """The tensor of the fewest elements: of one without any, no shard would be asked."""
        self._push_codecs: dict[str, str] = {}
        self._pull_codecs: dict[str, str] = {}

    def add(self, trained: Sequence[Trained]) -> None:
        training, learning = self._training, self._learning
        if self._fragments:
            raise UsageError(
                f"{quoted([one.name for one in trained])} came to be trained after the fragments were cut: make the"
                " optimizer anew, on all learners"
            )
        dtypes = {one.parameter.dtype for one in trained}
        check_hyper(learning.rule, learning.hyper(), group=0, dtypes=dtypes)
        whole = self._processes.wholes(trained)
        fragments = cut(trained, whole, learning.fragments)
        chosen = {one.name: training.compression_of(of) for of, one in zip(trained, whole, strict=True)}
        outer = learning.outer.param_groups[0]
        specs = [with_gradient_options(one.spec(learning.rule, group=training.first_group), outer) for one in whole]
        values = self._gather(trained, whole)
        self._processes.ask(lambda: self._create(specs, values))
        self._push_codecs = {name: one.push for name, one in chosen.items() if one.push != "none"}
        self._pull_codecs = {name: one.pull for name, one in chosen.items() if one.pull != "none"}
        self._fragments = fragments
        self._owners = {one.name: of.owner for of, one in zip(trained, whole, strict=True)}
        self._smallest = min(whole, key=lambda one: one.num_bytes or math.inf).name
        self._take_whole()
        if self._processes.leads:
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
        """Whole, by the leader alone, which encodes."""
        has_any = self._push_codecs and self._processes.leads
        held = self._training.store.residuals(list(self._push_codecs)) if has_any else {}
        return {self._owners[name]: torch.from_numpy(value) for name, value in held.items()}

    def set_residuals(self, residuals: Mapping[torch.Tensor, torch.Tensor]) -> None:
        if self._push_codecs and self._processes.leads:
            found = {name: residuals.get(self._owners[name]) for name in self._push_codecs}
            self._training.store.set_residuals(found)

    def progress(self) -> Mapping[str, Any]:
        return {
            **super().progress(),
            "counted": self._counted,
            "weighed_at": [fragment.weighed_at for fragment in self._fragments],
        }

    def set_progress(self, progress: Mapping[str, Any]) -> None:
        """A round that is under way ends before: it is due by the steps until now."""
        self._merge_if_due(math.inf)
        super().set_progress(progress)
        self._counted = float(progress["counted"])
        for fragment, weighed_at in zip(self._fragments, progress["weighed_at"], strict=True):
            fragment.weighed_at = float(weighed_at)

    def publish(self) -> None:
        self._merge_if_due(math.inf)
        whole = [one for fragment in self._fragments for one in fragment.whole]
        trained = [one for fragment in self._fragments for one in fragment.trained]
        values = self._gather(trained, whole)
        self._processes.ask(lambda: self._restore(whole, values))
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
        store, learning, processes = self._training.store, self._learning, self._processes
        number = fragment_of(processes.ask(self._open_round), len(self._fragments))
        fragment = self._fragments[number]
        parts = processes.together(partial(self._contribution, fragment))
        weight = self._weight_of(fragment)
        hypers: Hypers = {self._training.first_group: learning.hyper()}
        news: dict[int, list[torch.Tensor]] = {}
        ended: list[CommitResult] = []

        def push(gradients: list[torch.Tensor]) -> None:
            store.push_many(zip(fragment.names, gradients, strict=True), codec=self._push_codecs or None)

        def push_whole() -> None:
            gradients = processes.gather(fragment.whole, parts)
            processes.ask(lambda: push(gradients))

        def commit() -> None:
            ended.append(store.commit(hypers, weight=weight, present=fragment.names))

        exchange = Exchange(
            push_whole,
            lambda: processes.ask(commit),
            lambda: self._pull_news(news, own=number),
        )
        due, weighed_at = self._steps + learning.delay, fragment.weighed_at
        self._round = Round(exchange=exchange, own=number, weighed_at=weighed_at, due=due, news=news, ended=ended)
        fragment.weighed_at = self._counted
        if learning.delay:
            exchange.start()

    def _contribution(self, fragment: Fragment) -> list[torch.Tensor]:
        """This worker's pseudo-gradients. Raises UsageError, also where the outer optimizer's group has changed what
        the store's tensors have for good."""
        outer = self._learning.outer.param_groups[0]
        self._options.check_stays(outer, "the outer optimizer's group")
        check_rule_stays(self._rule, self._learning.outer, outer, "the outer optimizer's group")
        return fragment.pseudo_gradient()

    def _merge_if_due(self, step: float) -> bool:
        """Merges what a round has brought, if it is due. Returns whether what this worker has contributed came too
        late, and stays to be shared. Raises the store's errors; then the round goes on, and is merged in a later step.
        """
        if self._round is None or step < self._round.due:
            return False
        ending = self._round
        ending.exchange.finish()
        is_late = self._processes.ask(lambda: any(commit.late for commit in ending.ended))
        self._round = None
        for number, values in ending.news.items():
            fragment = self._fragments[number]
            if number == ending.own and is_late:
                fragment.carry_over(values)
                fragment.weighed_at = ending.weighed_at
            else:
                fragment.merge(values, share=self._learning.merge)
        for commit in ending.ended:
            tell_of_refusal(commit)
        return is_late

    def _pull_news(self, news: dict[int, list[torch.Tensor]], *, own: int) -> None:
        """Pulls the fragments that rounds were about since the last time: the one of this worker's round, and where
        rounds do without late workers also those that it has missed. Where rounds are each worker's it is that one
        alone: others change the rest, and each has its turn."""
        if not self._is_shared:
            news[own] = self._pull(self._fragments[own])
            return
        last = self._processes.ask(lambda: self._training.store.version)
        for number in fragments_since(self._merged, last, len(self._fragments)):
            news[number] = self._pull(self._fragments[number])
        self._merged = last

    def _open_round(self) -> int:
        """The open round's number. Where rounds are closed without late workers, goes on to it first: what came for an
        older one would not count."""
        store = self._training.store
        if self.refusal is not None:
            raise self.refusal
        if store.consistency.mode == "backup":
            store.pull_many([self._smallest], if_newer_than=store.version)  # asks what was decided
            if store.version >= store.round:
                store.commit(present=[])
        return store.round

    def _weight_of(self, fragment: Fragment) -> float:
        if self._learning.weight != "tokens":
            return self._training.weight
        weight = self._processes.total(self._counted - fragment.weighed_at)
        if weight <= 0:
            raise UsageError(
                "weight='tokens', and none were counted since this worker's last round: call"
                " optimizer.count(number of tokens) with each batch"
            )
        return weight

    def _pull(self, fragment: Fragment) -> list[torch.Tensor]:
        """The store's values of the fragment: of this process's parts."""
        values = fragment.empty() if self._processes.leads else []
        store, codecs = self._training.store, self._pull_codecs or None
        self._processes.ask(lambda: _nothing(store.pull_many(fragment.names, out=values, codec=codecs)))
        return self._processes.hand_out(fragment.whole, values)

    def _take_whole(self) -> None:
        """The parameters are the store's newest values."""
        self._merged = self._processes.ask(lambda: self._training.store.version)  # what comes then is pulled again
        for fragment in self._fragments:
            fragment.merge(self._pull(fragment), share=1.0)
            fragment.weighed_at = self._counted

    def _gather(self, trained: Sequence[Trained], whole: Sequence[SharedTensor]) -> list[torch.Tensor]:
        """The parameters' values, whole, on the leader, in main memory and the store's precision."""
        parts = [one.parameter.detach().to("cpu", w.dtype) for one, w in zip(trained, whole, strict=True)]
        return self._processes.gather(whole, parts)

    # ---- what the leader asks the store ----

    def _has_shared_rounds(self) -> bool:
        """Raises UsageError for a weight where there is no mean."""
        consistency = self._training.store.consistency
        if not consistency.lockstep and self._learning.weight != 1.0:
            raise UsageError(
                f"weight is {self._learning.weight!r}, a share in the mean of several learners, and in mode"
                f" {consistency.mode!r} each one's contribution is a step of its own: leave it out, or start the store"
                " with --mode sync, or with --quorum and --grace-s"
            )
        return consistency.lockstep

    def _create(self, specs: Sequence[TensorSpec], values: Sequence[torch.Tensor]) -> None:
        create_tensors(self._training, specs, values)
        agree(self._training, self._learning.agreed())

    def _restore(self, whole: Sequence[SharedTensor], values: Sequence[torch.Tensor]) -> None:
        store = self._training.store
        if self._training.is_first:
            store.restore({one.name: Restored(value) for one, value in zip(whole, values, strict=True)})
        store.barrier("published")


def _nothing(_: object) -> None:
    """For answers that nobody needs."""
