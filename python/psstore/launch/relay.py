"""A store's versions in another store, for readers near that one: it follows the one, and publishes in the other."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from psstore.client.changes import Version
from psstore.client.first_tensors import RELAYED
from psstore.client.store import Store


class Relay:
    """Publishes in its own store what a reader of another one has."""

    def __init__(self, own: Store) -> None:
        """`own`: its only worker's."""
        self._own = own
        self._forms: dict[str, tuple[tuple[int, ...], str]] = {}
        """Shape and dtype of what is published, by name."""

    def publish(self, version: Version) -> int:
        """Has the own store become that version, all of it at once, and returns its number there. What the followed
        store does not have any more, or has anew in another shape, is dropped before. Raises what `Store.publish`
        raises."""
        forms = {name: (value.shape, value.dtype.str) for name, value in version.values.items()}
        self._drop(name for name, form in self._forms.items() if forms.get(name) != form)
        changed = version.changed | (forms.keys() - self._forms.keys())
        values = {name: _as_stored(version.values[name]) for name in changed}
        if RELAYED not in version.values:
            values[RELAYED] = np.array([version.number], np.float64)
        number = self._own.publish(values)
        self._forms = forms
        return number

    def _drop(self, names: Iterable[str]) -> None:
        for name in list(names):
            self._own.drop(name)
            del self._forms[name]


def _as_stored(value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A copy's numbers in a dtype that a store keeps: a reader in half precision has of them the bits that it would
    have of the store that is followed."""
    if value.dtype == np.float16:
        return value.astype(np.float32)
    if value.dtype != np.int16:
        return value
    bits = np.empty(value.shape, np.uint32)
    np.left_shift(value.view(np.uint16), 16, out=bits, dtype=np.uint32)
    return bits.view(np.float32)
