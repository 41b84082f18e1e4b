"""Lightning and Accelerate train on a store without a strategy or a plugin: the optimizer is all that they are given.

One worker, in this process, is compared with plain torch; two are in tests/integrations/test_pages.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

import psstore
from tests.torch.support import assert_same_bits

STEPS = 8
BATCH = 4
RATE = 0.1
MAX_NORM = 0.1


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))


def loader() -> DataLoader[tuple[torch.Tensor, ...]]:
    inputs = torch.randn(STEPS * BATCH, 5, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=BATCH)


def sgd(module: nn.Module) -> SGD:
    return SGD(module.parameters(), lr=RATE, momentum=0.9, foreach=False)


def on(store: psstore.Store, module: nn.Module) -> psstore.torch.DistributedOptimizer:
    return psstore.torch.DistributedOptimizer(sgd(module), store, named_parameters=module.named_parameters())


def plain(max_norm: float | None = None) -> nn.Module:
    """The loop that both frameworks have inside."""
    module = model()
    optimizer = sgd(module)
    for inputs, targets in loader():
        optimizer.zero_grad()
        nn.functional.mse_loss(module(inputs), targets).backward()  # type: ignore[no-untyped-call]
        if max_norm is not None:
            nn.utils.clip_grad_norm_(module.parameters(), max_norm)
        optimizer.step()
    return module


def assert_close(left: nn.Module, right: nn.Module) -> None:
    """But for the norm, which torch sums in float32."""
    for one, other in zip(left.parameters(), right.parameters(), strict=True):
        torch.testing.assert_close(one, other)


# ---- Accelerate ----


def accelerated(store: psstore.Store, clip: Callable[[Any, nn.Module, Any], object]) -> nn.Module:
    """What it trains. `clip`: called before each step, with the accelerator and what it made of model and optimizer."""
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    module = model()
    prepared, optimizer, batches = accelerator.prepare(module, on(store, module), loader())
    for inputs, targets in batches:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.mse_loss(prepared(inputs), targets))
        clip(accelerator, prepared, optimizer)
        optimizer.step()
    return module


@pytest.mark.parametrize("max_norm", [None, MAX_NORM], ids=["as it is", "clipped"])
def test_accelerate_prepares_the_optimizer_and_trains_as_plain_torch(
    store: psstore.Store, max_norm: float | None
) -> None:
    def clip(accelerator: Any, prepared: nn.Module, _: Any) -> None:
        if max_norm is not None:
            accelerator.clip_grad_norm_(prepared.parameters(), max_norm)

    module = accelerated(store, clip)
    assert store.version == STEPS
    assert_same_bits(module, plain(max_norm))


def test_accelerate_leaves_clipping_to_the_optimizer_that_it_has_prepared(store: psstore.Store) -> None:
    module = accelerated(store, lambda _, __, optimizer: optimizer.optimizer.clip_grad_norm_(MAX_NORM))
    assert_close(module, plain(MAX_NORM))


# ---- Lightning ----


def lightning_module(lightning: Any, store: psstore.Store, *, clips: bool = False) -> Any:
    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = model()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            inputs, targets = batch
            return nn.functional.mse_loss(self.inner(inputs), targets)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return on(store, self.inner)

        def configure_gradient_clipping(
            self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
        ) -> None:
            if clips:
                optimizer.clip_grad_norm_(MAX_NORM)

    return Module()


@pytest.mark.parametrize("clips", [False, True])
def test_lightning_steps_the_optimizer_that_a_module_returns_and_trains_as_plain_torch(
    store: psstore.Store, clips: bool
) -> None:
    lightning = pytest.importorskip("lightning")
    module = lightning_module(lightning, store, clips=clips)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's own advice about workers of the loader
        trainer.fit(module, loader())
    assert store.version == STEPS
    if clips:
        assert_close(module.inner, plain(MAX_NORM))
    else:
        assert_same_bits(module.inner, plain())
