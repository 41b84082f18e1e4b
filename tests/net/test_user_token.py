"""A store on loopback that was given no token: its user's programs find one, and nobody else does."""

from __future__ import annotations

import errno
import os
import signal
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import psstore
from psstore import errors
from psstore.config import token_directories
from psstore.net import user_token
from psstore.net.address import TcpAddress, UnixAddress, parse_address
from psstore.net.user_token import UserToken, find, name_of
from psstore.server.other_member import refuses
from tests.support.free_ports import free_ports
from tests.support.raw_client import RawClient
from tests.support.server_process import StoreProcess, eventually
from tests.support.server_thread import make_service, serving

pytestmark = pytest.mark.sockets

NOBODY = 65534

HERE = TcpAddress("127.0.0.1", 5700)


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Where tokens of this process are left and looked for; none of them is there yet."""
    places = [tmp_path / "first", tmp_path / "second"]
    monkeypatch.setattr(user_token, "token_directories", lambda: places)
    return places


@pytest.fixture(scope="module")
def store(loop_name: str) -> Iterator[StoreProcess]:
    with StoreProcess("--shards", "2") as store:
        yield store


def say_hello(address: str) -> None:
    with RawClient(address) as client:
        client.hello()


def check_refuses_others(address: str) -> None:
    """Has a child that is another user say hello there."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            say_hello(address)
        except errors.AuthFailed:
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


# ---- stores ----


def test_every_shard_serves_its_own_user_and_no_other(store: StoreProcess) -> None:
    with psstore.connect(store.url) as own:
        own.create("w", [1.0])
        assert own.pull("w") == [1.0]
    for address in store.addresses:
        say_hello(address)
        check_refuses_others(address)


def test_who_finds_no_token_is_told_what_to_do(store: StoreProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psstore.client.remote.find", lambda _: None)
    with pytest.raises(errors.AuthFailed, match=r"needs a token: connect with token=, or set PSSTORE_TOKEN_FILE"):
        psstore.connect(store.url)


def test_files_are_of_their_user_alone_and_go_with_the_store() -> None:
    with StoreProcess("--shards", "2") as store:
        files = [token_directories()[0] / name_of(parse_address(address)) for address in store.addresses]
        assert {stat.S_IMODE(file.stat().st_mode) & 0o777 for file in files} == {0o600}
        assert stat.S_IMODE(files[0].parent.stat().st_mode) == 0o700
        assert find(store.addresses[0]) == find(store.addresses[1])
    assert not any(file.exists() for file in files)


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_next_store_on_the_same_port_has_another_token(end: signal.Signals) -> None:
    (port,) = free_ports(1)
    with StoreProcess(port=port) as first:
        url, before = first.url, find(first.url)
        with psstore.connect(url, role="client"):
            pass
        first.signal(end)
        first.wait()
    assert eventually(lambda: refuses(url)), "its shard has seen that it is gone"
    assert find(url) is None
    with StoreProcess(port=port) as second:
        assert second.url == url
        assert find(url) not in (None, before)
        with psstore.connect(url) as store:
            assert store.rank == 0


def test_store_with_a_unix_socket_and_a_port_is_found_by_both(tmp_path: Path) -> None:
    with StoreProcess("--uds", str(tmp_path / "store")) as store:
        for address in store.ready["shards"][0]:
            with psstore.connect(address, role="client") as client:
                assert client.keys() == []


def test_unix_socket_serves_no_other_user_though_he_may_open_it() -> None:
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o711)
        with StoreProcess("--uds", f"{directory}/store", port=None) as store:
            os.chmod(f"{directory}/store", 0o666)
            say_hello(store.url)
            check_refuses_others(store.url)


# ---- files ----


def test_token_is_found_by_every_name_of_its_address(places: list[Path]) -> None:
    unix = UnixAddress("/run/store")
    token = UserToken([HERE, TcpAddress("::1", 5701), unix])
    for address in ("ps://127.0.0.1:5700", "ps://localhost:5700", "ps://[::1]:5701", "ps://localhost:5701", str(unix)):
        assert find(address) == token.secret
    for address in ("ps://127.0.0.1:5701", "ps://127.0.0.2:5700", "ps://10.0.0.1:5700", "ps://host:5700", "unix:///x"):
        assert find(address) is None
    token.close()
    assert find("ps://127.0.0.1:5700") is None


def test_token_of_a_server_that_is_gone_is_passed_over_and_removed(places: list[Path]) -> None:
    token = UserToken([HERE])
    os.close(token._file)  # as when it is killed
    assert find(str(HERE)) is None
    other = UserToken([TcpAddress("127.0.0.1", 5701)])
    assert os.listdir(places[0]) == [name_of(TcpAddress("127.0.0.1", 5701))]
    other.close()


def test_store_that_ends_late_leaves_its_successor_s_token_alone(places: list[Path]) -> None:
    first, second = UserToken([HERE]), UserToken([HERE])
    first.close()
    assert find(str(HERE)) == second.secret
    second.close()


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o601])
def test_token_that_others_could_have_read_is_refused(places: list[Path], mode: int) -> None:
    token = UserToken([HERE])
    (places[0] / name_of(HERE)).chmod(mode)
    with pytest.raises(errors.BadArgument, match=rf"mode {mode:04o}\).* chmod 600 {places[0]}"):
        find(str(HERE))
    token.close()


def test_client_without_room_for_the_token_s_file_says_so_and_is_let_in_when_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That the store needs a token, which it has not been given, would be another matter."""
    left = 1 << 30

    def open_file(path: Any, *options: Any, **others: Any) -> int:
        nonlocal left
        if Path(path).parent in token_directories() and (left := left - 1) >= 0:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return os_open(path, *options, **others)

    os_open = os.open
    with StoreProcess() as store:
        monkeypatch.setattr(os, "open", open_file)
        with pytest.raises(errors.StoreUnreachable, match=r"no room to look for the token .*: Too many open files"):
            psstore.connect(store.url, connect_timeout_s=0.2)
        left = 2
        psstore.connect(store.url).close()


def test_directory_that_is_not_this_user_s_alone_is_left(places: list[Path]) -> None:
    places[0].mkdir(0o755)
    token = UserToken([HERE])
    assert os.listdir(places[1]) == [name_of(HERE)]
    assert find(str(HERE)) == token.secret
    token.close()


def test_server_that_stands_still_over_its_names_holds_up_no_other_for_ever(
    places: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_token, "LOCK_S", 0.1)
    places[0].mkdir(0o700)
    with user_token._locked(places[0]):
        token = UserToken([HERE])
    assert find(str(HERE)) == token.secret
    token.close()


def test_where_there_is_no_place_it_is_said_what_to_do(places: list[Path]) -> None:
    places[0].mkdir(0o755)
    places[1].write_text("no directory")
    with pytest.raises(errors.BadArgument, match=r"not a directory of this user alone.*give it with --token-file"):
        UserToken([HERE])


def test_store_that_asks_for_no_token_is_not_the_one_whose_token_is_there(places: list[Path]) -> None:
    with serving(make_service()) as url:
        token = UserToken([parse_address(url)])
        with pytest.raises(errors.AuthFailed, match="did not prove that it has the token"):
            psstore.connect(url)
        token.close()
        with RawClient(url) as client:
            client.hello()
