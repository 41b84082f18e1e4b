"""EmbeddingBag: the results and gradients of torch's with sparse gradients, bit for bit, of the same rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from psstore.client.store import Store
from psstore.errors import UsageError
from psstore.torch import DistributedOptimizer, Embedding, EmbeddingBag

DIM = 12
ROWS = 30
PADDING = 4

FLAT = torch.tensor([3, 4, 3, 9, 4, 29, 0, 3, 4, 4])
OFFSETS = torch.tensor([0, 3, 3, 8])
"""Bags of three, none, five and two ids, the last of them nothing but padding."""

BAGS: dict[str, tuple[torch.Tensor, ...]] = {
    "two dimensions": (torch.tensor([[3, 4, 3], [9, 4, 9], [4, 4, 4], [0, 29, 1]]),),
    "offsets": (FLAT, OFFSETS),
    "no id at all": (FLAT[:0], torch.tensor([0, 0])),
    "int32": (FLAT.int(), OFFSETS.int()),
}


def pair(store: Store, **options: Any) -> tuple[EmbeddingBag, nn.EmbeddingBag]:
    """The same rows in the store and in torch."""
    bags = EmbeddingBag("items", DIM, store, rule="sgd", init="normal(0, 1)", lr=1.0, **options)
    rows = torch.from_numpy(store.pull_rows("items", range(ROWS)))
    is_sparse = options["mode"] != "max"  # which torch has with dense gradients only
    return bags, nn.EmbeddingBag.from_pretrained(rows, freeze=False, sparse=is_sparse, **options)


def assert_same_gradients(bags: EmbeddingBag, torchs: nn.EmbeddingBag) -> None:
    """Those of each lookup, as torch has them in a sparse gradient; a dense one has each row's sum."""
    (left,) = bags.left
    gradient = torchs.weight.grad
    assert gradient is not None
    if gradient.is_sparse:
        assert torch.equal(left.ids, gradient._indices()[0])
        assert torch.equal(left.gradients, gradient._values())
    else:
        assert torch.equal(torch.zeros(ROWS, DIM).index_add_(0, left.ids, left.gradients), gradient)


@pytest.mark.parametrize("padding_idx", [None, PADDING], ids=["all", "padding"])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("given", BAGS)
def test_results_and_gradients_are_those_of_torch(store: Store, given: str, mode: str, padding_idx: int | None) -> None:
    ours, torchs = pair(store, mode=mode, padding_idx=padding_idx)
    result, wanted = ours(*BAGS[given]), torchs(*BAGS[given])
    assert torch.equal(result, wanted)
    toward = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1))
    result.backward(toward)
    wanted.backward(toward)
    assert_same_gradients(ours, torchs)


@pytest.mark.parametrize("given", ["two dimensions", "offsets"])
def test_weights_of_ids_count_and_have_gradients(store: Store, given: str) -> None:
    ours, torchs = pair(store, mode="sum", padding_idx=PADDING)
    weights = [torch.linspace(-1, 2, BAGS[given][0].numel()).view(BAGS[given][0].shape) for _ in range(2)]
    results = []
    for module, weight in zip((ours, torchs), weights, strict=True):
        results.append(module(*BAGS[given], per_sample_weights=weight.requires_grad_()))
        results[-1].square().sum().backward()
    assert torch.equal(*results)
    assert weights[0].grad is not None
    assert weights[1].grad is not None
    assert torch.equal(weights[0].grad, weights[1].grad)
    assert_same_gradients(ours, torchs)


def test_offsets_may_end_with_the_number_of_ids(store: Store) -> None:
    ours, torchs = pair(store, mode="sum", include_last_offset=True)
    ends = torch.tensor([0, 3, 3, 10])
    assert torch.equal(ours(FLAT, ends), torchs(FLAT, ends))


