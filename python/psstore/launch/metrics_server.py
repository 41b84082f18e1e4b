"""Answers /metrics, /livez, /readyz, and / (a board) with its /workers: `python -m psstore.launch.metrics_server`.

A process of its own, which answers whatever the shards do: it asks each shard of its host every two seconds, and tells
what that one said last. stdin brings what to do as one line of JSON and then stays open: its end is the supervisor's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from psstore.client.arguments import Options
from psstore.client.connect import open_store
from psstore.client.store import Store
from psstore.config import Credentials
from psstore.errors import DeadlineExceeded, NotInitialised, PsstoreError, UnknownKey, UnknownTensor
from psstore.launch import board
from psstore.launch.metric_names import METRICS, answer_of
from psstore.launch.shard_probe import ShardProbe
from psstore.launch.workers_page import WorkersPage
from psstore.net import loops
from psstore.server import logs
from psstore.server.processes import MetricsDuty

FRESH_S = 5.0
"""A shard is up if it has answered so recently: it is asked every two seconds."""

CONNECT_S = 2.0
"""How long a probe of /readyz may take to connect, to read and to write: less than its client waits."""

SMALLEST_OF = 16
"""How many tensors the one that /readyz reads and writes is chosen from."""

REQUEST_S = 10.0
"""How long a client of ours may say nothing before it has said what it wants."""

MAX_CLIENTS = 128
"""Served at once; beyond, the one that came first is cut off. Who keeps connections would keep others from /livez."""

_log = logging.getLogger("psstore.metrics")


class Health(NamedTuple):
    """An answer of /livez or /readyz."""

    is_well: bool
    text: str
    """A line that says why not, or that all is well."""


class LivePage:
    """/livez: false if a shard of this host hangs, so that starting all anew would help. One that has not begun to
    serve, or has ended, is the supervisor's business, which starts it again or ends."""

    def __init__(self, probes: Sequence[ShardProbe]) -> None:
        self._probes = probes

    def __call__(self) -> Health:
        hanging = [one for one in self._probes if one.hangs()]
        told = [f"shard {one.shard} runs and has answered nothing for {one.silent_s():.0f} s" for one in hanging]
        return Health(not told, "; ".join(told) or "ok")


class ReadyPage:
    """/readyz: true if each shard of this host has just answered, and a client can connect to the whole store, and read
    and write a value, if there is one. What is written is left out by the store: nothing changes."""

    def __init__(self, probes: Sequence[ShardProbe], *, credentials: Credentials) -> None:
        self._probes = probes
        self._credentials = credentials
        self._store: Store | None = None
        self._name: str | None = None
        """The tensor that is read and written."""
        self._one_at_a_time = threading.Lock()

    def __call__(self) -> Health:
        for one in self._probes:
            if one.counters is None or one.silent_s() > FRESH_S:
                why = f": {one.trouble}" if one.trouble else ""
                return Health(False, f"shard {one.shard} has not answered for {one.silent_s():.1f} s{why}")
            if "torn" in one.counters:
                return Health(False, f"there will be no other step: {one.counters['torn']}")
            if not one.counters["may_lead"]:
                return Health(False, f"the standby of shard {one.shard} has not all that its shard has")
        if not all(one.counters and one.counters["leads"] for one in self._probes):
            return Health(True, "ok: it stands by")
        with self._one_at_a_time:
            try:
                return Health(True, self._rehearse())
            except PsstoreError as error:
                self._disconnect()
                return Health(False, error.message)

    def _rehearse(self) -> str:
        """What came through. Raises PsstoreError."""
        if self._store is None:
            options = Options(
                role="client",
                credentials=self._credentials,
                timeout_s=CONNECT_S,
                wait_s=CONNECT_S,
                connect_timeout_s=CONNECT_S,
            )
            self._store = open_store(self._probes[0].address, options)
        store = self._store
        store.stats()  # of every shard, whoever's host it is on
        if self._name is None:
            tensors = [store.describe(name).spec for name in store.keys()[:SMALLEST_OF]]
            values = [spec for spec in tensors if spec.rows is None and spec.num_elems]
            self._name = min(values, key=lambda spec: spec.num_elems).name if values else None
        if self._name is None:
            return "ok: there are no tensors yet"
        try:
            store.rehearse(self._name)
        except (UnknownTensor, UnknownKey, NotInitialised, DeadlineExceeded) as error:
            self._name = None
            if isinstance(error, DeadlineExceeded):
                raise
            return "ok: the tensor to read and write is no more, or has no value yet"
        return f"ok: {self._name!r} was read and written"

    def _disconnect(self) -> None:
        if self._store is not None:
            self._store.close()
        self._store = self._name = None


