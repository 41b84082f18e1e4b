"""Hugging Face's `Trainer` on a store: `train(trainer)` in place of `trainer.train()`.

Several workers have one training, as under DDP: by the process group that the Trainer makes, each gets its part of the
data, and rank 0 alone logs and saves. The Trainer saves and resumes through the store, by a session.

The Trainer resumes by a folder with its `trainer_state.json`. Here that is a temporary one of this process, with no
weights in it: those, and the optimizer's state, the store has.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

try:
    from transformers.trainer_callback import ExportableState, TrainerCallback, TrainerState
    from transformers.trainer_utils import TrainOutput
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise ModuleNotFoundError(
        "psstore.integrations.huggingface needs transformers: pip install transformers accelerate", name="transformers"
    ) from None

from psstore.errors import UsageError
from psstore.torch.hooks import Hook
from psstore.torch.loop import Step, TrainingSession, session, unwrapped
from psstore.torch.worker_state import Stateful, host_random, put_back_host_random

PROGRESS = "transformers.progress"
"""The part that has the Trainer's state, which the Trainer needs before it has anything else to restore."""


def train(
    trainer: Any,
    *,
    resume_from_checkpoint: str | bool | None = None,
    stop_at: int | None = None,
    state: Mapping[str, Stateful] | None = None,
    checkpoint: str | None = None,
    checkpoint_to: str | None = None,
    hooks: Sequence[Hook] = (),
    log_every_s: float | None = 10.0,
    summaries: str | None = None,
    stop_on_nan: bool = True,
) -> TrainOutput:
    """Trains as `trainer.train()` does, in a session that has one step per step of the optimizer.

    >>> trainer = Trainer(model, args, train_dataset=data, optimizers=(optimizer, None))
    >>> psstore.integrations.huggingface.train(trainer, stop_at=100_000, checkpoint="600s")

    `optimizer` is a `psstore.torch.DistributedOptimizer`. Run again, on a store that began from a checkpoint, training
    goes on at the batch after the last one that the checkpoint has, as the Trainer goes on from a checkpoint of its
    own: with its state, its schedule and its random states. The Trainer's loop stops where the session does. What the
    Trainer logs is reported to the session's hooks, with the next step. Where the Trainer would wrap the model into
    DistributedDataParallel, it is left as it is: the store averages gradients.

    Args:
        trainer: of `transformers`, or of what derives from it; it keeps to its own way of making the optimizer.
        resume_from_checkpoint: as `trainer.train` has it: a folder that the Trainer has saved, or True for the last
            one. Weights and the optimizer's state go from there into the store. Where the store's checkpoint has this
            worker's place in training, that counts.

    The other arguments are those of `psstore.torch.session`; `state` is for what the Trainer does not know of.

    Returns what `trainer.train()` does; where the training had come to its end before, that of no step. Raises
    UsageError for an optimizer that is not the store's.
    """
    trainer.create_optimizer()  # if it has none
    progress = _Progress(trainer)
    driven = session(
        unwrapped(trainer.optimizer),
        stop_at=stop_at,
        state={PROGRESS: progress, "transformers.schedule": _Schedule(trainer), **(state or {})},
        checkpoint=checkpoint,
        checkpoint_to=checkpoint_to,
        hooks=hooks,
        log_every_s=log_every_s,
        summaries=summaries,
        stop_on_nan=stop_on_nan,
    )
    found = driven.found(PROGRESS)
    if driven.is_over:  # the Trainer would take a step before it looks
        return TrainOutput(json.loads(found["state"])["global_step"] if found else 0, 0.0, {})
    if found is None and not resume_from_checkpoint:
        driven.warn_of_anew()
    driver = SessionDriver(trainer, driven, progress, loads_weights=bool(resume_from_checkpoint) and found is None)
    trainer.add_callback(driver)
    is_clean = False
    try:
        with _not_wrapped(trainer), _resuming(trainer, found, resume_from_checkpoint) as folder:
            output: TrainOutput = trainer.train(resume_from_checkpoint=folder)
        is_clean = True
    finally:
        trainer.remove_callback(driver)
        driven.end(is_clean=is_clean)
    return output


