"""Lightning's `Trainer` saves and resumes through a session, wherever it is cut."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
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
    lives,
    loss_of,
    network,
    on,
    seed,
)

pytestmark = [pytest.mark.sockets, pytest.mark.one_loop]


@pytest.fixture(autouse=True)
def lightning() -> Iterator[None]:
    """Imported by the first test that runs (`lightning_training.py` says why), and without its advice about workers of
    the loader, and the like."""
    pytest.importorskip("lightning")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        yield


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
    from tests.integrations.lightning_training import trained

    def train(store: Store, stop_at: int | None, witness: Witness | None) -> Life:
        return trained(store, stop_at, witness, **WAYS[way])

    rest, whole = killed_and_whole(train, tmp_path)
    assert_same_training([rest], whole)


def test_a_training_that_was_stopped_goes_on_bit_for_bit(tmp_path: Path) -> None:
    from tests.integrations.lightning_training import trained

    def train(store: Store, stop_at: int | None) -> Life:
        return trained(store, stop_at, **WAYS["validating"])

    (whole,) = lives(train, tmp_path / "whole", None)
    parted = lives(train, tmp_path / "parted", 4, BATCHES, None, None)
    assert_same_training(parted, whole)


def test_a_training_that_a_validation_has_stopped_goes_on_bit_for_bit(tmp_path: Path) -> None:
    from tests.integrations.lightning_training import trained

    def one(store: Store, stop_at: int | None) -> Life:
        return trained(store, None, others=[stopping(store, "on_validation_end", stop_at)], **WAYS["validating"])

    (whole,) = lives(one, tmp_path / "whole", None)
    assert_same_training(lives(one, tmp_path / "parted", 4, None), whole)


@pytest.mark.parametrize("when", ["on_train_batch_end", "on_validation_end"])
def test_a_training_that_was_stopped_between_two_steps_goes_on_with_the_next_batch(tmp_path: Path, when: str) -> None:
    """Not with the next epoch. What had been accumulated is gone."""
    from tests.integrations.lightning_training import trained

    def one(store: Store, batch: int | None) -> Life:
        stops = stopping(store, when, None, batch=batch)
        return trained(store, None, others=[stops], accumulate_grad_batches=4, validates=True, val_check_interval=1)

    parts = lives(one, tmp_path, BATCHES - 2, None)
    assert [len(part.seen) for part in parts] == [BATCHES - 1, 2 * BATCHES + 1]


# ---- how it ends ----


def stopping(store: Store, when: str, version: int | None, *, batch: int | None = None) -> Any:
    """A callback that has Lightning stop, as EarlyStopping does: at that version, or after that batch of an epoch."""
    from lightning.pytorch import Callback

    class Stopping(Callback):
        pass

    def stop(trainer: Any, *_: Any) -> None:
        if version == store.version or batch == trainer.fit_loop.epoch_loop.batch_idx:
            trainer.should_stop = True

    made = Stopping()
    setattr(made, when, stop)
    return made


@pytest.mark.parametrize(("least", "num_steps"), [({"min_epochs": 2}, 2 * BATCHES), ({"min_steps": 8}, 8)])
def test_it_goes_on_as_long_as_lightning_does(least: dict[str, int], num_steps: int) -> None:
    from psstore.integrations.lightning import SessionCallback
    from tests.integrations.lightning_training import fitted

    class Ends(Hook):
        def __init__(self) -> None:
            self.versions: list[int] = []

        def end(self, session: TrainingSession) -> None:
            self.versions.append(session.version)

    ends = Ends()
    with psstore.connect("local://") as store:
        fitted(store, stopping(store, "on_train_batch_end", 3), SessionCallback(hooks=[ends]), **least)
    assert ends.versions == [num_steps]


def test_it_changes_nothing_of_a_training_that_nobody_disturbs() -> None:
    from lightning.pytorch import Callback

    from psstore.integrations.lightning import SessionCallback
    from tests.integrations.lightning_training import fitted

    def ended(*callbacks: Callback) -> bytes:
        seed(5)
        with psstore.connect("local://") as store:
            module = fitted(store, *callbacks, enable_checkpointing=bool(callbacks))
            return bytes_of(module)

    assert ended(SessionCallback()) == ended()


@pytest.mark.filterwarnings("ignore:the store has trained:UserWarning", "ignore:'0.weight':UserWarning")
def test_it_ends_where_the_session_does_even_if_lightning_was_to_train_for_longer() -> None:
    from psstore.integrations.lightning import SessionCallback
    from tests.integrations.lightning_training import fitted

    with psstore.connect("local://") as store:
        callback = SessionCallback(stop_at=2)
        module = fitted(store, callback, min_epochs=3)
        assert (store.version, len(module.seen), callback.session.is_clean) == (2, 2, True)
        again = SessionCallback(stop_at=2)
        assert fitted(store, again).seen == []
        assert again.session.is_clean


def test_a_store_without_lightnings_place_is_told_of() -> None:
    from psstore.integrations.lightning import SessionCallback
    from tests.integrations.lightning_training import fitted

    with psstore.connect("local://") as store:
        on(store, network()).step()
        with pytest.warns(UserWarning, match="begins with its first epoch, at the store's weights"):
            fitted(store, SessionCallback(stop_at=2))


def test_an_error_in_the_loop_ends_the_session() -> None:
    from lightning.pytorch import Callback

    from psstore.integrations.lightning import SessionCallback
    from tests.integrations.lightning_training import fitted

    class Failing(Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            if store.version == 3:
                raise ZeroDivisionError

    with psstore.connect("local://") as store:
        callback = SessionCallback()
        with pytest.raises(ZeroDivisionError):
            fitted(store, Failing(), callback)
        assert (store.version, callback.session.is_clean) == (3, False)


class Losses(Hook):
    def __init__(self) -> None:
        self.values: list[float] = []

    def after_step(self, session: TrainingSession, step: Step) -> None:
        self.values.append(step.values()["loss"])


def test_losses_are_those_of_batches_also_where_gradients_are_accumulated(monkeypatch: pytest.MonkeyPatch) -> None:
    from psstore.integrations.lightning import SessionCallback
    from tests.integrations import lightning_training

    def one(module: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = 1.0 + 0.0 * module(rows).sum()
        return loss

    monkeypatch.setattr(lightning_training, "loss_of", one)
    losses = Losses()
    with psstore.connect("local://") as store:
        lightning_training.fitted(store, SessionCallback(hooks=[losses]), max_epochs=1, accumulate_grad_batches=4)
    assert losses.values == [1.0, 1.0]


def test_losses_are_reported_and_one_that_is_not_finite_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from psstore.integrations.lightning import SessionCallback
    from tests.integrations import lightning_training

    right = loss_of

    def loss(module: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
        return right(module, rows) * (float("nan") if store.version == 2 else 1.0)

    monkeypatch.setattr(lightning_training, "loss_of", loss)
    losses = Losses()
    with psstore.connect("local://") as store:
        callback = SessionCallback(hooks=[losses])
        lightning_training.fitted(store, callback)
        assert callback.session.why == "loss is nan on rank 0 at version 3"
    assert [math.isnan(one) for one in losses.values] == [False, False, True]


def test_several_optimizers_are_refused() -> None:
    from lightning.pytorch import Trainer

    from psstore.integrations.lightning import SessionCallback
    from tests.integrations.lightning_training import QUIETLY, Module, loader

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
    from psstore.integrations.lightning import SessionCallback

    with pytest.raises(UsageError, match="no session yet"):
        assert SessionCallback().session
