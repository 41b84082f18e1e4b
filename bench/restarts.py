"""How long a store is away whose shard dies, and that goes back to its latest checkpoint, beside reading that plainly.

    python -m bench.restarts [--quick] [--megabytes M] [--json FILE]

A store of two shards with Adam's state has a checkpoint of M megabytes in the system's folder of temporary files. One
of its shards is killed with SIGKILL, and the time is that until a client is connected again and has read the value. The
limit reads the checkpoint's files by plain calls. Both read from the page cache: what was written is there still.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import time
from pathlib import Path

import numpy as np

import psstore
from bench.command import Subject, run
from bench.machine import machine
from bench.processes import store_server
from bench.report import Report, Table, spread, three_digits
from psstore.errors import PsstoreError

PARTS = 3
"""The value, and two buffers of Adam's state."""

MEGABYTES = 1000

READ_TIMES, MORE_S = 1.2, 5.0
"""What was aimed at: no longer away than so many times what reading takes, and so much more."""

AGAIN_S = 0.01

CALL_BYTES = 8 << 20


def restarts(chosen: argparse.Namespace) -> Report:
    megabytes = chosen.megabytes or (100 if chosen.quick else MEGABYTES)
    num_bytes = megabytes * 1_000_000
    rounds = 3 if chosen.quick else 5
    with tempfile.TemporaryDirectory() as folder:
        away_s, read_s = _measured(Path(folder), num_bytes, rounds=rounds)
    away, read = float(np.median(away_s)), float(np.median(read_s))
    return Report(
        subject="restarts",
        about="A shard dies, and all go back to the latest checkpoint: until a client has read a value again.",
        tables=[
            Table(
                f"a checkpoint of {megabytes} MB",
                ("away, s: median (min–max)", "its files read plainly, s", "away less reading, s", "away is to be, s"),
                [
                    [
                        spread(away, min(away_s), max(away_s)),
                        spread(read, min(read_s), max(read_s)),
                        three_digits(away - read),
                        f"≤ {three_digits(READ_TIMES * read + MORE_S)}",
                    ]
                ],
            )
        ],
        figures=[{"num_bytes": num_bytes, "away_s": away_s, "read_s": read_s}],
        summary=[["restarts", f"away for a checkpoint of {megabytes} MB", f"{away:.2f} s", away / read, None]],
        machine=machine(),
    )


def _measured(folder: Path, num_bytes: int, *, rounds: int) -> tuple[list[float], list[float]]:
    place = folder / "checkpoints"
    options = ("--checkpoint", str(place), "--checkpoint-every", "1000000", "--restarts", str(rounds + 1))
    away_s, read_s = [], []
    with store_server("tcp", 2, options=options) as url, psstore.connect(url, rank=0) as store:
        store.create("w", np.zeros(num_bytes // PARTS // 4, np.float32), rule="adam")
        store.push("w", np.ones(num_bytes // PARTS // 4, np.float32))
        store.commit({"lr": 1e-3})
        store.checkpoint()
        written = sum(path.stat().st_size for path in place.rglob("*"))
        assert written >= num_bytes, f"the checkpoint is of {written} bytes"
        for _ in range(rounds):
            read_s.append(_read_plainly(place))
            away_s.append(_outlive(store))
    return away_s, read_s


def _outlive(store: psstore.Store) -> float:
    victim = int(store.stats()[1]["process"])
    begin = time.perf_counter()
    os.kill(victim, signal.SIGKILL)
    while True:
        try:
            store.reconnect()
            store.pull("w")
        except PsstoreError:
            time.sleep(AGAIN_S)
        else:
            if int(store.stats()[1]["process"]) != victim:
                return time.perf_counter() - begin


def _read_plainly(folder: Path) -> float:
    memory = memoryview(bytearray(CALL_BYTES))
    begin = time.perf_counter()
    for path in filter(Path.is_file, sorted(folder.rglob("*"))):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(memory):
                pass
    return time.perf_counter() - begin


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--megabytes", type=int, metavar="M", help=f"of the checkpoint (default: {MEGABYTES})")


SUBJECT = Subject("restarts", __doc__.splitlines()[0], restarts, add_options)

if __name__ == "__main__":
    run(SUBJECT)
