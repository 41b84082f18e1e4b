"""Embedding: a row for each id."""

from __future__ import annotations

import torch

from psstore.torch.table_module import TableModule


class Embedding(TableModule):
    """Looks rows of a table up, and trains them: torch.nn.Embedding without a size, and without a weight here.

    >>> items = psstore.torch.Embedding("items", 64, store, rule="adagrad", init="normal(0, 0.01)", lr=0.1)
    >>> opt = psstore.torch.DistributedOptimizer(opt, store, model.named_parameters(), tables=[items])
    >>> vectors = items(ids)

    `forward` takes integers of any shape, none negative, and returns `lookup_dtype` of that shape and then (dim,), on
    the ids' device. The arguments are those of `TableModule`.
    """

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the rows, as every step in them that this worker was told of left them."""
        return self.rows_of(ids)

    def to_torch(self, num_embeddings: int) -> torch.nn.Embedding:
        """Returns a torch.nn.Embedding of this process with the rows of the ids below `num_embeddings`, as of one
        decision: to go on without a store. Those that nobody has trained have their first values.

        Raises UsageError where the table has rows of other ids.
        """
        weight = self.weight_of(num_embeddings)
        return torch.nn.Embedding(num_embeddings, self.dim, padding_idx=self.padding_idx, _weight=weight)
