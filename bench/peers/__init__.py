"""Who takes part in `dense`: each module here is a contestant, behind one small interface.

A module is loaded by its name, in the bench's process and in each worker's, so that only those import torch or redis
that need it. What it can't do it says in `why_not`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Protocol, cast

from bench.comparison import Role
from bench.work import Work


class Worker(Protocol):
    """One worker's end, in a process of its own."""

    @property
    def variants(self) -> Mapping[str, Callable[[], None]]:
        """The ways in which it can take a round. A round that the workers take together blocks until they all do."""

    @property
    def last(self) -> float:
        """The last parameter's last element, as it came back."""

    def close(self) -> None: ...


class Peer(Protocol):
    """A module of this package."""

    NAME: str
    ROLE: Role
    IN_ONE_PROCESS: bool
    """Whether one process does the work of all workers."""
    SPINS: bool
    """Whether its processes burn processor time while they wait. They stand still, then, while others have a turn."""

    def why_not(self, work: Work, transport: str) -> str | None:
        """Why it can't do this work here; None: it can."""

    def serve(self, work: Work, transport: str) -> AbstractContextManager[str]:
        """Its servers, in processes of their own; yields where the workers find them."""

    def join(self, work: Work, rank: int, where: str) -> Worker:
        """Called in the worker's process."""


def load(name: str) -> Peer:
    return cast(Peer, import_module(f"bench.peers.{name}"))
