"""What TLS costs: push and pull over pss://, beside OpenSSL's sockets that move the same bytes.

    python -m bench.tls [--quick] [--megabytes M] [--json FILE]

One client and one shard on this host, over TCP: a push of one plain tensor and its pull, in turns with Python's `ssl`
sockets (TLS 1.3, the same certificate and cipher), which send the bytes to a process that forgets them and receive as
many from it, and with both without TLS. The store keeps the bytes; nobody does anything else with them.
"""

from __future__ import annotations

import argparse
import socket
import ssl
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

import psstore
from bench.command import Subject, run
from bench.harness import Series, Turn, alternate
from bench.machine import machine
from bench.processes import store_server
from bench.report import Cell, Report, Table, three_digits

LEAST = 0.8
"""Of the rate of TLS sockets: the target."""

CHUNK_BYTES = 1 << 20

TCP, TLS_SOCKETS, PLAIN, TLS = "plain sockets", "TLS sockets", "psstore, ps://", "psstore, pss://"


class Peer:
    """A process that forgets what it is sent, and sends as much: `python -m bench.tls_peer`."""

    def __init__(self, value: np.ndarray[Any, Any], certificate: Path | None) -> None:
        self._value = memoryview(value).cast("B")
        self._into = memoryview(bytearray(len(self._value)))
        listener = socket.create_server(("127.0.0.1", 0))
        told = [str(listener.fileno()), str(len(self._value)), *([str(certificate)] if certificate else [])]
        self._process = subprocess.Popen([sys.executable, "-m", "bench.tls_peer", *told], pass_fds=[listener.fileno()])
        self._socket: socket.socket = socket.create_connection(listener.getsockname())
        listener.close()
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if certificate:
            context = ssl.create_default_context(cafile=str(certificate))
            self._socket = context.wrap_socket(self._socket, server_hostname="127.0.0.1")

    def round(self) -> None:
        self._socket.sendall(self._value)
        received = 0
        while received < len(self._into):
            received += self._socket.recv_into(self._into[received : received + CHUNK_BYTES])

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


def certificate_in(folder: Path) -> Path:
    """Its own CA, with its key in the same file."""
    what = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=bench"
    where = "-addext subjectAltName=IP:127.0.0.1 -keyout key.pem -out cert.pem"
    subprocess.run(["openssl", *what.split(), *where.split()], cwd=folder, check=True, capture_output=True)
    whole = folder / "whole.pem"
    whole.write_bytes((folder / "cert.pem").read_bytes() + (folder / "key.pem").read_bytes())
    return whole


def measure(chosen: argparse.Namespace) -> Report:
    value = np.random.default_rng(0).standard_normal(chosen.megabytes * 250_000, np.float32)
    into = np.empty_like(value)
    with ExitStack() as ends:
        certificate = certificate_in(Path(ends.enter_context(tempfile.TemporaryDirectory())))
        turns: dict[str, Turn] = {}
        for name, options in ((PLAIN, ()), (TLS, ("--tls-cert", str(certificate)))):
            url = ends.enter_context(store_server("tcp", 1, options=options))
            store = ends.enter_context(psstore.connect(url, role="client", tls_ca=certificate, transport="tcp"))
            store.create("w", value, rule="assign")

            def turn(store: psstore.Store = store) -> None:
                store.push("w", value)
                store.pull("w", out=into)

            turns[name] = turn
        for name, file in ((TCP, None), (TLS_SOCKETS, certificate)):
            peer = Peer(value, file)
            ends.callback(peer.close)
            turns[name] = peer.round
        found = alternate(turns, warm_up=2, rounds=5 if chosen.quick else 25, progress="tls")
    return _report(found, 2 * value.nbytes)


def _report(found: dict[str, Series], num_bytes: int) -> Report:
    rows: list[list[Cell]] = [
        [name, num_bytes / series.median / 1e6, found[TLS_SOCKETS].median / series.median]
        for name, series in found.items()
    ]
    return Report(
        subject="tls",
        about=(
            "Push and pull of one tensor over TCP on this host, with and without TLS 1.3, in turns with sockets. The"
            f" target: {LEAST:g} of the rate of TLS sockets."
        ),
        tables=[Table("bytes out and back", ("who", "MB/s", "× TLS sockets"), rows)],
        summary=[
            [
                "tls",
                "push and pull over pss://, beside TLS sockets",
                f"{three_digits(1e3 * found[TLS].median)} ms",
                found[TLS].median / found[TLS_SOCKETS].median,
                None,
            ]
        ],
        machine=machine(),
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--megabytes", type=int, default=64, help="of the tensor")


SUBJECT = Subject("tls", __doc__.splitlines()[0], measure, _add_options)

if __name__ == "__main__":
    run(SUBJECT)
