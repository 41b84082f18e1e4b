"""The store takes the step: gradients go there, new parameters come back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from psstore.errors import UsageError
from psstore.torch.parameters import STORED_AS, Trained
from psstore.torch.rules import hyper_of, rule_of
from psstore.torch.stepping import Overflow, Training
from psstore.types import TensorSpec


class StoreStep:
    """Push this round's gradients, commit with the hyper-parameters of now, pull into the parameters' own memory."""

    def __init__(self, training: Training) -> None:
        self._training = training

    def add(self, trained: Sequence[Trained]) -> None:
        training = self._training
        specs = [self._spec(one) for one in trained]
        values = [one.parameter.detach() for one in trained] if training.is_first else None
        training.store.create_many(specs, values, offer=training.is_first)
        self._pull(trained)

    def step(self, overflow: Overflow) -> bool:
        store = self._training.store
        store.push_many(self._gradients())
        committed = store.commit(
            self._hypers(),
            loss_scale=overflow.loss_scale,
            non_finite=overflow.found,
            average=self._training.average,
        )
        self._pull(self._training.trained)
        return not committed.skipped

    def clip(self, max_norm: float) -> torch.Tensor:
        raise NotImplementedError

    def no_sync(self) -> AbstractContextManager[None]:
        raise NotImplementedError

    def publish(self) -> None:
        raise NotImplementedError

    def state(self) -> dict[int, dict[str, Any]]:
        return {}

    def load_state(self, state: Mapping[int, Mapping[str, Any]]) -> None:
        if state:
            raise UsageError(
                "this state_dict holds optimizer state (momenta and the like) of a plain torch optimizer; the store"
                " keeps that state itself and can't take it over: start from the model's weights, or clear"
                " state_dict['state'] to load the hyper-parameters only"
            )

    # ---- how ----

    def _spec(self, one: Trained) -> TensorSpec:
        training = self._training
        return TensorSpec(
            name=one.name,
            shape=tuple(one.parameter.shape),
            dtype=STORED_AS[one.parameter.dtype],
            rule=rule_of(training.optimizer, training.optimizer.param_groups[one.group]),
            group=training.first_group + one.group,
            zeros=False,
        )

    def _gradients(self) -> dict[str, torch.Tensor]:
        """By name, those that are there."""
        found = {}
        for name, parameter, _ in self._training.trained:
            gradient = parameter.grad
            if gradient is not None:
                if gradient.layout is not torch.strided:
                    raise UsageError(
                        f"the gradient of {name!r} has layout {gradient.layout}; the store trains dense gradients: make"
                        " the embedding with sparse=False"
                    )
                found[name] = gradient
        return found

    def _hypers(self) -> dict[int, dict[str, float]]:
        """Of every group that has something to train, by its number in the store."""
        training = self._training
        groups = training.optimizer.param_groups
        return {
            training.first_group + index: hyper_of(rule_of(training.optimizer, groups[index]), groups[index])
            for index in sorted({one.group for one in training.trained})
        }

    def _pull(self, trained: Sequence[Trained]) -> None:
        self._training.store.pull_many([one.name for one in trained], out=[one.parameter.detach() for one in trained])
