"""Embedding: what torch does to an nn.Embedding with sparse gradients, bit for bit, beside dense parameters."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import psstore
from psstore.client.store import Store
from psstore.errors import BadArgument, BadHyper, DeadlineExceeded, UsageError
from psstore.torch import DistributedOptimizer, Embedding
from tests.kernels.parity import exact_square_root
from tests.support.cluster import at_once
from tests.torch.support import in_threads

DIM = 16
ROWS = 50

RULES: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.01, "eps": 1e-8}),
    "adam": (torch.optim.SparseAdam, {"lr": 0.05}),
}


class Model(nn.Module):
    """Two places that share rows, and a dense layer."""

    def __init__(self, items: nn.Module) -> None:
        super().__init__()
        self.items = items
        self.head = nn.Linear(2 * DIM, 1, bias=False)
        with torch.no_grad():
            self.head.weight.copy_(torch.linspace(-1, 1, 2 * DIM).view(1, -1))

    def forward(self, users: torch.Tensor, likes: torch.Tensor) -> torch.Tensor:
        both = torch.cat([self.items(users).mean(dim=1), self.items(likes)], dim=1)
        out: torch.Tensor = self.head(torch.tanh(both))
        return out


def batch(step: int, rank: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    users = torch.randint(0, ROWS, (8, 3), generator=generator)
    likes = torch.randint(0, ROWS, (8,), generator=generator)
    return users, likes, torch.randn(8, 1, generator=generator)


def loss_of(model: nn.Module, step: int, rank: int = 0) -> torch.Tensor:
    users, likes, wanted = batch(step, rank)
    return nn.functional.mse_loss(model(users, likes), wanted)


def first_rows(store: Store, name: str) -> torch.Tensor:
    return torch.from_numpy(store.pull_rows(name, range(ROWS)))


def summed(gradient: torch.Tensor) -> torch.Tensor:
    """What coalesce() gives, with the parts of one row added in order: torch adds them as its sort leaves them."""
    ids, places = torch.unique(gradient._indices()[0], return_inverse=True)
    rows = torch.zeros(len(ids), gradient.shape[1]).index_add_(0, places, gradient._values())
    return torch.sparse_coo_tensor(ids[None], rows, gradient.shape, check_invariants=True).coalesce()


class Reference:
    """One process with an nn.Embedding, whose sparse gradient is the mean of those of the workers."""

    def __init__(self, rows: torch.Tensor, rule: str) -> None:
        kind, hypers = RULES[rule]
        self.items = nn.Embedding(ROWS, DIM, sparse=True, _weight=rows.clone())
        self.model = Model(self.items)
        self.sparse = kind([self.items.weight], **hypers)
        self.dense = torch.optim.SGD(self.model.head.parameters(), lr=0.1)

    def step(self, losses: Any, num_workers: int) -> None:
        sums: list[torch.Tensor] = []
        dense: list[torch.Tensor] = []
        for loss in losses:
            self.sparse.zero_grad()
            self.dense.zero_grad()
            loss(self.model).backward()
            assert self.items.weight.grad is not None
            assert self.model.head.weight.grad is not None
            sums.append(summed(self.items.weight.grad))
            dense.append(self.model.head.weight.grad.clone())
        # In rank order, as the store adds them: a row that a worker lacks adds nothing.
        total = sums[0]
        for one in sums[1:]:
            total = (total + one).coalesce()
        self.items.weight.grad = torch.sparse_coo_tensor(
            total.indices(), total.values() / num_workers, total.shape, check_invariants=True
        ).coalesce()
        self.model.head.weight.grad = sum(dense[1:], start=dense[0]) / num_workers
        with exact_square_root():  # torch's own is its math library's
            self.sparse.step()
        self.dense.step()


@pytest.fixture
def store() -> Iterator[Store]:
    with psstore.connect("local://?shards=3", rank=0, num_workers=1) as connected:
        yield connected


def distributed(model: nn.Module, items: Embedding, store: Store, **options: Any) -> DistributedOptimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return DistributedOptimizer(optimizer, store, model.named_parameters(), tables=[items], **options)


@pytest.mark.parametrize("rule", RULES)
def test_one_worker_trains_as_torch_does_with_sparse_gradients(store: Store, rule: str) -> None:
    items = Embedding("items", DIM, store, rule=rule, init="normal(0, 0.5)", **RULES[rule][1])
    reference = Reference(first_rows(store, "items"), rule)
    model = Model(items)
    optimizer = distributed(model, items, store)
    for step in range(6):
        reference.step([partial(loss_of, step=step)], 1)
        torch.autograd.backward(loss_of(model, step))
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(first_rows(store, "items"), reference.items.weight.detach())
    assert torch.equal(model.head.weight, reference.model.head.weight)


@pytest.mark.parametrize("rule", RULES)
def test_rows_in_bfloat16_are_looked_up_in_float32_and_trained_to_a_neighbour(store: Store, rule: str) -> None:
    options: dict[str, Any] = {"rule": rule, "init": "normal(0, 0.5)", **RULES[rule][1]}
    items = Embedding("items", DIM, store, dtype="bfloat16", **options)
    reference = Reference(first_rows(store, "items"), rule)
    model = Model(items)
    optimizer = distributed(model, items, store)
    users = batch(0)[0]
    assert items(users).dtype is torch.float32
    reference.step([partial(loss_of, step=0)], 1)
    torch.autograd.backward(loss_of(model, 0))
    optimizer.step()
    rows, exact = first_rows(store, "items"), reference.items.weight.detach()
    assert torch.equal(rows, rows.bfloat16().float())
    assert not torch.equal(rows, exact)
    assert ((rows - exact).abs() <= exact.abs() * 2**-7).all()
    assert torch.equal(model.head.weight, reference.model.head.weight)


@pytest.mark.parametrize("rule", RULES)
def test_two_workers_train_as_one_process_with_the_mean_of_their_gradients(rule: str) -> None:
    with psstore.LocalStore(shards=2, workers=2) as server:

        def train(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            with server.connect(rank=rank) as store:
                items = Embedding("items", DIM, store, rule=rule, init="normal(0, 0.5)", **RULES[rule][1])
                before = first_rows(store, "items")
                model = Model(items)
                optimizer = distributed(model, items, store)
                for step in range(5):
                    torch.autograd.backward(loss_of(model, step, rank))
                    optimizer.step()
                    optimizer.zero_grad()
                store.barrier("trained")
                return before, first_rows(store, "items"), model.head.weight.detach().clone()

        (before, rows, head), (_, others, _) = at_once(partial(train, 0), partial(train, 1))
    reference = Reference(before, rule)
    for step in range(5):
        reference.step([partial(loss_of, step=step, rank=rank) for rank in range(2)], 2)
    assert torch.equal(rows, others)
    assert torch.equal(rows, reference.items.weight.detach())
    assert torch.equal(head, reference.model.head.weight.detach())


MOMENTA: list[dict[str, Any]] = [
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.3, "maximize": True},
    {"momentum": 0.9, "nesterov": True},
]


def trained_by_torch(rows: torch.Tensor, gradients: list[torch.Tensor], **options: Any) -> torch.Tensor:
    """What torch's SGD makes of rows by gradients of (row numbers, their gradients)."""
    weight = nn.Parameter(rows.clone())
    optimizer = torch.optim.SGD([weight], **options)
    for gradient in gradients:
        weight.grad = gradient
        optimizer.step()
    return weight.detach()


