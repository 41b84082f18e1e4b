"""psstore: a fully sharded in-memory parameter store for PyTorch.

>>> import psstore
>>> store = psstore.connect("ps://127.0.0.1:5700")

Names are loaded when they are first used: importing psstore imports neither torch nor numpy.
"""

from __future__ import annotations

from importlib import import_module

from psstore.release import __version__ as __version__

TYPE_CHECKING = False
"""As type checkers read typing's, which is most of what is imported before Ctrl-C can be told what to do."""

if TYPE_CHECKING:
    from psstore import cluster as cluster
    from psstore import cuda as cuda
    from psstore import errors as errors
    from psstore import ray as ray
    from psstore import torch as torch
    from psstore.client.connect import connect as connect
    from psstore.client.connect import connect_async as connect_async
    from psstore.client.follow import FollowingReader as FollowingReader
    from psstore.client.follow import follow as follow
    from psstore.client.local import LocalStore as LocalStore
    from psstore.client.store import AsyncStore as AsyncStore
    from psstore.client.store import Store as Store

_HOMES = {
    "connect": "psstore.client.connect",
    "connect_async": "psstore.client.connect",
    "FollowingReader": "psstore.client.follow",
    "follow": "psstore.client.follow",
    "Store": "psstore.client.store",
    "AsyncStore": "psstore.client.store",
    "LocalStore": "psstore.client.local",
}

__all__ = ["AsyncStore", "FollowingReader", "LocalStore", "Store", "connect", "connect_async", "follow"]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in ("torch", "cuda", "errors", "cluster", "ray"):
        return import_module(f"psstore.{name}")
    raise AttributeError(f"module 'psstore' has no attribute {name!r}")
