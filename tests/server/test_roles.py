"""Ten identities and nine operations: who may do what, asked of a store over its sockets, 90 of 90.

Beside the table of roles in python/psstore/protocol/roles.py, which this does not read: what is expected stands here.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psstore
from psstore import _core, errors
from psstore.client.store import Store
from psstore.net.address import TcpAddress, parse_address
from psstore.protocol.auth import proof
from psstore.protocol.proof_limits import BURST, LOCK_S
from psstore.wire import messages as m
from tests.support.certificates import Identity, TestCA
from tests.support.cluster import PATIENCE_S
from tests.support.raw_client import TIMEOUT_S, RawClient, connect_socket
from tests.support.server_process import StoreProcess, eventually, failed_start

pytestmark = [pytest.mark.sockets, pytest.mark.one_loop]

OLD, NEW = b"an admin's token, the old one", b"an admin's token, the new one"
WORKER, READ = b"a worker's token, 16 bytes", b"a reader's token, 16 bytes"
OLD_WORKER, NEW_WORKER = b"a worker's token until then", b"a worker's token from then on"
REMOVED = b"a token that was removed since"

SOURCES = itertools.count(1)

NO, READS, TRAINS, ALL = 0, 1, 2, 3
"""What is expected of an identity."""


@dataclass
class Trusted:
    """A store with TLS, a CA of clients, and tokens of all roles."""

    server: StoreProcess
    ca: TestCA
    client: Identity
    tokens: Path

    def dial(self, *, certificate: bool = True) -> RawClient:
        """Each time from another address, so that those who guess keep nobody else out."""
        address = parse_address(self.server.url)
        assert isinstance(address, TcpAddress)
        context = ssl.create_default_context(cafile=str(self.ca.pem))
        if certificate:
            context.load_cert_chain(self.client.cert, self.client.key)
        source = f"127.0.1.{next(SOURCES)}"
        plain = socket.create_connection((address.host, address.port), TIMEOUT_S, source_address=(source, 0))
        return RawClient(self.server.url, sock=context.wrap_socket(plain, server_hostname=address.host))

    def write(self, name: str, *tokens: bytes) -> Path:
        path = self.tokens / name
        new = self.tokens / f".{name}"
        new.write_bytes(b"\n".join(tokens))
        new.chmod(0o600)
        new.replace(path)
        return path


@pytest.fixture(scope="module")
def store(loop_name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trusted]:
    folder = tmp_path_factory.mktemp("trust")
    ca = TestCA(folder)
    host, client = ca.issue("127.0.0.1", "localhost"), ca.issue("client.example", file="client")
    trusted = Trusted(None, ca, client, folder)  # type: ignore[arg-type]
    flags = ["--token-file", trusted.write("admin", NEW, OLD), "--read-token-file", trusted.write("read", READ)]
    flags += ["--worker-token-file", trusted.write("worker", WORKER, REMOVED), "--checkpoint", folder / "run"]
    with StoreProcess("--workers", "4", *map(str, flags), *host.flags(ca=ca.pem)) as trusted.server:
        yield trusted


# ---- ten identities: how each comes, and what it may do ----


def proves(token: bytes | None) -> Callable[[Trusted, m.Role], RawClient]:
    def come(store: Trusted, role: m.Role) -> RawClient:
        raw = store.dial()
        raw.hello(token, role=role)
        return raw

    return come


def comes_without_a_certificate(store: Trusted, role: m.Role) -> RawClient:
    raw = store.dial(certificate=False)
    raw.hello(NEW, role=role)
    return raw


def replays(store: Trusted, role: m.Role) -> RawClient:
    """What it has heard of a handshake of the admin's is all that it knows."""
    with store.dial() as honest:
        hello = m.Hello(client=honest.client, role=role, nonce=os.urandom(32))
        honest.send("HELLO", body=hello)
        challenge = m.decode_body(m.Challenge, honest.reply("CHALLENGE").body)
        heard = proof(NEW, "client", client=hello.client, client_nonce=hello.nonce, shard_nonce=challenge.nonce)
        honest.send("AUTH", body=m.Auth(proof=heard))
        honest.reply("WELCOME")
    raw = store.dial()
    raw.send("HELLO", body=hello)
    raw.reply("CHALLENGE")
    raw.send("AUTH", body=m.Auth(proof=heard))
    raw.reply("WELCOME")
    return raw


