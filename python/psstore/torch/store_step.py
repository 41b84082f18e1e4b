"""StoreStep: the store takes the step. Gradients go there, new parameters come back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from psstore.torch.change_detection import ExternalUpdates
from psstore.torch.gradient_step import CommittedRound, GradientStep, Hypers
from psstore.torch.optimizer_state import adopt_state, drop_local_state, load_state, read_state
from psstore.torch.param_groups import check_hyper, check_rule_stays, hyper_of, rule_of, with_gradient_options
from psstore.torch.parameters import Trained, mark_written
from psstore.torch.part_tensors import create_parts
from psstore.torch.training import Training, create_tensors, split_trained
from psstore.torch.warnings import warn
from psstore.types import TensorSpec


class StoreStep(GradientStep):
    """Pushes this round's gradients, commits with the hyper-parameters of now, pulls into the parameters' own
    memory."""

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._codecs: dict[str, str] = {}
        """Codecs of pulls other than 'none', by name."""
        self._external = ExternalUpdates(training, codecs=self._codecs)
        self._retired = False
        """Another optimizer uses the same rule state; the next step warns of it."""
        self._decision: int | None = None
        """The last decision that all parameters here include; None before the first step."""
        self._rules: dict[int, str] = {}
        """Rules that the store's tensors have for good, by group."""
        self._checked: dict[int, dict[str, float]] = {}
        """Hyper-parameters that have passed their check, by group."""

    def add(self, trained: Sequence[Trained]) -> None:
        training = self._training
        chosen = {one.name: training.compression_of(one) for one in trained}
        specs = [self._spec(one) for one in trained]
        if training.has_parts:
            create_parts(training, trained, specs)
        else:
            create_tensors(training, specs, [one.parameter.detach() for one in trained])
        self._codecs.update({name: one.pull for name, one in chosen.items() if one.pull != "none"})
        self._pull([one.name for one in trained], [one.parameter for one in trained], [one.owner for one in trained])
        begun, continued = split_trained(training, trained)
        adopt_state(training, begun)
        drop_local_state(training, continued)
        self._external.add(trained)
        self._gradients.watch(
            {one.name: one.parameter for one in trained},
            codecs={name: one.push for name, one in chosen.items()},
        )

    def retire(self) -> None:
        super().retire()
        self._retired = True

    def publish(self) -> None:
        training = self._training
        training.publish()
        self._pull(training.trained_names, training.trained_parameters, training.trained_owners)
        self._external.remember(training.trained)

    def synchronize(self) -> None:
        """Does nothing: the parameters are the store's after each step."""

    def state(self, *, whole: bool = False) -> Mapping[torch.Tensor, dict[str, Any]]:
        return read_state(self._training, whole=whole)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        load_state(self._training, state_dict)

    # ---- how ----

    def _spec(self, one: Trained) -> TensorSpec:
        training = self._training
        group = training.optimizer.param_groups[one.group]
        rule = self._rules.setdefault(one.group, rule_of(training.optimizer, group))
        return with_gradient_options(one.spec(rule, group=training.first_group + one.group), group)

    def _prepare(self) -> None:
        training = self._training
        if self._retired:
            self._warn_of_successor()
        if training.optimizer.state:
            adopt_state(training, training.trained)
        self._external.reconcile()

    def _warn_of_successor(self) -> None:
        self._retired = False
        warn(
            "step() of an optimizer after another was made that trains some of its tensors under the same names: both"
            " use the same momenta and other state in the store. Step one of them only, or pass name= for each to have"
            " its own. This is said once"
        )

    def _apply(self, committed: CommittedRound) -> None:
        training, newer_than = self._training, None if committed.changed_all else self._decision
        places = training.trained_names, training.trained_parameters, training.trained_owners
        self._pull(*places, newer_than=newer_than)
        self._external.remember_values(training.trained)
        self._decision = committed.commit.decision

    def _hypers(self) -> Hypers:
        """Hyper-parameters of every group that has something to train. Raises UsageError, BadHyper."""
        training = self._training
        groups = training.optimizer.param_groups
        found = {}
        for index in sorted(training.trained_groups):
            rule = self._rules[index]
            check_rule_stays(rule, training.optimizer, groups[index], f"parameter group {index}")
            hyper = found[training.first_group + index] = hyper_of(rule, groups[index])
            if hyper != self._checked.get(index):
                dtypes = {one.parameter.dtype for one in training.trained if one.group == index}
                check_hyper(rule, hyper, group=index, dtypes=dtypes)
                self._checked[index] = hyper
        return found

    def _pull(
        self,
        names: Sequence[str],
        parameters: Sequence[torch.Tensor],
        owners: Sequence[torch.Tensor],
        *,
        newer_than: int | None = None,
    ) -> None:
        """Pulls into the parameters what the store has changed after the decision `newer_than`; None: everything."""
        values = self._training.store.pull_many(
            names, out=parameters, if_newer_than=newer_than, codec=self._codecs or None
        )
        if newer_than is not None:
            owners = [one for one, value in zip(owners, values, strict=True) if value is not None]
        mark_written(owners)
