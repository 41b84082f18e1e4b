"""Shards that are made without a word about where they are to be, on fake devices: so tests of shards in main memory
are tests of those on devices as well."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from psstore import _core


def on_devices() -> Callable[..., _core.Shard]:
    """What makes shards, each on a device of its own."""
    make, seeds = _core.Shard, count()

    def shard(*, device: str = "cpu", arena: object = None, **options: Any) -> _core.Shard:
        if device == "cpu":
            return make(device=f"fake:0?seed={next(seeds)}", **options)
        return make(device=device, **options)

    return shard


in_main_memory = pytest.mark.skipif("config.getoption('--device') != 'cpu'", reason="on a device it is otherwise")
"""Of tests that say where the host's memory is, and what is copied there."""
