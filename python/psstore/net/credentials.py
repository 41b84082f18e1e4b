"""Whose process is at the other end of a unix socket, by the kernel's word (unix(7), SO_PEERCRED)."""

from __future__ import annotations

import os
import socket
import struct

UCRED = struct.Struct("=iII")
"""Process, user and group when the peer connected; a user that has no number in our user namespace is 65534."""

ROOT = 0


def peer_user(sock: socket.socket) -> int:
    """The peer's effective user id; our own where the system does not tell."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return os.geteuid()
    _, user, _ = UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, option, UCRED.size))
    return int(user)


def is_trusted(user: int) -> bool:
    """This process's own user, and root, who can read its memory anyway."""
    return user in (os.geteuid(), ROOT)
