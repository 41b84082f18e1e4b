"""Rounds of training whose outcome is the same wherever the shards live: for tests that compare bytes."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

import psstore

Floats = npt.NDArray[np.float32]

RULES = ("sgd", "adam", "adamw", "adagrad", "rmsprop", "reduce", "delayed_nesterov")

SHAPES = ((7,), (1024,), (300_001,))
"""Less than a vector, a small slice, and two slices of which one is not full."""

WORKERS = 3

CODECS = ("raw", "bf16", "int8", "sign", "topk:0.1")
"""Tensors are compressed by each in turn."""

FOLLOWED = ("int8", "sign")
"""So is what all workers follow."""

HYPERS = {group: {} if rule == "reduce" else {"lr": 0.01} for group, rule in enumerate(RULES)}


def after_rounds(device: str, *, rounds: int = 4, shards: int = 2, max_norm: float | None = None) -> dict[str, Floats]:
    """Every tensor's value, and what is published of it, after rounds of workers that are threads."""
    server = psstore.LocalStore(shards=shards, workers=WORKERS, device=device)
    created = threading.Barrier(WORKERS)
    with ThreadPoolExecutor(WORKERS) as threads:
        works = [threads.submit(_work, server, rank, rounds, max_norm, created) for rank in range(WORKERS)]
        found = [work.result() for work in works]
    server.close()
    for other in found[1:]:
        assert_same_bits(found[0], other)
    return found[0]


def assert_same_bits(ours: dict[str, Floats], theirs: dict[str, Floats]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        different = np.flatnonzero(ours[name].view(np.uint32) != value.view(np.uint32))
        assert not different.size, f"{different.size} elements of {name}, the first is {different[0]}"


def names() -> Sequence[str]:
    return [f"{rule}-{size}" for rule in RULES for (size,) in SHAPES]


def _work(
    server: psstore.LocalStore, rank: int, rounds: int, max_norm: float | None, created: threading.Barrier
) -> dict[str, Floats]:
    random = np.random.default_rng([7, rank])
    with server.connect(rank=rank) as store:
        for group, rule in enumerate(RULES):
            for (size,) in SHAPES:
                store.create(f"{rule}-{size}", np.linspace(-1, 1, size, dtype=np.float32), rule=rule, group=group)
        created.wait(30)
        codecs = {name: codec for name, codec in zip(names(), itertools.cycle(CODECS)) if codec != "raw"}
        for _ in range(rounds):
            sizes = [int(name.split("-")[1]) for name in names()]
            store.push_many(
                {name: random.standard_normal(size, np.float32) for name, size in zip(names(), sizes, strict=True)},
                codec=codecs,
            )
            store.commit(HYPERS, max_norm=max_norm)
            if max_norm is not None:
                store.global_norm()
            pulled = store.pull_many(names())
            followed = store.pull_many(names(), codec=dict(zip(names(), itertools.cycle(FOLLOWED), strict=False)))
        published = {f"{name}, as published": value for name, value in zip(names(), followed, strict=True)}
        return dict(zip(names(), pulled, strict=True)) | published
