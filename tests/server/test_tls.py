"""TLS at `pss://`: every connection of a store goes by it, and what does not fit is an error that says so at once."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from cryptography.x509.oid import ExtendedKeyUsageOID
from typer.testing import CliRunner

import psstore
from psstore import _core, errors
from psstore.cli.main import app
from psstore.client.store_status import look_at as look_at_store
from psstore.config import Credentials
from psstore.net.address import TcpAddress, parse_address
from psstore.net.user_token import find
from psstore.server.other_member import look_at
from tests.launch.test_metrics import get
from tests.server.test_apart_standbys import TOKEN
from tests.server.test_standbys import ELEMS, await_standbys, create, expected, leader, train
from tests.support.certificates import TestCA
from tests.support.cluster import PATIENCE_S
from tests.support.free_ports import free_ports
from tests.support.server_process import StoreProcess, eventually, failed_start

pytestmark = [pytest.mark.sockets, pytest.mark.one_loop]

LOCAL = ("127.0.0.1", "localhost")
AT_ONCE_S = 5.0
"""An error that is known at the first handshake does not wait for any patience."""


@pytest.fixture
def ca(tmp_path: Path) -> TestCA:
    return TestCA(tmp_path)


@contextlib.contextmanager
def refused(why: str) -> Iterator[None]:
    began = time.monotonic()
    with pytest.raises(errors.TlsFailed, match=why):
        yield
    assert time.monotonic() - began < AT_ONCE_S


def test_training_goes_by_tls_and_ends_as_without(ca: TestCA) -> None:
    with (
        StoreProcess("--shards", "2", *ca.issue(*LOCAL).flags()) as server,
        psstore.connect(server.url, tls_ca=ca.pem, transport="tcp", wait_s=PATIENCE_S) as store,
    ):
        assert server.url.startswith("pss://")
        values = np.arange(3_000_000, dtype=np.float32)
        store.create("w", np.zeros_like(values), rule="sgd")
        for step in range(1, 4):
            store.push("w", values)
            store.commit({"lr": 1.0})
            np.testing.assert_array_equal(store.pull("w"), -step * values)


def test_bytes_on_the_wire_are_tls(ca: TestCA) -> None:
    """A plain OpenSSL client of Python's agrees on TLS 1.3 with it."""
    with StoreProcess("--shards", "1", *ca.issue(*LOCAL).flags()) as server:
        address = parse_address(server.url)
        assert isinstance(address, TcpAddress)
        context = ssl.create_default_context(cafile=str(ca.pem))
        plain = socket.create_connection((address.host, address.port), 10.0)
        with context.wrap_socket(plain, server_hostname=address.host) as wrapped:
            assert wrapped.version() == "TLSv1.3"


def test_ca_of_somebody_else_is_refused(ca: TestCA, tmp_path: Path) -> None:
    other = TestCA(tmp_path, "other")
    with StoreProcess("--shards", "1", *ca.issue(*LOCAL).flags()) as server:
        with pytest.raises(errors.TlsFailed, match=r"of no CA that is trusted here .* tls_ca= or PSSTORE_TLS_CA"):
            psstore.connect(server.url, tls_ca=other.pem)
        with pytest.raises(errors.TlsFailed, match="of no CA that is trusted here"):
            psstore.connect(server.url)


def test_certificate_of_another_host_is_refused_and_another_name_can_be_asked_for(ca: TestCA) -> None:
    with StoreProcess("--shards", "1", *ca.issue("store.example").flags()) as server:
        port = server.url.rpartition(":")[2]
        url = f"pss://127.0.0.1:{port}"
        with refused(r"of another name .*subjectAltName has 127.0.0.1"):
            psstore.connect(url, tls_ca=ca.pem, transport="tcp")
        credentials = Credentials(token=find(url), tls_ca=str(ca.pem))
        assert look_at(f"{url}?name=store.example", credentials).leads


def test_expired_certificate_is_refused(ca: TestCA) -> None:
    with (
        StoreProcess("--shards", "1", *ca.issue(*LOCAL, expired=True).flags()) as server,
        refused(r"not valid now .*expired"),
    ):
        psstore.connect(server.url, tls_ca=ca.pem)


def test_certificate_for_clients_alone_is_refused(ca: TestCA) -> None:
    with (
        StoreProcess("--shards", "1", *ca.issue(*LOCAL, use=ExtendedKeyUsageOID.CLIENT_AUTH).flags()) as server,
        refused(r"is not for servers .*extendedKeyUsage has serverAuth"),
    ):
        psstore.connect(server.url, tls_ca=ca.pem)


