"""The scripts that tests/torch/ddp_parity.py runs: one for each thing that people do with DistributedDataParallel.

Each is what one would write in ordinary PyTorch; what can't be the same under DDP and with a store it asks its
trainer for (tests/torch/ddp_trainers.py). All data and first values come from fixed seeds, on every worker alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn
from torch.optim import SGD, AdamW, NAdam, Optimizer

from tests.torch.ddp_trainers import NUM_WORKERS, Options, Script, Trainer

STEPS = 12
BATCH = 16
WIDTH = 8

Model = Callable[..., torch.Tensor]
Loss = Callable[[Model, torch.Tensor], torch.Tensor]
MakeOptimizer = Callable[[Iterable[torch.Tensor]], Optimizer]

MOMENTUM: MakeOptimizer = partial(SGD, lr=0.05, momentum=0.9)


def batches(count: int = STEPS) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randn(BATCH, WIDTH, generator=generator)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """As it comes from one seed, which nobody else's random numbers can disturb: workers may be threads."""
    model = make()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)
    return model


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, WIDTH))


def error(model: Model, inputs: torch.Tensor) -> torch.Tensor:
    """Mean over samples, so that the mean of equal parts' is that of the whole."""
    loss: torch.Tensor = (model(inputs).float() - inputs.sin()).square().mean()
    return loss


