"""A store's versions in another store, for readers near that one: it follows the one, and publishes in the other."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from psstore import _core
from psstore.client.changes import Version
from psstore.client.first_tensors import RELAYED
from psstore.client.store import Store
from psstore.errors import MissingContribution, RolledBack, StaleIncarnation, StoreClosed, UnknownTensor
from psstore.types import REDUCED_GROUP

_log = logging.getLogger("psstore.relay")

HALVES: Mapping[np.dtype[Any], str] = {np.dtype(np.int16): "bfloat16", np.dtype(np.float16): "float16"}
"""How copies in half precision are seen by numpy, which has no bfloat16."""

PUBLISHED = "reduce"
"""The rule of what is published."""

ENDED = (RolledBack, StoreClosed, StaleIncarnation, MissingContribution)
"""What ends a life of the own store, or of its worker, as clients can who drop what is just being published. A store is
closed where connecting to it anew has failed."""


class StoredForm(NamedTuple):
    """What a tensor is in the own store."""

    shape: tuple[int, ...]
    dtype: str
    rule: str = PUBLISHED
    group: int = REDUCED_GROUP


class Relay:
    """Publishes in its own store what a reader of another one has."""

    def __init__(self, own: Store) -> None:
        """`own`: its only worker's."""
        self._own = own
        self._forms: dict[str, StoredForm] = {}
        """What the own store may have of the versions so far, or in their place, by name."""
        self._is_whole = False
        """The own store has all of the version before, and nothing else: that one was published, and the store has not
        gone back or on since."""
        self._last: Version | None = None

    @property
    def has_begun(self) -> bool:
        """Whether there was a version to publish."""
        return self._last is not None

    def publish(self, version: Version) -> int:
        """Has the own store become that version, all of it at once, and returns its number there. What the followed
        store does not have any more, or has anew in another shape, is dropped before. Where the own store begins again
        meanwhile, all of it once more. Raises what `Store.publish` raises."""
        self._last = version
        while True:
            try:
                return self._publish(version)
            except ENDED as error:
                _log.warning("%s; all of it is published there again", error.message)
                self._own.reconnect()

    def renew(self) -> None:
        """Publishes the last version once more where the own store has begun again since: there may be no newer one for
        a long time. Raises what `Store.publish` raises."""
        if self._last is None:
            return
        try:
            self._own.stats()
        except (RolledBack, StoreClosed):
            self.publish(self._last)

    def _publish(self, version: Version) -> int:
        # If this fails, the next version does not say what has changed in this one: all of it is published then.
        is_whole, self._is_whole = self._is_whole, False
        values = {RELAYED: np.array([version.number], np.float64), **version.values}
        forms = {name: StoredForm(value.shape, _stored_dtype(value)) for name, value in values.items()}
        if not is_whole:
            self._forms = self._found(forms.keys())
        self._drop(name for name, form in self._forms.items() if forms.get(name) != form)
        changed = {RELAYED, *version.changed, *(forms.keys() - self._forms.keys())} if is_whole else forms.keys()
        self._forms = forms  # as early as this, since a failure may leave new tensors there
        number = self._own.publish({name: _as_stored(values[name]) for name in changed})
        self._is_whole = True
        return number

    def _found(self, names: Collection[str]) -> dict[str, StoredForm]:
        """What the own store has that was published, and whatever it has by these names: one that has begun with a
        checkpoint has what was dropped since that was written."""
        specs = [self._own.describe(name).spec for name in self._own.keys()]
        forms = {spec.name: StoredForm(spec.shape, spec.dtype, spec.rule, spec.group) for spec in specs}
        return {name: form for name, form in forms.items() if form.rule == PUBLISHED or name in names}

    def _drop(self, names: Iterable[str]) -> None:
        for name in list(names):
            with contextlib.suppress(UnknownTensor):  # it went with what the own store has gone back behind
                self._own.drop(name)
            del self._forms[name]


def _stored_dtype(value: np.ndarray[Any, Any]) -> str:
    return "float32" if value.dtype in HALVES else value.dtype.name


def _as_stored(value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A copy's numbers in a dtype that a store keeps: a reader in half precision has of them the bits that it would
    have of the store that is followed."""
    half = HALVES.get(value.dtype)
    if half is None:
        return value
    found = np.empty(value.shape, np.float32)
    _core.convert(value, _core.DTYPES[half], found, _core.DTYPES["float32"])
    return found
