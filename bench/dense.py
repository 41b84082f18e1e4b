"""A training step's traffic: push + SGD + pull of ResNet-50's 161 tensors, beside raw sockets moving the same bytes.

    python -m bench.dense [--quick] [--json FILE]

Axes: transport (TCP over loopback, unix sockets), shards. One worker, fp32, 102 MB up and 102 MB down per round,
more than any cache. Each round of each configuration and of its peer is taken in turn, after a warm-up, so that
what else the machine does slows all alike: the ratios are the result, the times are this machine's.

The peer (bench/raw_sockets.py) has as many connections and server processes, and does no arithmetic: what remains
above 1 is framing, staging, the update and Python. On two cores, client and server share them with the kernel.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

import psstore
from bench.raw_sockets import RawLink
from psstore.cli.model_shapes import resnet50
from psstore.types import TensorSpec

Round = Callable[[], None]

HYPERS = {"lr": 1e-6}


@dataclass(frozen=True)
class Figure:
    """One configuration beside its peer; times in milliseconds per round."""

    transport: str
    shards: int
    median_ms: float
    min_ms: float
    max_ms: float
    raw_median_ms: float
    raw_min_ms: float
    raw_max_ms: float
    ratio: float
    """Of the medians: how many times as long as raw sockets."""
    cpu_ms: float
    """Processor time of this process per round."""


@contextlib.contextmanager
def store_round(transport: str, shards: int) -> Iterator[Round]:
    """A store with ResNet-50 in it, and one training round of it."""
    shapes = resnet50()
    chance = np.random.default_rng(0)
    gradients = {name: chance.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
    weights = [np.zeros(shape, np.float32) for shape in shapes.values()]
    specs = [TensorSpec(name=name, shape=shape, rule="sgd") for name, shape in shapes.items()]
    with server(transport, shards) as url, psstore.connect(url, rank=0, num_workers=1) as store:
        store.create_many(specs)

        def one_round() -> None:
            store.push_many(gradients)
            store.commit(HYPERS)
            store.pull_many(list(shapes), out=weights)

        yield one_round
        expected = -HYPERS["lr"] * store.version * gradients["fc.weight"][0, 0]
        assert np.isclose(weights[list(shapes).index("fc.weight")][0, 0], expected, rtol=1e-3)


@contextlib.contextmanager
def server(transport: str, shards: int, *, workers: int = 1) -> Iterator[str]:
    """The URL of a store in processes of its own."""
    with tempfile.TemporaryDirectory() as folder:
        where = ["--port", "0"] if transport == "tcp" else ["--uds", str(Path(folder) / "store")]
        read_fd, write_fd = os.pipe()
        command = [
            sys.executable,
            "-m",
            "psstore.cli.server",
            "--shards",
            str(shards),
            "--workers",
            str(workers),
            *where,
        ]
        process = subprocess.Popen(
            [*command, "--ready-fd", str(write_fd)], pass_fds=[write_fd], stdout=subprocess.DEVNULL
        )
        os.close(write_fd)
        with os.fdopen(read_fd) as ready:
            url = json.loads(ready.readline())["url"]
        try:
            yield url
        finally:
            process.terminate()
            process.wait()


@contextlib.contextmanager
def raw_round(transport: str, shards: int) -> Iterator[Round]:
    """The same bytes over plain sockets, the connections side by side."""
    num_bytes = 4 * sum(int(np.prod(shape)) for shape in resnet50().values()) // shards
    links = [RawLink(transport, num_bytes) for _ in range(shards)]
    up = [memoryview(np.ones(num_bytes, np.uint8)) for _ in links]
    down = [memoryview(np.ones(num_bytes, np.uint8)) for _ in links]
    with ThreadPoolExecutor(shards) as pool:

        def one_round() -> None:
            list(pool.map(RawLink.round, links, up, down))

        yield one_round
    for link in links:
        link.close()


def measure(configurations: list[tuple[str, int]], *, warm_up: int, rounds: int) -> list[Figure]:
    with contextlib.ExitStack() as ends:
        pairs = [
            (ends.enter_context(store_round(*which)), ends.enter_context(raw_round(*which))) for which in configurations
        ]
        times: list[tuple[list[float], list[float], list[float]]] = [([], [], []) for _ in pairs]
        for number in range(warm_up + rounds):
            for (ours, raw), (our_ms, raw_ms, cpu_ms) in zip(pairs, times, strict=True):
                cpu = time.process_time()
                our_time = milliseconds(ours)
                cpu = time.process_time() - cpu
                raw_time = milliseconds(raw)
                if number >= warm_up:
                    our_ms.append(our_time)
                    raw_ms.append(raw_time)
                    cpu_ms.append(1e3 * cpu)
    return [
        Figure(
            transport=transport,
            shards=shards,
            median_ms=statistics.median(our_ms),
            min_ms=min(our_ms),
            max_ms=max(our_ms),
            raw_median_ms=statistics.median(raw_ms),
            raw_min_ms=min(raw_ms),
            raw_max_ms=max(raw_ms),
            ratio=statistics.median(our_ms) / statistics.median(raw_ms),
            cpu_ms=statistics.median(cpu_ms),
        )
        for (transport, shards), (our_ms, raw_ms, cpu_ms) in zip(configurations, times, strict=True)
    ]


def milliseconds(work: Round) -> float:
    begin = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - begin)


def machine() -> dict[str, object]:
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "psstore": psstore.__version__,
    }


def show(figures: list[Figure]) -> None:
    shapes = resnet50()
    megabytes = 4e-6 * sum(int(np.prod(shape)) for shape in shapes.values())
    print(f"ResNet-50: {len(shapes)} tensors, {megabytes:.1f} MB up and down per round, one worker, fp32 SGD")
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    print("| transport | shards | psstore ms: median (min–max) | raw sockets ms | ratio | client CPU ms |")
    print("|---|---|---|---|---|---|")
    for f in figures:
        print(
            f"| {f.transport} | {f.shards} | {f.median_ms:.1f} ({f.min_ms:.1f}–{f.max_ms:.1f})"
            f" | {f.raw_median_ms:.1f} ({f.raw_min_ms:.1f}–{f.raw_max_ms:.1f}) | {f.ratio:.2f} | {f.cpu_ms:.0f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few rounds: does it run, roughly how fast")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    arguments = parser.parse_args()
    configurations = [(transport, shards) for transport in ("tcp", "unix") for shards in (1, 2)]
    figures = measure(configurations, warm_up=1 if arguments.quick else 3, rounds=5 if arguments.quick else 21)
    show(figures)
    if arguments.json:
        written = {"machine": machine(), "figures": [asdict(figure) for figure in figures]}
        arguments.json.write_text(json.dumps(written, indent=2) + "\n")


if __name__ == "__main__":
    main()
