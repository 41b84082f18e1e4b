"""`psstore.follow`: a reader that keeps whole versions of a store's tensors, and is told only what changes."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from psstore.client.changes import Copies, Dtypes, Version
from psstore.client.connect import connect
from psstore.client.first_tensors import FirstTensors
from psstore.client.store import Store
from psstore.errors import PsstoreError, RolledBack


class FollowingReader:
    """Tensors of a store, always of one version. Made by `psstore.follow`; one thread at a time.

    >>> with psstore.follow("ps://127.0.0.1:5700", dtype="bfloat16") as reader:
    ...     for version in reader:
    ...         print(version.number, len(version.changed), "tensors changed,", version.num_bytes, "bytes came")
    """

    def __init__(self, store: Store, names: Sequence[str] | None, dtypes: Dtypes) -> None:
        """The store is the reader's from now on."""
        self._copies = Copies(names, dtypes)
        self._store = store
        self._is_behind = False
        """True if the store has gone back, or is another one by now, and this was not connected to it anew."""

    @property
    def version(self) -> int | None:
        """The decision after which the values are; None: none came yet, or the store has gone back behind it."""
        return self._copies.number

    @property
    def values(self) -> dict[str, np.ndarray[Any, Any]]:
        """The tensors by name, as of `version`: the reader's own memory, which the next call that reads changes. In
        dtype 'bfloat16', which numpy does not have, they are int16 of the same bits:
        `torch.from_numpy(value).view(torch.bfloat16)`."""
        return self._copies.values

    def next(self, *, timeout_s: float | None = None) -> Version:
        """The newest version: as soon as its tensors are there the first time, and then as soon as there is one after
        `version`. Its values are `values`.

        `timeout_s`: how long to wait for it (default: the store's `wait_s`); to bring it may take the store's `wait_s`,
        however little this is. Raises DeadlineExceeded, after which the values are what they were, and so for any other
        error; UnknownTensor for names that nobody has created although the first step was taken. A store that was
        restored from a checkpoint is read whole again: the version may be a lower one, and says `restored`. So is one
        that was started anew, or refused a token that was replaced since, which raises StoreUnreachable or AuthFailed
        before: to call again connects anew.
        """
        return self._reading(lambda: self._copies.advance(self._store._operations, wait_s=timeout_s))

    def verify(self, *, timeout_s: float | None = None) -> Version:
        """`next` without the wait, which also reads all trained tensors whole, at the same version, and compares the
        SHA-256 of each. Raises InternalError that names one that differs, and nothing has changed then."""
        return self._reading(lambda: self._copies.verify(self._store._operations, wait_s=timeout_s))

    def sha256(self) -> str:
        """A hash of names, shapes, dtypes and bits of `values`: readers of one version in one dtype have the same."""
        return self._copies.sha256()

    def close(self) -> None:
        """Disconnects. The values stay what they are."""
        self._is_behind = False
        self._store.close()

    def _reading(self, call: Callable[[], Coroutine[Any, Any, Version]]) -> Version:
        while True:
            if self._is_behind:
                self._store.reconnect()
                self._is_behind = False
            try:
                return self._store._run(call())
            except RolledBack:  # as often as it comes
                self._begin_anew()
            except PsstoreError:
                if self._store._is_lost:
                    self._begin_anew()
                raise

    def _begin_anew(self) -> None:
        self._is_behind = True
        self._copies.forget()

    def __iter__(self) -> Iterator[Version]:
        """All versions that there is time for, without an end. Raises what `next` raises."""
        while True:
            yield self.next()

    def __enter__(self) -> FollowingReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<FollowingReader of {self._store!r} at version {self.version}>"


def follow(
    url: str | None = None, names: Sequence[str] | None = None, *, dtype: Dtypes = None, **options: Any
) -> FollowingReader:
    """Connects to a store as a reader of these tensors (default: all there are that are no tables), which then keeps
    one whole version of them in its own memory, and for a newer one is sent what has changed, without loss. Blocks
    until it is connected; `FollowingReader.next` reads.

    `url`, `options`: those of `psstore.connect`, without `role`. `dtype`: 'bfloat16' or 'float16' for float32 tensors
    (default: as stored), or a mapping that says it for some by name: what changes is what differs in that dtype.

    Raises BadArgument, and what `psstore.connect` raises.
    """
    copies_of = names if names is None or isinstance(names, str) else tuple(names)
    Copies(copies_of, dtype)  # what is wrong with them is said before anything is connected
    return FollowingReader(connect(url, role="client", **options), copies_of, dtype)


def await_tensors(store: Store, names: Sequence[str]) -> None:
    """Returns when the store has tensors of these names, as a reader waits for them that was started before the
    trainer, for the store's `wait_s`. Raises UnknownTensor, DeadlineExceeded."""
    store._run(FirstTensors(names).arrive(store._operations, wait_s=None))
