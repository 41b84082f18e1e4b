"""embeddings_in_store: an existing model's embeddings, as tables of a store."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from psstore.client.store import Store
from psstore.codec.compression import Compression
from psstore.errors import UsageError
from psstore.torch.embedding import Embedding
from psstore.torch.embedding_bag import EmbeddingBag, Pooling
from psstore.torch.table_module import Hyper, TableModule

Kind = nn.Embedding | nn.EmbeddingBag

ROW_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
"""What weights may be in -> what rows of a table are kept in."""


def embeddings_in_store(
    model: nn.Module,
    store: Store,
    *,
    only: Collection[str] | None = None,
    rule: str = "adagrad",
    dtype: str | None = None,
    init: str = "normal(0, 1)",
    seed: int = 0,
    prefix: str = "",
    cache_bytes: int | None = None,
    compression: Compression | str | None = None,
    **hypers: Hyper,
) -> list[TableModule]:
    """Replaces the nn.Embedding and nn.EmbeddingBag modules of a model by tables of a store, and returns these.

    >>> tables = psstore.torch.embeddings_in_store(model, store, rule="adagrad", lr=0.1)
    >>> opt = torch.optim.AdamW(model.parameters())  # of what has stayed a parameter
    >>> opt = psstore.torch.DistributedOptimizer(opt, store, model.named_parameters(), tables=tables)

    A table has its module's name in the model, and its `padding_idx`. Its rows begin with first values, as `init` has
    them, torch's by default; the module's weight is dropped, and what was trained of it is lost. Ids are not held
    against the module's size any more. Modules that are frozen stay as they are. Every worker calls it, before it makes
    optimizers.

    Args:
        only: names of the modules to replace, as `model.named_modules()` has them; None: all.
        dtype: what rows are kept in, 'float32' or 'bfloat16'; None: as the module's weight. Lookups are in the dtype of
            the weight in any case, so that the model goes on with what it had.
        prefix: put before the tables' names, to tell models on one store apart.

    The other arguments are those of `psstore.torch.Embedding`, for each table.

    Raises UsageError, which names the module, for one that a table can't stand in for: with max_norm,
    scale_grad_by_freq, a weight that other modules use, a dtype that rows have not, a class of its own, or a row of
    padding that is not zeros; and if there is none to replace. Nothing is changed then.
    """
    found = list(_to_replace(model, only))
    if not found:
        raise UsageError("the model has no nn.Embedding or nn.EmbeddingBag that is trained: there is nothing to put")
    users = _users_of_weights(model)
    for one in found:
        _check(one, users[id(one.module.weight)])
    tables: list[TableModule] = []
    for one in found:
        table_name = f"{prefix}{one.names[0]}"
        options: dict[str, Any] = {"rule": rule, "init": init, "seed": seed}
        options |= {"dtype": dtype or ROW_DTYPES[one.module.weight.dtype], "lookup_dtype": one.module.weight.dtype}
        options |= {"cache_bytes": cache_bytes, "compression": compression}
        table = _table(one.module, table_name, store, **options, **hypers)
        table.train(one.module.training)
        for name in one.names:
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, table)
        tables.append(table)
    return tables


class _Found(NamedTuple):
    names: list[str]
    """In the model; several where it is used in several places."""
    module: Kind


def _to_replace(model: nn.Module, only: Collection[str] | None) -> Iterator[_Found]:
    """Raises UsageError for names in `only` that are no embeddings."""
    found: dict[int, _Found] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, Kind) and (module.weight.requires_grad if only is None else name in only):
            found.setdefault(id(module), _Found([], module)).names.append(name)
    missing = set(only or ()).difference(*(one.names for one in found.values()))
    if missing:
        raise UsageError(f"only= names {sorted(missing)}, which are no nn.Embedding or nn.EmbeddingBag of the model")
    yield from found.values()


def _users_of_weights(model: nn.Module) -> dict[int, list[str]]:
    """Names of the modules that have a parameter, by its id()."""
    users: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            users.setdefault(id(parameter), []).append(name)
    return users


def _check(one: _Found, users: list[str]) -> None:
    """Raises UsageError for what a table can't stand in for."""
    name, module = one.names[0], one.module
    refused = {
        "the model itself: put it into another module": name == "",
        f"a {type(module).__qualname__}, of which nothing is known here: make it a psstore.torch.Embedding yourself": (
            type(module) not in (nn.Embedding, nn.EmbeddingBag)
        ),
        f"made with max_norm={module.max_norm}, and rows are not renormed when they are looked up": (
            module.max_norm is not None
        ),
        "made with scale_grad_by_freq, and gradients of rows are added up": module.scale_grad_by_freq,
        f"tied: {', '.join(map(repr, users))} have one weight, and a table has no weight to share": len(users) > 1,
        f"{module.weight.dtype}, and rows are float32 or bfloat16": module.weight.dtype not in ROW_DTYPES,
        f"one whose row of padding, {module.padding_idx}, is not zeros, as a table has it": (
            isinstance(module, nn.Embedding)
            and module.padding_idx is not None
            and not module.weight.is_meta
            and bool(module.weight[module.padding_idx].any())
        ),
    }
    for reason, is_so in refused.items():
        if is_so:
            raise UsageError(
                f"embedding {name!r} can't be put into a store: it is {reason}. only= says which others to put there"
            )


def _table(module: Kind, name: str, store: Store, **options: Any) -> TableModule:
    if isinstance(module, nn.Embedding):
        return Embedding(name, module.embedding_dim, store, padding_idx=module.padding_idx, **options)
    return EmbeddingBag(
        name,
        module.embedding_dim,
        store,
        mode=cast(Pooling, module.mode),
        include_last_offset=module.include_last_offset,
        padding_idx=module.padding_idx,
        **options,
    )