def sparse(ids: list[int], step: int) -> torch.Tensor:
    rows = torch.randn(len(ids), DIM, generator=torch.Generator().manual_seed(step))
    return torch.sparse_coo_tensor(torch.tensor([ids]), rows, (ROWS, DIM), check_invariants=True).coalesce()


@pytest.mark.parametrize("options", MOMENTA, ids=str)
def test_momentum_of_rows_that_are_pushed_in_every_step_is_torchs(store: Store, options: dict[str, Any]) -> None:
    store.create_table("items", dim=DIM, rule="momentum", init="normal(0, 0.5)")
    rows = first_rows(store, "items")
    gradients = [sparse(list(range(ROWS)), step) for step in range(6)]
    for gradient in gradients:
        store.push_rows("items", gradient.indices()[0], gradient.values())
        store.commit({"lr": 0.1, **{name: float(value) for name, value in options.items()}})
    assert torch.equal(first_rows(store, "items"), trained_by_torch(rows, gradients, lr=0.1, **options))


def test_momentum_moves_a_row_only_when_it_is_pushed_and_torch_moves_each_that_ever_was(store: Store) -> None:
    """A row that comes later begins alike in both: with its dampened gradient."""
    options = {"lr": 0.5, "momentum": 0.5, "dampening": 0.25}
    store.create_table("items", dim=DIM, rule="momentum", init="normal(0, 0.5)")
    rows = first_rows(store, "items")
    gradients = [sparse([1], 0), sparse([2], 1)]
    for gradient in gradients:
        store.push_rows("items", gradient.indices()[0], gradient.values())
        store.commit(options)
    ours, torchs = first_rows(store, "items"), trained_by_torch(rows, gradients, **options)
    stepped_once = trained_by_torch(rows, gradients[:1], **options)
    assert torch.equal(ours[1], stepped_once[1])
    assert not torch.equal(torchs[1], stepped_once[1])
    assert torch.equal(ours[2], torchs[2])


