"""rowwise_adagrad beside FBGEMM's table with EXACT_ROWWISE_ADAGRAD, on the CPU: the same steps to a few ulp."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from psstore.client.store import Store
from psstore.torch import DistributedOptimizer, Embedding

tables = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_training", reason="needs fbgemm-gpu-cpu")
configs = pytest.importorskip("fbgemm_gpu.split_embedding_configs")

ROWS, DIM = 200, 64
STEPS = 100
LOOKUPS = 300
RATE, EPS = 0.05, 1e-8


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Ids, of which many come several times, and a gradient for each lookup."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(STEPS):
        ids = (torch.rand(LOOKUPS, generator=generator) ** 3 * ROWS).long()
        yield ids, torch.randn(LOOKUPS, DIM, generator=generator)


def trained_by_fbgemm(rows: torch.Tensor) -> np.ndarray:
    table = tables.SplitTableBatchedEmbeddingBagsCodegen(
        [(ROWS, DIM, tables.EmbeddingLocation.HOST, tables.ComputeDevice.CPU)],
        optimizer=configs.EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=RATE,
        eps=EPS,
    )
    (weight,) = table.split_embedding_weights()
    weight.copy_(rows)
    bounds = torch.arange(LOOKUPS + 1)
    for ids, gradients in batches():
        table(ids, bounds).backward(gradients)
    found: np.ndarray = weight.numpy()
    return found


def test_rows_are_those_of_fbgemm_to_a_few_ulp(store: Store) -> None:
    items = Embedding("items", DIM, store, rule="rowwise_adagrad", init="normal(0, 1)", lr=RATE, eps=EPS)
    rows = torch.from_numpy(store.pull_rows("items", range(ROWS)))
    dense = torch.nn.Linear(1, 1)
    sgd = torch.optim.SGD(dense.parameters(), lr=0.0)
    optimizer = DistributedOptimizer(sgd, store, dense.named_parameters(), tables=[items])
    for ids, gradients in batches():
        optimizer.zero_grad()
        items(ids).backward(gradients)
        optimizer.step()
    found, expected = store.pull_rows("items", range(ROWS)), trained_by_fbgemm(rows)
    scale = np.spacing(np.abs(expected).max(axis=1, keepdims=True))
    assert (np.abs(found - expected) / scale).max() <= 4  # of a row's largest element
