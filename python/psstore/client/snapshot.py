"""Reading as of one decision: all tensors at one version, while others train on.

The shards keep what a slice was before it changes (csrc/table/holds.h), until the snapshot ends. Tensors that are
assigned or added to have no decisions: they are read as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from psstore.client.arrays import Array
from psstore.client.device.arrays import seen
from psstore.client.layout import Pull
from psstore.client.operations import Operations
from psstore.client.rule_state import RuleState
from psstore.client.tables import Ids
from psstore.protocol.holds import Hold

T = TypeVar("T")


class _View:
    """What both kinds of snapshots share."""

    def __init__(self, operations: Operations, hold: Hold) -> None:
        self._operations = operations
        self._hold = hold

    @property
    def version(self) -> int:
        """Number of the last decision in what is read."""
        return self._hold.version

    def _pull(
        self, names: Sequence[str], out: Sequence[Array] | None, dtype: str | None, wait_s: float | None
    ) -> Coroutine[Any, Any, list[Array]]:
        places = None if out is None else seen(list(out), writable=True)
        asked = Pull(tuple(names), places, dtype=dtype, wait_s=wait_s, hold=self._hold)
        return self._operations.reading.pull(asked)

    def _pull_state(self, names: Sequence[str], wait_s: float | None) -> Coroutine[Any, Any, list[RuleState]]:
        return self._operations.reading.pull_state(names, wait_s=wait_s, hold=self._hold)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of version {self.version}>"


class Snapshot(_View):
    """Every trained tensor at one version. Methods raise VersionGone once the shards have had to let go of it."""

    def __init__(self, operations: Operations, hold: Hold, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        """`run`: runs an operation to its end."""
        super().__init__(operations, hold)
        self._run = run

    def pull(
        self, name: str, *, out: Array | None = None, dtype: str | None = None, wait_s: float | None = None
    ) -> Array:
        """The tensor's value; the arguments are those of `Store.pull`."""
        values: list[Array] = self._run(self._pull((name,), None if out is None else [out], dtype, wait_s))
        return values[0]

    def pull_many(
        self,
        names: Sequence[str],
        *,
        out: Sequence[Array] | None = None,
        dtype: str | None = None,
        wait_s: float | None = None,
    ) -> list[Array]:
        """`pull` for many tensors, in the order of `names`."""
        values: list[Array] = self._run(self._pull(names, out, dtype, wait_s))
        return values

    def pull_rows(
        self,
        name: str,
        ids: Array,
        *,
        out: Array | None = None,
        codec: str | None = None,
        wait_s: float | None = None,
    ) -> Array:
        """Rows of a table; the arguments are those of `Store.pull_rows`."""
        return self._run(self._operations.tables.pull(name, ids, out, wait_s=wait_s, hold=self._hold, codec=codec))

    def keys(self, table: str, *, wait_s: float | None = None) -> Ids:
        """The ids of a table's rows, as `Store.keys` gives them."""
        ids: Ids = self._run(self._operations.tables.keys(table, wait_s=wait_s, hold=self._hold))
        return ids

    def pull_state(self, names: Sequence[str], *, wait_s: float | None = None) -> list[RuleState]:
        """What `Store.pull_state` gives, of a snapshot that was taken with `state`."""
        states: list[RuleState] = self._run(self._pull_state(names, wait_s))
        return states

    def __getitem__(self, name: str) -> Array:
        return self.pull(name)


class AsyncSnapshot(_View):
    """A `Snapshot` whose calls are awaited."""

    def __init__(
        self,
        operations: Operations,
        hold: Hold,
        awaited: Callable[[Coroutine[Any, Any, Any]], Coroutine[Any, Any, Any]],
    ) -> None:
        """`awaited`: what an operation comes to."""
        super().__init__(operations, hold)
        self._awaited = awaited

    async def pull(
        self, name: str, *, out: Array | None = None, dtype: str | None = None, wait_s: float | None = None
    ) -> Array:
        """The tensor's value; the arguments are those of `AsyncStore.pull`."""
        return (await self.pull_many((name,), out=None if out is None else [out], dtype=dtype, wait_s=wait_s))[0]

    async def pull_many(
        self,
        names: Sequence[str],
        *,
        out: Sequence[Array] | None = None,
        dtype: str | None = None,
        wait_s: float | None = None,
    ) -> list[Array]:
        """`pull` for many tensors, in the order of `names`."""
        values: list[Array] = await self._awaited(self._pull(names, out, dtype, wait_s))
        return values

    async def pull_rows(
        self,
        name: str,
        ids: Array,
        *,
        out: Array | None = None,
        codec: str | None = None,
        wait_s: float | None = None,
    ) -> Array:
        """Rows of a table; the arguments are those of `AsyncStore.pull_rows`."""
        rows = self._operations.tables.pull(name, ids, out, wait_s=wait_s, hold=self._hold, codec=codec)
        return await self._awaited(rows)

    async def keys(self, table: str, *, wait_s: float | None = None) -> Ids:
        """The ids of a table's rows, as `AsyncStore.keys` gives them."""
        keys = self._operations.tables.keys(table, wait_s=wait_s, hold=self._hold)
        ids: Ids = await self._awaited(keys)
        return ids

    async def pull_state(self, names: Sequence[str], *, wait_s: float | None = None) -> list[RuleState]:
        """What `AsyncStore.pull_state` gives, of a snapshot that was taken with `state`."""
        states: list[RuleState] = await self._awaited(self._pull_state(names, wait_s))
        return states
