"""torch's functions that clip gradients, for what a store trains: they clip what all workers' gradients come to.

Under DDP gradients are averaged when backward returns, and a script clips the averages in place. Here they are averaged
in the store, and only it can clip them. While a DistributedOptimizer exists, torch.nn.utils.clip_grad_norm_ is
therefore the optimizer's own `clip_grad_norm_` where it is called with the parameters that this one trains together
with other workers, whoever calls it, a script or a framework. For all other parameters it is torch's. What the store
can't clip is refused.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import CellType
from typing import Any, Protocol

import torch
from torch.nn.utils import clip_grad

from psstore.errors import UsageError
from psstore.torch.graphs import outside_of_graphs

Function = Callable[..., Any]


class Clips(Protocol):
    """An optimizer, as far as clipping is concerned."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...

    @property
    def combines_workers(self) -> bool:
        """Whether its steps are made of several workers' gradients."""

    def clip_grad_norm_(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> torch.Tensor: ...


def stand_in_for(optimizer: Clips) -> None:
    """Has torch's functions clip for this optimizer, for as long as it exists."""
    with _lock:
        _optimizers.append(weakref.ref(optimizer, _forget))
        if len(_optimizers) == 1:
            _replace_functions()


# ---- what the functions do ----


@outside_of_graphs
def clip_norm(
    original: Function,
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    given = _listed(parameters)
    optimizer = _optimizer_of(given)
    if optimizer is None:
        norm: torch.Tensor = original(given or parameters, max_norm, norm_type, error_if_nonfinite, foreach)
        return norm
    _refuse_parts(given, optimizer)
    return optimizer.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)


@outside_of_graphs
def clip_with_norm(
    original: Function, parameters: torch.Tensor | Iterable[torch.Tensor], *args: Any, **kwargs: Any
) -> None:
    given = _listed(parameters)
    if _optimizer_of(given) is not None:
        raise UsageError(
            "clip_grads_with_norm_ would scale this worker's gradients by a norm of its own, and the workers' average"
            " is made in the store, after it: call torch.nn.utils.clip_grad_norm_(parameters, max_norm), which clips"
            " the average, and returns its norm"
        )
    original(given, *args, **kwargs)


@outside_of_graphs
def clip_value(
    original: Function, parameters: torch.Tensor | Iterable[torch.Tensor], *args: Any, **kwargs: Any
) -> None:
    given = _listed(parameters)
    if _optimizer_of(given) is not None:
        raise UsageError(
            "clip_grad_value_ would clip this worker's gradients, and under DDP it clips the workers' average, which is"
            " made in the store, after it: clip the norm, by torch.nn.utils.clip_grad_norm_ or by"
            " DistributedOptimizer(..., max_norm=); or clip each worker's own gradients before they are averaged, by a"
            " hook of each parameter: parameter.register_hook(lambda gradient: gradient.clamp(-value, value))"
        )
    original(given, *args, **kwargs)


def _listed(parameters: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def _optimizer_of(given: Sequence[torch.Tensor]) -> Clips | None:
    """The optimizer that trains these parameters together with other workers, or one of several that do: the last that
    was made, of those that train a gradient if there is one."""
    with _lock:
        alive = [found for one in reversed(_optimizers) if (found := one()) is not None]
    able = [optimizer for optimizer in alive if optimizer.combines_workers]
    for among in (_ids(one for one in given if one.grad is not None), _ids(given)):
        for optimizer in able:
            if not among.isdisjoint(_ids(_trained(optimizer))):
                return optimizer
    return None


def _refuse_parts(given: Sequence[torch.Tensor], optimizer: Clips) -> None:
    """Raises UsageError if gradients are to be clipped of which the optimizer's are only a part, or a part of these."""
    trained = _trained(optimizer)
    known, named = _ids(trained), _ids(given)
    foreign = [one for one in given if one.grad is not None and id(one) not in known]
    if foreign:
        raise UsageError(
            f"clip_grad_norm_ was called with parameters of which a DistributedOptimizer trains"
            f" {len(named & known)}, and {len(foreign)} that have gradients are another optimizer's, or nobody's. The"
            " store clips what one optimizer trains, by one norm, in its step: call clip_grad_norm_ for the parameters"
            " of each optimizer by themselves, right before its step(), or train all of them with one; freeze what"
            " nobody trains, by requires_grad_(False)"
        )
    missing = [one for one in trained if one.grad is not None and id(one) not in named]
    if missing:
        raise UsageError(
            f"clip_grad_norm_ was called with {len(named)} of the parameters that a DistributedOptimizer trains, and"
            f" {len(missing)} others have gradients, too. The store clips all that one optimizer trains by one norm:"
            " call it once, with all parameters, or train those that have a norm of their own with a"
            " DistributedOptimizer of their own (name=)"
        )


def _trained(optimizer: Clips) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _ids(parameters: Iterable[torch.Tensor]) -> set[int]:
    return set(map(id, parameters))


# ---- how they come to do it ----

HANDLERS: dict[str, Function] = {
    "clip_grad_norm_": clip_norm,
    "_clip_grads_with_norm_": clip_with_norm,  # known as clip_grads_with_norm_; torch 2.4 and 2.5 have none
    "clip_grad_value_": clip_value,
}
"""By the function's name in torch.nn.utils.clip_grad."""

_lock = threading.RLock()
"""Guards the two below. An optimizer may be collected, and forgotten, while this thread holds it."""
_optimizers: list[weakref.ref[Clips]] = []
"""In the order in which they were made."""
_originals: list[tuple[CellType, Function]] = []
"""What is replaced now."""


def _forget(gone: weakref.ref[Clips]) -> None:
    with _lock:
        _optimizers.remove(gone)
        if not _optimizers:
            _restore_functions()


def _replace_functions() -> None:
    """A function is replaced behind its decorator, so that whoever has imported it by name calls the new one, too. One
    that is not made like that is left as it is: what it does to gradients is refused as any other change of them is."""
    for name, handler in HANDLERS.items():
        cell = decorated(getattr(clip_grad, name, None))
        if cell is not None:
            _originals.append((cell, cell.cell_contents))
            cell.cell_contents = _instead_of(cell.cell_contents, handler)


def _restore_functions() -> None:
    while _originals:
        cell, original = _originals.pop()
        cell.cell_contents = original


def decorated(function: Function | None) -> CellType | None:
    """Where the decorator of a function of torch.nn.utils.clip_grad, `_no_grad`, keeps what it calls."""
    if not inspect.isfunction(function) or "func" not in function.__code__.co_freevars:
        return None
    cell: CellType = (function.__closure__ or ())[function.__code__.co_freevars.index("func")]
    return cell


def _instead_of(original: Function, handler: Function) -> Function:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return handler(original, *args, **kwargs)

    return call
