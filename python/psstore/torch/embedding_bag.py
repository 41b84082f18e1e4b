"""EmbeddingBag: the sum, mean or maximum of the rows of several ids."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch

from psstore.client.store import Store
from psstore.errors import UsageError
from psstore.torch.table_module import TableModule

Pooling = Literal["sum", "mean", "max"]


class EmbeddingBag(TableModule):
    """Reduces bags of rows, and trains them: torch.nn.EmbeddingBag without a size, and without a weight here.

    >>> items = psstore.torch.EmbeddingBag("items", 64, store, mode="sum", rule="adagrad", lr=0.1)
    >>> vectors = items(torch.tensor([3, 5, 3, 8]), torch.tensor([0, 3]))  # the rows of 3, 5, 3, and the row of 8

    torch's own function reduces. Results, and the gradient of each lookup, are those of an nn.EmbeddingBag with
    sparse=True, which torch has not for mode 'max': there it is the sum of a row's gradients that is the same.

    Args:
        mode: how a bag is reduced: 'sum', 'mean' or 'max'. An empty one is zeros.
        include_last_offset: offsets end with the number of ids, as in the CSR format.
        padding_idx: an id that takes no part in its bag.

    The other arguments are those of `TableModule`.
    """

    def __init__(
        self,
        name: str,
        dim: int,
        store: Store,
        *,
        mode: Pooling = "mean",
        include_last_offset: bool = False,
        **options: Any,
    ) -> None:
        if mode not in get_args(Pooling):
            raise UsageError(f"mode is {mode!r}; it must be one of {', '.join(map(repr, get_args(Pooling)))}")
        super().__init__(name, dim, store, **options)
        self.mode = mode
        self.include_last_offset = include_last_offset

    def forward(
        self, ids: torch.Tensor, offsets: torch.Tensor | None = None, per_sample_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns `lookup_dtype` of (bags, dim), on the ids' device.

        `ids`: integers, none negative; (bags, ids of a bag), or flat with `offsets`, the place of each bag's first one.
        `per_sample_weights`: a factor for each id, in its shape, with mode 'sum'; it gets a gradient, too.
        """
        self._check(ids, offsets, per_sample_weights)
        rows = self.rows_of(ids.reshape(-1))
        # Each lookup has a row of its own, so that the gradient of each comes back.
        places = torch.arange(ids.numel(), device=ids.device).view(ids.shape)
        return torch.nn.functional.embedding_bag(
            places,
            rows,
            offsets,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=self._gather_padding(ids, places),
        )

    def _gather_padding(self, ids: torch.Tensor, places: torch.Tensor) -> int | None:
        """Sends all padding to the place of the first, which is returned: torch leaves out one place only. None: there
        is no padding."""
        is_padding = None if self.padding_idx is None else ids == self.padding_idx
        if is_padding is None or not is_padding.any():
            return None
        first = int(places[is_padding][0])
        places[is_padding] = first
        return first

    def _check(self, ids: torch.Tensor, offsets: torch.Tensor | None, weights: torch.Tensor | None) -> None:
        """Raises UsageError before anything is pulled."""
        shape = tuple(getattr(ids, "shape", ()))
        if len(shape) != (2 if offsets is None else 1):
            given = "without offsets" if offsets is None else "with offsets"
            raise UsageError(
                f"bags of table {self.table!r} are of shape {shape} {given}; expected (bags, ids of a bag) without"
                " offsets, or flat ids with them"
            )
        if weights is not None and self.mode != "sum":
            raise UsageError(f"per_sample_weights are for mode='sum', and table {self.table!r} has mode={self.mode!r}")
        if weights is not None and weights.shape != ids.shape:
            raise UsageError(
                f"per_sample_weights are of shape {tuple(weights.shape)}; expected that of the ids, {shape}"
            )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, mode={self.mode!r}"
