"""The stores that are read from, and how."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from psstore.types import TensorSpec

MODES = ("sync", "backup", "ssp", "async")
SHARDS = (1, 2, 3, 5, 8)
LINKS = (("tcp", 1), ("tcp", 3), ("unix", 1), ("shm", 1))
"""Transports, and how many connections a reader has with each shard."""

NUM_WORKERS = 2
SMALL = tuple(f"layer{number}.weight" for number in range(24))
WIDE = "embedding.weight"
"""Three slices, which two shards of many have."""

SMALL_ELEMS, WIDE_ELEMS = 64, 150_000


@dataclass(frozen=True)
class TornCase:
    """One store under test."""

    mode: str
    num_shards: int
    transport: str
    connections: int = 1

    def __str__(self) -> str:
        links = f" by {self.connections} connections" if self.connections > 1 else ""
        return f"{self.mode}, {self.num_shards} shards, {self.transport}{links}"


def all_cases() -> list[TornCase]:
    """Every mode over every transport with every number of shards, those that differ most first."""
    cases = [TornCase(mode, shards, *link) for mode, shards, link in product(MODES, SHARDS, LINKS)]
    stride = 37  # shares no factor with their number: each is met once
    return [cases[number * stride % len(cases)] for number in range(len(cases))]


def specs() -> list[TensorSpec]:
    small = [TensorSpec(name=name, shape=(SMALL_ELEMS,), rule="sgd") for name in SMALL]
    return [*small, TensorSpec(name=WIDE, shape=(WIDE_ELEMS,), rule="sgd")]
