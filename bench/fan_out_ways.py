"""Ways to bring a trainer's weights to many readers on its machine: a store's, whole over raw sockets, by way of Redis,
by gloo's broadcast, and as files of what has changed.

Each is a trainer's end, which is given float32 and hands over bfloat16, and readers in processes of their own.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

import psstore
from bench.comparison import Role
from bench.peers import redis_store
from bench.peers.raw_sockets import receive_all, tune
from bench.processes import FRESH, child, store_server
from bench.work import Floats, one_large
from psstore.client.follow import FollowingReader
from psstore.config import Transport

Bits = NDArray[np.int16]
"""Weights in bfloat16, bit for bit."""

HandOver = Callable[[Floats], None]
"""What the trainer does with its newest weights."""

Receive = Callable[[], Sequence[Bits]]
"""Waits for newer weights, and returns all of them."""

NUM_TENSORS = 16
"""Of a store's; other ways have one array."""

NAMES = tuple(f"layer{number}.weight" for number in range(NUM_TENSORS))
SHARDS = 2

LOOK_AGAIN_S = 0.0005
"""Between two looks whether a file is there."""


def bits_of(weights: Floats) -> Bits:
    import torch  # here and below: its import takes longer than a reader that has no need of it

    bits: Bits = torch.from_numpy(weights).to(torch.bfloat16).view(torch.int16).numpy()
    return bits


def digest(bits: Sequence[Bits]) -> int:
    value = 0
    for one in bits:
        value = crc32(one.data, value)
    return value


class Readers:
    """Processes that read, each version when they are told to wait for it."""

    def __init__(self, ends: contextlib.ExitStack, work: Callable[..., None], arguments: Sequence[Sequence[object]]):
        """`arguments`: of each, behind its link."""
        self._links: list[Connection] = []
        for own in arguments:
            ours, theirs = FRESH.Pipe()
            ends.enter_context(child(work, theirs, *own))
            theirs.close()
            self._links.append(ends.enter_context(contextlib.closing(ours)))

    def began(self) -> None:
        """Returns when all of them are there."""
        for link in self._links:
            link.recv()

    def wait_for_next(self) -> None:
        for link in self._links:
            link.send(None)

    def last_end(self) -> float:
        """When the last one had the version, by time.perf_counter()."""
        return max(float(link.recv()) for link in self._links)

    def digests(self) -> list[int]:
        """Of what each has. Made when all have it: else it would take processors from those who read still."""
        for link in self._links:
            link.send(None)
        return [link.recv() for link in self._links]


def read(link: Connection, receive: Receive) -> None:
    """A reader's life, until its link is closed."""
    with contextlib.suppress(EOFError, ConnectionError):
        link.send(None)
        while True:
            link.recv()
            bits = receive()
            link.send(time.perf_counter())
            link.recv()
            link.send(digest(bits))


# ---- psstore ----


@contextlib.contextmanager
def store(transport: Transport, num_readers: int, num_elems: int) -> Iterator[tuple[HandOver, Readers]]:
    """`store.publish` of all tensors, and followers."""
    with contextlib.ExitStack() as ends:
        url = ends.enter_context(store_server("tcp" if transport == "tcp" else "unix", SHARDS))
        trainer = ends.enter_context(psstore.connect(url, rank=0, transport=transport))

        def hand_over(weights: Floats) -> None:
            trainer.publish(dict(zip(NAMES, weights.reshape(NUM_TENSORS, -1), strict=True)))

        hand_over(np.zeros(num_elems, np.float32))
        yield hand_over, Readers(ends, _follow, [(url, transport)] * num_readers)


def _follow(link: Connection, url: str, transport: Transport) -> None:
    with psstore.connect(url, role="client", transport=transport) as source:
        follower = FollowingReader(source, NAMES, "bfloat16")
        follower.next()

        def receive() -> Sequence[Bits]:
            values = follower.next().values
            return [values[name] for name in NAMES]

        read(link, receive)


# ---- raw sockets ----


@contextlib.contextmanager
def raw_sockets(num_readers: int, num_elems: int) -> Iterator[tuple[HandOver, Readers]]:
    """All of it to each reader, by a thread of its own."""
    with contextlib.ExitStack() as ends:
        listener = ends.enter_context(socket.create_server(("127.0.0.1", 0)))
        readers = Readers(ends, _read_socket, [(listener.getsockname(), num_elems)] * num_readers)
        links = [ends.enter_context(listener.accept()[0]) for _ in range(num_readers)]
        for link in links:
            tune(link)
        pool = ends.enter_context(ThreadPoolExecutor(num_readers))

        def hand_over(weights: Floats) -> None:
            bits = bits_of(weights)
            list(pool.map(lambda link: link.sendall(bits.data), links))

        yield hand_over, readers


def _read_socket(link: Connection, address: tuple[str, int], num_elems: int) -> None:
    bits = np.empty(num_elems, np.int16)
    with socket.create_connection(address) as source:
        tune(source)

        def receive() -> Sequence[Bits]:
            receive_all(source, bits.data.cast("B"))
            return [bits]

        read(link, receive)


