"""The parameters that a store trains: their names and groups, checked once, at construction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from psstore.errors import UsageError

STORED_AS: Mapping[torch.dtype, str] = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.bfloat16: "float32",
    torch.float16: "float32",
}
"""The store keeps fp32 masters of half-precision parameters, which travel in their own precision."""


class Trained(NamedTuple):
    """One parameter that the store trains."""

    name: str
    parameter: torch.Tensor
    group: int
    """Index of its parameter group."""


def trained_parameters(
    param_groups: Sequence[Mapping[str, Any]], named: Iterable[tuple[str, torch.Tensor]]
) -> list[Trained]:
    """Every parameter of the groups that requires a gradient, under its name; frozen ones stay local.

    A parameter with several names (tied weights) has the first. Raises UsageError for what can't be trained.
    """
    names = _names(named)
    found = [
        Trained(_name(parameter, names, f"parameter {position} of group {index}"), parameter, index)
        for index, group in enumerate(param_groups)
        for position, parameter in enumerate(group["params"])
        if parameter.requires_grad
    ]
    if not found:
        raise UsageError("no parameter of this optimizer requires a gradient, so there is nothing to train")
    return found


def _names(named: Iterable[tuple[str, torch.Tensor]]) -> dict[torch.Tensor, str]:
    """Tensors hash by identity."""
    names: dict[torch.Tensor, str] = {}
    owners: dict[str, torch.Tensor] = {}
    for pair in named:
        if not isinstance(pair, tuple) or not isinstance(pair[0], str):
            raise UsageError(
                "named_parameters must yield (name, parameter) pairs: pass model.named_parameters(), not"
                " model.parameters()"
            )
        name, parameter = pair
        if owners.setdefault(name, parameter) is not parameter:
            raise UsageError(
                f"two parameters are named {name!r}; names must be unique: to train several models together, prefix"
                " their names, as model.named_parameters(prefix='generator') does"
            )
        names.setdefault(parameter, name)
    return names


def _name(parameter: torch.Tensor, names: Mapping[torch.Tensor, str], position: str) -> str:
    """Its name, if the store can train it."""
    if parameter not in names:
        raise UsageError(
            f"{position}, of shape {tuple(parameter.shape)}, has no name, and the store knows parameters by name: pass"
            " named_parameters=model.named_parameters() of the model, or of all models, that the optimizer was given"
        )
    name = names[parameter]
    if parameter.layout is not torch.strided:
        raise UsageError(f"parameter {name!r} has layout {parameter.layout}; the store trains dense parameters")
    if parameter.dtype not in STORED_AS:
        known = ", ".join(short(dtype) for dtype in STORED_AS)
        raise UsageError(f"parameter {name!r} has dtype {short(parameter.dtype)}; the store trains {known}")
    return name


def short(dtype: torch.dtype) -> str:
    """'float32', not 'torch.float32'."""
    return str(dtype).removeprefix("torch.")
