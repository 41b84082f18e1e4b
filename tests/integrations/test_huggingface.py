"""Hugging Face's `Trainer` saves and resumes through a session, wherever it is cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import psstore
from psstore.client.store import Store
from psstore.errors import UsageError
from psstore.torch import Hook, Step, TrainingSession
from tests.integrations.support import (
    BATCHES,
    Life,
    Witness,
    assert_same_training,
    bytes_of,
    killed_and_whole,
    lives,
)

pytestmark = [pytest.mark.sockets, pytest.mark.one_loop]


@pytest.fixture(autouse=True)
def transformers() -> None:
    """Imported by the first test that runs (`huggingface_training.py` says why)."""
    pytest.importorskip("transformers")


WAYS: dict[str, dict[str, Any]] = {
    "batch by batch": {},
    "accumulating": {"gradient_accumulation_steps": 4, "lr_scheduler_type": "cosine"},
    "validating": {"eval_strategy": "steps", "eval_steps": 2},
    "by steps": {
        "max_steps": 11,
        "eval_strategy": "epoch",
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 8,
    },
}


QUICK = ("accumulating", "validating")
"""The others are of the same kind, and take as long."""


@pytest.mark.parametrize("way", [way if way in QUICK else pytest.param(way, marks=pytest.mark.long) for way in WAYS])
def test_a_training_that_was_killed_goes_on_from_its_checkpoint_bit_for_bit(way: str, tmp_path: Path) -> None:
    from tests.integrations.huggingface_training import trained

    def one(store: Store, stop_at: int | None, witness: Witness | None) -> Life:
        return trained(store, stop_at, witness, tmp_path / "output", **WAYS[way])

    rest, whole = killed_and_whole(one, tmp_path)
    assert_same_training([rest], whole)


def test_a_training_that_was_stopped_goes_on_bit_for_bit(tmp_path: Path) -> None:
    from tests.integrations.huggingface_training import trained

    def one(store: Store, stop_at: int | None) -> Life:
        return trained(store, stop_at, None, tmp_path / "output", **WAYS["validating"])

    (whole,) = lives(one, tmp_path / "whole", None)
    parted = lives(one, tmp_path / "parted", 4, BATCHES, None, None)
    assert_same_training(parted, whole)


def test_a_training_that_a_callback_has_stopped_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """In the middle of an epoch, whose end has an evaluation, for which random numbers are drawn."""
    from transformers import TrainerCallback

    from tests.integrations.huggingface_training import trained

    class Stopping(TrainerCallback):
        def __init__(self, version: int | None) -> None:
            self._version = version

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == self._version:
                control.should_training_stop = True

    def one(store: Store, stop_at: int | None) -> Life:
        return trained(store, None, None, tmp_path / "output", others=[Stopping(stop_at)], eval_strategy="epoch")

    (whole,) = lives(one, tmp_path / "whole", None)
    assert_same_training(lives(one, tmp_path / "parted", 4, None), whole)


# ---- what it begins with ----


def test_a_checkpoint_of_the_trainers_own_goes_into_the_store(tmp_path: Path) -> None:
    from psstore.integrations.huggingface import train
    from tests.integrations.huggingface_training import Model, trainer_of

    def ended(resumes: str | bool | None) -> tuple[bytes, int]:
        with psstore.connect("local://") as store:
            model = Model(store)
            trainer = trainer_of(model, store, tmp_path, save_strategy="steps", save_steps=4)
            train(trainer, resume_from_checkpoint=resumes)
            return bytes_of(model), store.version

    whole, num_steps = ended(None)
    assert ended(str(tmp_path / "checkpoint-4")) == (whole, num_steps - 4)
    assert ended(True) == (whole, 0)  # the last one, of the end


def test_a_store_without_the_trainers_place_is_told_of(tmp_path: Path) -> None:
    from psstore.integrations.huggingface import train
    from tests.integrations.huggingface_training import Model, trainer_of

    with psstore.connect("local://") as store:
        trainer = trainer_of(Model(store), store, tmp_path)
        assert trainer.optimizer is not None
        trainer.optimizer.step()
        with pytest.warns(UserWarning, match="begins with its first epoch, at the store's weights"):
            train(trainer, stop_at=2)


# ---- how it ends ----


def test_it_changes_nothing_of_a_training_that_nobody_disturbs(tmp_path: Path) -> None:
    from transformers import Trainer

    from psstore.integrations.huggingface import train
    from tests.integrations.huggingface_training import Model, trainer_of

    def ended(run: Callable[[Trainer], object]) -> bytes:
        with psstore.connect("local://") as store:
            model = Model(store)
            run(trainer_of(model, store, tmp_path))
            return bytes_of(model)

    assert ended(train) == ended(Trainer.train)


def test_it_ends_where_the_session_does(tmp_path: Path) -> None:
    from psstore.integrations.huggingface import train
    from tests.integrations.huggingface_training import Model, trainer_of

    with psstore.connect("local://") as store:
        model = Model(store)
        trainer = trainer_of(model, store, tmp_path)
        assert train(trainer, stop_at=2).global_step == 2
        assert (store.version, len(model.seen)) == (2, 2)
        assert train(trainer, stop_at=2).global_step == 2
        assert len(model.seen) == 2


class Told(Hook):
    def __init__(self) -> None:
        self.reported: list[dict[str, float]] = []
        self.ended: list[bool] = []

    def after_step(self, session: TrainingSession, step: Step) -> None:
        self.reported.append(step.values())
        if "loss" in step.values():
            session.stop()

    def end(self, session: TrainingSession) -> None:
        self.ended.append(session.is_clean)


def test_what_the_trainer_logs_is_reported_with_the_next_step(tmp_path: Path) -> None:
    from psstore.integrations.huggingface import train
    from tests.integrations.huggingface_training import Model, trainer_of

    told = Told()
    with psstore.connect("local://") as store:
        train(trainer_of(Model(store), store, tmp_path), hooks=[told])
        assert store.version == 4  # the step in which it was stopped, and the one that was under way
    assert [("loss" in one, "learning_rate" in one) for one in told.reported[:3]] == [(False, False)] * 2 + [
        (True, True)
    ]
    assert told.ended == [True]


def test_an_evaluation_takes_nothing_from_what_is_reported(tmp_path: Path) -> None:
    from psstore.integrations.huggingface import train
    from tests.integrations.huggingface_training import Model, trainer_of

    told = Told()
    with psstore.connect("local://") as store:
        train(trainer_of(Model(store), store, tmp_path, eval_strategy="steps", eval_steps=2), hooks=[told])
    assert [{"loss", "eval_runtime"} <= one.keys() for one in told.reported[:3]] == [False, False, True]


def test_an_error_in_the_loop_ends_the_session_and_leaves_the_trainer_as_it_was(tmp_path: Path) -> None:
    from transformers import TrainerCallback

    from psstore.integrations.huggingface import train
    from tests.integrations.huggingface_training import Model, trainer_of

    class Failing(TrainerCallback):
        def on_substep_end(self, *_: Any, **__: Any) -> None:
            raise ZeroDivisionError

    told = Told()
    with psstore.connect("local://") as store:
        trainer = trainer_of(Model(store), store, tmp_path, gradient_accumulation_steps=2)
        trainer.add_callback(Failing)
        before = list(trainer.callback_handler.callbacks)
        with pytest.raises(ZeroDivisionError):
            train(trainer, hooks=[told])
        assert trainer.callback_handler.callbacks == before
    assert told.ended == [False]


def test_an_optimizer_of_the_trainers_own_is_refused(tmp_path: Path) -> None:
    from psstore.integrations.huggingface import train
    from tests.integrations.huggingface_training import Model, trainer_of

    with psstore.connect("local://") as store:
        trainer = trainer_of(Model(store), store, tmp_path)
        trainer.optimizer = None
        with pytest.raises(UsageError, match=r"is no psstore\.torch\.DistributedOptimizer"):
            train(trainer)
