"""Sockets do not survive a fork: in the child every store is closed, and says so when it is used.

The operating system has one list of fork handlers per process, so there is one list of stores here.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Abandonable(Protocol):
    def abandon(self) -> None:
        """Called in the child, where no other thread exists: takes no locks, talks to nobody."""


_open_stores: weakref.WeakSet[Abandonable] = weakref.WeakSet()
_watching = False


def watch(store: Abandonable) -> None:
    """From now on, a forked child abandons `store`."""
    global _watching
    _open_stores.add(store)
    if not _watching:
        os.register_at_fork(after_in_child=_abandon_all)
        _watching = True


def _abandon_all() -> None:
    for store in list(_open_stores):
        store.abandon()
