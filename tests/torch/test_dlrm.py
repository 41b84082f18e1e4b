"""The DLRM of the examples: two workers on two shards train to the bits of one process that adds up in their order."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import psstore
from psstore.cli.demo.dlrm import DIM, TABLES, ClickLog, Clicks, Dlrm, auc
from psstore.client.store import Store
from tests.kernels.parity import exact_square_root
from tests.support.cluster import at_once
from tests.torch.test_embedding import summed

STEPS = 12
WORKERS = 2
SAMPLES = 256

Train = Callable[..., Dlrm]
Rows = dict[str, torch.Tensor]


@pytest.fixture
def train(repository: Path) -> Train:
    """That of examples/dlrm.py."""
    spec = importlib.util.spec_from_file_location("dlrm", repository / "examples" / "dlrm.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    assert example.SAMPLES == SAMPLES
    found: Train = example.train
    return found


def all_rows(store: Store) -> Rows:
    return {name: torch.from_numpy(store.pull_rows(name, range(num_ids))) for name, (num_ids, _) in TABLES.items()}


def first_rows() -> Rows:
    """As the example's tables begin."""
    with psstore.connect("local://") as store:
        for name in TABLES:
            store.create_table(name, dim=DIM, rule="adagrad", init="normal(0, 0.1)")
        return all_rows(store)


def train_in_one_process() -> tuple[Dlrm, Rows]:
    """Takes the workers' batches of each step in rank order, adds their gradients, divides, steps."""
    log = ClickLog(seed=0)
    tables = {
        name: nn.EmbeddingBag.from_pretrained(rows, freeze=False, mode="sum", sparse=True)
        for name, rows in first_rows().items()
    }
    model = Dlrm(list(tables.values()))
    rows = [table.weight for table in tables.values()]
    dense = [*model.bottom.parameters(), *model.top.parameters()]
    sparse_optimizer = torch.optim.Adagrad(rows, lr=0.1)
    dense_optimizer = torch.optim.SGD(dense, lr=0.05, momentum=0.9, foreach=False)
    for step in range(STEPS):
        dense_optimizer.zero_grad()
        sums: list[torch.Tensor] = []
        for rank in range(WORKERS):
            sparse_optimizer.zero_grad()
            model.loss(log.batch(step, samples=SAMPLES, rank=rank)).backward()  # type: ignore[no-untyped-call]
            own = [summed(one.grad) for one in rows if one.grad is not None]
            sums = [(before + one).coalesce() for before, one in zip(sums, own, strict=True)] if sums else own
        for one, total in zip(rows, sums, strict=True):
            one.grad = torch.sparse_coo_tensor(
                total.indices(), total.values() / WORKERS, total.shape, is_coalesced=True, check_invariants=True
            )
        for parameter in dense:
            assert parameter.grad is not None
            parameter.grad /= WORKERS
        with exact_square_root():  # torch's own is its math library's
            sparse_optimizer.step()
        dense_optimizer.step()
    return model, {name: table.weight.detach() for name, table in tables.items()}


def test_two_workers_train_to_the_bits_of_one_process(train: Train) -> None:
    with psstore.LocalStore(shards=2, workers=WORKERS) as server:

        def work(rank: int) -> tuple[nn.Module, Rows, float]:
            with server.connect(rank=rank) as store:
                model = train(store, steps=STEPS)
                found = auc(model, ClickLog(seed=0).test())
                store.barrier("trained")
                return model, all_rows(store), found

        (model, rows, found), (_, others, other) = at_once(partial(work, 0), partial(work, 1))
    wanted, wanted_rows = train_in_one_process()
    assert {name: torch.equal(one, others[name]) for name, one in rows.items()} == dict.fromkeys(TABLES, True)
    assert {name: torch.equal(one, wanted_rows[name]) for name, one in rows.items()} == dict.fromkeys(TABLES, True)
    for name, value in wanted.named_parameters():
        if "tables" not in name:
            assert torch.equal(dict(model.named_parameters())[name], value), name
    assert found == other == auc(wanted, ClickLog(seed=0).test())


class Fixed(Dlrm):
    """Scores that are given."""

    def __init__(self, scores: torch.Tensor) -> None:
        super().__init__([])
        self.scores = scores

    def forward(self, batch: Clicks) -> torch.Tensor:
        return self.scores


def test_the_area_under_the_curve_is_the_share_of_pairs_in_order() -> None:
    batch = ClickLog(seed=3).test(samples=60)
    scores = torch.linspace(-1, 1, 60).round(decimals=1) + batch.clicked / 4  # some are equal
    clicked, others = scores[batch.clicked > 0].tolist(), scores[batch.clicked == 0].tolist()
    pairs = [(one > other) + (one == other) / 2 for one in clicked for other in others]
    assert auc(Fixed(scores), batch) == pytest.approx(sum(pairs) / len(pairs))


def test_batches_are_functions_of_seed_step_and_rank() -> None:
    log, again = ClickLog(seed=1), ClickLog(seed=1)
    for step, rank in ((0, 0), (0, 1), (1, 0)):
        one, other = (made.batch(step, samples=5, rank=rank) for made in (log, again))
        assert torch.equal(one.dense, other.dense)
        assert all(map(torch.equal, one.ids, other.ids))
    firsts = [log.batch(*place, samples=5).dense for place in ((0,), (1,))] + [log.batch(0, samples=5, rank=1).dense]
    assert len({tuple(one.flatten().tolist()) for one in firsts}) == 3