def test_schedulers_cycle_the_momentum_of_rows(store: Store) -> None:
    items = Embedding("items", DIM, store, rule="momentum", init="zeros", lr=0.1)
    layer = nn.Linear(1, 1)
    optimizer = distributed(layer, items, store)
    lr_scheduler.CyclicLR(optimizer, base_lr=0.1, max_lr=0.2, base_momentum=0.7, max_momentum=0.8)
    assert items.hypers["momentum"] == 0.8


def test_passes_before_a_step_add_up(store: Store) -> None:
    items = Embedding("items", DIM, store, rule="sgd", init="zeros", lr=1.0)
    model = Model(items)
    optimizer = distributed(model, items, store)
    for _ in range(2):
        items(torch.tensor([3, 3, 9])).sum().backward()
    optimizer.step()
    assert torch.equal(first_rows(store, "items")[[3, 9, 4]], torch.tensor([[-4.0], [-2.0], [0.0]]).expand(3, DIM))
    assert not items.left


def test_zero_grad_forgets_gradients_and_no_pass_that_still_gets_one(store: Store) -> None:
    items = Embedding("items", DIM, store, rule="sgd", init="zeros", lr=1.0)
    optimizer = distributed(Model(items), items, store)
    items(torch.tensor([1])).sum().backward()
    later = items(torch.tensor([2])).sum()
    optimizer.zero_grad()
    later.backward()
    optimizer.step()
    assert torch.equal(first_rows(store, "items")[[1, 2], 0], torch.tensor([0.0, -1.0]))


