"""embeddings_in_store: a model's embeddings become tables, and it trains on; what can't become one is said by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from psstore.client.store import Store
from psstore.errors import UsageError
from psstore.torch import DistributedOptimizer, Embedding, EmbeddingBag, embeddings_in_store

DIM = 4
ROWS = 10


class Model(nn.Module):
    """One embedding that is used in two places, bags, one that is frozen, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(ROWS, DIM, padding_idx=-1)
        self.towers = nn.ModuleList([nn.EmbeddingBag(ROWS, DIM, mode="sum", padding_idx=2), self.users])
        self.places = nn.Embedding(ROWS, DIM)
        self.places.requires_grad_(False)
        self.head = nn.Linear(DIM, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.users(ids) + self.towers[1](ids) + self.places(ids)
        out: torch.Tensor = self.head(rows.sum(dim=1) + self.towers[0](ids))
        return out


def test_a_model_trains_on_with_tables_in_place_of_its_embeddings(store: Store) -> None:
    model = Model().eval()
    tables = embeddings_in_store(model, store, rule="sgd", init="zeros", prefix="net/", lr=1.0)
    assert [one.table for one in tables] == ["net/users", "net/towers.0"]
    assert isinstance(model.users, Embedding)
    assert model.users is model.towers[1]
    assert model.users.padding_idx == ROWS - 1
    bags = model.towers[0]
    assert isinstance(bags, EmbeddingBag)
    assert (bags.mode, bags.padding_idx, bags.training) == ("sum", 2, False)
    assert {name for name, _ in model.named_parameters()} == {"places.weight", "head.weight", "head.bias"}
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.head.parameters(), lr=0.0), store, model.named_parameters(), tables=tables
    )
    model(torch.tensor([[1, 2], [9, 1]])).sum().backward()
    optimizer.step()
    weight = model.head.weight.detach()[0]
    taken = {name: -torch.from_numpy(store.pull_rows(f"net/{name}", [1, 2, 9])) for name in ("users", "towers.0")}
    assert torch.allclose(taken["users"], torch.outer(torch.tensor([4.0, 2.0, 0.0]), weight))
    assert torch.allclose(taken["towers.0"], torch.outer(torch.tensor([2.0, 0.0, 1.0]), weight))


def test_only_those_that_are_named_are_replaced(store: Store) -> None:
    model = Model()
    (table,) = embeddings_in_store(model, store, only=["towers.0"], dtype="bfloat16", compression="push=int8")
    assert store.describe("towers.0").spec.dtype == "bfloat16"
    assert (table.compression.push, table.compression.pull) == ("int8", "none")
    assert model.towers[0] is table
    assert isinstance(model.users, nn.Embedding)
    with pytest.raises(UsageError, match="'user'"):
        embeddings_in_store(model, store, only=["user"])


@pytest.mark.parametrize(("dtype", "kept"), [(None, "bfloat16"), ("float32", "float32")])
def test_a_model_in_bfloat16_goes_on_in_it_and_so_do_its_rows_unless_told_otherwise(
    store: Store, dtype: str | None, kept: str
) -> None:
    model = nn.ModuleList([nn.Embedding(ROWS, DIM), nn.EmbeddingBag(ROWS, DIM, mode="sum")]).to(torch.bfloat16)
    names = ["0", "1"]
    tables = embeddings_in_store(model, store, rule="sgd", dtype=dtype, cache_bytes=1 << 20, lr=1.0)
    assert [store.describe(name).spec.dtype for name in names] == [kept, kept]
    ids = torch.tensor([[3, 7], [7, 7]])
    weights = [torch.zeros(ROWS, DIM) for _ in names]
    for weight, name in zip(weights, names, strict=True):
        weight[[3, 7]] = torch.from_numpy(store.pull_rows(name, [3, 7]))
    wide = [nn.Embedding(ROWS, DIM, _weight=weights[0]), nn.EmbeddingBag(ROWS, DIM, mode="sum", _weight=weights[1])]
    for of_store, of_torch in zip(model, wide, strict=True):
        found, expected = of_store(ids), of_torch.to(torch.bfloat16)(ids)
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, expected)
        found.sum().backward()
    dense = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(dense.parameters(), lr=0.0)
    DistributedOptimizer(optimizer, store, dense.named_parameters(), tables=tables).step()
    for weight, name in zip(weights, names, strict=True):
        after = torch.from_numpy(store.pull_rows(name, [3, 7]))
        steps = weight[[3, 7]] - torch.tensor([[1.0], [3.0]])
        assert torch.equal(after, steps) if kept == "float32" else torch.allclose(after, steps, rtol=2**-7)
        assert store.row_cache(name).asked_rows == 2


