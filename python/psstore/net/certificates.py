"""The certificates of one side of TLS: files that are looked at before each connection, and read when they change."""

from __future__ import annotations

import contextlib
import logging
import os

from psstore import _core
from psstore.config import Credentials
from psstore.errors import BadArgument, TlsFailed

_log = logging.getLogger("psstore.tls")


class Certificates:
    """Makes the TLS side of connections. A file that is being replaced and does not fit leaves the former in use."""

    def __init__(self, files: Credentials, *, server: bool) -> None:
        """`files`: of them the certificates. Raises TlsFailed that names the one that is unusable, BadArgument."""
        import ssl  # noqa: F401  # loads the interpreter's OpenSSL, which is then the core's, too, wherever it lies

        if (files.tls_cert is None) and (server or files.tls_key is not None):
            raise BadArgument(
                "a private key without its certificate: give --tls-cert (tls_cert=, PSSTORE_TLS_CERT), too"
            )
        cert = files.tls_cert or ""
        self._files = {"cert": cert, "key": files.tls_key or cert, "ca": files.tls_ca or ""}
        self._server = server
        self._stamp = self._look()
        self._context = self._read()

    def session(self, host: str = "") -> _core.TlsSession:
        """For one connection. `host`: of a client, the name or IP address that the peer's certificate has to have."""
        stamp = self._look()
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._context = self._read()
                _log.info("certificates have changed, and were read: %s", self._named())
            except TlsFailed as error:
                _log.warning("certificates have changed, and the former stay in use: %s", error.message)
        return self._context.session(host)

    def _read(self) -> _core.TlsContext:
        return _core.TlsContext(server=self._server, **self._files)

    def _look(self) -> list[tuple[int, int, int]]:
        """What is another one when a file is."""
        found = []
        for path in filter(None, self._files.values()):
            with contextlib.suppress(OSError):
                there = os.stat(path)
                found.append((there.st_mtime_ns, there.st_ino, there.st_size))
        return found

    def _named(self) -> str:
        return ", ".join(dict.fromkeys(filter(None, self._files.values())))
