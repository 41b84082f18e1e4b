"""Lightning's `Trainer` on a store: `StoreStrategy` has several workers in one Trainer, and `SessionCallback` saves and
resumes through the store, by a session in its loop.

What a session brings back is what `Trainer.fit(ckpt_path=…)` brings back, from the same `state_dict()`s, but for the
weights and the optimizer's state, which the store has; and the loaders' place, also of those that have no state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

try:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import Checkpoint
    from lightning.pytorch.strategies import DDPStrategy
except ModuleNotFoundError as error:
    if error.name != "lightning":
        raise
    raise ModuleNotFoundError(
        "psstore.integrations.lightning needs Lightning: pip install lightning", name="lightning"
    ) from None

from psstore.errors import UsageError
from psstore.torch.hooks import Hook
from psstore.torch.loop import Step, TrainingSession, session
from psstore.torch.resumable_loader import ResumableLoader
from psstore.torch.worker_state import Stateful

LOOPS = "lightning.loops"
"""The part that has the place in training."""


class StoreStrategy(DDPStrategy):
    """Lightning's DDP but for DDP itself: the store averages gradients, and the module is not wrapped.

    >>> Trainer(accelerator="cpu", devices=2, strategy=StoreStrategy()).fit(module, loader)

    The module's `configure_optimizers` returns a `psstore.torch.DistributedOptimizer`. All else that Lightning does for
    several processes it does as under DDP, by a process group of its own: samplers give each worker its part of the
    data, and rank 0 alone logs and saves.

    Args: those of Lightning's `DDPStrategy` that are not handed on to DistributedDataParallel.
    """

    strategy_name = "psstore"

    def configure_ddp(self) -> None:
        """Does nothing: a DistributedOptimizer sees to what DDP would."""


class SessionCallback(Checkpoint):
    """A session around each `fit`, one step of it per step of the optimizer.

    >>> callback = SessionCallback(stop_at=100_000, checkpoint="600s")
    >>> Trainer(devices=1, max_epochs=90, callbacks=[callback]).fit(module, loader)

    The module's `configure_optimizers` returns one `psstore.torch.DistributedOptimizer`. Started again, on a store that
    began from a checkpoint, training goes on at the batch after the last one that the checkpoint has. Lightning's loops
    stop where the session does. What a batch's `loss` was is reported to the session's hooks. To Lightning this is the
    checkpointing: other callbacks come before it, and it adds no `ModelCheckpoint` of its own accord.

    Args: those of `psstore.torch.session`. `state` is for what Lightning does not know of: progress, schedulers,
    callbacks, the data module and the loaders' places are handed in by themselves.
    """

    def __init__(
        self,
        *,
        stop_at: int | None = None,
        state: Mapping[str, Stateful] | None = None,
        checkpoint: str | None = None,
        checkpoint_to: str | None = None,
        hooks: Sequence[Hook] = (),
        log_every_s: float | None = 10.0,
        summaries: str | None = None,
        stop_on_nan: bool = True,
    ) -> None:
        self._state = dict(state or {})
        self._options: dict[str, Any] = {
            "stop_at": stop_at,
            "checkpoint": checkpoint,
            "checkpoint_to": checkpoint_to,
            "hooks": hooks,
            "log_every_s": log_every_s,
            "summaries": summaries,
            "stop_on_nan": stop_on_nan,
        }
        self._session: TrainingSession | None = None
        self._step: Step | None = None
        """The session's that is under way: of several batches, where gradients are accumulated."""
        self._num_steps = 0
        """What Lightning had counted of the optimizer's when that began."""
        self._ends_after_validation = False
        """Whether the last step has one to come, as it would have if it were not the last."""

    @property
    def session(self) -> TrainingSession:
        """The one of this `fit`, or of the last. Raises UsageError before the first."""
        if self._session is None:
            raise UsageError("there is no session yet: the Trainer's fit begins it")
        return self._session

    # ---- Lightning's hooks ----

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if len(trainer.optimizers) != 1:
            raise UsageError(f"a session is of one optimizer; the module has configured {len(trainer.optimizers)}")
        _make_resumable(trainer.fit_loop)
        self._session = session(trainer.optimizers[0], state={**_parts(trainer), **self._state}, **self._options)
        self._step, self._ends_after_validation = None, False
        if self._session.found(LOOPS) is None:
            self._session.warn_of_anew()
        self._session.begin()
        self._stop_if_over(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._step is None:
            self._step, self._num_steps = self.session.before_step(), trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._step is not None and trainer.global_step > self._num_steps:
            if isinstance(outputs, Mapping) and "loss" in outputs:
                self._step.report(loss=_whole(outputs["loss"], trainer, pl_module))
            step, self._step = self._step, None
            self.session.after_step(step)
        validates = _validates_now(trainer)
        self._stop_if_over(trainer)
        if _ends_inside_an_epoch(trainer):  # and here, since Lightning is going to take the epoch for a whole one
            self._ends_after_validation = validates
            if not validates:
                self.session.end()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Also where what it has found is to end the training, as under EarlyStopping."""
        if self._session is None or trainer.sanity_checking:
            return
        if self._ends_after_validation or _ends_inside_an_epoch(trainer):
            self._session.end()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.session.end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._session is not None:
            self._session.end(is_clean=False)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Also ends a session whose `fit` had nothing to train."""
        if self._session is not None:
            self._session.end()

    # ---- how ----

    def _stop_if_over(self, trainer: Trainer) -> None:
        """Also where Lightning was to train for longer: no step counts any more."""
        if self.session.is_over:
            trainer.should_stop = True
            trainer.fit_loop.min_epochs = 0
            trainer.fit_loop.epoch_loop.min_steps = None


def _whole(loss: Any, trainer: Trainer, module: LightningModule) -> Any:
    """A batch's loss as the module has returned it: Lightning divides it where it accumulates gradients by itself."""
    return loss * trainer.accumulate_grad_batches if module.automatic_optimization else loss


def _validates_now(trainer: Any) -> bool:
    """Whether this batch is one after which the trainer validates, whatever else ends with it."""
    loop = trainer.fit_loop
    return loop._data_fetcher is not None and bool(loop.epoch_loop._should_check_val_fx(loop._data_fetcher))


def _ends_inside_an_epoch(trainer: Any) -> bool:
    """Whether this batch is the last of the training, but not of its epoch."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    if progress.is_last_batch or progress.current.ready == trainer.num_training_batches:
        return False
    stops = trainer.should_stop and trainer.fit_loop._can_stop_early  # else Lightning goes on, to min_epochs
    return bool(stops or 0 <= trainer.max_steps <= trainer.global_step)


# ---- what is handed in ----


def _parts(trainer: Any) -> dict[str, Stateful]:
    parts: dict[str, Stateful] = {LOOPS: _Loops(trainer), "lightning.callbacks": _Callbacks(trainer)}
    parts |= {
        f"lightning.scheduler.{number}": config.scheduler for number, config in enumerate(trainer.lr_scheduler_configs)
    }
    if trainer.datamodule is not None:
        parts["lightning.data"] = trainer.datamodule
    return parts


class _Callbacks:
    """States of the trainer's callbacks, by the keys that Lightning saves them under."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        states = {one.state_key: one.state_dict() for one in self._trainer.callbacks}
        return {key: state for key, state in states.items() if state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for one in self._trainer.callbacks:
            if one.state_key in state:
                one.load_state_dict(state[one.state_key])


class _Loops:
    """Progress of the loops of `fit`, and the loaders' places in it, as between two batches."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._loaded: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        loop = self._trainer.fit_loop
        if self._loaded is not None and loop._combined_loader is None:
            return self._loaded  # nothing has come of it yet
        state = loop.state_dict()
        is_inside_an_epoch = loop.epoch_progress.current.processed < loop.epoch_progress.current.started
        return _as_after_a_batch(self._trainer, state) if is_inside_an_epoch else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loaded = deepcopy(state)
        self._trainer.fit_loop.load_state_dict(state)


def _as_after_a_batch(trainer: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Loops' state as Lightning saves it at a batch's end, from which it goes on with the next batch: also where that
    has been fetched already, and counted as ready. It takes up `completed` one behind, and counts this batch's step
    for its loggers as it loads, so one that was counted is taken back."""
    loop = trainer.fit_loop.epoch_loop
    progress = loop.batch_progress
    has_counted = progress.current.ready > progress.current.processed
    if progress.current.processed:
        for which in ("total", "current"):
            count = state["epoch_loop.batch_progress"][which]["processed"]
            state["epoch_loop.batch_progress"][which] = {
                "ready": count, "started": count, "processed": count, "completed": count - 1
            }  # fmt: skip
        will_count = True
    else:
        first = progress.current.ready  # of an epoch: Lightning takes it for one that has failed, and begins with it
        will_count = first > 0 and (
            first % trainer.accumulate_grad_batches == 0 or first == trainer.num_training_batches
        )
    state["epoch_loop.batch_progress"]["is_last_batch"] = False
    state["epoch_loop.state_dict"]["_batches_that_stepped"] -= int(has_counted and will_count)
    return state


# ---- loaders ----


class _FittedLoader(ResumableLoader):
    """A loader of the loop's, whose batches may have been fetched and not yet trained with."""

    def __init__(self, loader: Any, fit_loop: Any) -> None:
        super().__init__(loader)
        self._fit_loop = fit_loop

    def state_dict(self, *, num_unused: int = 0) -> dict[str, Any]:
        fetched = self._fit_loop._data_fetcher.fetched if self._fit_loop._data_fetcher is not None else 0
        processed = self._fit_loop.epoch_loop.batch_progress.current.processed
        return super().state_dict(num_unused=max(num_unused, fetched - processed, 0))


def _make_resumable(fit_loop: Any) -> None:
    """Whenever the loop has made its loaders, and before it iterates over them, Lightning puts states back into those
    that can have them: there the others become such."""
    if hasattr(fit_loop, "_load_plain"):  # in an earlier fit
        return
    fit_loop._load_plain = fit_loop._load_combined_loader_states
    fit_loop._load_combined_loader_states = _loading(fit_loop)


def _loading(fit_loop: Any) -> Callable[[], None]:
    def load() -> None:
        loaders = fit_loop._combined_loader
        loaders.flattened = [
            one if hasattr(one, "state_dict") else _FittedLoader(one, fit_loop) for one in loaders.flattened
        ]
        states = fit_loop._combined_loader_states_to_load
        if states and not fit_loop.restarting:  # at an epoch's end: what is of the next one is to be as it was
            loaders._load_state_dicts(states)
            for one in loaders.flattened:
                if isinstance(one, ResumableLoader):
                    one.begin_anew()
        fit_loop._load_plain()

    return load
