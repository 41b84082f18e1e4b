"""What tests train in the loop of Lightning's `Trainer`. Importing it imports Lightning, which takes a second of
processor time: tests do so as they run, since all of pytest's workers collect all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

from psstore.client.store import Store
from psstore.integrations.lightning import SessionCallback
from tests.integrations.support import BATCH, Life, Rows, Witness, life, loss_of, network, on

QUIETLY: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


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
    others: Sequence[Callback] = (),
    **options: Any,
) -> Life:
    module = Module(store, witness, interval=interval)
    callback, counting = SessionCallback(stop_at=stop_at, checkpoint="2"), Counting()
    trainer = Trainer(
        **QUIETLY, **{"max_epochs": 3, "num_sanity_val_steps": 0, **options}, callbacks=[callback, counting, *others]
    )
    trainer.fit(module, data(), loader() if validates else None)
    assert (trainer.global_step, callback.session.is_clean) == (store.version, True)
    assert trainer.fit_loop.epoch_loop._batches_that_stepped == store.version, "what loggers count by"
    assert counting.batches == trainer.fit_loop.epoch_loop.total_batch_idx + 1
    return life(module.inner, callback.session.optimizer, module.seen)


def fitted(store: Store, *callbacks: Callback, **options: Any) -> Module:
    module = Module(store, None, interval="step")
    trainer = Trainer(**QUIETLY, **{"max_epochs": 3, **options}, callbacks=list(callbacks))
    trainer.fit(module, loader())
    return module
