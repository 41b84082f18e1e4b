"""Lightning's `Trainer` saves and resumes through a session, wherever it is cut."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import psstore
from psstore.client.store import Store
from psstore.errors import UsageError
from psstore.torch import Hook, Step, TrainingSession
from tests.integrations.support import (
    BATCH,
    BATCHES,
    Life,
    Rows,
    Stream,
    Witness,
    assert_same_training,
    bytes_of,
    killed_and_whole,
    life,
    lives,
    loss_of,
    network,
    on,
    seed,
)

pytest.importorskip("lightning")
from lightning.pytorch import Callback, LightningModule, Trainer

from psstore.integrations.lightning import SessionCallback

pytestmark = [pytest.mark.sockets, pytest.mark.one_loop]

QUIETLY: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


@pytest.fixture(autouse=True)
def lightnings_advice() -> Iterator[None]:
    """About workers of the loader, and the like."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        yield


class Module(LightningModule):
    def __init__(self, store: Store, witness: Witness | None, *, interval: str) -> None:
        super().__init__()
        self.inner = network()
        self.seen: list[Any] = []
        self._store = store
        self._witness = witness
        self._interval = interval

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        numbers, rows = batch
        self.seen.append((self._store.version, self.current_epoch, number, numbers.tolist(), rows.sum().item()))
        if self._witness is not None:
            self._witness.look(self._store.version)
        return loss_of(self.inner, rows)

    def validation_step(self, batch: Any, _: int) -> None:
        torch.rand(3)

    def configure_optimizers(self) -> Any:
        optimizer = on(self._store, self.inner)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": self._interval}}


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(Rows(augmented=True), BATCH, shuffle=True, **options)


class Counting(Callback):
    """A callback with a state of its own."""

    def __init__(self) -> None:
        self.batches = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.batches += 1

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches = state["batches"]


def trained(
    store: Store,
    stop_at: int | None,
    witness: Witness | None = None,
    *,
    interval: str = "step",
    validates: bool = False,
    data: Callable[[], DataLoader[Any]] = loader,
    **options: Any,
) -> Life:
    module = Module(store, witness, interval=interval)
    callback, counting = SessionCallback(stop_at=stop_at, checkpoint="2"), Counting()
    trainer = Trainer(
        **QUIETLY, **{"max_epochs": 3, "num_sanity_val_steps": 0, **options}, callbacks=[callback, counting]
    )
    trainer.fit(module, data(), loader() if validates else None)
    assert (trainer.global_step, callback.session.is_clean) == (store.version, True)
    assert trainer.fit_loop.epoch_loop._batches_that_stepped == store.version, "what loggers count by"
    assert counting.batches == trainer.fit_loop.epoch_loop.total_batch_idx + 1
    return life(module.inner, callback.session.optimizer, module.seen)


WAYS: dict[str, dict[str, Any]] = {
    "batch by batch": {},
    "accumulating": {"accumulate_grad_batches": 4},
    "validating": {"validates": True, "val_check_interval": 2},
    "rates by epoch": {"interval": "epoch", "validates": True},
    "a stream": {"data": lambda: DataLoader(Stream(), BATCH), "accumulate_grad_batches": 4},
    "processes": {"data": lambda: DataLoader(Rows(augmented=False), BATCH, shuffle=True, num_workers=2)},
    "by steps": {"max_epochs": -1, "max_steps": 11},
}


QUICK = ("accumulating", "validating")
"""The others are of the same kind, and take as long."""


@pytest.mark.parametrize("way", [way if way in QUICK else pytest.param(way, marks=pytest.mark.long) for way in WAYS])
def test_a_training_that_was_killed_goes_on_from_its_checkpoint_bit_for_bit(way: str, tmp_path: Path) -> None:
    def train(store: Store, stop_at: int | None, witness: Witness | None) -> Life:
        return trained(store, stop_at, witness, **WAYS[way])

    rest, whole = killed_and_whole(train, tmp_path)
    assert_same_training([rest], whole)


def test_a_training_that_was_stopped_goes_on_bit_for_bit(tmp_path: Path) -> None:
    def train(store: Store, stop_at: int | None) -> Life:
        return trained(store, stop_at, **WAYS["validating"])

    (whole,) = lives(train, tmp_path / "whole", None)
    parted = lives(train, tmp_path / "parted", 4, BATCHES, None, None)
    assert_same_training(parted, whole)


# ---- how it ends ----


def fitted(store: Store, *callbacks: Callback, **options: Any) -> Module:
    module = Module(store, None, interval="step")
    trainer = Trainer(**QUIETLY, **{"max_epochs": 3, **options}, callbacks=list(callbacks))
    trainer.fit(module, loader())
    return module


def test_it_changes_nothing_of_a_training_that_nobody_disturbs() -> None:
    def ended(*callbacks: Callback) -> bytes:
        seed(5)
        with psstore.connect("local://") as store:
            module = fitted(store, *callbacks, enable_checkpointing=bool(callbacks))
            return bytes_of(module)

    assert ended(SessionCallback()) == ended()


@pytest.mark.filterwarnings("ignore:the store has trained:UserWarning", "ignore:'0.weight':UserWarning")
def test_it_ends_where_the_session_does_even_if_lightning_was_to_train_for_longer() -> None:
    with psstore.connect("local://") as store:
        callback = SessionCallback(stop_at=2)
        module = fitted(store, callback, min_epochs=3)
        assert (store.version, len(module.seen), callback.session.is_clean) == (2, 2, True)
        again = SessionCallback(stop_at=2)
        assert fitted(store, again).seen == []
        assert again.session.is_clean


def test_an_error_in_the_loop_ends_the_session() -> None:
    class Failing(Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            if store.version == 3:
                raise ZeroDivisionError

    with psstore.connect("local://") as store:
        callback = SessionCallback()
        with pytest.raises(ZeroDivisionError):
            fitted(store, Failing(), callback)
        assert (store.version, callback.session.is_clean) == (3, False)


def test_losses_are_reported_and_one_that_is_not_finite_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Losses(Hook):
        def __init__(self) -> None:
            self.values: list[float] = []

        def after_step(self, session: TrainingSession, step: Step) -> None:
            self.values.append(step.values()["loss"])

    right = loss_of

    def loss(module: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
        return right(module, rows) * (float("nan") if store.version == 2 else 1.0)

    monkeypatch.setattr(f"{__name__}.loss_of", loss)
    losses = Losses()
    with psstore.connect("local://") as store:
        callback = SessionCallback(hooks=[losses])
        fitted(store, callback)
        assert callback.session.why == "loss is nan on rank 0 at version 3"
    assert [math.isnan(one) for one in losses.values] == [False, False, True]


def test_several_optimizers_are_refused() -> None:
    class Two(Module):
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]

    trainer = Trainer(**QUIETLY, max_epochs=1, callbacks=[SessionCallback()])
    with psstore.connect("local://") as store:
        module = Two(store, None, interval="step")
        module.automatic_optimization = False
        with pytest.raises(UsageError, match="configured 2"):
            trainer.fit(module, loader())


def test_there_is_no_session_before_fit() -> None:
    with pytest.raises(UsageError, match="no session yet"):
        assert SessionCallback().session
