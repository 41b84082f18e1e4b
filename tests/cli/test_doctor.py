"""`psstore doctor`: each fault that it claims to find is made here, and found, with the line that mends it. Faults of
hosts, which a test can't bring about on one machine, are made in the answers of a store that is well."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from bench.virtual_hosts import VirtualHosts, why_not
from typer.testing import CliRunner

import psstore
from psstore.cli.main import app
from psstore.config import Credentials
from psstore.launch import diagnosis, examining, packet_sizes
from psstore.launch.diagnosis import Finding, Here, ShardAnswers, diagnose
from psstore.launch.examining import examine
from psstore.net import client
from tests.support.certificates import TestCA
from tests.support.free_ports import free_ports
from tests.support.server_process import StoreProcess, eventually

pytestmark = [pytest.mark.sockets, pytest.mark.one_loop]

F32 = np.float32
HERE = Here(psstore.__version__, 1024)


def doctor(url: str) -> tuple[int, str]:
    """(exit status, what it says)."""
    ran = CliRunner().invoke(app, ["doctor", url])
    return ran.exit_code, ran.output


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examining, "PATIENCE_S", 2.0)
    monkeypatch.setattr(client, "HANDSHAKE_S", 2.0)
    monkeypatch.setattr(diagnosis, "SLOW_S", diagnosis.LONE_SLOW_S)  # tests beside make one shard or the other slow
    monkeypatch.delenv("PSSTORE_TOKEN_FILE", raising=False)


def token_file(folder: Path, letter: str) -> Path:
    path = folder / f"token-{letter}"
    path.write_text(32 * letter)
    path.chmod(0o600)
    return path


# ---- stores, each with several faults ----


class Stores:
    """What faults are made in; each starts when it is first asked for, and lives as long as the module's tests."""

    def __init__(self, folder: Path, ends: contextlib.ExitStack) -> None:
        self.folder = folder
        self._ends = ends
        self._started: dict[str, Any] = {}

    def well(self) -> tuple[StoreProcess, list[ShardAnswers]]:
        """A store without a fault, and what its shards say."""
        return self._once("well", self._start_well)  # type: ignore[no-any-return]

    def guarded(self) -> str:
        """The address of one with a token, which tells clients that it is where nobody listens."""
        return self._once("guarded", self._start_guarded)  # type: ignore[no-any-return]

    def ill(self) -> StoreProcess:
        """One that has lost a worker, has little memory left, and a place for checkpoints that is a file."""
        return self._once("ill", self._start_ill)  # type: ignore[no-any-return]

    def _once(self, name: str, start: Callable[[], Any]) -> Any:
        if name not in self._started:
            self._started[name] = start()
        return self._started[name]

    def _start_well(self) -> tuple[StoreProcess, list[ShardAnswers]]:
        process = self._ends.enter_context(StoreProcess("--shards", "2", "--workers", "2", "--mode", "async"))
        stores = [self._ends.enter_context(psstore.connect(process.url, rank=rank)) for rank in range(2)]
        told = [ShardAnswers(i, process.addresses[i], one, 0.001, 0.0) for i, one in enumerate(stores[0].stats())]
        return process, told

    def _start_guarded(self) -> str:
        flags = ("--token-file", str(token_file(self.folder, "r")), "--advertise", f"127.0.0.1:{free_ports(1)[0]}")
        port = free_ports(1)[0]
        self._ends.enter_context(StoreProcess(*flags, port=port))
        return f"ps://127.0.0.1:{port}"

    def _start_ill(self) -> StoreProcess:
        place = self.folder / "run"
        flags = ("--workers", "2", "--max-memory", "8MiB", "--checkpoint", str(place))
        process = self._ends.enter_context(StoreProcess(*flags))
        store = self._ends.enter_context(psstore.connect(process.url, rank=0))
        psstore.connect(process.url, rank=1).end(leave=False)
        store.create("w", np.ones(1_950_000, F32))
        place.rename(self.folder / "elsewhere")
        place.write_text("no folder any more")
        with pytest.raises(psstore.errors.PsstoreError):
            store.checkpoint(wait_s=5.0)
        assert eventually(lambda: store.stats()[0]["ranks_lost"] == "1")
        return process


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stores]:
    with contextlib.ExitStack() as ends:
        yield Stores(tmp_path_factory.mktemp("stores"), ends)


# ---- how a fault is made: what is found then ----

Seed = Callable[[Stores], list[Finding]]


def found_at(url: str, **files: Path) -> list[Finding]:
    """`files`: of credentials."""
    credentials = Credentials(**{name: str(path) for name, path in files.items()})  # type: ignore[arg-type]
    return examine(url, credentials=credentials, version=psstore.__version__)