def backward(loss: torch.Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def one_step(trainer: Trainer, inputs: torch.Tensor, loss: Loss = error) -> None:
    trainer.optimizer.zero_grad()
    backward(loss(trainer.model, trainer.part(inputs)))
    trainer.optimizer.step()


def simple(trainer: Trainer, make_optimizer: MakeOptimizer = MOMENTUM) -> nn.Module:
    """The loop of every tutorial."""
    model = seeded(perceptron)
    trainer.prepare(model, make_optimizer(model.parameters()))
    for inputs in batches():
        one_step(trainer, inputs)
    return model


def sgd(trainer: Trainer) -> nn.Module:
    return simple(trainer)


def adamw(trainer: Trainer) -> nn.Module:
    return simple(trainer, partial(AdamW, lr=0.01))


def exact_adamw(trainer: Trainer) -> nn.Module:
    """torch's own root is not always the correctly rounded one (docs/update_rules.md)."""
    with trainer.exact_square_root():
        return adamw(trainer)


def nadam(trainer: Trainer) -> nn.Module:
    return simple(trainer, partial(NAdam, lr=0.01))


def accumulation(trainer: Trainer) -> nn.Module:
    model = seeded(perceptron)
    trainer.prepare(model, MOMENTUM(model.parameters()))
    for inputs, more in zip(batches(), batches(), strict=True):
        trainer.optimizer.zero_grad()
        with trainer.no_sync():
            backward(error(trainer.model, trainer.part(inputs)))
        backward(error(trainer.model, trainer.part(more.flip(0))))
        trainer.optimizer.step()
    return model


def clipping(trainer: Trainer) -> nn.Module:
    model = seeded(perceptron)
    trainer.prepare(model, MOMENTUM(model.parameters()))
    for inputs in batches():
        trainer.optimizer.zero_grad()
        backward(error(trainer.model, trainer.part(inputs)))
        trainer.clip(0.5)
        trainer.optimizer.step()
    return model


def own_clipping(trainer: Trainer) -> nn.Module:
    """By torch's function, as under DDP."""
    model = seeded(perceptron)
    trainer.prepare(model, MOMENTUM(model.parameters()))
    for inputs in batches():
        trainer.optimizer.zero_grad()
        backward(error(trainer.model, trainer.part(inputs)))
        nn.utils.clip_grad_norm_(trainer.model.parameters(), 0.5)
        trainer.optimizer.step()
    return model


def grad_scaler(trainer: Trainer) -> nn.Module:
    """fp16; in one step the last sample, which is the last worker's alone, overflows."""
    model = seeded(perceptron)
    trainer.prepare(model, MOMENTUM(model.parameters()))
    scaler = trainer.scaler(init_scale=2.0**12, growth_interval=4)
    for number, inputs in enumerate(batches()):
        if number == 5:
            inputs[-1] = float("inf")
        trainer.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = error(trainer.model, trainer.part(inputs))
        backward(scaler.scale(loss))
        scaler.step(trainer.optimizer)
        scaler.update()
    return model


def bf16_autocast(trainer: Trainer) -> nn.Module:
    model = seeded(perceptron)
    trainer.prepare(model, MOMENTUM(model.parameters()))
    for inputs in batches():
        trainer.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = error(trainer.model, trainer.part(inputs))
        backward(loss)
        trainer.optimizer.step()
    return model


def schedule(trainer: Trainer) -> nn.Module:
    model = seeded(perceptron)
    trainer.prepare(model, MOMENTUM(model.parameters()))
    one_cycle = torch.optim.lr_scheduler.OneCycleLR(trainer.optimizer, max_lr=0.1, total_steps=STEPS)
    for inputs in batches():
        one_step(trainer, inputs)
        one_cycle.step()
    return model


def unfreezing(trainer: Trainer) -> nn.Module:
    model = seeded(perceptron)
    first = model.get_submodule("0").requires_grad_(False)
    trainer.prepare(model, MOMENTUM(model.parameters()))
    for number, inputs in enumerate(batches()):
        if number == STEPS // 2:
            trainer.unfreeze(first.parameters())
        one_step(trainer, inputs)
    return model


class Branched(nn.Module):
    """Not every call uses the branch."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = perceptron()
        self.branch = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: torch.Tensor, use_branch: bool) -> torch.Tensor:
        result: torch.Tensor = self.trunk(inputs)
        return result + self.branch(inputs) if use_branch else result


def branched_error(model: Model, inputs: torch.Tensor, *, use_branch: bool) -> torch.Tensor:
    loss: torch.Tensor = (model(inputs, use_branch) - inputs.sin()).square().mean()
    return loss


def unused(trainer: Trainer) -> nn.Module:
    """In every third step, by all workers."""
    model = seeded(Branched)
    trainer.prepare(model, MOMENTUM(model.parameters()))
    for number, inputs in enumerate(batches()):
        one_step(trainer, inputs, partial(branched_error, use_branch=number % 3 > 0))
    return model


def absent(trainer: Trainer) -> nn.Module:
    """The last worker never uses the branch: in one process, its part of the batch goes through alone."""
    model = seeded(Branched)
    trainer.prepare(model, MOMENTUM(model.parameters()))
    for inputs in batches():
        parts = inputs.chunk(NUM_WORKERS)
        trainer.optimizer.zero_grad()
        for rank in trainer.ranks:
            part_of_mean = branched_error(trainer.model, parts[rank], use_branch=rank == 0) / len(trainer.ranks)
            backward(part_of_mean)
        trainer.optimizer.step()
    return model


class Tied(nn.Module):
    """Encodes and decodes with one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(WIDTH, WIDTH, bias=False)
        self.decode = nn.Linear(WIDTH, WIDTH)
        self.decode.weight = self.encode.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.decode(torch.tanh(self.encode(inputs)))
        return result


def tied(trainer: Trainer) -> nn.Module:
    model = seeded(Tied)
    trainer.prepare(model, MOMENTUM(model.parameters()))
    for inputs in batches():
        one_step(trainer, inputs)
    return model


def batch_norm(trainer: Trainer) -> nn.Module:
    """Each worker normalises its own part, so that whole batches train to other weights; rank 0's running statistics
    are everybody's."""
    model = seeded(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)))
    trainer.prepare(model, MOMENTUM(model.parameters()))
    for inputs in batches():
        one_step(trainer, inputs)
    return model


