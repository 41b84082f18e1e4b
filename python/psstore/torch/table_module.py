"""TableModule: a module whose rows are a table of the store, and no parameter of the model.

A forward pass pulls the rows of its batch, and backward leaves a gradient for each row that it was asked for, which the
DistributedOptimizer that was given the module pushes, and which counts in its step (table_gradients.py). What is made
of the rows is up to the subclasses: embedding.py, embedding_bag.py.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from psstore.client.arguments import whole
from psstore.client.store import Store
from psstore.client.tables import RULES, row_encoding
from psstore.codec.compression import Compression
from psstore.errors import UsageError
from psstore.torch.graphs import outside_of_graphs
from psstore.torch.param_groups import hyper_of, row_group
from psstore.torch.warnings import warn

Hyper = float | bool | tuple[float, float]

ROWS_PULLED_TOGETHER = 1 << 16
"""Where all rows of a table are pulled."""

Start = Callable[[Callable[[], torch.Tensor]], "Future[torch.Tensor]"]
"""Runs a function in another thread."""

Bearing = Callable[[], AbstractContextManager[None]]
"""Makes the context of a block that is left if the store has gone back, and somebody takes up from there."""


class RowGradients(NamedTuple):
    """What a backward pass has left of one lookup."""

    ids: torch.Tensor
    """As they were asked for, flat; one may be there several times, and padding is not."""
    gradients: torch.Tensor
    """(ids, dim)."""
    lookup: int
    """Which lookup of the module it was."""


class _Announced(NamedTuple):
    """A lookup of the next step."""

    ids: torch.Tensor
    """Flat, on the CPU."""
    kept: Future[torch.Tensor] | None
    """Done when a cache has its rows, as they are before the step."""


class _Coming(NamedTuple):
    """Rows that are pulled before they are looked up."""

    ids: torch.Tensor
    """Flat, on the CPU."""
    rows: Future[torch.Tensor]
    """(ids, dim)."""


class _Lookup(torch.autograd.Function):
    """Hands rows to a graph, and tells of the gradient that comes back. Its first argument takes no part, but that it
    requires a gradient: it gets a zero of each lookup, and so has its gradient when a pass is done with all of them."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, rows: torch.Tensor, leave: Callable[[torch.Tensor], None]
    ) -> torch.Tensor:
        ctx.anchor, ctx.leave = anchor, leave
        return rows

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.leave(gradient)
        return torch.zeros_like(ctx.anchor), None, None