def test_plain_client_at_a_tls_port_is_told_so(ca: TestCA) -> None:
    with (
        StoreProcess("--shards", "1", *ca.issue(*LOCAL).flags()) as server,
        refused(r"speaks TLS 1.3 here, and what came is not: connect to pss://"),
    ):
        psstore.connect(server.url.replace("pss://", "ps://"))


def test_client_that_is_turned_away_before_it_is_heard_is_not_taken_for_a_plain_one(ca: TestCA) -> None:
    """A store that has no room for a connection says so at once: then the handshake is heard while that is sent."""
    shard, identity = _core.Shard(index=0), ca.issue(*LOCAL)
    data = shard.make_data_service(max_leased_bytes=0, describe_blocks=lambda blocks: b"")
    poller = _core.Poller(data, wakeup_fd=-1)
    near, far = socket.socketpair()
    tls = _core.TlsContext(server=True, cert=str(identity.cert), key=str(identity.key)).session()
    poller.add(1, socket=near.detach(), protocol=data.connect(1), tls=tls)
    poller.send(1, [b"there is no room"])
    poller.close(1)

    def visit() -> bytes:
        context = ssl.create_default_context(cafile=str(ca.pem))
        with context.wrap_socket(far, server_hostname="localhost") as wrapped:
            told = wrapped.recv(100)
            wrapped.sendall(b"it has come, and goes")
            return told + wrapped.recv(100)

    with ThreadPoolExecutor() as threads:
        visitor = threads.submit(visit)
        assert poller.turn(PATIENCE_S) == (1, None)
        assert visitor.result() == b"there is no room"


def test_tls_client_at_a_plain_port_is_told_so(ca: TestCA) -> None:
    with (
        StoreProcess("--shards", "1") as server,
        refused(r"does not speak TLS 1.3 .* ps:// in place of pss://"),
    ):
        psstore.connect(server.url.replace("ps://", "pss://"), tls_ca=ca.pem)


def test_with_a_ca_clients_need_a_certificate_of_it(ca: TestCA, tmp_path: Path) -> None:
    other = TestCA(tmp_path, "other").issue("worker.example", file="stranger")
    worker = ca.issue("worker.example", file="worker")
    with StoreProcess("--shards", "1", *ca.issue(*LOCAL).flags(ca=ca.pem)) as server:
        with refused(r"only clients with a certificate of its CA"):
            psstore.connect(server.url, tls_ca=ca.pem)
        with refused(r"does not accept this client's certificate"):
            psstore.connect(server.url, tls_ca=ca.pem, tls_cert=other.cert, tls_key=other.key)
        with psstore.connect(server.url, tls_ca=ca.pem, tls_cert=worker.cert, tls_key=worker.key) as store:
            assert store.num_workers == 1
        assert "a client without a certificate" in server.log()


def test_new_connections_take_a_new_certificate(ca: TestCA, tmp_path: Path) -> None:
    """A half that does not fit yet leaves the former in use, and who is connected stays so."""
    first = ca.issue(*LOCAL)
    with contextlib.ExitStack() as ends:
        server = ends.enter_context(StoreProcess("--shards", "1", *first.flags()))
        with psstore.connect(server.url, tls_ca=ca.pem, transport="tcp") as store:
            store.create("w", np.ones(10, np.float32), rule="assign")
            other = TestCA(tmp_path, "other")
            new = other.issue(*LOCAL, file="new")
            first.cert.write_bytes(new.cert.read_bytes())
            with psstore.connect(server.url, role="client", tls_ca=ca.pem, transport="tcp") as again:
                np.testing.assert_array_equal(again.pull("w"), np.ones(10, np.float32))
            first.key.write_bytes(new.key.read_bytes())
            with psstore.connect(server.url, role="client", tls_ca=other.pem, transport="tcp") as again:
                np.testing.assert_array_equal(again.pull("w"), store.pull("w"))
            with pytest.raises(errors.TlsFailed, match="of no CA that is trusted here"):
                psstore.connect(server.url, role="client", tls_ca=ca.pem, transport="tcp")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--tls-key", "{key}"), "--tls-key and --tls-ca go with a certificate of this host"),
        (("--tls-cert", "{key}", "--tls-key", "{key}"), "certificate {key}: no start line"),
        (("--tls-cert", "{cert}", "--tls-key", "{other}"), "private key {other}: key values mismatch"),
        (("--tls-cert", "/nowhere/cert.pem"), "certificate /nowhere/cert.pem: "),
    ],
)
def test_certificate_that_can_not_be_used_is_an_error_at_the_start(
    ca: TestCA, flags: tuple[str, ...], said: str
) -> None:
    host, other = ca.issue(*LOCAL), ca.issue("other", file="other")
    named = {"key": host.key, "cert": host.cert, "other": other.key}
    status, log = failed_start(*(flag.format(**named) for flag in flags))
    assert status == 3
    assert said.format(**named) in log


