"""A worker of two in its framework's loop, which clips, logs and saves: `framework_worker.py FRAMEWORK`, under torchrun
with DistributedDataParallel, or under `psstore run` with a store. Between the two, docs/pytorch.md's lines differ."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.distributed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

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
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 1))

    def optimizer(self) -> torch.optim.Optimizer:
        plain = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        if self.store is None:
            return plain
        return psstore.torch.DistributedOptimizer(plain, self.store, self.model.named_parameters())

    def data(self) -> TensorDataset:
        """Everybody's: whose part is whose is the framework's business."""
        inputs = torch.randn(2 * STEPS * BATCH, WIDTH, generator=torch.Generator().manual_seed(1))
        return TensorDataset(inputs, 5 * inputs.sin().sum(1, keepdim=True))

    def loader(self) -> DataLoader[Any]:
        return DataLoader(self.data(), batch_size=BATCH, shuffle=True)


def plain(worker: Worker) -> None:
    model: nn.Module = worker.model
    if worker.store is None:
        torch.distributed.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = worker.optimizer()
    sampler: DistributedSampler[Any] = DistributedSampler(worker.data(), num_replicas=2, rank=worker.rank or 0)
    for inputs, targets in DataLoader(worker.data(), batch_size=BATCH, sampler=sampler):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        print(f"norm {norm.item():.4f}")
        optimizer.step()


def accelerate(worker: Worker) -> None:
    module: Any = import_module("accelerate")  # which has no types
    accelerator = module.Accelerator(cpu=True)
    if worker.store is None:
        model, optimizer, loader = accelerator.prepare(worker.model, worker.optimizer(), worker.loader())
    else:
        model = accelerator.prepare_model(worker.model, evaluation_mode=True)
        optimizer, loader = accelerator.prepare(worker.optimizer(), worker.loader())
    for inputs, targets in loader:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
        norm = accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
        print(f"norm {norm.item():.4f}")
        optimizer.step()
    accelerator.save_state("output")
    accelerator.print("logged")


def lightning(worker: Worker) -> None:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.loggers import CSVLogger

    from psstore.integrations.lightning import StoreStrategy

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = worker.model

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            loss = nn.functional.mse_loss(self.inner(batch[0]), batch[1])
            self.log("loss", loss, sync_dist=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return worker.optimizer()

    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp" if worker.store is None else StoreStrategy(),
        max_epochs=1,
        gradient_clip_val=MAX_NORM,
        logger=CSVLogger("output"),
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), worker.loader())


def huggingface(worker: Worker) -> None:
    from transformers import Trainer, TrainingArguments

    from psstore.integrations.huggingface import train

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = worker.model

        def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": nn.functional.mse_loss(self.inner(inputs), targets)}

    arguments = TrainingArguments(
        "output",
        per_device_train_batch_size=BATCH,
        num_train_epochs=1,
        save_steps=STEPS // 2,
        logging_steps=1,
        lr_scheduler_type="constant",
        disable_tqdm=True,
        report_to=[],
        use_cpu=True,
    )
    assert arguments.max_grad_norm == 1.0
    rows: Any = [{"inputs": inputs, "targets": targets} for inputs, targets in zip(*worker.data().tensors, strict=True)]
    trainer = Trainer(Model(), arguments, train_dataset=rows, optimizers=(worker.optimizer(), None))
    if worker.store is None:
        trainer.train()
    else:
        train(trainer)
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
    (framework,) = sys.argv[1:]
    torch.set_num_threads(1)
    worker = Worker()
    FRAMEWORKS[framework](worker)
    weights = {name: value.detach().clone() for name, value in worker.model.state_dict().items()}
    torch.save(weights, f"{worker.rank}.pt")
    if worker.store is not None:
        assert worker.store.version == STEPS
        worker.store.close()
    elif torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
