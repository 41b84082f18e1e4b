"""A client's way to the memory that a shard shares: see lending.py for who says what."""

from __future__ import annotations

import contextlib
import logging
import os
import socket

from psstore import _core
from psstore.net.lending import MAPPED, SEALED
from psstore.wire.messages import Shared

BORROW_S = 2.0
"""How long the shard may take: it may be in the middle of a large update."""

_log = logging.getLogger("psstore.client")


def borrow(offer: Shared) -> _core.ClientMemory | None:
    """The memory that a shard offers; None if it is on another machine, or can't be mapped. Blocks for BORROW_S at
    most, usually for less than a millisecond."""
    if not offer.address:
        return None
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(BORROW_S)
            sock.connect(b"\0" + offer.address.encode())
            return _visit(sock, offer.ticket)
    except ConnectionRefusedError:
        return None  # nobody of that name here: the shard is elsewhere
    except (OSError, RuntimeError, ValueError) as error:
        _log.warning("no shared memory with the shard: %s; its socket is used instead", error)
        return None


def _visit(sock: socket.socket, ticket: bytes) -> _core.ClientMemory | None:
    sock.send(ticket)
    _, files, _, _ = socket.recv_fds(sock, 1, 3)
    try:
        if len(files) != 3:
            return None
        values, pushes, control = files
        memory = _core.ClientMemory(values=values, pushes=pushes, control=control)
    finally:
        for file in files:
            with contextlib.suppress(OSError):
                os.close(file)
    sock.send(MAPPED)
    return memory if sock.recv(1) == SEALED else None
