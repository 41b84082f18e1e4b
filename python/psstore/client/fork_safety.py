"""The stores that are open in this process: what becomes of them when it forks, and when it ends.

Sockets do not survive a fork: in the child every store is closed, and says so when it is used. A program that
comes to its end leaves the stores that it did not close, as if it had; one that dies of an exception does not,
so that the others are told that it is lost.

The interpreter has one list of handlers for each of the two, so there is one list of stores here.
"""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from typing import Protocol


class OpenStore(Protocol):
    def holds(self, store: str) -> int | None:
        """The rank that it has in the store of that id, if it has one."""

    def abandon(self) -> None:
        """Called in the child, where no other thread exists: takes no locks, talks to nobody."""

    def end(self, *, leave: bool) -> None:
        """Disconnects, and leaves before if told so. Does nothing the second time."""


_open: weakref.WeakSet[OpenStore] = weakref.WeakSet()
_watching = False


def watch(store: OpenStore) -> None:
    """Has a forked child abandon `store`, and the end of the process end it."""
    global _watching
    _open.add(store)
    if not _watching:
        os.register_at_fork(after_in_child=_abandon_all)
        atexit.register(_end_all)
        _watching = True


def ranks_held(store: str) -> list[int]:
    """Ranks of the store of that id that stores open in this process hold, whatever URL they were given."""
    return sorted(rank for one in list(_open) if (rank := one.holds(store)) is not None)


def _abandon_all() -> None:
    for store in list(_open):
        store.abandon()


def _end_all() -> None:
    # Of an exception that the interpreter had to print; in a notebook, or at a prompt, the program goes on after one.
    died = getattr(sys, "last_type", None) is not None and not hasattr(sys, "ps1")
    for store in list(_open):
        store.end(leave=not died)