def test_a_trained_model_goes_on_without_a_store(store: Store) -> None:
    model = Model()
    tables = embeddings_in_store(model, store, rule="sgd", lr=1.0)
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.head.parameters(), lr=0.0), store, model.named_parameters(), tables=tables
    )
    ids = torch.tensor([[1, 2], [9, 1]])
    model(ids).sum().backward()
    optimizer.step()
    trained = model(ids)
    bags = model.towers[0]
    assert isinstance(model.users, Embedding)
    assert isinstance(bags, EmbeddingBag)
    with pytest.raises(UsageError, match=r"'users' has ids up to 9, and num_embeddings is 9"):
        model.users.to_torch(9)
    model.users = model.towers[1] = model.users.to_torch(ROWS)
    model.towers[0] = bags.to_torch(ROWS)
    assert [type(one) for one in model.towers] == [nn.EmbeddingBag, nn.Embedding]
    assert [one.padding_idx for one in model.towers] == [2, ROWS - 1]
    assert torch.equal(model(ids), trained)
    assert "users.weight" in model.state_dict()


def test_lookups_are_in_a_dtype_that_rows_travel_in(store: Store) -> None:
    with pytest.raises(UsageError, match=r"lookup_dtype of table 't' is torch.float16; lookups give"):
        Embedding("t", DIM, store, lookup_dtype=torch.float16)


def tied() -> nn.Module:
    model = nn.ModuleDict({"words": nn.Embedding(ROWS, DIM), "head": nn.Linear(DIM, ROWS, bias=False)})
    model["head"].weight = model["words"].weight
    return model


class Positions(nn.Embedding): ...


def within(module: nn.Module) -> nn.Module:
    return nn.Sequential(nn.EmbeddingBag(ROWS, DIM), module)


@pytest.mark.parametrize(
    ("model", "complaint"),
    [
        (tied, "'words'.*'words', 'head' have one weight"),
        (lambda: within(nn.Embedding(ROWS, DIM, max_norm=1.0)), "'1'.*max_norm=1.0"),
        (lambda: within(nn.EmbeddingBag(ROWS, DIM, scale_grad_by_freq=True)), "'1'.*scale_grad_by_freq"),
        (lambda: within(nn.Embedding(ROWS, DIM, dtype=torch.float16)), "'1'.*float16, and rows are"),
        (lambda: within(Positions(ROWS, DIM)), "'1'.*Positions"),
        (lambda: within(nn.Embedding(2, 2, padding_idx=0, _weight=torch.ones(2, 2))), "'1'.*padding, 0"),
        (lambda: nn.Embedding(ROWS, DIM), "''.*the model itself"),
        (lambda: nn.Linear(1, 1), "no nn.Embedding"),
    ],
)
def test_what_no_table_can_stand_in_for_is_said_by_name(
    store: Store, model: Callable[[], nn.Module], complaint: str
) -> None:
    made = model()
    before = list(made.modules())
    with pytest.raises(UsageError, match=complaint):
        embeddings_in_store(made, store)
    assert list(made.modules()) == before
    assert store.keys() == []
