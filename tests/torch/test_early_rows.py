"""Gradients of rows go to the store while backward runs, once, and are the bytes that step() would push."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import psstore
from psstore.client.store import Store
from psstore.errors import TableFull
from psstore.torch import DistributedOptimizer, Embedding, GradScaler
from tests.torch.support import until

DIM = 8
ROWS = 40
STEPS = 4


class Model(nn.Module):
    """A layer, then a table that is looked up twice, so that backward is at the layer last."""

    def __init__(self, items: Embedding) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.items = items
        self.first = nn.Linear(DIM, DIM)

    def forward(self, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step)
        users, likes = torch.randint(0, ROWS, (2, 12), generator=generator)
        hidden = self.first(torch.ones(12, DIM))
        out: torch.Tensor = (self.items(users) * self.items(likes) * hidden.tanh()).square().mean()
        return out


class Trainee:
    """A worker of its own store, and what it trains."""

    def __init__(self, store: Store, **options: Any) -> None:
        overlap = options.pop("overlap", "backward")
        self.store = store
        options = {"rule": "sgd", "init": "normal(0, 1)", "lr": 0.5, **options}
        self.items = Embedding("items", DIM, store, **options)
        self.model = Model(self.items)
        self.optimizer = DistributedOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=0.5),
            store,
            self.model.named_parameters(),
            tables=[self.items],
            overlap=overlap,
        )

    def backward(self, step: int) -> None:
        torch.autograd.backward(self.model(step))

    def rows(self) -> torch.Tensor:
        return torch.from_numpy(self.store.pull_rows("items", range(ROWS)))


@pytest.fixture
def stores() -> Iterator[tuple[Store, Store]]:
    with psstore.connect("local://?shards=2") as one, psstore.connect("local://?shards=2") as other:
        yield one, other


def trained(trainee: Trainee, steps: Callable[[Trainee, int], None]) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Rows, the layer, and the bytes that each step pushed."""
    pushed = []
    for step in range(STEPS):
        before = trainee.store.bytes_pushed
        trainee.optimizer.zero_grad()
        steps(trainee, step)
        trainee.optimizer.step()
        pushed.append(trainee.store.bytes_pushed - before)
    return trainee.rows(), trainee.model.first.weight.detach().clone(), pushed


def plainly(trainee: Trainee, step: int) -> None:
    trainee.backward(step)


def after_quiet_passes(trainee: Trainee, step: int) -> None:
    with trainee.optimizer.no_sync():
        trainee.backward(step + 100)
        trainee.backward(step + 200)
    trainee.backward(step)


def by_several_passes(trainee: Trainee, step: int) -> None:
    trainee.backward(step + 100)
    trainee.backward(step)


def begun_anew(trainee: Trainee, step: int) -> None:
    trainee.backward(step + 100)
    trainee.optimizer.zero_grad()
    trainee.backward(step)


def test_rows_are_in_the_store_before_backward_comes_to_the_layer_before_them(stores: tuple[Store, Store]) -> None:
    """Backward waits there until they have arrived; what step() pushes then is the layer."""
    late = Trainee(stores[1], overlap="none")
    *_, (wanted, *_) = trained(late, plainly)
    layer_bytes = sum(parameter.nbytes for parameter in late.model.parameters())
    early = Trainee(stores[0])
    before = early.store.bytes_pushed

    def wait(_: torch.Tensor) -> None:
        until(lambda: early.store.bytes_pushed - before >= wanted - layer_bytes)

    early.model.first.weight.register_hook(wait)  # type: ignore[no-untyped-call]
    early.backward(0)
    assert early.store.bytes_pushed - before == wanted - layer_bytes > 0
    early.optimizer.step()
    assert early.store.bytes_pushed - before == wanted


@pytest.mark.parametrize(
    "options",
    [{}, {"compression": "push=int8"}, {"rule": "adagrad", "padding_idx": 3}],
    ids=["plain", "int8", "padding"],
)
@pytest.mark.parametrize("steps", [plainly, after_quiet_passes, by_several_passes, begun_anew])
def test_a_training_has_the_bits_of_one_whose_rows_are_pushed_in_step(
    stores: tuple[Store, Store], steps: Callable[[Trainee, int], None], options: dict[str, Any]
) -> None:
    rows, layer, pushed = trained(Trainee(stores[0], **options), steps)
    wanted_rows, wanted_layer, wanted_pushed = trained(Trainee(stores[1], overlap="none", **options), steps)
    assert torch.equal(rows, wanted_rows)
    assert torch.equal(layer, wanted_layer)
    if steps is not begun_anew:  # there each pass pushes, and replaces what the one before has
        assert pushed[1:] == wanted_pushed[1:], "in the first step hooks may learn that gradients accumulate"
    assert (pushed[0] == wanted_pushed[0]) is (steps in (plainly, after_quiet_passes))


def test_a_scaled_loss_and_skipped_steps_leave_no_trace_in_what_codecs_keep_back(stores: tuple[Store, Store]) -> None:
    def train(trainee: Trainee) -> torch.Tensor:
        scaler = GradScaler("cpu", init_scale=8.0, growth_interval=2)
        for step in range(6):
            trainee.optimizer.zero_grad()
            loss = trainee.model(step) * (torch.inf if step == 3 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(trainee.optimizer)
            assert trainee.optimizer.skipped is (step == 3)
            scaler.update()
        return trainee.rows()

    early, late = (
        Trainee(stores[0], compression="push=int8"),
        Trainee(stores[1], compression="push=int8", overlap="none"),
    )
    assert torch.equal(train(early), train(late))


def test_what_a_table_has_no_room_for_is_told_by_step_and_not_by_backward(stores: tuple[Store, Store]) -> None:
    trainee = Trainee(stores[0], init="zeros", max_rows=64)  # one in each partition
    trainee.items(torch.arange(ROWS)).sum().backward()
    with pytest.raises(TableFull, match="'items'"):
        trainee.optimizer.step()
    trainee.optimizer.zero_grad()
    trainee.items(torch.tensor([7])).sum().backward()
    trainee.optimizer.step()
    rows = trainee.rows()
    assert torch.equal(rows[7], torch.full((DIM,), -0.5))
    assert not rows[:7].any()
