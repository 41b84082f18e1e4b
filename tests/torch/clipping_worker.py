"""A worker of two that clips as its framework does: `clipping_worker.py FRAMEWORK FOLDER`, under torchrun with
DistributedDataParallel, or under `psstore run` with a store. Between the two only that differs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psstore

STEPS = 12
BATCH = 8
WIDTH = 8
MAX_NORM = 0.5
"""Hugging Face's Trainer has its default, which most of its steps exceed, too."""


class Worker:
    """What is not the same under DDP and with a store."""

    def __init__(self) -> None:
        self.store = psstore.connect() if "PSSTORE_URL" in os.environ else None
        self.rank = int(os.environ["RANK"]) if self.store is None else self.store.rank
        if self.store is not None:
            for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):  # as docs/pytorch.md says
                os.environ.pop(variable, None)
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 1))

    def optimizer(self) -> torch.optim.Optimizer:
        plain = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        if self.store is None:
            return plain
        return psstore.torch.DistributedOptimizer(plain, self.store, self.model.named_parameters())

    def loader(self) -> DataLoader[Any]:
        """This worker's part of the data."""
        generator = torch.Generator().manual_seed(1 + int(self.rank or 0))
        inputs = torch.randn(STEPS * BATCH, WIDTH, generator=generator)
        return DataLoader(TensorDataset(inputs, 5 * inputs.sin().sum(1, keepdim=True)), batch_size=BATCH)


def plain(worker: Worker) -> None:
    model: nn.Module = worker.model
    if worker.store is None:
        torch.distributed.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = worker.optimizer()
    for inputs, targets in worker.loader():
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        print(f"norm {norm.item():.4f}")
        optimizer.step()


def accelerate(worker: Worker) -> None:
    module: Any = import_module("accelerate")  # which has no types
    accelerator = module.Accelerator(cpu=True)
    assert accelerator.num_processes == (2 if worker.store is None else 1)
    model, optimizer = accelerator.prepare(worker.model, worker.optimizer())
    for inputs, targets in worker.loader():
        optimizer.zero_grad()
        accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
        norm = accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
        print(f"norm {norm.item():.4f}")
        optimizer.step()


def lightning(worker: Worker) -> None:
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = worker.model

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return nn.functional.mse_loss(self.inner(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return worker.optimizer()

    together: dict[str, Any] = {"devices": 2, "strategy": "ddp"} if worker.store is None else {"devices": 1}
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        use_distributed_sampler=False,
        gradient_clip_val=MAX_NORM,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **together,
    )
    trainer.fit(Module(), worker.loader())


def huggingface(worker: Worker) -> None:
    from transformers import Trainer, TrainingArguments

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = worker.model

        def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": nn.functional.mse_loss(self.inner(inputs), targets)}

    class OwnPart(Trainer):
        def get_train_dataloader(self) -> DataLoader[Any]:
            loader = worker.loader()
            loader.collate_fn = lambda rows: {
                "inputs": torch.stack([row[0] for row in rows]),
                "targets": torch.stack([row[1] for row in rows]),
            }
            return loader

    arguments = TrainingArguments(
        f"output-{worker.rank}",
        per_device_train_batch_size=BATCH,
        num_train_epochs=1,
        save_strategy="no",
        logging_steps=1,
        lr_scheduler_type="constant",
        disable_tqdm=True,
        report_to=[],
        use_cpu=True,
    )
    assert arguments.world_size == (2 if worker.store is None else 1)
    assert arguments.max_grad_norm == 1.0
    trainer = OwnPart(Model(), arguments, optimizers=(worker.optimizer(), None))
    trainer.train()
    for logged in trainer.state.log_history:
        if "grad_norm" in logged:
            print(f"norm {logged['grad_norm']:.4f}")


FRAMEWORKS: dict[str, Callable[[Worker], None]] = {
    "plain": plain,
    "accelerate": accelerate,
    "lightning": lightning,
    "huggingface": huggingface,
}


def main() -> None:
    framework, folder = sys.argv[1:]
    torch.set_num_threads(1)
    worker = Worker()
    FRAMEWORKS[framework](worker)
    weights = {name: value.detach().clone() for name, value in worker.model.state_dict().items()}
    torch.save(weights, Path(folder) / f"{worker.rank}.pt")
    if worker.store is not None:
        assert worker.store.version == STEPS
        worker.store.close()
    elif torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