def uneven(trainer: Trainer) -> nn.Module:
    """The last worker has two thirds of the batches."""
    model = seeded(perceptron)
    trainer.prepare(model, MOMENTUM(model.parameters()))
    with trainer.uneven():
        for number, inputs in enumerate(batches()):
            everybody = number < STEPS * 2 // 3
            if everybody:
                one_step(trainer, inputs)
            elif trainer.knows_first:
                trainer.optimizer.zero_grad()
                backward(error(trainer.model, inputs.chunk(NUM_WORKERS)[0]))
                trainer.optimizer.step()
    return model


def new_group(trainer: Trainer) -> nn.Module:
    """The first layer trains from the middle on, at a rate of its own."""
    model = seeded(perceptron)
    trainer.prepare(model, MOMENTUM(model.get_submodule("2").parameters()))
    for number, inputs in enumerate(batches()):
        if number == STEPS // 2:
            model.zero_grad()
            trainer.optimizer.add_param_group({"params": list(model.get_submodule("0").parameters()), "lr": 0.01})
        one_step(trainer, inputs)
    return model


def exchanged_state(trainer: Trainer) -> nn.Module:
    """Plain torch, then the trainer, then plain torch again, each with the weights and momenta of the one before."""
    model = seeded(perceptron)
    third = list(batches(STEPS // 3))
    before = MOMENTUM(model.parameters())
    _plainly(model, before, third)
    trainer.prepare(model, MOMENTUM(model.parameters()))
    trainer.optimizer.load_state_dict(deepcopy(before.state_dict()))
    for inputs in third:
        one_step(trainer, inputs)
    after = MOMENTUM(model.parameters())
    after.load_state_dict(trainer.optimizer.state_dict())
    _plainly(model, after, third)
    return model


def _plainly(model: nn.Module, optimizer: Optimizer, inputs: Iterable[torch.Tensor]) -> None:
    """Whole batches, everywhere."""
    for batch in inputs:
        optimizer.zero_grad()
        backward(error(model, batch))
        optimizer.step()


def replicated(trainer: Trainer) -> nn.Module:
    model = seeded(perceptron)
    trainer.prepare(trainer.spread(model), MOMENTUM(model.parameters()))
    for inputs in batches():
        one_step(trainer, inputs)
    return model


def compiled(trainer: Trainer) -> nn.Module:
    model = seeded(perceptron)
    trainer.prepare(model, MOMENTUM(model.parameters()))
    fast = torch.compile(trainer.model, backend="aot_eager")
    for inputs in batches():
        trainer.optimizer.zero_grad()
        backward(error(fast, trainer.part(inputs)))
        trainer.optimizer.step()
    return model


@dataclass(frozen=True)
class Feature:
    """One row of the table."""

    name: str
    script: Script
    ddp: Options = field(default_factory=dict)
    """What DistributedDataParallel is told."""
    store: Options = field(default_factory=dict)
    """What DistributedOptimizer is told."""


FINDING = {"find_unused_parameters": True}

FEATURES = (
    Feature("SGD with momentum", sgd),
    Feature("AdamW", adamw),
    Feature("AdamW, torch with an exact square root", exact_adamw),
    Feature("gradient accumulation, `no_sync`", accumulation),
    Feature("clipping the global norm", clipping),
    Feature("torch's `clip_grad_norm_` left as it is", own_clipping),
    Feature("`GradScaler`, fp16, one overflow", grad_scaler),
    Feature("bf16 autocast", bf16_autocast),
    Feature("learning-rate scheduler", schedule),
    Feature("frozen, unfrozen later", unfreezing),
    Feature("parameters unused in some steps", unused, ddp=FINDING),
    Feature("parameters absent on one worker", absent, ddp=FINDING),
    Feature("tied weights", tied),
    Feature("BatchNorm and its buffers", batch_norm),
    Feature("uneven batches", uneven),
    Feature("`add_param_group` in the middle", new_group),
    Feature("`state_dict` from and to plain torch", exchanged_state),
    Feature("NAdam, applied in the worker", nadam),
    Feature('`overlap="eager"`', sgd, store={"overlap": "eager"}),
    Feature("`Replicas`, two per worker", replicated),
    Feature("`torch.compile`", compiled),
)
