"""Random schedules of readers that skip versions, come late, lose their connections and come back, while tensors
change, go and come anew: whatever they missed, they have the bits of a whole pull of their version.

    python -m tests.client.follow_schedules [--schedules N] [--seed SEED]

runs as many as one likes; pytest runs some. Ends with an error at the first reader that has other bits.
"""

from __future__ import annotations

import argparse
import hashlib
import random
from typing import NamedTuple

import numpy as np

from psstore import LocalStore, _core
from psstore.client.changes import Copies, Version
from psstore.client.store import Store
from psstore.types import TensorSpec

SCHEDULES_PER_STORE = 50
OPS_PER_SCHEDULE = 14
NAMES = ("a", "b", "c", "d")
DTYPES = ("float32", "bfloat16", "float16")
RULES = ("sgd", "assign")


class Reads(NamedTuple):
    """Versions that readers were sent, of which each was compared with a whole pull."""

    number: int
    by_changes: int
    """Those of which something came, and no slice whole."""
    wholes: int
    """Slices that came whole."""


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
        self.num_reads = self.num_changes = self.num_wholes = 0
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
        self.num_reads += 1
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


def of_one_store(seeds: range) -> Reads:
    """Runs a schedule of each seed, one after the other on one store: some readers were those of the ones before."""
    with LocalStore(shards=2) as local:
        schedule = Schedule(local, seeds[0])
        for seed in seeds:
            schedule.draw.seed(seed)
            schedule.run()
            schedule.readers = schedule.readers[-3:]
        schedule.worker.close()
    return Reads(schedule.num_reads, schedule.num_changes, schedule.num_wholes)


def run(seeds: range) -> Reads:
    """Runs a schedule of each seed."""
    firsts = range(seeds.start, seeds.stop, SCHEDULES_PER_STORE)
    found = [of_one_store(range(first, min(first + SCHEDULES_PER_STORE, seeds.stop))) for first in firsts]
    return Reads(*map(sum, zip(*found, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.client.follow_schedules", description=__doc__)
    parser.add_argument("--schedules", type=int, default=10_000, help="in all (default: 10,000)")
    parser.add_argument("--seed", type=int, default=0, help="of the first")
    chosen = parser.parse_args()
    found = run(range(chosen.seed, chosen.seed + chosen.schedules))
    print(
        f"{chosen.schedules:,} schedules: {found.number:,} versions read, each with the SHA-256 of a whole pull;"
        f" {found.by_changes:,} by changes alone, {found.wholes:,} slices came whole"
    )


if __name__ == "__main__":
    main()
