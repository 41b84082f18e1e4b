"""psstore-server starts: what it says, where it listens, and which sentence helps when it can't."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from psstore.net.user_token import find
from tests.support.free_ports import consecutive_ports
from tests.support.raw_client import RawClient
from tests.support.server_process import StoreProcess, failed_start

NOT_STARTED = 3
pytestmark = pytest.mark.sockets


# ---- it starts --------------------------------------------------------------------------------------


def test_ready_line_names_every_shard_and_says_the_same_as_the_json() -> None:
    with StoreProcess("--shards", "3", "--workers", "2") as store:
        ports = [address.rpartition(":")[2] for address in store.addresses]
        assert store.ready["url"] == store.addresses[0]
        assert (store.ready["mode"], store.ready["workers"]) == ("sync", 2)
        assert store.ready["pid"] == store.process.pid
        assert store.stop() == 0
        line = f"psstore-server ready: {store.url} (3 shards: {' '.join(ports)}; sync, 2 workers)\n"
        assert store.output() == line
        assert store.log() == ""


def test_every_shard_answers_with_the_map_of_all() -> None:
    with StoreProcess("--shards", "3", "--workers", "4", "--staleness", "2") as store:
        for index, address in enumerate(store.addresses):
            with RawClient(address) as client:
                welcome = client.hello()
            assert (welcome.shard, welcome.store) == (index, store.ready["store"])
            assert [addresses[0] for addresses in welcome.addresses] == store.addresses
            assert (welcome.num_workers, welcome.quorum, welcome.staleness) == (4, 1, 2)


@pytest.mark.one_loop
def test_shard_i_listens_on_port_plus_i() -> None:
    port = consecutive_ports(3)
    with StoreProcess("--shards", "3", port=port) as store:
        assert store.addresses == [f"ps://127.0.0.1:{port + index}" for index in range(3)]


@pytest.mark.one_loop
def test_host_that_means_all_is_advertised_as_one_that_can_be_reached(tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("0123456789abcdef")
    token_file.chmod(0o600)
    flags = ("--host", "0.0.0.0", "--token-file", str(token_file))
    with StoreProcess(*flags, "--advertise", "127.0.0.1") as store, RawClient(store.url) as client:
        assert store.url.startswith("ps://127.0.0.1:")
        assert client.hello(b"0123456789abcdef").addresses == ((store.url,),)
    with StoreProcess(*flags) as store:
        assert not store.url.startswith("ps://0.0.0.0")


@pytest.mark.one_loop
@pytest.mark.parametrize("each", [False, True])
def test_clients_are_told_other_addresses_than_those_that_are_listened_at(each: bool) -> None:
    """As behind NAT, a proxy or a service of Kubernetes; who comes there on this machine finds the user's token."""
    outside = consecutive_ports(2)
    told = [f"ps://127.0.0.1:{outside + index}" for index in range(2)]
    advertise = ",".join(address.removeprefix("ps://") for address in (told if each else told[:1]))
    with StoreProcess("--shards", "2", "--advertise", advertise) as store:
        assert (store.url, store.addresses) == (told[0], told)
        ports = [one.laddr.port for shard in store.shards() for one in shard.net_connections("tcp")]
        assert len(ports) == 2
        assert not set(ports) & {outside, outside + 1}
        for port in ports:
            with RawClient(f"ps://127.0.0.1:{port}") as client:
                assert client.hello(find(told[1])).addresses == tuple((address,) for address in told)
    assert find(told[1]) is None


@pytest.mark.one_loop
def test_shards_load_neither_torch_nor_numpy() -> None:
    with StoreProcess("--shards", "2", environ={"PYTHONPROFILEIMPORTTIME": "1"}) as store:
        with RawClient(store.url) as client:
            client.hello()
            client.join()
            client.create(name="w", shape=(8,), rule="sgd")
        assert store.stop() == 0
        imported = set(re.findall(r"^import time:.*\|\s+(\S+)$", store.log(), re.MULTILINE))
    assert "psstore.protocol.service" in imported, "import times were not recorded"
    assert not imported & {"torch", "numpy", "typer", "rich"}


# ---- unix sockets -----------------------------------------------------------------------------------


