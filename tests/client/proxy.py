"""A TCP proxy that cuts connections, swallows or changes what they carry, after so many bytes or when told to, or is
slow. Its clients are to notice nothing."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator

READ_BYTES = 64 << 10

SLOW_BUFFER_BYTES = 128 << 10
"""What the system takes for a slow proxy: little, so that its clients see by that how it gets on."""


class Proxy:
    """Forwards every connection to `target`, until it has carried its allowance of bytes."""

    def __init__(self, target: tuple[str, int], allowances: Iterator[int], *, pause_s: float = 0.0) -> None:
        """`allowances`: bytes, in both directions together, that each connection may carry; then it is cut. When they
        run out, connections live on. `pause_s`: after every READ_BYTES."""
        self._target = target
        self._allowances = allowances
        self._pause_s = pause_s
        self._listener = self._listen(0)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self.num_accepted = 0
        self.num_cut = 0
        self.refusing = False
        """True: whoever connects is hung up on at once."""
        self.change: Callable[[bytes], bytes] = bytes
        """What becomes of the bytes of one read."""
        self._open: set[socket.socket] = set()
        self._mute: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._start_accepting()

    def cut(self) -> None:
        """Cuts every connection that is open now."""
        with self._lock:
            for sock in self._open:
                _shut(sock)

    def swallow(self) -> None:
        """Carries nothing more of what the connections that are open now say, and closes none of them."""
        with self._lock:
            self._mute |= self._open

    def end(self) -> None:
        """As if its process were gone: whoever connects is refused."""
        _shut(self._listener)
        self._listener.close()
        self.cut()

    def begin_again(self) -> None:
        """At the same address."""
        self._listener = self._listen(self.address[1])
        self._start_accepting()

    def close(self) -> None:
        self.end()
        for thread in self._threads:
            thread.join()

    def _listen(self, port: int) -> socket.socket:
        listener = socket.create_server(("127.0.0.1", port))
        if self._pause_s:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_BUFFER_BYTES)
        return listener

    def _start_accepting(self) -> None:
        thread = threading.Thread(target=self._accept, args=(self._listener,), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            self.num_accepted += 1
            if self.refusing:
                client.close()
                continue
            thread = threading.Thread(target=self._forward, args=(client, next(self._allowances, None)), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _forward(self, client: socket.socket, allowance: int | None) -> None:
        with client, socket.create_connection(self._target) as server:
            with self._lock:
                self._open |= {client, server}
            with contextlib.suppress(OSError):
                self._carry({client: server, server: client}, allowance)
            with self._lock:
                self._open -= {client, server}

    def _carry(self, other: dict[socket.socket, socket.socket], allowance: int | None) -> None:
        with selectors.DefaultSelector() as selector:
            for sock in other:
                selector.register(sock, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    assert isinstance(key.fileobj, socket.socket)
                    sender: socket.socket = key.fileobj
                    data = sender.recv(READ_BYTES if allowance is None else min(READ_BYTES, allowance))
                    if not data:
                        return
                    if sender in self._mute:
                        continue
                    other[sender].sendall(self.change(data))
                    time.sleep(self._pause_s)
                    if allowance is not None:
                        allowance -= len(data)
                        if allowance <= 0:
                            self.num_cut += 1
                            return


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
