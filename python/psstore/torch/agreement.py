"""What all learners of a store have to have alike, and the store can't see: the first of them writes it down there."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from psstore.errors import UsageError
from psstore.torch.training import Training, create_tensors
from psstore.types import TensorSpec

MOST = 32
"""Numbers that can be agreed on: four of a learner's, and the hyper-parameters of a rule."""


def agree(training: Training, settings: Mapping[str, float]) -> None:
    """Returns when the store has these settings: the first worker's, or those that it had already. Raises UsageError
    that names those in which this worker differs."""
    here = torch.zeros(MOST, dtype=torch.float64, device="cpu")
    here[: len(settings)] = torch.tensor(list(settings.values()), dtype=torch.float64, device="cpu")
    stored = training.names.stored("learners/agreed")
    spec = TensorSpec(name=stored, shape=(MOST,), dtype="float64", rule="assign", zeros=False)
    create_tensors(training, [spec], [here])
    there = torch.empty_like(here)
    training.store.pull(stored, out=there)
    differing = [
        f"{name}={mine:g} here and {others:g} there"
        for name, mine, others in zip(settings, here.tolist(), there.tolist(), strict=False)
        if mine != others
    ]
    if differing:
        raise UsageError(
            f"the learners of this store do otherwise than this one: {', '.join(differing)}. Give all of them the same,"
            " or train under another name="
        )
