"""Which way a step is taken: as the optimizer's class and the constructor's options have it."""

from __future__ import annotations

from typing import Literal, get_args

import torch

from psstore.client.store import Store
from psstore.errors import NotAWorker, UsageError
from psstore.torch.averaging import Averaging
from psstore.torch.eager import EagerStep
from psstore.torch.param_groups import check_distributable, has_rule, may_compress
from psstore.torch.store_step import StoreStep
from psstore.torch.training import Overlap, StepStrategy, Training
from psstore.torch.worker_step import WorkerStep
from psstore.wire.messages import Exist

Mode = Literal["gradients", "average"]
"""What the workers share in a round: gradients, or what training alone made of the parameters."""

OPTIONS = {"overlap": Overlap, "mode": Mode, "exist": Exist}


def check_arguments(optimizer: torch.optim.Optimizer, store: Store, **options: str) -> None:
    """Raises UsageError, NotAWorker for what can't work together."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"a {type(optimizer).__qualname__} is no optimizer: wrap the torch.optim optimizer itself")
    if not isinstance(store, Store):
        raise UsageError(f"a {type(store).__qualname__} is no store that blocks: pass what psstore.connect() returned")
    if store.rank is None:
        raise NotAWorker("only a worker's store can train: connect with role='worker' (the default), before leave()")
    for option, value in options.items():
        allowed = get_args(OPTIONS[option])
        if value not in allowed:
            raise UsageError(f"{option} is {value!r}; it must be one of {', '.join(map(repr, allowed))}")
    check_distributable(optimizer)


def select_step(training: Training, *, mode: Mode, every: int) -> StepStrategy:
    """Raises UsageError for what the store's mode or the optimizer's class rules out."""
    if mode == "average":
        if may_compress(training.optimizer.param_groups, training.compression):
            raise UsageError("compression is for gradients, and mode='average' exchanges parameters: leave it out")
        return Averaging(training, every=every)
    if every != 1:
        raise UsageError(f"every={every} is for mode='average'; gradients are exchanged in every step")
    by_store = has_rule(training.optimizer)
    if training.overlap == "eager":
        if not by_store:
            kind = type(training.optimizer).__qualname__
            raise UsageError(f"overlap='eager' needs the store to take the step, and it has no rule for {kind}")
        return EagerStep(training)
    return StoreStep(training) if by_store else WorkerStep(training)
