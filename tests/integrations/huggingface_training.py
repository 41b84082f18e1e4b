"""What tests train in the loop of Hugging Face's `Trainer`. Importing it imports transformers, which takes two seconds
of processor time: tests do so as they run, since all of pytest's workers collect all of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from psstore.client.store import Store
from psstore.integrations.huggingface import train
from psstore.torch.loop import unwrapped
from tests.integrations.support import BATCH, Life, Rows, Witness, life, loss_of, network, on


class Model(torch.nn.Module):
    """As the Trainer calls it. Notes what it is trained with."""

    def __init__(self, store: Store, witness: Witness | None = None) -> None:
        super().__init__()
        self.inner = network()
        self.seen: list[Any] = []
        self._store = store
        self._witness = witness

    def forward(self, numbers: torch.Tensor, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training:
            self.seen.append((self._store.version, numbers.tolist()))
            if self._witness is not None:
                self._witness.look(self._store.version)
        return {"loss": loss_of(self.inner, rows)}


def together(rows: list[tuple[int, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {"numbers": torch.tensor([number for number, _ in rows]), "rows": torch.stack([row for _, row in rows])}


def trainer_of(model: Model, store: Store, folder: Path, **options: Any) -> Trainer:
    chosen: dict[str, Any] = {
        "num_train_epochs": 3,
        "save_strategy": "no",
        "max_grad_norm": 0.0,
        "logging_steps": 2,
        **options,
    }
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=BATCH,
        remove_unused_columns=False,
        disable_tqdm=True,
        report_to=[],
        use_cpu=True,
        **chosen,
    )
    data = Rows(augmented=False)
    return Trainer(
        model,
        arguments,
        train_dataset=data,
        eval_dataset=data,
        data_collator=together,
        optimizers=(on(store, model.inner), None),
    )


def trained(
    store: Store,
    stop_at: int | None,
    witness: Witness | None,
    folder: Path,
    *,
    others: Sequence[TrainerCallback] = (),
    **options: Any,
) -> Life:
    model = Model(store, witness)
    trainer = trainer_of(model, store, folder, **options)
    for one in others:
        trainer.add_callback(one)
    output = train(trainer, stop_at=stop_at, checkpoint="2")
    assert output.global_step == trainer.state.global_step == store.version
    assert not list(folder.glob("checkpoint-*"))
    assert trainer.optimizer is not None
    return life(model.inner, unwrapped(trainer.optimizer), model.seen)