class SessionDriver(TrainerCallback):
    """Calls a session where the Trainer's loop is."""

    def __init__(
        self, trainer: Any, driven: TrainingSession, progress: _Progress, *, loads_weights: bool = False
    ) -> None:
        """`loads_weights`: whether the model has other weights than the store when training begins."""
        self._trainer = trainer
        self._session = driven
        self._progress = progress
        self._loads_weights = loads_weights
        self._step: Step | None = None
        self._logged: dict[str, float] = {}
        self._random: dict[str, Any] | None = None
        """What the first step is to begin with, where it is not what the epoch begins with."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The schedule and the optimizer are as they will be in the loop, and about to be as they were."""
        if unwrapped(self._trainer.optimizer) is not self._session.optimizer:
            raise UsageError("the Trainer has made itself another optimizer: pass it a model, and no model_init")
        if self._loads_weights:
            self._session.optimizer.publish()
        self._session.begin()
        loaded = self._progress.loaded
        if loaded is not None and loaded["is_inside_an_epoch"]:  # which the Trainer begins, and draws random numbers
            self._random = host_random()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._random is not None:
            put_back_host_random(self._random)
            self._random = None
        self._progress.loaded, self._progress.has_fetched = None, True
        self._step = self._session.before_step()
        self._progress.has_fetched = False

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._step is None:
            return
        self._step.report(**self._logged)
        self._logged = {}
        step, self._step = self._step, None
        self._session.after_step(step)
        if self._session.is_over:
            control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self._logged |= {name: value for name, value in (logs or {}).items() if isinstance(value, (int, float))}

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Also where the last step was not the epoch's last one: then what comes with an epoch's end is not due."""
        if (self._session.is_over or control.should_training_stop) and not _is_whole(state.epoch):
            self._session.end()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._session.end()


class _Progress:
    """The Trainer's own state, as it saves it."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.has_fetched = False
        """Whether the batches of the next step are there, so that their epoch has begun."""
        self.loaded: dict[str, Any] | None = None
        """What training goes on from, as long as nothing has come of it."""

    def state_dict(self) -> dict[str, Any]:
        if self.loaded is not None:
            return self.loaded
        state = self._trainer.state
        is_inside = self.has_fetched or not _is_whole(state.epoch)
        text = json.dumps({**asdict(state), "stateful_callbacks": self._callbacks()})
        return {"state": text, "is_inside_an_epoch": is_inside}

    def load_state_dict(self, found: dict[str, Any]) -> None:
        """The Trainer has read it from the folder."""
        self.loaded = found

    def _callbacks(self) -> dict[str, Any]:
        """States of callbacks by class, of several of one class a list, as the Trainer looks for them."""
        found: dict[str, list[Any]] = {}
        for one in [*self._trainer.callback_handler.callbacks, self._trainer.control]:
            if isinstance(one, ExportableState):
                found.setdefault(type(one).__name__, []).append(one.state())
        return {name: states[0] if len(states) == 1 else states for name, states in found.items()}


def _is_whole(epoch: float | None) -> bool:
    """Whether so many epochs are over, and no other has begun."""
    return epoch is None or math.isclose(epoch, round(epoch))


class _Schedule:
    """The Trainer's, which it makes as training begins."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = self._trainer.lr_scheduler.state_dict()
        return {key: value for key, value in found.items() if not callable(value)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._trainer.lr_scheduler.load_state_dict(state)


@contextmanager
def _not_wrapped(trainer: Any) -> Iterator[None]:
    """Within it, what the Trainer prepares has its device and precision, and is no DistributedDataParallel."""
    accelerator = trainer.accelerator
    accelerator.prepare_model = partial(accelerator.prepare_model, evaluation_mode=True)  # in Accelerate's words
    try:
        yield
    finally:
        del accelerator.prepare_model


@contextmanager
def _resuming(trainer: Any, found: dict[str, Any] | None, otherwise: str | bool | None) -> Iterator[str | bool | None]:
    """What the Trainer is told to resume from: a folder that it can read, for as long as it may."""
    if found is None:
        yield otherwise
        return
    with TemporaryDirectory(prefix="psstore-") as folder:
        TrainerState(**json.loads(found["state"])).save_to_json(str(Path(folder) / "trainer_state.json"))
        trainer._load_from_checkpoint = lambda *_, **__: None  # weights: they are in place
        try:
            yield folder
        finally:
            del trainer._load_from_checkpoint
