"""Who serves rows over TCP beside a store, from another process of this machine: the limit, raw sockets around the loop
in C, and TensorFlow's and DMLC's parameter servers."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path

import numpy as np

from bench.harness import Turn
from bench.peers import ps_lite
from bench.peers.raw_sockets import receive_all, send_all, tune
from bench.processes import child, free_port
from bench.row_peers import CORES, RowLoop, tensorflow, tensorflow_step
from bench.row_work import DIM, EPS, RATE, Floats, Ids

PULL, PUSH, DONE = b"<", b">", b"."

PS_LITE_ROWS = Path(__file__).parent / "peers" / "ps_lite_rows.cc"


@contextlib.contextmanager
def raw_sockets(sets: Sequence[Ids], gradients: Floats, *, num_rows: int) -> Iterator[Turn]:
    """The bytes of a store's requests and answers, but for their headers: ids both times, rows, gradients."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        child(_serve_loop, listener, len(gradients), num_rows),
        socket.create_connection(listener.getsockname()) as link,
    ):
        tune(link)
        values, turns = np.zeros_like(gradients), cycle(sets)
        answer = memoryview(bytearray(1))

        def step() -> None:
            ids = next(turns)
            link.sendall(PULL)
            link.sendall(ids.data)
            receive_all(link, values.data.cast("B"))
            link.sendall(PUSH)
            link.sendall(ids.data)
            send_all(link, gradients.reshape(-1))
            receive_all(link, answer)

        yield step


def _serve_loop(listener: socket.socket, num_ids: int, num_rows: int) -> None:
    """Until the client is gone."""
    link, _ = listener.accept()
    tune(link)
    loop, values, ids = RowLoop(num_rows), np.zeros((num_ids, DIM), np.float32), np.zeros(num_ids, np.uint64)
    what = bytearray(1)
    with contextlib.suppress(ConnectionError):
        while True:
            receive_all(link, memoryview(what))
            receive_all(link, ids.data.cast("B"))
            if what == PULL:
                loop.gather(ids, values)
                send_all(link, values.reshape(-1))
            else:
                receive_all(link, values.data.cast("B"))
                loop.step(ids, values)
                link.sendall(DONE)


@contextlib.contextmanager
def tensorflow_server(sets: Sequence[Ids], gradients: Floats, *, num_rows: int) -> Iterator[Turn]:
    """Variables on a `tf.distribute.Server`, whose operations run there. Raises ImportError."""
    tf = tensorflow()
    port = free_port()
    with (
        socket.create_server(("127.0.0.1", 0)) as ending,
        child(_serve_tensorflow, ending, port),
        socket.create_connection(ending.getsockname()) as link,
    ):
        receive_all(link, memoryview(bytearray(1)))  # it listens
        tf.config.experimental_connect_to_host(f"127.0.0.1:{port}", job_name="ps")
        device = "/job:ps/replica:0/task:0/device:CPU:0"
        yield tensorflow_step(sets, gradients, num_rows=num_rows, device=device)


def _serve_tensorflow(ending: socket.socket, port: int) -> None:
    """Until the client is gone: TensorFlow's server has no end of its own."""
    tf = tensorflow()
    link, _ = ending.accept()
    config = tf.compat.v1.ConfigProto(intra_op_parallelism_threads=CORES, inter_op_parallelism_threads=CORES)
    tf.distribute.Server({"ps": [f"127.0.0.1:{port}"]}, job_name="ps", task_index=0, config=config)
    link.sendall(DONE)
    link.recv(1)
    os._exit(0)


@contextlib.contextmanager
def ps_lite_server(sets: Sequence[Ids], gradients: Floats, *, num_rows: int) -> Iterator[Turn]:
    """ZPull and ZPush of a KVWorker, whose server has Adagrad over an std::unordered_map. Keys ascend, as ps-lite has
    them. Raises ImportError that says what is missing."""
    missing = ps_lite.why_not_built()
    if missing is not None:
        raise ImportError(missing)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sets"
        np.sort(np.stack(sets), axis=1).tofile(path)
        program = str(ps_lite.compiled(PS_LITE_ROWS))
        command = [program, str(DIM), str(num_rows), str(len(gradients)), str(path), str(RATE), str(EPS)]
        with ps_lite.servers(command, 1, {}) as environment, ps_lite.rounds(command, environment) as take:
            yield partial(_ignore, take)


def _ignore(take: Callable[[str], str]) -> None:
    take("step")