def test_uds_serves_no_tcp_unless_asked(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with StoreProcess("--uds", str(path), "--shards", "2", port=None) as store:
        assert store.ready["shards"] == [[f"unix://{path}"], [f"unix://{path}.1"]]
        assert store.url == f"unix://{path}"
        assert (path.stat().st_mode & 0o777) == 0o600
        for address in store.addresses:
            with RawClient(address) as client:
                client.hello()
        assert not [c for shard in store.shards() for c in shard.net_connections("tcp")]
        assert store.stop() == 0
    assert list(tmp_path.iterdir()) == []


def test_uds_and_tcp_serve_the_same_store(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with StoreProcess("--uds", str(path)) as store:
        (unix, tcp) = store.ready["shards"][0]
        assert unix == f"unix://{path}"
        with RawClient(unix) as near, RawClient(tcp) as far:
            assert near.hello().store == far.hello().store


def test_uds_left_by_a_killed_server_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    with StoreProcess("--uds", str(path), port=None) as store, RawClient(store.url) as client:
        client.hello()


@pytest.mark.one_loop
def test_uds_of_a_running_server_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with StoreProcess("--uds", str(path), port=None) as store:
        status, said = failed_start("--uds", str(path), port=None)
        assert status == NOT_STARTED
        assert "is taken by a server that runs" in said
        with RawClient(store.url) as client:
            client.hello()


@pytest.mark.one_loop
def test_uds_never_replaces_a_file(tmp_path: Path) -> None:
    path = tmp_path / "store"
    path.write_text("mine")
    status, said = failed_start("--uds", str(path), port=None)
    assert status == NOT_STARTED
    assert "is no socket" in said
    assert path.read_text() == "mine"


# ---- it can't start ---------------------------------------------------------------------------------


@pytest.mark.one_loop
@pytest.mark.parametrize("taken", [0, 1])
def test_taken_port_is_named_with_its_owner_and_nothing_is_left(taken: int) -> None:
    port = consecutive_ports(2)
    with socket.create_server(("127.0.0.1", port + taken)):
        status, said = failed_start("--shards", "2", port=port)
    assert status == NOT_STARTED
    name = psutil.Process().name()
    assert said == (
        f"psstore-server: port {port + taken} is taken by {name} (process {psutil.Process().pid}); use --port 0\n"
    )
    with socket.create_server(("127.0.0.1", port)):
        pass


@pytest.mark.one_loop
def test_no_other_port_is_advised_where_clients_are_told_which_it_is(tmp_path: Path) -> None:
    port, token = consecutive_ports(1), tmp_path / "token"
    token.touch(0o600)
    token.write_text(32 * "t")
    with socket.create_server(("127.0.0.1", port)):
        places = f"127.0.0.1:{port},127.0.0.1:{port + 1}"
        _, said = failed_start("--shards-at", places, "--shard-index", "0", "--token-file", str(token), port=None)
    assert said.endswith(f"(process {psutil.Process().pid})\n")


@pytest.mark.one_loop
def test_off_loopback_it_needs_a_token_and_says_how_to_make_one() -> None:
    status, said = failed_start("--host", "0.0.0.0")
    assert status == NOT_STARTED
    assert "clients need a token" in said
    assert "secrets.token_hex" in said


@pytest.mark.one_loop
@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--workers", "2", "--quorum", "3"), "quorum is 3; it must be between 1 and the number of workers, 2"),
        (("--workers", "two"), "workers is 'two'; expected a number, or FEWEST:MOST as in 2:8"),
        (("--shards", "0"), "shards (--shards) is '0': Expected `int` >= 1"),
        (("--mode", "fast"), "mode (--mode) is 'fast': expected sync, backup, ssp, async"),
        (("--staleness", "-1"), "staleness (--staleness) is '-1': Expected `int` >= 0"),
        (("--token-file", "/nowhere/token"), "token file /nowhere/token: No such file or directory"),
        (("--silence-s", "1"), "make silence_s at least twice heartbeat_s"),
        (("--uds", "/nowhere/store"), "can't listen on unix socket /nowhere/store: No such file or directory"),
        (("--uds", "/tmp/" + "x" * 200), "can't listen on unix socket"),
    ],
)
def test_settings_that_can_not_work_are_explained(flags: tuple[str, ...], sentence: str) -> None:
    status, said = failed_start(*flags)
    assert status == NOT_STARTED
    assert said.startswith("psstore-server: ")
    assert sentence in said
    assert "Traceback" not in said


@pytest.mark.one_loop
def test_host_that_is_not_this_one_is_refused(tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("0123456789abcdef")
    token_file.chmod(0o600)
    status, said = failed_start("--host", "192.0.2.1", "--token-file", str(token_file))
    assert status == NOT_STARTED
    assert "can't listen on 192.0.2.1 port 0" in said


@pytest.mark.one_loop
def test_token_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("0123456789abcdef")
    token_file.chmod(0o640)
    status, said = failed_start("--token-file", str(token_file))
    assert status == NOT_STARTED
    assert (
        f"can be read by others (mode 0640), who may have it by now: make a new one, and chmod 600 {token_file}" in said
    )


@pytest.mark.one_loop
def test_ports_beyond_the_last_are_refused() -> None:
    status, said = failed_start("--shards", "4", port=65533)
    assert status == NOT_STARTED
    assert "go beyond port 65535" in said


@pytest.mark.one_loop
def test_unknown_flag_is_status_2() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "psstore.cli.server", "--shard", "2"], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 2
    assert "unrecognized arguments: --shard 2" in done.stderr


@pytest.mark.one_loop
@pytest.mark.parametrize(
    ("uvloop", "sentence"),
    [
        ("raise ImportError('it is broken')", "shard 0 can't start: it is broken"),
        ("import os; os._exit(7)", "shard 0 ended with exit status 7 before it was ready"),
        ("import os; os.kill(os.getpid(), 9)", "shard 0 was killed by signal 9 (SIGKILL) before it was ready"),
    ],
    ids=["explained", "silent", "killed"],
)
def test_shard_that_can_not_start_ends_the_store(tmp_path: Path, uvloop: str, sentence: str) -> None:
    (tmp_path / "uvloop.py").write_text(uvloop)
    status, said = failed_start("--loop", "uvloop", environ={"PYTHONPATH": str(tmp_path)})
    assert status == NOT_STARTED
    assert sentence in said