def test_after_a_step_that_failed_zero_grad_leaves_the_next_pass_its_gradients(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round was committed, and its values did not come."""
    items = Embedding("items", DIM, store, rule="sgd", init="zeros", lr=1.0)
    model = Model(items)
    optimizer = distributed(model, items, store)

    def fail(*_: object, **__: object) -> None:
        raise DeadlineExceeded("no values came")

    (items(torch.tensor([1])).sum() + model.head.weight.sum()).backward()
    with monkeypatch.context() as patched:
        patched.setattr(store, "pull_many", fail)
        with pytest.raises(DeadlineExceeded):
            optimizer.step()
    optimizer.zero_grad()
    (items(torch.tensor([2])).sum() + model.head.weight.sum()).backward()
    optimizer.step()
    assert torch.equal(first_rows(store, "items")[[1, 2], 0], torch.tensor([-1.0, -1.0]))


@pytest.mark.parametrize("overlap", ["none", "backward"])
@pytest.mark.parametrize("goes_on", [False, True])
def test_a_step_that_waited_in_vain_may_be_taken_again_or_others_follow(overlap: str, goes_on: bool) -> None:
    """And no gradient of a row counts twice, or nowhere."""
    with psstore.LocalStore(workers=2) as local:
        stores = [local.connect(rank=0, wait_s=0.05), local.connect(rank=1)]
        tables = [Embedding("items", DIM, store, rule="sgd", init="zeros", lr=1.0) for store in stores]
        optimizers = []
        for table, store in zip(tables, stores, strict=True):
            head = Model(table)
            optimizers.append(distributed(head, table, store, overlap=overlap))

        def pass_back(rank: int, ids: list[int]) -> None:
            optimizers[rank].zero_grad()
            tables[rank](torch.tensor(ids)).sum().backward()

        def insist(until: int) -> None:
            while stores[0].round <= until:
                with suppress(DeadlineExceeded):
                    optimizers[0].step()

        pass_back(0, [1, 2])
        for _ in range(2):
            with pytest.raises(DeadlineExceeded):
                optimizers[0].step()
        pass_back(1, [2, 3])
        if goes_on:
            optimizers[1].step()
            pass_back(0, [4])
            pass_back(1, [4, 5])
            in_threads([partial(insist, 2), optimizers[1].step])
        else:
            in_threads([partial(insist, 1), optimizers[1].step])
        wanted = [-0.5, -1.0, -0.5, -1.0, -0.5] if goes_on else [-0.5, -1.0, -0.5, 0.0, 0.0]
        assert stores[1].pull_rows("items", [1, 2, 3, 4, 5])[:, 0].tolist() == wanted
        for store in stores:
            store.close()


def test_a_program_may_fill_its_buffer_of_ids_anew(store: Store) -> None:
    items = Embedding("items", DIM, store, rule="sgd", init="zeros", lr=1.0)
    optimizer, ids = distributed(Model(items), items, store), torch.empty(2, dtype=torch.int64)
    for few in ([1, 2], [3, 4]):
        ids.copy_(torch.tensor(few))
        items(ids).sum().backward()
    ids.fill_(7)
    optimizer.step()
    assert first_rows(store, "items")[[1, 2, 3, 4, 7], 0].tolist() == [-1.0, -1.0, -1.0, -1.0, 0.0]


def test_what_a_step_has_left_behind_goes_with_the_store_that_it_was_for(store: Store) -> None:
    items = Embedding("items", DIM, store, rule="sgd", init="zeros", lr=1.0)
    model = Model(items)
    optimizer = distributed(model, items, store)
    items(torch.tensor([1])).sum().backward()
    optimizer.reattach()
    model.zero_grad()
    items(torch.tensor([1])).sum().backward()
    optimizer.step()
    assert float(first_rows(store, "items")[1, 0]) == -1.0


def test_hyper_parameters_are_read_at_every_step(store: Store) -> None:
    items = Embedding("items", DIM, store, rule="sgd", init="zeros", lr=1.0)
    optimizer = distributed(Model(items), items, store)
    for rate, wanted in ((1.0, -1.0), (0.5, -1.5)):
        items.hypers["lr"] = rate
        items(torch.tensor([1])).sum().backward()
        optimizer.step()
        assert float(first_rows(store, "items")[1, 0]) == wanted


def test_schedulers_reach_tables_as_the_optimizer_of_an_embedding(store: Store) -> None:
    items = Embedding("items", DIM, store, rule="adam", init="normal(0, 0.5)")
    reference = Reference(first_rows(store, "items"), "adam")
    model = Model(items)
    optimizer = DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=0.0), store, model.named_parameters(), tables=[items]
    )
    rates = lr_scheduler.OneCycleLR(optimizer, max_lr=[1e-9, 0.1], total_steps=6)  # cycles betas, too
    wanted = lr_scheduler.OneCycleLR(reference.sparse, max_lr=0.1, total_steps=6)
    reference.dense.param_groups[0]["lr"] = 0.0
    for step in range(5):
        assert items.hypers["lr"] == reference.sparse.param_groups[0]["lr"]
        assert items.hypers["betas"] == reference.sparse.param_groups[0]["betas"]
        model.head.weight.data.copy_(reference.model.head.weight)
        reference.step([partial(loss_of, step=step)], 1)
        torch.autograd.backward(loss_of(model, step))
        optimizer.step()
        optimizer.zero_grad()
        rates.step()
        wanted.step()
    assert torch.equal(first_rows(store, "items"), reference.items.weight.detach())


@pytest.mark.parametrize("by", ["the distributed", "the plain"])
def test_a_state_dict_has_the_hyper_parameters_of_tables(store: Store, by: str) -> None:
    items = Embedding("items", DIM, store, rule="sgd", init="zeros", lr=0.5)
    layer = nn.Linear(1, 1)
    inner = torch.optim.SGD(layer.parameters(), lr=0.1)
    optimizer = DistributedOptimizer(inner, store, layer.named_parameters(), tables=[items])
    kept = optimizer.state_dict()
    items.hypers["lr"] = 0.25
    (optimizer if by == "the distributed" else inner).load_state_dict(kept)
    assert items.hypers["lr"] == 0.5
    optimizer.param_groups[1]["lr"] = 2.0
    items(torch.tensor([1])).sum().backward()
    optimizer.step()
    assert float(first_rows(store, "items")[1, 0]) == -2.0
    again = DistributedOptimizer(inner, store, layer.named_parameters(), tables=[items])
    assert len(again.param_groups) == 2


def test_a_state_dict_without_the_tables_is_refused(store: Store) -> None:
    layer, items = nn.Linear(1, 1), Embedding("items", DIM, store)
    optimizer = DistributedOptimizer(
        torch.optim.SGD(layer.parameters(), lr=0.1), store, layer.named_parameters(), tables=[items]
    )
    kept = torch.optim.SGD(layer.parameters(), lr=0.1).state_dict()
    kept["param_groups"].append({**kept["param_groups"][0], "params": []})
    with pytest.raises(UsageError, match="'items'"):
        optimizer.load_state_dict(kept)


def test_a_hyper_parameter_that_the_rule_has_not_is_refused(store: Store) -> None:
    with pytest.raises(BadHyper, match="weight_decay"):
        Embedding("items", DIM, store, rule="adagrad", weight_decay=0.1)


def test_clipping_knows_the_rows(store: Store) -> None:
    items = Embedding("items", 2, store, rule="sgd", init="zeros", lr=1.0)
    layer = nn.Linear(1, 1, bias=False)
    optimizer = distributed(layer, items, store, max_norm=1.0)
    (items(torch.tensor([1]))[0, 0] * 4 + layer(torch.tensor([3.0]))).sum().backward()
    optimizer.step()
    assert optimizer.norm is not None
    assert float(optimizer.norm) == 5.0
    assert first_rows(store, "items")[1, 0] == -4 * torch.tensor(1.0 / (5.0 + 1e-6))


def test_a_table_that_no_optimizer_was_given_is_told_of(store: Store) -> None:
    items, head = Embedding("items", DIM, store), nn.Linear(DIM, 1)
    optimizer = DistributedOptimizer(torch.optim.SGD(head.parameters(), lr=0.1), store, head.named_parameters())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            head(items(torch.tensor([1, 2]))).sum().backward()
            optimizer.step()
    assert ["'items', which no optimizer trains" in str(one.message) for one in said] == [True]


def test_a_pass_without_backward_leaves_nothing(store: Store) -> None:
    items = Embedding("items", DIM, store)
    with torch.no_grad():
        items(torch.tensor([1, 2]))
    items(torch.tensor([1, 2])).sum()
    assert not items.left
    assert sum(int(one["rows"]) for one in store.stats()) == 0


def test_a_scaled_loss_trains_alike_and_gradients_that_are_not_finite_are_skipped(store: Store) -> None:
    items = Embedding("items", DIM, store, rule="sgd", init="zeros", lr=1.0)
    optimizer = distributed(Model(items), items, store)
    scaler = psstore.torch.GradScaler("cpu", init_scale=8.0)
    scaler.scale(items(torch.tensor([1])).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert float(first_rows(store, "items")[1, 0]) == -1.0
    scaler.scale(items(torch.tensor([1])).sum() * torch.inf).backward()
    scaler.step(optimizer)
    assert optimizer.skipped
    assert float(first_rows(store, "items")[1, 0]) == -1.0
    scaler.update()
    scaler.scale(items(torch.tensor([1])).sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(UsageError, match="unscale_"):
        scaler.step(optimizer)


@pytest.mark.parametrize("options", [{"overlap": "eager"}, {"mode": "average"}], ids=str)
def test_what_tables_can_not_do_yet_is_refused_by_name(store: Store, options: dict[str, Any]) -> None:
    items = Embedding("items", DIM, store)
    with pytest.raises(UsageError, match="tables="):
        distributed(Model(items), items, store, **options)


def test_tables_that_do_not_fit_are_refused(store: Store) -> None:
    items = Embedding("items", DIM, store)
    layer = nn.Linear(1, 1)
    with pytest.raises(UsageError, match="twice"):
        DistributedOptimizer(
            torch.optim.SGD(layer.parameters(), lr=1), store, layer.named_parameters(), tables=[items, items]
        )
    with pytest.raises(UsageError, match="EmbeddingBag modules"):
        distributed(layer, nn.Embedding(3, 3), store)  # type: ignore[arg-type]  # that is the point
    with pytest.raises(UsageError, match="integers"):
        items(torch.tensor([1.0]))
    with pytest.raises(UsageError, match="copied"):
        copy.deepcopy(items)


# ---- fewer bytes --------------------------------------------------------------------------------------------


def trained(compression: str | None, loss_scale: float = 1.0) -> torch.Tensor:
    """Rows after some steps of a worker of a store of its own."""
    with psstore.connect("local://?shards=2", rank=0, num_workers=1) as store:
        items = Embedding("items", DIM, store, rule="sgd", init="normal(0, 0.5)", lr=0.5, compression=compression)
        model = Model(items)
        optimizer = distributed(model, items, store)
        scaler = psstore.torch.GradScaler("cpu", init_scale=loss_scale)
        for step in range(8):
            torch.autograd.backward(scaler.scale(loss_of(model, step)))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return first_rows(store, "items")


@pytest.mark.parametrize("compression", ["int8", "push=int8,pull=bf16", "bf16"])
def test_rows_in_a_codec_train_nearly_as_others(compression: str) -> None:
    plain, coded = trained(None), trained(compression)
    assert not torch.equal(plain, coded)
    assert torch.allclose(plain, coded, atol=0.01)


def test_residuals_of_rows_are_in_units_of_real_gradients() -> None:
    assert torch.equal(trained("push=int8"), trained("push=int8", loss_scale=1024.0))


def test_a_state_dict_goes_on_with_what_was_kept_back_of_rows(store: Store) -> None:
    def trainee(on: Store) -> tuple[Model, DistributedOptimizer]:
        items = Embedding("items", DIM, on, rule="sgd", init="normal(0, 0.5)", lr=0.5, compression="push=int8")
        model = Model(items)
        return model, distributed(model, items, on)

    def train(model: Model, optimizer: DistributedOptimizer, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            torch.autograd.backward(loss_of(model, step))
            optimizer.step()

    model, optimizer = trainee(store)
    train(model, optimizer, range(4))
    saved, rows = optimizer.state_dict(), first_rows(store, "items")
    weights = copy.deepcopy(model.state_dict())
    train(model, optimizer, range(4, 8))
    with psstore.connect("local://", rank=0, num_workers=1) as other:
        again, optimizer = trainee(other)
        again.load_state_dict(weights)
        optimizer.publish()
        other.assign_rows("items", range(ROWS), rows)
        optimizer.load_state_dict(saved)
        train(again, optimizer, range(4, 8))
        assert torch.equal(first_rows(other, "items"), first_rows(store, "items"))
        assert torch.equal(again.head.weight, model.head.weight)
        saved["residuals"]["rank"] = 1
        optimizer.load_state_dict(saved)
        assert "residuals" not in optimizer.state_dict(), "this worker has not seen another's gradients"


@pytest.mark.parametrize("compression", ["sign", "topk:0.1", "push=sign"])
def test_a_codec_that_rows_have_not_is_refused(store: Store, compression: str) -> None:
    with pytest.raises(BadArgument, match=r"table 'items': push: codec is .* rows travel in none, bf16, fp16, int8"):
        Embedding("items", DIM, store, compression=compression)
    assert store.keys() == []
