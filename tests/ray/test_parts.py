"""What a store on Ray is made of, without Ray."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest

import psstore
from psstore.errors import BadArgument, StoreUnreachable
from psstore.launch.ray.directory import Directory, Hosts
from psstore.launch.ray.host_names import HostNames
from psstore.launch.ray.member import MemberActor
from psstore.launch.ray.plan import StorePlan
from psstore.net.names import read_hosts
from tests.server.test_standbys import leader
from tests.support.free_ports import free_ports
from tests.support.server_process import eventually

TOKEN = "0123456789abcdef" * 4


def plan_of(*, shards: int = 1, standbys: int = 0, port: int = 5700, **settings: object) -> StorePlan:
    return StorePlan(
        name="store", shards=shards, standbys=standbys, port=port, token=TOKEN, settings={"workers": 1, **settings}
    )


class DirectoryThread:
    """A directory that is asked as the actor is: from other threads, whose calls block."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.directory = Directory()

    def here(self) -> str:
        return "127.0.0.1"

    def moved(self, own: Mapping[str, str]) -> Hosts:
        return asyncio.run_coroutine_threadsafe(self.directory.moved(own), self._loop).result()

    def news(self, known: Mapping[str, str], own: Mapping[str, str]) -> Hosts | None:
        return asyncio.run_coroutine_threadsafe(self.directory.news(known, own), self._loop).result()

    def end(self) -> None:
        asyncio.run_coroutine_threadsafe(self.directory.end(), self._loop).result()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def directory() -> Iterator[DirectoryThread]:
    directory = DirectoryThread()
    yield directory
    directory.end()
    assert eventually(lambda: not [one for one in threading.enumerate() if one.name == "psstore-hosts"])
    directory.close()


def hosts_of(names: HostNames) -> dict[str, str]:
    return read_hosts(Path(names.environ["PSSTORE_HOSTS_FILE"]))


def test_who_asks_hears_where_others_are_as_soon_as_they_have_moved(directory: DirectoryThread) -> None:
    names = HostNames(directory, own={"a": "10.0.0.1"}, token=TOKEN)
    assert hosts_of(names) == {"a": "10.0.0.1"}
    for address in ("10.0.0.2", "10.0.0.3"):
        directory.moved({"b": address})
        assert eventually(lambda: hosts_of(names) == {"a": "10.0.0.1", "b": address})  # noqa: B023 (at once)


def test_a_directory_that_was_started_again_is_told_anew(directory: DirectoryThread) -> None:
    one, other = (HostNames(directory, own={name: f"10.0.0.{name}"}, token=TOKEN) for name in "12")
    both = {"1": "10.0.0.1", "2": "10.0.0.2"}
    assert eventually(lambda: hosts_of(one) == both)
    former, directory.directory = directory.directory, Directory()
    asyncio.run_coroutine_threadsafe(former.moved({"wake": "10.0.0.9"}), directory._loop).result()  # both ask again
    late = HostNames(directory, own={}, token=TOKEN)
    late.await_all(2)
    assert {name: hosts_of(late)[name] for name in both} == both
    assert {name: hosts_of(other)[name] for name in both} == both


def test_where_a_member_was_does_not_count_when_its_next_life_has_said_where_it_is() -> None:
    async def ask() -> Hosts | None:
        directory = Directory()
        await directory.moved({"a": "10.0.0.2"})
        return await directory.news({}, {"a": "10.0.0.1"})

    assert asyncio.run(ask()) == {"a": "10.0.0.2"}


def test_the_files_are_private_and_gone_with_the_store(directory: DirectoryThread) -> None:
    names = HostNames(directory, own={}, token=TOKEN)
    token = Path(names.environ["PSSTORE_TOKEN_FILE"])
    assert token.read_text() == TOKEN
    assert token.stat().st_mode & 0o077 == 0
    assert token.parent.stat().st_mode & 0o077 == 0
    directory.end()
    assert eventually(lambda: not token.parent.exists())


@pytest.mark.parametrize(("shards", "num_bundles"), [(1, 2), (2, 2), (3, 3), (5, 5)])
def test_no_bundle_has_both_processes_of_a_shard(shards: int, num_bundles: int) -> None:
    plan = plan_of(shards=shards, standbys=1)
    bundles = [plan.bundle(member) for member in range(plan.num_members)]
    assert all(bundles[shard] != bundles[shard + shards] for shard in range(shards))
    assert sorted(set(bundles)) == list(range(plan.num_bundles)) == list(range(num_bundles))


def test_a_store_is_named_by_both_places_of_its_first_shard() -> None:
    assert plan_of(shards=2).url == "ps://shard-0.store:5700"
    assert plan_of(shards=2, standbys=1).url == "ps://shard-0.store:5700,standby-0.store:5702"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"shards": 0}, "shards is 0"),
        ({"standbys": 2}, "standbys 2"),
        ({"port": 65535, "shards": 2}, "port is 65535"),
        ({"shards_at": "h1:5700"}, "no setting 'shards_at'"),
        ({"colour": "red"}, "no setting 'colour'"),
        ({"mode": "never"}, "expected sync, backup, ssp, async"),
        ({"checkpoint": "/shared", "standbys": 1, "restarts": 3}, "don't go together"),
    ],
)
def test_what_can_not_be_is_refused_before_anything_is_started(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(BadArgument, match=message):
        plan_of(**wrong).check()  # type: ignore[arg-type]


def test_a_store_with_checkpoints_goes_back_to_them_as_often_as_nodes_die(tmp_path: Path) -> None:
    told = plan_of(checkpoint=str(tmp_path)).environ(0, "10.0.0.1")
    assert told["PSSTORE_RESTORE"] == "auto"
    assert int(told["PSSTORE_RESTARTS"]) > 100
    plan_of(checkpoint=str(tmp_path), standbys=1).check()


@pytest.mark.sockets
@pytest.mark.one_loop
def test_a_member_starts_its_server_again_and_ends_it(
    directory: DirectoryThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(port=free_ports(1)[0])
    member = MemberActor(plan, 0, directory)
    member.ready()
    names = HostNames(directory, own={}, token=TOKEN)
    for name, value in names.environ.items():
        monkeypatch.setenv(name, value)
    with psstore.connect(plan.url, role="client") as store:
        former = leader(store, 0)
    os.kill(psutil.Process(former).ppid(), signal.SIGKILL)
    assert eventually(lambda: serves(plan.url, former))
    files = Path(member._environ["PSSTORE_TOKEN_FILE"]).parent
    assert files.is_dir()
    member.stop()
    assert not files.exists()
    with pytest.raises(StoreUnreachable):
        psstore.connect(plan.url, role="client", connect_timeout_s=0.2)


def serves(url: str, former: int) -> bool:
    """Whether a shard answers that is another process."""
    try:
        with psstore.connect(url, role="client", connect_timeout_s=0.5) as store:
            return leader(store, 0) != former
    except StoreUnreachable:
        return False


def test_a_member_that_can_not_start_says_so(directory: DirectoryThread) -> None:
    plan = plan_of(port=free_ports(1)[0], device="cuda:99")
    member = MemberActor(plan, 0, directory)
    with pytest.raises(StoreUnreachable, match=r"shard-0\.store: psstore-server ended with 3"):
        member.ready()
    member.stop()


def test_without_ray_it_is_said_what_to_install() -> None:
    program = "import sys; sys.modules['ray'] = None; import psstore.ray"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "psstore.ray needs Ray: pip install 'psstore[ray]'" in run.stderr
