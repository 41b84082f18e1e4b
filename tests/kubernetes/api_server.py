"""The one thing of an API server that a pod here asks for: the scale of a StatefulSet, by who may change it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import secrets
import ssl
from collections.abc import AsyncIterator, Callable

import trustme

from tests.kubernetes.node import NODE

PORT = 6443

SCALE = re.compile(r"/apis/apps/v1/namespaces/default/statefulsets/([-a-z0-9]+)/scale")

TOLD = {"KUBERNETES_SERVICE_HOST": NODE, "KUBERNETES_SERVICE_PORT": str(PORT)}
"""What each pod's environment says of it."""

PatchScale = Callable[[str, str, int], int]
"""Service account, StatefulSet and replicas to HTTP's status."""


class ApiServer:
    """HTTPS, with a certificate of its own CA, which service accounts are given with their tokens."""

    def __init__(self, patch_scale: PatchScale) -> None:
        self._patch_scale = patch_scale
        self._ca = trustme.CA()
        self._tokens: dict[str, str] = {}
        """Service account by its token."""

    def account(self, name: str) -> dict[str, str]:
        """What a pod of that account has in its volume."""
        token = secrets.token_hex(16)
        self._tokens[token] = name
        return {"token": token, "ca.crt": self._ca.cert_pem.bytes().decode(), "namespace": "default"}

    @contextlib.asynccontextmanager
    async def serve(self, host: str, port: int = PORT) -> AsyncIterator[int]:
        """The port that it is at."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._ca.issue_cert(host).configure_cert(context)
        server = await asyncio.start_server(self._answer, host, port, ssl=context)
        async with server:
            yield server.sockets[0].getsockname()[1]

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            size = re.search(r"(?im)^content-length: (\d+)", head)
            body = await reader.readexactly(int(size[1]) if size else 0)
            status = self._status(head, body)
            writer.write(f"HTTP/1.1 {status} told\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{{}}".encode())
            await writer.drain()
        finally:
            writer.close()

    def _status(self, head: str, body: bytes) -> int:
        method, path, _ = head.splitlines()[0].split()
        bearer = re.search(r"(?im)^authorization: Bearer (\w+)", head)
        asked = SCALE.fullmatch(path)
        if bearer is None or bearer[1] not in self._tokens:
            return 401
        if asked is None or method != "PATCH" or "application/merge-patch+json" not in head:
            return 404
        return self._patch_scale(self._tokens[bearer[1]], asked[1], int(json.loads(body)["spec"]["replicas"]))
