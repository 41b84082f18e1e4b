"""Which parameters of this process train which tensors of a store: two of one name would overwrite each other."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch

from psstore.client.store import Store
from psstore.torch.parameters import Trained, some
from psstore.torch.telling import warn

_claims: WeakKeyDictionary[Store, WeakValueDictionary[str, torch.Tensor]] = WeakKeyDictionary()
"""By store and tensor name, as long as store and parameter live."""


def claim(store: Store, trained: Sequence[Trained]) -> None:
    """Warns of tensors that another parameter trains. It may be a model of before, still about; or another one."""
    claimed = _claims.setdefault(store, WeakValueDictionary())
    twice = [one.name for one in trained if claimed.get(one.name, one.parameter) is not one.parameter]
    if twice:
        warn(
            f"{some(twice)} of this store: other parameters of this process are trained under the same names. If these"
            " are different models, each optimizer needs a name of its own: pass name="
        )
    for one in trained:
        claimed[one.name] = one.parameter
