"""What runs on hosts beside the workers: a store's shards, and peers of plain sockets."""

from __future__ import annotations

import contextlib
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.far import Hosts
from psstore.net.address import TcpAddress

STORE_PORT, PEER_PORT = 5700, 5800

TOKEN = secrets.token_hex(16)


def shard_addresses(hosts: Hosts, count: int, first_host: int) -> list[str]:
    """All different, also where the hosts are one; and those of a store of another size are others."""
    port = STORE_PORT + 10 * count
    return [f"{hosts.address(first_host + shard)}:{port + shard}" for shard in range(count)]


@contextlib.contextmanager
def shards(hosts: Hosts, count: int, *, first_host: int) -> Iterator[str]:
    """A store with a shard on each of so many hosts, for as many workers as there are hosts before them, who have
    TOKEN. Yields its URL; it may be starting still."""
    at = shard_addresses(hosts, count, first_host)
    with contextlib.ExitStack() as ends:
        token_file = Path(ends.enter_context(tempfile.TemporaryDirectory()), "token")
        token_file.write_text(TOKEN)
        token_file.chmod(0o600)
        told = ["--shards-at", ",".join(at), "--workers", str(first_host), "--token-file", str(token_file)]
        command = [sys.executable, "-m", "psstore.cli.server", *told, "--log-level", "error", "--shard-index"]
        for shard in range(count):
            ends.enter_context(_running(hosts.on(first_host + shard, [*command, str(shard)])))
        yield f"ps://{at[0]}"


@contextlib.contextmanager
def peers(hosts: Hosts, count: int, *, first_host: int) -> Iterator[None]:
    """A peer of plain sockets on each host of a shard."""
    with contextlib.ExitStack() as ends:
        for host in range(first_host, first_host + count):
            address = TcpAddress(hosts.address(host), PEER_PORT)
            command = [sys.executable, "-m", "psstore.cli.main", "bench", "--serve", str(address)]
            ends.enter_context(_running(hosts.on(host, command)))
        yield


@contextlib.contextmanager
def _running(command: Sequence[str]) -> Iterator[None]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait()
