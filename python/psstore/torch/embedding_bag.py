"""EmbeddingBag: the sum, mean or maximum of the rows of several ids."""

from __future__ import annotations

from typing import Any, Literal, Protocol, get_args, runtime_checkable

import torch

from psstore.client.store import Store
from psstore.errors import UsageError
from psstore.torch.graphs import outside_of_graphs
from psstore.torch.table_module import TableModule

Pooling = Literal["sum", "mean", "max"]


@runtime_checkable
class Jagged(Protocol):
    """Bags of ids that know their ends: TorchRec's JaggedTensor and KeyedJaggedTensor, and what is like them."""

    def values(self) -> torch.Tensor:
        """Ids, flat, one bag after the other."""

    def offsets(self) -> torch.Tensor:
        """Where each bag begins among them, and then their number."""

    def weights_or_none(self) -> torch.Tensor | None:
        """A factor for each id."""


class EmbeddingBag(TableModule):
    """Reduces bags of rows, and trains them: torch.nn.EmbeddingBag without a size, and without a weight here.

    >>> items = psstore.torch.EmbeddingBag("items", 64, store, mode="sum", rule="adagrad", lr=0.1)
    >>> vectors = items(torch.tensor([3, 5, 3, 8]), torch.tensor([0, 3]))  # the rows of 3, 5, 3, and the row of 8

    torch's own function reduces. Results, and the gradient of each lookup, are those of an nn.EmbeddingBag with
    sparse=True, which torch has not for mode 'max': there it is the sum of a row's gradients that is the same.

    Args:
        mode: how a bag is reduced: 'sum', 'mean' or 'max'. An empty one is zeros.
        include_last_offset: offsets end with the number of ids, as in the CSR format.

    The other arguments are those of `TableModule`; the id `padding_idx` takes no part in its bag.
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

    @outside_of_graphs  # also what follows from the ids' values
    def forward(
        self,
        ids: torch.Tensor | Jagged,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns `lookup_dtype` of (bags, dim), on the ids' device.

        `ids`: integers, none negative; (bags, ids of a bag), or flat with `offsets`, the place of each bag's first one;
            or a jagged tensor of TorchRec, which has both, and weights: of a keyed one the bags of all its keys, those
            of the first key first.
        `per_sample_weights`: a factor for each id, in its shape, with mode 'sum'; it gets a gradient, too.
        """
        include_last_offset = self.include_last_offset
        if isinstance(ids, Jagged):
            ids, offsets, per_sample_weights = self._parts_of(ids, offsets, per_sample_weights)
            include_last_offset = True
        self._check_ids(ids)
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
            include_last_offset=include_last_offset,
            padding_idx=self._gather_padding(ids, places),
        )

    def to_torch(self, num_embeddings: int) -> torch.nn.EmbeddingBag:
        """Returns a torch.nn.EmbeddingBag of this process with the rows of the ids below `num_embeddings`, as of one
        decision: to go on without a store. Those that nobody has trained have their first values.

        Raises UsageError where the table has rows of other ids.
        """
        return torch.nn.EmbeddingBag(
            num_embeddings,
            self.dim,
            mode=self.mode,
            include_last_offset=self.include_last_offset,
            padding_idx=self.padding_idx,
            _weight=self.weight_of(num_embeddings),
        )

    def _parts_of(
        self, jagged: Jagged, offsets: torch.Tensor | None, weights: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Raises UsageError for offsets or weights beside its own."""
        if offsets is not None or weights is not None:
            raise UsageError(
                f"bags of table {self.table!r} are a {type(jagged).__name__}, which has offsets and weights of its own;"
                " give it alone"
            )
        return jagged.values(), jagged.offsets(), jagged.weights_or_none()

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
        shape = tuple(ids.shape)
        if len(shape) != (2 if offsets is None else 1):
            given = "without offsets" if offsets is None else "with offsets"
            raise UsageError(
                f"bags of table {self.table!r} are of shape {shape} {given}; expected (bags, ids of a bag) without"
                " offsets, or flat ids with them"
            )
        if offsets is not None and not _are_places(offsets, num_ids=len(ids)):
            raise UsageError(
                f"bags of table {self.table!r} have offsets that are no places among {len(ids)} ids: expected a flat"
                " tensor of integers which begins with 0, never falls, and ends with that number at most"
            )
        if weights is not None and not isinstance(weights, torch.Tensor):
            raise UsageError(f"per_sample_weights are a {type(weights).__name__}; expected a tensor")
        if weights is not None and self.mode != "sum":
            raise UsageError(f"per_sample_weights are for mode='sum', and table {self.table!r} has mode={self.mode!r}")
        if weights is not None and weights.shape != ids.shape:
            raise UsageError(
                f"per_sample_weights are of shape {tuple(weights.shape)}; expected that of the ids, {shape}"
            )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, mode={self.mode!r}"


def _are_places(offsets: torch.Tensor, *, num_ids: int) -> bool:
    if not isinstance(offsets, torch.Tensor) or offsets.dim() != 1 or offsets.dtype not in (torch.int32, torch.int64):
        return False
    if not len(offsets):
        return True
    rises = bool((offsets[1:] >= offsets[:-1]).all())
    return rises and int(offsets[0]) == 0 and int(offsets[-1]) <= num_ids
