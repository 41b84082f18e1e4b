"""A store's versions in another store, for readers near that one: it follows the one, and publishes in the other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from psstore import _core
from psstore.client.changes import Version
from psstore.client.first_tensors import RELAYED
from psstore.client.store import Store

HALVES: Mapping[np.dtype[Any], str] = {np.dtype(np.int16): "bfloat16", np.dtype(np.float16): "float16"}
"""How copies in half precision are seen by numpy, which has no bfloat16."""


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
    half = HALVES.get(value.dtype)
    if half is None:
        return value
    found = np.empty(value.shape, np.float32)
    _core.convert(value, _core.DTYPES[half], found, _core.DTYPES["float32"])
    return found