# ---- Redis ----


@contextlib.contextmanager
def redis(num_readers: int, num_elems: int) -> Iterator[tuple[HandOver, Readers]]:
    """SET and PUBLISH; readers, who have subscribed, GET. Raises ImportError."""
    missing = redis_store.why_not(one_large(1), "unix")
    if missing is not None:
        raise ImportError(missing)
    with contextlib.ExitStack() as ends:
        where = ends.enter_context(redis_store.serve(one_large(1), "unix"))
        trainer = ends.enter_context(redis_store.client(where))
        readers = Readers(ends, _read_redis, [(where,)] * num_readers)

        def hand_over(weights: Floats) -> None:
            pipeline = trainer.pipeline(transaction=False)
            pipeline.set("weights", bits_of(weights).data.cast("B"))
            pipeline.publish("versions", "newer")
            pipeline.execute()

        yield hand_over, readers


def _read_redis(link: Connection, where: str) -> None:
    with redis_store.client(where) as store, store.pubsub(ignore_subscribe_messages=True) as versions:
        versions.subscribe("versions")
        versions.get_message(timeout=1.0)

        def receive() -> Sequence[Bits]:
            while versions.get_message(timeout=1.0) is None:
                pass
            return [np.frombuffer(store.get("weights"), np.int16)]

        read(link, receive)


# ---- gloo ----


@contextlib.contextmanager
def broadcast(num_readers: int, num_elems: int) -> Iterator[tuple[HandOver, Readers]]:
    """torch.distributed's, from the trainer, of one group."""
    import torch
    import torch.distributed as dist

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as ends:
        group = f"file://{folder}/group"
        arguments = [(group, rank, num_readers + 1, num_elems) for rank in range(1, num_readers + 1)]
        readers = Readers(ends, _read_broadcast, arguments)
        dist.init_process_group("gloo", init_method=group, rank=0, world_size=num_readers + 1)
        ends.callback(dist.destroy_process_group)

        def hand_over(weights: Floats) -> None:
            dist.broadcast(torch.from_numpy(weights).to(torch.bfloat16), 0)

        yield hand_over, readers


def _read_broadcast(link: Connection, group: str, rank: int, world_size: int, num_elems: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=group, rank=rank, world_size=world_size)
    weights = torch.empty(num_elems, dtype=torch.bfloat16)

    def receive() -> Sequence[Bits]:
        dist.broadcast(weights, 0)
        return [weights.view(torch.int16).numpy()]

    read(link, receive)


# ---- files ----


@contextlib.contextmanager
def sparse_files(num_readers: int, num_elems: int) -> Iterator[tuple[HandOver, Readers]]:
    """Places and bits of what has changed, as safetensors in a folder in memory; readers look for the next one. Raises
    ImportError."""
    if importlib.util.find_spec("safetensors") is None:
        raise ImportError("there is no safetensors (pip install safetensors)")
    import torch
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, contextlib.ExitStack() as ends:
        readers = Readers(ends, _read_files, [(folder, num_elems)] * num_readers)
        before = torch.zeros(num_elems, dtype=torch.int16)
        versions = itertools.count()

        def hand_over(weights: Floats) -> None:
            now = torch.from_numpy(bits_of(weights))
            places = torch.nonzero(now != before).squeeze(1)
            version = next(versions)
            temporary = Path(folder) / "temporary"
            save_file({"places": places.to(torch.int32), "bits": now[places]}, temporary)
            temporary.rename(_file(folder, version))
            before.copy_(now)
            _file(folder, version - 2).unlink(missing_ok=True)

        yield hand_over, readers


def _file(folder: str, version: int) -> Path:
    return Path(folder) / f"{version}.safetensors"


def _read_files(link: Connection, folder: str, num_elems: int) -> None:
    import torch
    from safetensors.torch import load_file

    torch.set_num_threads(1)
    bits = torch.zeros(num_elems, dtype=torch.int16)
    versions = itertools.count()

    def receive() -> Sequence[Bits]:
        path = _file(folder, next(versions))
        while not path.exists():
            time.sleep(LOOK_AGAIN_S)
        changes = load_file(path)
        bits[changes["places"].long()] = changes["bits"]
        return [bits.numpy()]

    read(link, receive)


# ---- all ----

Way = Callable[[int, int], contextlib.AbstractContextManager[tuple[HandOver, Readers]]]
"""To so many readers, of so many weights."""

WAYS: Mapping[str, tuple[Role, Way]] = {
    "psstore, shm": ("psstore", partial(store, "shm")),
    "psstore, tcp": ("psstore", partial(store, "tcp")),
    "raw sockets, tcp, whole": ("limit", raw_sockets),
    "Redis, unix, whole": ("peer", redis),
    "gloo broadcast, tcp, whole": ("peer", broadcast),
    "safetensors files of what has changed": ("peer", sparse_files),
}