class StoreCollector(Collector):
    """The metrics, as prometheus_client collects them."""

    def __init__(self, probes: Sequence[ShardProbe]) -> None:
        self._probes = probes

    def collect(self) -> Iterator[Metric]:
        answers = [answer_of(one.shard, one.answers, is_up=one.silent_s() <= FRESH_S) for one in self._probes]
        for metric in METRICS:
            kind = CounterMetricFamily if metric.is_counter else GaugeMetricFamily
            family = kind(metric.name, metric.about, labels=metric.labels)
            for labels, value in metric.samples(answers):
                family.add_metric(labels, value)
            yield family


class Pages:
    """What is answered to which path."""

    def __init__(self, probes: Sequence[ShardProbe], *, credentials: Credentials) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(StoreCollector(probes))
        self._health: dict[str, Callable[[], Health]] = {
            "/livez": LivePage(probes),
            "/readyz": ReadyPage(probes, credentials=credentials),
        }
        self._workers = WorkersPage(probes)
        self._was_well = dict.fromkeys(self._health, True)

    def page(self, path: str) -> tuple[int, str, bytes]:
        """(status, content type, body)."""
        if path == "/":
            return 200, "text/html; charset=utf-8", board.PAGE
        if path == "/metrics":
            return 200, CONTENT_TYPE_LATEST, generate_latest(self._registry)
        if path == "/workers":
            return 200, "application/json", self._workers()
        if path in self._health:
            health = self._health[path]()
            if health.is_well != self._was_well[path]:
                _log.warning("%s: %s", path, health.text)
            self._was_well[path] = health.is_well
            return 200 if health.is_well else 503, "text/plain; charset=utf-8", f"{health.text}\n".encode()
        return 404, "text/plain; charset=utf-8", b"there are /, /metrics, /workers, /livez and /readyz\n"


class PageServer(ThreadingHTTPServer):
    """A thread for each request, and a bound on both."""

    request_queue_size = MAX_CLIENTS

    def __init__(self, sock: socket.socket, handler: type[BaseHTTPRequestHandler]) -> None:
        """`sock`: bound, and listened at from now on."""
        super().__init__(sock.getsockname()[:2], handler, bind_and_activate=False)
        self._clients: dict[Any, None] = {}
        """Connections, in the order in which they came."""
        self.socket.close()
        self.socket = sock
        self.server_activate()

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self._clients) >= MAX_CLIENTS:
            oldest = next(iter(self._clients))
            self._clients.pop(oldest, None)
            with contextlib.suppress(OSError):  # its thread has closed it
                oldest.shutdown(socket.SHUT_RDWR)
        self._clients[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._clients.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # whoever asked has gone
            _log.exception("a bug in psstore")


def http_server(sock: socket.socket, pages: Pages) -> PageServer:
    """Answers on a bound socket, once `serve_forever` is called."""

    policy = board.policy()

    class Handler(BaseHTTPRequestHandler):
        timeout = REQUEST_S

        def do_GET(self) -> None:
            self.wfile.write(self._begin())

        def do_HEAD(self) -> None:
            self._begin()

        def _begin(self) -> bytes:
            """Answers but for the body, which it returns."""
            status, kind, body = pages.page(self.path.partition("?")[0])
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Content-Security-Policy", policy)
            self.end_headers()
            return body

        def log_message(self, *_: object) -> None:
            """Leaves what is asked every second out of the log."""

    return PageServer(sock, Handler)


async def serve(duty: MetricsDuty) -> None:
    """Until the supervisor is gone."""
    probes = [
        ShardProbe(duty.first + i, address, credentials=duty.credentials, clock=time.monotonic)
        for i, address in enumerate(duty.addresses)
    ]
    server = http_server(socket.socket(fileno=duty.socket), Pages(probes, credentials=duty.credentials))
    threading.Thread(target=server.serve_forever, name="psstore-http", daemon=True).start()
    tasks = [asyncio.ensure_future(one.run()) for one in probes]
    over = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), over.set)
    await over.wait()
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


def main() -> None:
    """Ends with the supervisor."""
    duty = msgspec.json.decode(sys.stdin.buffer.readline(), type=MetricsDuty)
    logs.configure(who="metrics", level=duty.log_level, form=duty.log_format)
    loops.run(serve(duty), "auto")


if __name__ == "__main__":
    main()