IDENTITIES: dict[str, tuple[Callable[[Trusted, m.Role], RawClient], int]] = {
    "no token": (proves(None), NO),
    "a wrong token": (proves(b"some other store's token"), NO),
    "no certificate, the admin's token": (comes_without_a_certificate, NO),
    "a proof that was heard before": (replays, NO),
    "a token that was removed": (proves(REMOVED), NO),
    "the reader's token": (proves(READ), READS),
    "the worker's token": (proves(WORKER), TRAINS),
    "the admin's old token": (proves(OLD), ALL),
    "the admin's new token": (proves(NEW), ALL),
    "the worker's new token, beside the old one": (proves(NEW_WORKER), TRAINS),
}

# ---- nine operations: what each asks, and who may. An answer of another error means that it was allowed to ask. ----


def subscribe(raw: RawClient) -> None:
    raw.ask("HOLD", "HELD", sequence=1)


def assign(raw: RawClient) -> None:
    ask_of_data(raw, "ASSIGN", sequence=1)


def push(raw: RawClient) -> None:
    ask_of_data(raw, "PUSH", round=1)


def pull(raw: RawClient) -> None:
    ask_of_data(raw, "PULL", payload=False)


def ask_of_data(raw: RawClient, op: str, *, payload: bool = True, **fields: Any) -> None:
    table = _core.SliceTable([(1 << 40, 16 if payload else 0, _core.DTYPES["float32"])])
    raw.send(op, table=table, payload=[np.zeros(4, np.float32)] if payload else (), **fields)
    raw.reply({"PULL": "PULLED", "PUSH": "PUSHED", "ASSIGN": "ASSIGNED"}[op])


def define(raw: RawClient) -> None:
    raw.create(name=f"a tensor of {raw.client}", shape=(4,), dtype="float32", rule="assign")


OPERATIONS: dict[str, tuple[m.Role, Callable[[RawClient], object], int]] = {
    "pull": ("client", pull, READS),
    "snapshot": ("client", subscribe, READS),
    "status": ("operator", lambda raw: raw.ask("STATS", "STATISTICS"), READS),
    "push": ("client", push, TRAINS),
    "assign": ("client", assign, TRAINS),
    "define a tensor": ("client", define, TRAINS),
    "stop": ("client", lambda raw: raw.ask("STOP", "STOPPED", body=m.Stop()), TRAINS),
    "checkpoint": ("client", lambda raw: raw.ask("BEGIN", "BEGUN", body=m.Begin(url=None)), ALL),
    "promote": ("operator", lambda raw: raw.ask("PROMOTE", "PROMOTED", body=m.Promote(force=False)), ALL),
}

TURNED_AWAY = (errors.AuthFailed, ssl.SSLError, ConnectionError)


@pytest.fixture(scope="module")
def replaced(store: Trusted) -> Trusted:
    """The worker's token is being replaced, and one of them was removed."""
    store.write("worker", NEW_WORKER, WORKER)

    def counts() -> bool:
        with contextlib.suppress(errors.AuthFailed), store.dial() as raw:
            raw.hello(NEW_WORKER)
            return True
        return False

    assert eventually(counts)
    return store


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("identity", IDENTITIES)
def test_who_may_do_what(replaced: Trusted, identity: str, operation: str) -> None:
    come, access = IDENTITIES[identity]
    role, ask, least = OPERATIONS[operation]
    try:
        raw = come(replaced, role)
    except TURNED_AWAY:
        assert access == NO, f"{identity} was turned away"
        return
    with raw:
        assert access != NO, f"{identity} was let in"
        try:
            ask(raw)
        except errors.NotAllowed:
            assert access < least, f"{identity} may {operation}"
        except (errors.NotAWorker, errors.StaleIncarnation):  # whether it has joined is asked after that
            assert operation in ("push", "stop")
            assert access >= least, f"{identity} may not {operation}"
        else:
            assert access >= least, f"{identity} may not {operation}"


def test_ten_identities_and_nine_operations() -> None:
    assert len(IDENTITIES) * len(OPERATIONS) == 90


# ---- one store, another test each ----


@pytest.fixture
def tokens(tmp_path: Path) -> Trusted:
    """Without TLS, whose files a test may change."""
    return Trusted(None, None, None, tmp_path)  # type: ignore[arg-type]


