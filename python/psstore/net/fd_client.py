"""A client's way to the memory that a shard shares: see fd_server.py for who says what."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from psstore import _core
from psstore.errors import PsstoreError
from psstore.net.fd_server import MAPPED, SEALED
from psstore.wire.messages import Parcel, Shared, decode_body

BORROW_S = 2.0
"""How long the shard may take: it may be in the middle of a large update."""

GREETING_BYTES = 4096
"""Size of the buffer for a visit's first packet: more than a `Parcel` has."""

T = TypeVar("T")

_log = logging.getLogger("psstore.client")


def borrow(offer: Shared) -> _core.ClientMemory | None:
    """The memory that a shard offers; None if it is on another machine, or can't be mapped. Blocks for BORROW_S at
    most, usually for less than a millisecond."""
    return _visited(offer, _map_files)


def borrow_pushes(offer: Shared, blocks: _core.BorrowedDevice) -> _core.DevicePushes | None:
    """Maps an arena of a device to push through; its block becomes one of `blocks`."""

    def unpack(greeting: bytes, files: Sequence[int]) -> _core.DevicePushes | None:
        if len(files) != 1:
            return None
        parcel = decode_body(Parcel, greeting)
        blocks.add_block(parcel.block.address, parcel.block.num_bytes, parcel.block.handle)
        return _core.DevicePushes(blocks, control=files[0], address=parcel.address, num_bytes=parcel.num_bytes)

    return _visited(offer, unpack)


def see(offer: Shared, address: int) -> _core.SeenMemory | None:
    """The memory that a standby's shard offers, from `address` on; None if it is out of reach, or can't be mapped.
    Blocks as `borrow` does."""
    seen: list[_core.SeenMemory] = []

    def unpack(_: bytes, files: Sequence[int]) -> _core.SeenMemory | None:
        seen.extend(_core.SeenMemory(file, address=address) for file in files[:1])
        return seen[0] if seen else None

    _visited(offer, unpack)
    return seen[0] if seen else None  # also if no more was heard: what was said may have been, and counts


def _map_files(_: bytes, files: Sequence[int]) -> _core.ClientMemory | None:
    if len(files) != 3:
        return None
    values, pushes, control = files
    return _core.ClientMemory(values=values, pushes=pushes, control=control)


def _visited(offer: Shared, unpack: Callable[[bytes, Sequence[int]], T | None]) -> T | None:
    """What `unpack` makes of what the shard hands over."""
    if not offer.address:
        return None
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            until = time.monotonic() + BORROW_S
            sock.settimeout(BORROW_S)
            sock.connect(b"\0" + offer.address.encode())
            return _visit(sock, offer.ticket, unpack, until)
    except ConnectionRefusedError:
        return None  # nobody of that name here: the shard is elsewhere
    except (OSError, RuntimeError, ValueError, PsstoreError) as error:
        _log.warning("no shared memory with the shard: %s; its socket is used instead", error)
        return None


def _visit(
    sock: socket.socket, ticket: bytes, unpack: Callable[[bytes, Sequence[int]], T | None], until: float
) -> T | None:
    def wait() -> None:
        """For what comes next, no longer than until then."""
        sock.settimeout(max(1e-3, until - time.monotonic()))

    sock.send(ticket)
    wait()
    greeting, files, _, _ = socket.recv_fds(sock, GREETING_BYTES, 3)
    try:
        memory = unpack(greeting, files)
    finally:
        for file in files:
            with contextlib.suppress(OSError):
                os.close(file)
    if memory is None:
        return None
    sock.send(MAPPED)
    wait()
    return memory if sock.recv(1) == SEALED else None
