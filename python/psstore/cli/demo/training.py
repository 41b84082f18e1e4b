"""The network and its training, as ordinary PyTorch: what a worker does and what the reference does alike."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from psstore.cli.demo.data import NUM_CLASSES, Digits
from psstore.cli.demo.settings import LABEL_SMOOTHING, MOMENTUM, Settings

Batch = tuple[torch.Tensor, torch.Tensor]


def seeded_model(digits: Digits, seed: int) -> nn.Module:
    """Two convolutions, a pooling, one more convolution, two linear layers: 150 thousand parameters at 8x8."""
    torch.manual_seed(seed)
    pooled = digits.image_size // 2
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * pooled * pooled, 128),
        nn.ReLU(),
        nn.Linear(128, NUM_CLASSES),
    )


def plain_optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """SGD, which the store takes bit for bit as torch does (docs/update_rules.md). `foreach=False`: one tensor at a
    time, which is the arithmetic that it follows."""
    return torch.optim.SGD(
        model.parameters(), lr=settings.learning_rate, momentum=MOMENTUM, nesterov=True, foreach=False
    )


def cosine(optimizer: torch.optim.Optimizer, num_rounds: int) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=num_rounds)


class Batches:
    """One worker's own part of the training images, reshuffled in each epoch."""

    def __init__(self, digits: Digits, settings: Settings, *, rank: int) -> None:
        dataset = TensorDataset(digits.train_images, digits.train_labels)
        self._sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(
            dataset, num_replicas=settings.num_workers, rank=rank, seed=settings.seed, drop_last=True
        )
        self._loader = DataLoader(dataset, batch_size=settings.batch_images, sampler=self._sampler, drop_last=True)

    def __len__(self) -> int:
        """Batches per epoch."""
        return len(self._loader)

    def epoch(self, number: int) -> Iterator[Batch]:
        self._sampler.set_epoch(number)
        yield from self._loader


def backward(model: nn.Module, batch: Batch) -> float:
    """Leaves the gradients of one batch in the parameters; returns the loss."""
    images, labels = batch
    loss: torch.Tensor = nn.functional.cross_entropy(model(images), labels, label_smoothing=LABEL_SMOOTHING)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.item()


@torch.no_grad()
def accuracy(model: nn.Module, digits: Digits) -> float:
    """Share of the test images that are recognised."""
    recognised = model(digits.test_images).argmax(dim=1)
    return float((recognised == digits.test_labels).double().mean())