def test_removed_token_ends_the_connections_that_proved_it(tokens: Trusted) -> None:
    flags = ("--token-file", str(tokens.write("admin", OLD)))
    with StoreProcess(*flags) as server, psstore.connect(server.url, role="client", token=OLD, timeout_s=5.0) as store:
        store.stats()
        tokens.write("admin", NEW)
        with psstore.connect(server.url, role="client", token=NEW) as other:
            other.stats()
        with pytest.raises(errors.AuthFailed):
            [store.stats() for _ in itertools.count()]


def test_token_file_that_does_not_fit_leaves_the_former_valid(tokens: Trusted) -> None:
    path = tokens.write("admin", OLD)
    with StoreProcess("--token-file", str(path)) as server:
        path.write_bytes(b"short")
        with psstore.connect(server.url, role="client", token=OLD) as store:
            store.stats()
        assert "the former tokens stay valid" in server.log()


@pytest.fixture
def known_by_file(tokens: Trusted, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[StoreProcess, Store]]:
    """A store, and a client of it whose token is in a file of its own, 'own'."""
    server_file, own_file = tokens.write("admin", OLD), tokens.write("own", OLD)
    monkeypatch.setenv("PSSTORE_TOKEN_FILE", str(own_file))
    with StoreProcess("--token-file", str(server_file)) as server, psstore.connect(server.url, role="client") as store:
        store.stats()
        yield server, store


def test_client_with_a_token_file_takes_the_new_token_when_it_comes_back(
    tokens: Trusted, known_by_file: tuple[StoreProcess, Store]
) -> None:
    server, store = known_by_file
    tokens.write("admin", NEW, OLD)
    tokens.write("own", NEW)
    tokens.write("admin", NEW)
    with psstore.connect(server.url, role="client") as other:
        other.stats()
    store.stats()


def test_client_whose_token_file_is_gone_for_a_moment_comes_back(
    tokens: Trusted, known_by_file: tuple[StoreProcess, Store]
) -> None:
    server, store = known_by_file
    Path(os.environ["PSSTORE_TOKEN_FILE"]).unlink()
    tokens.write("admin", NEW)  # whoever has proved the old one has to come again
    with RawClient(server.url) as raw:
        raw.hello(NEW)
    calling = threading.Thread(target=store.stats)
    calling.start()
    time.sleep(1.0)  # two attempts at least
    tokens.write("own", NEW)
    calling.join(PATIENCE_S)
    assert not calling.is_alive()
    store.stats()


def test_who_is_refused_and_does_not_go_keeps_nobody_out(tokens: Trusted) -> None:
    with StoreProcess("--token-file", str(tokens.write("admin", NEW)), "--max-connections", "20") as server:
        refused = []
        for _ in range(40):
            refused.append(connect_socket(server.url))
            refused[-1].sendall(b"no frame begins like this, and it is longer than a header is" * 2)
        assert eventually(lambda: bool(select.select(refused[:1], [], [], 0)[0]))
        with psstore.connect(server.url, role="client", token=NEW, connect_timeout_s=4) as store:
            store.stats()
        for sock in refused:
            sock.close()


def test_address_of_wrong_proofs_is_told_for_how_long_and_who_is_known_comes_back(tokens: Trusted) -> None:
    with StoreProcess("--token-file", str(tokens.write("admin", NEW))) as server:
        with RawClient(server.url) as known:
            known.hello(NEW)
        for _ in range(BURST):
            with RawClient(server.url) as raw, pytest.raises(errors.AuthFailed):
                raw.hello(OLD)
        with RawClient(server.url) as raw, pytest.raises(errors.TooManyProofs) as refused:
            raw.hello(NEW)
        assert 0.0 < float(str(refused.value.details["wait_s"])) <= LOCK_S
        with RawClient(server.url, client=known.client) as again:
            again.hello(NEW)
        began = time.monotonic()
        with psstore.connect(server.url, role="client", token=NEW) as store:
            store.stats()
        assert time.monotonic() - began < 4 * LOCK_S


def test_roles_need_an_owner() -> None:
    status, said = failed_start("--read-token-file", "/nowhere")
    assert status == 3
    assert "whose token --token-file names; give that, too" in said