def nobody_there(_: Stores) -> list[Finding]:
    return found_at(f"ps://127.0.0.1:{free_ports(1)[0]}")


def somebody_else_there(answer: bytes | None) -> Seed:
    """A program that takes connections and says that; None: nothing."""

    def seed(_: Stores) -> list[Finding]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            taken = []

            def answer_all() -> None:
                with contextlib.suppress(OSError):
                    while True:
                        connection, _ = server.accept()
                        taken.append(connection)
                        if answer is not None:
                            connection.sendall(answer)

            thread = threading.Thread(target=answer_all)
            thread.start()
            try:
                return found_at(f"ps://127.0.0.1:{server.getsockname()[1]}")
            finally:
                server.shutdown(socket.SHUT_RDWR)
                thread.join()
                for connection in taken:
                    connection.close()

    return seed


def no_token(stores: Stores) -> list[Finding]:
    return found_at(stores.guarded())


def a_wrong_token(stores: Stores) -> list[Finding]:
    return found_at(stores.guarded(), token_file=token_file(stores.folder, "w"))


def an_advertised_address_that_leads_nowhere(stores: Stores) -> list[Finding]:
    return found_at(stores.guarded(), token_file=token_file(stores.folder, "r"))


def tls_with_a_certificate_of_somebody_else(stores: Stores) -> list[Finding]:
    theirs, ours = TestCA(stores.folder, "theirs"), TestCA(stores.folder, "ours")
    with StoreProcess(*theirs.issue("127.0.0.1", "localhost").flags()) as process:
        return found_at(process.url, tls_ca=ours.pem)


def tls_at_one_end_only(stores: Stores) -> list[Finding]:
    process, _ = stores.well()
    return found_at(process.url.replace("ps://", "pss://"), tls_ca=TestCA(stores.folder).pem)


def a_shard_that_stands_still(stores: Stores) -> list[Finding]:
    process, _ = stores.well()
    pid = process.shard_pids()[1]
    os.kill(pid, signal.SIGSTOP)
    try:
        return found_at(process.url)
    finally:
        os.kill(pid, signal.SIGCONT)


def an_ill_store(stores: Stores) -> list[Finding]:
    return found_at(stores.ill().url)


def said(shard: int, **counters: Any) -> Seed:
    """A shard's counters are these."""

    def seed(stores: Stores) -> list[Finding]:
        _, answers = stores.well()
        answers = list(answers)
        answers[shard] = answers[shard]._replace(counters={**answers[shard].counters, **counters})
        return diagnose(answers, HERE)

    return seed


def measured(shard: int, *, of: int = 2, **figures: Any) -> Seed:
    """What was measured of a shard is this. `of`: shards of the store."""

    def seed(stores: Stores) -> list[Finding]:
        _, answers = stores.well()
        answers = list(answers)[:of]
        answers[shard] = answers[shard]._replace(**figures)
        return diagnose(answers, HERE)

    return seed


def few_files_here(stores: Stores) -> list[Finding]:
    return diagnose(stores.well()[1], Here(psstore.__version__, 64))


class Fault(NamedTuple):
    kind: str
    seed: Seed
    said: str
    """Words of what is found,"""
    mend: str
    """and of what mends it."""


LATE = {"checkpoint_every_s": 60.0, "checkpoint_age_s": 200.0, "decisions": 7, "checkpoint": 3}

