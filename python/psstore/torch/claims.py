"""Who trains which tensors of a store, in this process: two under one name would get in each other's way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch

from psstore.client.store import Store
from psstore.torch.parameters import Trained, some
from psstore.torch.telling import warn

if TYPE_CHECKING:
    from psstore.torch.stepping import Way


class Claims:
    """On the tensors of one store, by name; each as long as its parameter and its way live."""

    def __init__(self) -> None:
        self.parameters: WeakValueDictionary[str, torch.Tensor] = WeakValueDictionary()
        self.ways: WeakValueDictionary[str, Way] = WeakValueDictionary()


_claims: WeakKeyDictionary[Store, Claims] = WeakKeyDictionary()


def claimed(store: Store) -> set[str]:
    """Names of what somebody in this process trains."""
    return set(_claims[store].parameters) if store in _claims else set()


def claim(store: Store, way: Way, trained: Sequence[Trained]) -> None:
    """From now on it is `way` that trains these: whoever did so before is retired.

    Warns of tensors that another parameter trains. It may be a model of before, still about; or another one.
    """
    claims = _claims.setdefault(store, Claims())
    twice = [one.name for one in trained if claims.parameters.get(one.name, one.parameter) is not one.parameter]
    if twice:
        warn(
            f"{some(twice)} of this store: other parameters of this process are trained under the same names. If these"
            " are different models, each optimizer needs a name of its own: pass name="
        )
    before = {id(older): older for one in trained if (older := claims.ways.get(one.name)) is not None}
    for older in before.values():
        if older is not way:
            older.retire()
    for one in trained:
        claims.parameters[one.name] = one.parameter
        claims.ways[one.name] = way
