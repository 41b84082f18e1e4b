"""Random schedules of readers that skip versions, come late, lose their connections and come back, while tensors
change, go and come anew: whatever they missed, they have the bits of a whole pull of their version."""

from __future__ import annotations

import hashlib
import random
import threading
import time
from typing import Literal

import numpy as np
import pytest

from psstore import FollowingReader, LocalStore, _core
from psstore.client.changes import Copies, Version
from psstore.client.store import Store
from psstore.types import TensorSpec
from tests.support.cluster import PATIENCE_S, at_once, clusters

NUM_SCHEDULES = 1000
SCHEDULES_PER_STORE = 50
OPS_PER_SCHEDULE = 14
NAMES = ("a", "b", "c", "d")
DTYPES = ("float32", "bfloat16", "float16")
RULES = ("sgd", "assign")

pytestmark = pytest.mark.one_loop


def sha256_of(store: Store, dtype: str) -> str:
    """Of all tensors, by whole pulls, as `Copies.sha256` says it."""
    digest = hashlib.sha256()
    for name in sorted(str(name) for name in store.keys()):
        value = store.pull(name)
        as_read = np.empty(value.size, np.int16 if dtype != "float32" else np.float32)
        _core.convert(value, _core.DTYPES["float32"], as_read, _core.DTYPES[dtype])
        digest.update(f"{name!r} {dtype} {value.shape}\n".encode())
        digest.update(as_read)
    return digest.hexdigest()


class Schedule:
    """One store, its worker, and some readers, of which each has copies that outlive its connections."""

    def __init__(self, local: LocalStore, seed: int) -> None:
        self.draw = random.Random(seed)
        self.values = np.random.default_rng(seed)
        self.local = local
        self.worker = local.connect(rank=0)
        self.readers: list[tuple[Copies, str]] = []
        self.links: list[Store] = []
        self.num_changes = self.num_wholes = 0
        for name in NAMES:
            self.make(name)

    def make(self, name: str) -> None:
        shape = (self.draw.choice([0, 1, 3, 31, 33, 700, 5000]),)
        spec = TensorSpec(name=name, shape=shape, rule=self.draw.choice(RULES), zeros=False)
        self.worker.create_many([spec], [self.values.standard_normal(shape, np.float32)], exist="overwrite")

    def step(self) -> None:
        share = self.draw.choice([0, 0.01, 0.1, 1.0])
        gradients, plain = {}, {}
        for name in NAMES:
            spec = self.worker.describe(name).spec
            if self.draw.random() < 0.3:
                continue
            changed = self.values.random(spec.shape) < share
            noise = np.where(changed, self.values.standard_normal(spec.shape), 0).astype(np.float32)
            if spec.rule == "sgd":
                gradients[name] = noise
            else:
                plain[name] = self.worker.pull(name) + noise
        if plain:
            self.worker.push_many(plain)
        if gradients:
            self.worker.push_many(gradients)
        self.worker.commit({"lr": 1.0}, present=list(gradients))

    def read(self) -> None:
        """One of the readers goes to the newest version, over whatever link."""
        if not self.readers or self.draw.random() < 0.1:
            dtype = self.draw.choice(DTYPES)
            self.readers.append((Copies(None, dtype), dtype))
        if not self.links or self.draw.random() < 0.2:
            self.links.append(self.local.connect(role="client"))
        copies, dtype = self.draw.choice(self.readers)
        link = self.draw.choice(self.links)
        version: Version = link._run(copies._find_version(link._operations, None, is_checked=False))
        self.num_wholes += version.num_whole
        self.num_changes += bool(version.changed) and not version.num_whole
        assert copies.sha256() == sha256_of(self.worker, dtype)

    def disconnect(self) -> None:
        if self.links:
            self.links.pop(self.draw.randrange(len(self.links))).close()

    def run(self) -> None:
        ops = [self.step, self.step, self.step, self.read, self.read, self.read, self.disconnect, self.remake]
        for _ in range(OPS_PER_SCHEDULE):
            self.draw.choice(ops)()
        self.read()
        for link in self.links:
            link.close()
        self.links = []

    def remake(self) -> None:
        if self.draw.random() < 0.3:
            self.make(self.draw.choice(NAMES))


@pytest.mark.parametrize("batch", range(4))
def test_whatever_readers_miss_they_have_the_bits_of_a_whole_pull(batch: int) -> None:
    num_changes = num_wholes = 0
    for first in range(batch * NUM_SCHEDULES // 4, (batch + 1) * NUM_SCHEDULES // 4, SCHEDULES_PER_STORE):
        with LocalStore(shards=2) as local:
            schedule = Schedule(local, first)
            for seed in range(first, first + SCHEDULES_PER_STORE):
                schedule.draw.seed(seed)
                schedule.run()
                schedule.readers = schedule.readers[-3:]
            num_changes += schedule.num_changes
            num_wholes += schedule.num_wholes
            schedule.worker.close()
    assert num_changes > NUM_SCHEDULES / 10
    assert num_wholes > NUM_SCHEDULES / 10


@pytest.mark.sockets
@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize(("mode", "shards"), [("sync", 3), ("async", 2)])
def test_no_version_is_torn_while_workers_train(mode: str, shards: int, transport: Literal["tcp", "shm"]) -> None:
    """Every worker adds the same to all elements: in a whole version all are equal, and the number of the version says
    how many steps were taken. Frames are of 4 MiB: two from each shard, which are seldom of one decision."""
    shape = (2_500_000,)
    with clusters(transport) as start:
        cluster = start(shards=shards, workers=2, mode=mode)
        workers = cluster.workers()
        workers[0].create_many([TensorSpec(name=name, shape=shape, rule="sgd") for name in NAMES[:2]])
        over = threading.Event()

        def train(rank: int) -> None:
            while not over.is_set():
                workers[rank].push_many({name: np.ones(shape, np.float32) for name in NAMES[:2]})
                workers[rank].commit({"lr": 1.0}, average=False)
            workers[rank].leave()

        def read() -> list[tuple[int, set[float]]]:
            found: list[tuple[int, set[float]]] = []
            try:
                with FollowingReader(cluster.connect(role="client"), NAMES[:2], None) as reader:
                    began = time.monotonic()
                    while len(found) < 5 and time.monotonic() - began < PATIENCE_S:
                        version = reader.next()
                        values = np.concatenate([np.unique(value) for value in version.values.values()])
                        found.append((version.number, set(values.tolist())))
                    reader.verify()
            finally:
                over.set()
            return found

        versions = at_once(*[lambda rank=rank: train(rank) for rank in range(2)], read)[-1]
        assert versions is not None
        assert len(versions) == 5
        steps_of_a_round = 2 if mode == "sync" else 1
        for number, values in versions:
            assert values == {-float(number * steps_of_a_round)}
