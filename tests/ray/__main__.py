"""`python -m tests.ray`: kills nodes of a Ray cluster, one after the other, under the training of two actors. Ends with
1 if the training comes to other bytes than by an undisturbed `psstore-server`."""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from typing import Any

import psstore.ray
from tests.ray.nodes import Nodes, member_addresses
from tests.ray.training import Workers, eventually_whole, undisturbed
from tests.support.free_ports import free_ports

NUM_WORKERS = 2


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.ray", description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps-each", type=int, default=20, help="between two kills, at least")
    parser.add_argument("--shards", type=int, default=3)
    parser.add_argument("--checkpoints", action="store_true", help="the store goes back to them; else it has standbys")
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    chance = random.Random(chosen.seed)
    begin = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - begin:7.1f} s  {line}", flush=True)

    with tempfile.TemporaryDirectory() as folder, Nodes(chosen.shards + 1) as nodes:
        way: dict[str, Any] = {"checkpoint": folder, "checkpoint_every": "10"} if chosen.checkpoints else {}
        standbys = 0 if chosen.checkpoints else 1
        store = psstore.ray.start(
            chosen.shards,
            standbys=standbys,
            port=free_ports(1)[0],
            workers=NUM_WORKERS,
            strategy="STRICT_SPREAD",
            **way,
        )
        with store:
            store.use()
            say(f"the store serves at {store.url}")
            workers, waits = Workers(store, NUM_WORKERS), []
            for kill in range(1, chosen.kills + 1):
                assert standbys == 0 or eventually_whole(store)
                first = workers.steps()
                address = chance.choice(sorted(set(member_addresses(store).values())))
                nodes.kill(address)
                nodes.add()
                workers.await_steps(workers.steps() + chosen.steps_each)
                waits.append(workers.longest_s(first))
                say(f"kill {kill}: {address}; a worker waited {waits[-1]:.2f} s; step {workers.steps()}")
            num_steps, digest = workers.end()
            say(f"{num_steps} steps")
    whole = digest == undisturbed(NUM_WORKERS, num_steps, shards=chosen.shards)
    print(f"steps  {num_steps}, {'with the bytes' if whole else 'NOT with the bytes'} of the undisturbed training")
    typical, most = statistics.median(waits), max(waits)
    print(f"{chosen.kills} × kill of a node  a worker waits {typical:.2f} s (median), {most:.2f} s (most)")
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
