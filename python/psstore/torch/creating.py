"""Whose values a tensor begins with: rank 0's, or what the store has already."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from psstore.errors import DTypeMismatch, RuleMismatch, ShapeMismatch
from psstore.torch.parameters import Trained, some
from psstore.torch.stepping import Training
from psstore.torch.telling import explained, warn
from psstore.types import TensorSpec


def create(training: Training, specs: Sequence[TensorSpec], values: Sequence[torch.Tensor | None]) -> None:
    """Creates tensors with rank 0's values. What the store has of that name is dealt with as `training.exist` says.

    With 'error' and 'overwrite', which only rank 0 can carry out, all workers wait for each other. Raises TensorExists,
    ShapeMismatch, DTypeMismatch, RuleMismatch.
    """
    store = training.store
    try:
        if training.exist != "match" and training.is_first:
            store.create_many(specs, values, exist=training.exist)
            store.barrier("created")
            return
        if training.exist != "match":
            store.barrier("created")
        store.create_many(specs, values if training.is_first else None, offer=training.is_first)
    except (ShapeMismatch, DTypeMismatch, RuleMismatch) as error:
        raise explained(
            error,
            "models must be alike on every worker; if another optimizer trains it, each needs a name of its own: pass"
            " name= to DistributedOptimizer",
        ) from None


def split_trained(training: Training, pulled: Sequence[Trained]) -> tuple[list[Trained], list[Trained]]:
    """(those that begin here, those that the store has trained before). Tells rank 0, whose values would count, that
    they don't."""
    store = training.store
    versions = {one.name: store.version_of(one.name) for one in pulled}
    before = [one for one in pulled if versions[one.name] > 0]
    if before and training.is_first:
        warn(
            f"the store has trained {some([one.name for one in before])} before, up to version"
            f" {max(versions.values())}: training goes on from the weights and the optimizer state there, and those"
            " given here are not used. To start anew, pass exist='overwrite', or exist='error' to be sure; to train"
            " another model there, pass name="
        )
    return [one for one in pulled if versions[one.name] == 0], before