def test_worker_that_only_beats_is_alive(ca: TestCA) -> None:
    flags = ("--heartbeat-s", "0.2", "--silence-s", "1", "--rejoin-s", "0")
    with (
        StoreProcess("--shards", "1", *flags, *ca.issue(*LOCAL).flags()) as server,
        psstore.connect(server.url, tls_ca=ca.pem, transport="tcp"),
        psstore.connect(server.url, tls_ca=ca.pem, transport="tcp", role="client") as reader,
    ):
        silent = eventually(lambda: look_at_store(reader).lost == (0,), timeout_s=4.0)
        assert not silent
        assert look_at_store(reader).live == (0,)


# ---- everything else that connects to a store ----


def test_standbys_checkpoints_metrics_and_commands_go_by_it(
    ca: TestCA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = ca.issue(*LOCAL)
    monkeypatch.setenv("PSSTORE_TLS_CA", str(ca.pem))
    monkeypatch.setenv("PSSTORE_TLS_CERT", str(host.cert))
    monkeypatch.setenv("PSSTORE_TLS_KEY", str(host.key))
    flags = ("--shards", "2", "--standbys", "1", "--metrics", "0", "--checkpoint", str(tmp_path / "run"))
    with StoreProcess(*flags, "--checkpoint-every", "2") as server:
        assert server.url.startswith("pss://")
        with psstore.connect(server.url, transport="tcp", wait_s=PATIENCE_S) as store:
            create(store)
            await_standbys(store)
            train(store, 2)
            assert eventually(lambda: any(int(one["checkpoint"]) >= 2 for one in store.stats()[:1]))
            assert eventually(lambda: get(f"{server.ready['metrics']}/readyz")[0] == 200)
            commands = CliRunner()
            for command in (["status", server.url], ["doctor", server.url], ["checkpoint", "save", server.url]):
                answer = commands.invoke(app, command)
                assert answer.exit_code == 0, (command, answer.output)
            os.kill(leader(store, 1), signal.SIGKILL)
            train(store, 1)
            np.testing.assert_array_equal(store.pull("w"), np.full(ELEMS, expected(3), np.float32))


def test_with_a_ca_a_certificate_for_servers_alone_is_enough_for_all_that_a_store_does(
    ca: TestCA, tmp_path: Path
) -> None:
    """Its own processes connect to it with that."""
    host = ca.issue(*LOCAL, use=ExtendedKeyUsageOID.SERVER_AUTH)
    worker = ca.issue("worker.example", file="worker")
    flags = ("--standbys", "1", "--metrics", "0", "--checkpoint", str(tmp_path / "run"), "--checkpoint-every", "2")
    with (
        StoreProcess("--shards", "2", *flags, *host.flags(ca=ca.pem)) as server,
        psstore.connect(server.url, tls_ca=ca.pem, tls_cert=worker.cert, tls_key=worker.key, transport="tcp") as store,
    ):
        create(store)
        await_standbys(store)
        train(store, 2)
        assert eventually(lambda: int(store.stats()[0]["checkpoint"]) >= 2)
        assert eventually(lambda: get(f"{server.ready['metrics']}/readyz")[0] == 200)


def test_shards_and_standbys_on_several_hosts_go_by_it(ca: TestCA, tmp_path: Path) -> None:
    host, token = ca.issue(*LOCAL), tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    places = [f"127.0.0.1:{port}" for port in free_ports(4)]
    where = ["--shards-at", ",".join(places[:2]), "--standbys-at", ",".join(places[2:]), "--token-file", str(token)]
    with contextlib.ExitStack() as ends:
        servers = [
            StoreProcess(*where, *host.flags(ca=ca.pem), "--shard-index", str(index), port=None) for index in range(4)
        ]
        for server in servers:
            ends.callback(server.end)
        for server in servers:
            assert server.wait_ready(), server.log()
        with psstore.connect(
            f"pss://{places[0]},{places[2]}",
            token=TOKEN,
            wait_s=PATIENCE_S,
            tls_ca=ca.pem,
            tls_cert=host.cert,
            tls_key=host.key,
        ) as store:
            create(store)
            await_standbys(store)
            train(store, 2)
            np.testing.assert_array_equal(store.pull("w"), np.full(ELEMS, expected(2), np.float32))