class TableModule(torch.nn.Module):
    """Looks rows of a table up, and trains them.

    Construction creates the table, or finds it, on every worker. A pass pulls each row of its batch once; several
    backward passes before a step add up.

    Args:
        name: of the table in the store.
        dim: elements of a row.
        store: a connected `psstore.Store`; to train, a worker's.
        lookup_dtype: what lookups give, torch.float32 or torch.bfloat16, to which rows that are kept in float32 are
            rounded; gradients are added up in float32 either way.
        padding_idx: an id that stands for nothing: its row is zeros, and gets no gradient.
        cache_bytes: of memory in this process for rows that were looked up: those that have not changed since do not
            travel again, and what `prefetch` announces travels before the step (docs/rows.md, 'A cache of hot rows').
        compression: rows and gradients travel in fewer bytes: 'bf16', 'fp16' or 'int8' for both ways, 'push=int8' for
            one, or a psstore.torch.Compression (docs/rows.md, 'Fewer bytes').
        hypers: of the rule, under torch's names: lr, betas, eps, … What is not given has torch's default.

    `rule`, `dtype`, `init`, `seed`, `max_rows`, `max_bytes`, `evict` and `admit` are as `Store.create_table` has them.
    Lookups are float32 also where rows are kept in 'bfloat16', and then rows travel in that.

    Raises BadHyper for one that the rule has not, BadArgument for a codec that rows have not, UsageError.
    """

    def __init__(
        self,
        name: str,
        dim: int,
        store: Store,
        *,
        rule: str = "adagrad",
        dtype: str = "float32",
        lookup_dtype: torch.dtype = torch.float32,
        init: str = "normal(0, 0.01)",
        seed: int = 0,
        max_rows: int | None = None,
        max_bytes: int | None = None,
        evict: str | None = None,
        admit: str | None = None,
        padding_idx: int | None = None,
        cache_bytes: int | None = None,
        compression: Compression | str | None = None,
        **hypers: Hyper,
    ) -> None:
        super().__init__()
        if not isinstance(store, Store):
            raise UsageError(
                f"a {type(store).__qualname__} is no store that blocks: pass what psstore.connect() returned"
            )
        if padding_idx is not None and whole("padding_idx", padding_idx) < 0:
            raise UsageError(
                f"padding_idx of table {name!r} is {padding_idx}, and a table has no end to count from: give the id"
            )
        if lookup_dtype not in (torch.float32, torch.bfloat16):
            raise UsageError(
                f"lookup_dtype of table {name!r} is {lookup_dtype}; lookups give torch.float32 or torch.bfloat16"
            )
        self.compression = Compression.of(compression)
        for way, codec in (("push", self.compression.push), ("pull", self.compression.pull)):
            row_encoding(f"table {name!r}: {way}", codec)
        self.table = name
        """The table's name in the store."""
        self.dim = dim
        self.rule = rule
        self.lookup_dtype = lookup_dtype
        self.padding_idx = padding_idx
        self.hypers: dict[str, Any]
        """Hyper-parameters, under torch's names, which are read at every step: `items.hypers["lr"] = 0.05` counts from
        the next one on. A DistributedOptimizer has them as a parameter group, where schedulers find them."""
        self.group = zlib.crc32(f"table {name}".encode()) | 0xFF
        """Number of the table's parameter group in the store: each has its own, beside those of optimizers, which are
        numbered from a multiple of 256 on."""
        self.left: list[RowGradients] = []
        """What backward passes have left since the last step, in their order."""
        self._announced: list[_Announced] = []
        """Lookups that follow the next step."""
        self._coming: list[_Coming] = []
        """Rows as the last step left them, of lookups that have not been made yet."""
        self._start: Start | None = None
        self._bearing: Bearing = nullcontext
        self._num_lookups = 0
        self.anchor = torch.zeros((), requires_grad=True, device="cpu")
        """Its gradient, a zero, is accumulated when a backward pass has left all that it will of this table."""
        self._store = store
        self._cache_bytes = cache_bytes
        store.create_table(
            name,
            dim=dim,
            rule=rule,
            dtype=dtype,
            init=init,
            seed=seed,
            group=self.group,
            max_rows=max_rows,
            max_bytes=max_bytes,
            evict=evict,
            admit=admit,
        )
        self.hypers = row_group(RULES[rule], hypers)
        self._keep_rows()

    @property
    def store(self) -> Store:
        return self._store

    @property
    def pushes_in_a_codec(self) -> bool:
        """Whether gradients of rows are rounded, so that something is kept back of them."""
        return row_encoding("push", self.compression.push) != "float32"

    @outside_of_graphs
    def rows_of(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the rows, as every step in them that this worker was told of left them: lookup_dtype of the ids'
        shape and then (dim,), on the ids' device. The gradient of each is left when backward comes by. Zeros, where the
        store has gone back and a session takes up from there: it leaves the step out that they are for.

        Raises UsageError for what is no tensor of integers.
        """
        self._check_ids(ids)
        rows = self._look_up(_flat(ids)).view(*ids.shape, self.dim).to(ids.device)
        if self.padding_idx is not None:
            rows[ids == self.padding_idx] = 0.0
        self._num_lookups += 1
        apply: Callable[..., torch.Tensor] = _Lookup.apply
        kept = ids.detach().reshape(-1).clone()  # a program may fill its buffer anew before the gradients are pushed
        return apply(self.anchor, rows, partial(self._leave, kept, self._num_lookups))

    def weight_of(self, num_embeddings: int) -> torch.Tensor:
        """The rows of all ids below `num_embeddings` as of one decision, (num_embeddings, dim) of `lookup_dtype` on the
        CPU: what lookups give of each.

        Raises UsageError where the table has rows, or padding, of other ids.
        """
        rows = torch.empty(num_embeddings, self.dim, dtype=self.lookup_dtype, device="cpu")
        with self._store.snapshot() as view:
            last = max(int(view.keys(self.table).max(initial=0)), self.padding_idx or 0)
            if last >= num_embeddings:
                raise UsageError(
                    f"table {self.table!r} has ids up to {last}, and num_embeddings is {num_embeddings}: give one that"
                    " is larger, or write the rows that there are by store.export_table"
                )
            for first in range(0, num_embeddings, ROWS_PULLED_TOGETHER):
                some = rows[first : first + ROWS_PULLED_TOGETHER]
                view.pull_rows(self.table, np.arange(first, first + len(some)), out=some)
        if self.padding_idx is not None:
            rows[self.padding_idx] = 0.0
        return rows

    def attach(self, start: Start, bearing: Bearing) -> None:
        """Pulls ahead by `start`, and looks rows up within `bearing`. For the optimizer, when it begins with the store
        or goes on with another one."""
        self._start, self._bearing = start, bearing
        self._keep_rows()

    @outside_of_graphs
    def prefetch(self, ids: torch.Tensor) -> None:
        """Announces a lookup that follows the optimizer's next step, and returns at once: its rows are pulled as soon
        as that step is decided, beside the new parameters and whatever comes before the lookup. A lookup of these ids,
        all in one tensor, takes them then; they are what it would have pulled itself right after the step, so that rows
        which are assigned later are as they were. Those that no lookup has taken by the step after are dropped. With
        `cache_bytes` they are pulled now, too, and then again what has changed.

        Raises UsageError for what is no tensor of integers.
        """
        self._check_ids(ids)
        flat = _flat(ids).clone()
        kept = None
        if self._cache_bytes and self._start is not None:
            kept = self._start(partial(self._pull, flat))
        self._announced.append(_Announced(flat, kept))

    def await_kept(self) -> None:
        """Blocks until what was announced has been pulled as it is before the step; if that has failed, the pull after
        the step says why."""
        wait([one.kept for one in self._announced if one.kept is not None])

    def begin_prefetch(self) -> None:
        """Pulls what was announced. For the optimizer, when its step is decided."""
        announced, self._announced = self._announced, []
        if self._start is not None:
            self._coming = [_Coming(one.ids, self._start(partial(self._pull, one.ids))) for one in announced]

    def _look_up(self, ids: torch.Tensor) -> torch.Tensor:
        with self._bearing():
            return self._take(ids)
        return torch.zeros(len(ids), self.dim, dtype=self.lookup_dtype, device="cpu")

    def _take(self, ids: torch.Tensor) -> torch.Tensor:
        for place, one in enumerate(self._coming):
            if one.ids.dtype == ids.dtype and torch.equal(one.ids, ids):
                del self._coming[place]
                return one.rows.result()
        return self._pull(ids)

    def _keep_rows(self) -> None:
        if self._cache_bytes is not None:
            self._store.cache_rows(self.table, self._cache_bytes, codec=self._pull_codec)

    @property
    def _pull_codec(self) -> str:
        is_narrow = self.lookup_dtype is torch.bfloat16 and self.compression.pull == "none"
        return "bf16" if is_narrow else self.compression.pull

    def _pull(self, ids: torch.Tensor) -> torch.Tensor:
        rows = torch.empty(len(ids), self.dim, dtype=self.lookup_dtype, device="cpu")
        self._store.pull_rows(self.table, ids, out=rows, codec=self._pull_codec)
        return rows

    def _check_ids(self, ids: torch.Tensor) -> None:
        if not isinstance(ids, torch.Tensor) or ids.is_floating_point() or ids.is_complex() or ids.dtype is torch.bool:
            what = f"dtype {ids.dtype}" if isinstance(ids, torch.Tensor) else type(ids).__name__
            raise UsageError(f"table {self.table!r} is looked up by a tensor of integers, not by {what}")
        if ids.is_nested:
            raise UsageError(
                f"table {self.table!r} is looked up by a plain tensor, not by a nested one: an EmbeddingBag takes its"
                " values() and offsets()"
            )

    def current_hypers(self) -> dict[str, float]:
        """For a commit, under the store's names. Raises UsageError if one is missing."""
        return hyper_of(RULES[self.rule], self.hypers)

    @outside_of_graphs
    def _leave(self, ids: torch.Tensor, lookup: int, gradient: torch.Tensor) -> None:
        if self._start is None and not self.left:
            warn(
                f"backward leaves gradients of table {self.table!r}, which no optimizer trains: they are kept until one"
                " is made that takes them. Pass tables= to DistributedOptimizer, with this module in it"
            )
        gradients = gradient.reshape(len(ids), self.dim).to(torch.float32)
        if self.padding_idx is not None:
            is_row = ids != self.padding_idx
            ids, gradients = ids[is_row], gradients[is_row]
        self.left.append(RowGradients(ids, gradients, lookup))

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.table!r}, {self.dim}, rule={self.rule!r}{padding}"

    def __getstate__(self) -> Any:
        raise UsageError(
            f"the rows of table {self.table!r} are in the store, and the module is a connection to it: it can't be"
            " copied or pickled; make one in each process"
        )


def _flat(ids: torch.Tensor) -> torch.Tensor:
    return ids.detach().reshape(-1).cpu()