FAULTS = (
    Fault("unreachable", nobody_there, "nothing answers at ps://127.0.0.1:", "psstore-server --shards 1"),
    Fault("protocol", somebody_else_there(b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(64)), "no store of this version",
          "pip install the same psstore everywhere"),
    Fault("hangs", somebody_else_there(None), "takes connections and answers nothing", "kill -CONT"),
    Fault("token", no_token, "does not know the token here", "export PSSTORE_TOKEN_FILE="),
    Fault("token", a_wrong_token, "does not know the token here", "copy here the file that the store was started with"),
    Fault("advertised", an_advertised_address_that_leads_nowhere, "clients are told that shard 0 is at ps://127.0.0.1:",
          "psstore-server --advertise HOST"),
    Fault("tls", tls_with_a_certificate_of_somebody_else, "no TLS with the store at pss://", "openssl s_client"),
    Fault("tls", tls_at_one_end_only, "no TLS with the store at pss://", "PSSTORE_TLS_CA=FILE"),
    Fault("hangs", a_shard_that_stands_still, "shard 1 at ", "kill -CONT"),
    Fault("worker", an_ill_store, "lost: rank 1", "start it again with its rank: RANK=1 python train.py"),
    Fault("worker", said(0, ranks_lost="0,3"), "lost: ranks 0, 3", "start each again with its rank: RANK=0 python"),
    Fault("memory", an_ill_store, "of the 8 MiB that it may", "psstore-server --max-memory"),
    Fault("checkpoint", an_ill_store, "the last checkpoint came to nothing", "psstore checkpoint save"),
    Fault("versions", said(1, psstore="9.9.9"), f"shard 1 runs psstore 9.9.9, and here is {psstore.__version__}",
          "pip install psstore==9.9.9"),
    Fault("clock", measured(1, clock_ahead_s=30.0), "30.0 s ahead of", "set-ntp"),
    Fault("clock", measured(1, clock_ahead_s=-4.0), "4.0 s behind", "set-ntp"),
    Fault("files", said(0, max_connections=200), "takes 200 connections, and not 4096", "ulimit -n 5120"),
    Fault("files here", few_files_here, "may have 64 open files here", "ulimit -n 4096"),
    Fault("connections", said(0, connections=4000), "4000 of the 4096", "--max-connections 8192"),
    Fault("slow", measured(1, answer_s=0.3), "takes 300 ms for a plain answer, the others 1.0 ms", "ping it"),
    Fault("slow", measured(0, of=1, answer_s=0.3), "takes 300 ms for a plain answer", "ping it"),
    Fault("staleness", said(0, rank_clocks="0:500,1:30"), "rank 0 is 470 rounds ahead of rank 1", "--staleness 8"),
    Fault("standby", said(1, standbys_asked=1), "no standby of shard 1 may lead", "look for 'standby'"),
    Fault("torn", said(0, torn="round 3 is torn"), "round 3 is torn", "--restore URL"),
    Fault("old checkpoint", said(0, **LATE), "200 s old, and there is to be one every 60 s", "checkpoint save"),
)  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.kind}-{fault.said[:20].strip()}")
def test_a_fault_is_found_with_what_mends_it(fault: Fault, stores: Stores) -> None:
    found = fault.seed(stores)
    (one,) = (one for one in found if one.kind == fault.kind)
    assert fault.said in one.what
    assert fault.mend in one.mend
    if fault.seed is not an_ill_store:
        assert len(found) == 1, found


def test_each_fault_that_the_page_lists_is_among_them(repository: Path) -> None:
    page = (repository / "docs" / "monitoring.md").read_text().partition("## `psstore doctor`")[2]
    listed = {
        kind.strip("`")
        for row in page.splitlines()
        if row.startswith("| `")
        for kind in row.split("|")[1].strip().split(", ")
    }
    assert listed == {fault.kind for fault in FAULTS} | {"mtu"}


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_packets_that_are_lost_because_they_are_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small questions are answered, and what is larger than a packet is not: the store is in another network namespace,
    behind a port of a smaller MTU, which tells nobody."""
    monkeypatch.setattr(packet_sizes, "PATIENCE_S", 1.0)
    token = token_file(tmp_path, "r")

    def findings(hosts: VirtualHosts) -> list[list[Finding]]:
        hosts.move_to(0)
        where = ("--host", "0.0.0.0", "--advertise", hosts.address(0), "--token-file", str(token))
        with StoreProcess(*where) as process:
            hosts.move_to(1)
            before = found_at(process.url, token_file=token)
            hosts.swallow_large_packets(1, 1420)
            return [before, found_at(process.url, token_file=token)]

    with VirtualHosts(2) as hosts, ThreadPoolExecutor(1) as elsewhere:
        before, (one,) = elsewhere.submit(findings, hosts).result()
    assert before == []
    assert one.kind == "mtu"
    assert "packets of 1500 bytes" in one.what
    assert "those of 1420 arrive" in one.what
    assert one.mend.startswith("ip link set dev DEVICE mtu 1420")


# ---- the command ----


def test_a_store_that_is_well_is_said_to_be(stores: Stores) -> None:
    process, answers = stores.well()
    assert diagnose(answers, HERE) == []
    assert doctor(process.url) == (0, "nothing is wrong, as far as can be seen from here\n")


def test_a_fault_is_said_with_what_mends_it_below(stores: Stores) -> None:
    url = f"ps://127.0.0.1:{free_ports(1)[0]}"
    code, text = doctor(url)
    assert code == 1
    assert text.startswith(f"unreachable: nothing answers at {url} from here")
    assert text.splitlines()[1].startswith("    ")


def test_a_checkpoint_is_not_old_if_nothing_was_decided_since(stores: Stores) -> None:
    assert said(0, **{**LATE, "checkpoint": 7})(stores) == []


def test_without_an_address_it_asks_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PSSTORE_URL", raising=False)
    ran = CliRunner().invoke(app, ["doctor"])
    assert ran.exit_code == 2
    assert "give a URL" in ran.output