@dataclass
class Feature:
    """What TorchRec's jagged tensors are asked for."""

    ids: torch.Tensor
    ends: torch.Tensor
    weights: torch.Tensor | None = None

    def values(self) -> torch.Tensor:
        return self.ids

    def offsets(self) -> torch.Tensor:
        return self.ends

    def weights_or_none(self) -> torch.Tensor | None:
        return self.weights


@pytest.mark.parametrize("weights", [None, torch.linspace(-1, 2, len(FLAT))], ids=["plain", "weighted"])
def test_a_jagged_tensor_has_bags_and_weights_of_its_own(store: Store, weights: torch.Tensor | None) -> None:
    bags, _ = pair(store, mode="sum", padding_idx=PADDING)
    result = bags(Feature(FLAT, torch.tensor([0, 3, 3, 8, len(FLAT)]), weights))
    assert torch.equal(result, bags(FLAT, OFFSETS, weights))
    with pytest.raises(UsageError, match=r"'items' are a Feature, .* give it alone"):
        bags(Feature(FLAT, OFFSETS), OFFSETS)


def test_an_optimizer_trains_the_rows_of_bags_and_no_padding(store: Store) -> None:
    bags = EmbeddingBag("items", DIM, store, mode="sum", rule="sgd", init="zeros", lr=1.0, padding_idx=PADDING)
    layer = nn.Linear(1, 1)
    sgd = torch.optim.SGD(layer.parameters(), lr=1.0)
    optimizer = DistributedOptimizer(sgd, store, layer.named_parameters(), tables=[bags])
    bags(torch.tensor([[1, 2], [2, PADDING]])).sum().backward()
    optimizer.step()
    rows = torch.from_numpy(store.pull_rows("items", range(ROWS)))
    assert rows[:5, 0].tolist() == [0.0, -1.0, -2.0, 0.0, 0.0]
    assert sum(int(one["rows"]) for one in store.stats()) == 2


def test_padding_of_an_embedding_is_zeros_and_has_no_gradient(store: Store) -> None:
    items = Embedding("items", DIM, store, init="constant(2)", padding_idx=PADDING)
    rows = items(torch.tensor([[1, PADDING]]))
    assert rows[0, :, 0].tolist() == [2.0, 0.0]
    rows.sum().backward()
    assert items.left[0].ids.tolist() == [1]
    assert items.left[0].gradients.shape == (1, DIM)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ((FLAT,), "without offsets"),
        ((FLAT.view(2, 5), OFFSETS), "with offsets"),
        ((FLAT.view(2, 5), None, torch.ones(3)), "shape"),
        ((FLAT.view(2, 5).float(),), "integers"),
        (([[1, 2]],), "integers, not by list"),
        (
            (torch.nested.nested_tensor([FLAT, FLAT[:3]], layout=torch.jagged),),
            r"nested one: .* values\(\) and offsets\(\)",
        ),
        ((FLAT, [0, 3]), "no places among 10 ids: expected a flat tensor of integers"),
        ((FLAT, OFFSETS.float()), "no places"),
        ((FLAT, OFFSETS.view(2, 2)), "no places"),
        ((FLAT, OFFSETS + 1), "no places"),
        ((FLAT, torch.tensor([0, 11])), "no places"),
        ((FLAT, torch.tensor([0, 5, 3])), "no places"),
        ((FLAT, OFFSETS, [1.0] * 10), "per_sample_weights are a list; expected a tensor"),
    ],
)
def test_what_is_no_bag_is_refused(store: Store, given: tuple[Any, ...], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        EmbeddingBag("items", DIM, store, mode="sum")(*given)


def test_what_no_bag_can_be_is_refused(store: Store) -> None:
    with pytest.raises(UsageError, match="'median'"):
        EmbeddingBag("items", DIM, store, mode="median")  # type: ignore[arg-type]  # that is the point
    with pytest.raises(UsageError, match="padding_idx"):
        EmbeddingBag("items", DIM, store, padding_idx=-1)
    with pytest.raises(UsageError, match="mode='sum'"):
        EmbeddingBag("items", DIM, store, mode="mean")(FLAT, OFFSETS, torch.ones(10))
