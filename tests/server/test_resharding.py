"""A store that goes on with another number of shards while it is used: nothing that was told is lost."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy as np
import psutil
import pytest
from numpy.testing import assert_array_equal

import psstore
from psstore.client.remote import Remote
from psstore.client.store import Store
from psstore.config import NO_CREDENTIALS, token_directories
from psstore.errors import AvailabilityError, BadArgument, Overloaded, RolledBack, StoreUnreachable
from psstore.exit_codes import EXIT_MISSING, EXIT_OK
from psstore.net.address import TcpAddress
from psstore.net.user_token import name_of
from psstore.server import other_member, resharding
from psstore.server.host_shards import says_ready
from psstore.server.other_member import look_at
from psstore.server.processes import ShardProcess
from psstore.server.resharding import Resharding
from psstore.server.settings import ServerSettings
from psstore.server.site import Site
from psstore.server.store_token import StoreToken
from psstore.text import counted
from psstore.wire.messages import Welcome
from tests.support.cluster import PACE_S, PATIENCE_S, TO_SHARDS
from tests.support.fork_server import ServedPopen
from tests.support.free_ports import consecutive_ports, free_ports
from tests.support.server_process import POLL_S, StoreProcess, eventually, reshard, reshard_command

F32 = np.float32
ELEMS = 600_000
"""Some slices, on every shard."""

HELD_WRITER = Path(__file__).parents[1] / "support" / "held_writer"

pytestmark = pytest.mark.sockets


def psstore_reshard(
    url: str, num_shards: int, environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return reshard(url, num_shards, timeout_s=PATIENCE_S, environ=environ)


class Training:
    """Steps of one worker beside plain writes, of which each adds one."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.define()
        store.create("tally", shape=(4,), rule="add")
        self.steps = self.writes = self.undone = 0
        self.at: list[int] = []
        """Versions at which the store went on."""

    def define(self) -> None:
        """Once more it is a check: what differs from the store's is refused."""
        self.store.create("w", shape=(ELEMS,), rule="sgd", reduction="median")

    def step(self) -> None:
        try:
            self.store.push("w", np.full(ELEMS, 1.0, F32))
            self.store.commit({"lr": 1.0})
            self.steps += 1
            self.store.push("tally", np.ones(4, F32))
            self.writes += 1
        except RolledBack as error:
            self.at.append(int(str(error.details["version"])))
            self.undone += int(str(error.details["undone"]))
            self.store.reconnect()
            self.steps = self.store.version  # a step may count of which nobody was told

    def until(self, done: threading.Event) -> None:
        while not done.is_set():
            self.step()
            time.sleep(PACE_S)
        self.step()

    def check(self) -> None:
        assert self.undone == 0
        assert self.store.version == self.steps
        self.define()
        assert_array_equal(self.store.pull("w"), np.full(ELEMS, -self.steps, F32))
        tally = self.store.pull("tally")
        assert self.writes <= tally.min()
        assert tally.max() <= self.writes + len(self.at)  # one may be there of which nobody was told


@contextmanager
def resharded(process: StoreProcess, num_shards: int) -> Iterator[threading.Event]:
    """In the block, somebody types the command; the event tells that it has ended."""
    done = threading.Event()
    results = []

    def command() -> None:
        results.append(psstore_reshard(process.url, num_shards))
        done.set()

    thread = threading.Thread(target=command)
    thread.start()
    try:
        yield done
    finally:
        thread.join()
    assert results[0].returncode == EXIT_OK, results[0].stderr + process.log()
    assert f"the store goes on with {counted(num_shards, 'shard')}" in results[0].stdout


@pytest.mark.parametrize("transport", TO_SHARDS)
def test_training_goes_on_with_more_and_fewer_shards(tmp_path: Path, transport: str) -> None:
    uds = ("--host", "127.0.0.1", "--uds", str(tmp_path / "socket"))
    with (
        StoreProcess("--shards", "2", *uds) as process,
        psstore.connect(process.url, transport=transport, wait_s=PATIENCE_S) as store,  # type: ignore[arg-type]
    ):
        training = Training(store)
        training.step()
        for num_shards in (5, 1, 3):
            with resharded(process, num_shards) as done:
                training.until(done)
            assert len(store.stats()) == num_shards
            training.check()
        assert len(training.at) == 3
        assert process.stop() == 0


@pytest.mark.one_loop
def test_with_standbys_and_a_place_for_checkpoints_which_go_on(tmp_path: Path) -> None:
    place = str(tmp_path / "run")
    flags = ("--checkpoint", place, "--checkpoint-every", "1000000", "--restarts", "1", "--standbys", "1")
    with (
        StoreProcess("--shards", "2", *flags) as process,
        psstore.connect(process.url, wait_s=PATIENCE_S) as store,
    ):
        training = Training(store)
        training.step()
        with resharded(process, 3) as done:
            training.until(done)
        training.check()
        assert len(training.at) == 1
        assert store.checkpoint() == store.version
        assert eventually(lambda: all(shard["standbys"] == 1 for shard in store.stats()))
        os.kill(process.shard_pids()[0], signal.SIGKILL)
        training.step()
        training.check()
        assert len(training.at) == 1, "its standby leads"


@pytest.mark.one_loop
def test_who_connects_meanwhile_is_a_client_of_the_store_that_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has asked a shard where all are, and finds others there."""
    discover, numbers = Remote._discover, [3]

    async def discover_before(remote: Remote, *rest: Any) -> Welcome:
        welcome = await discover(remote, *rest)
        if numbers:
            assert (await asyncio.to_thread(psstore_reshard, process.url, numbers.pop())).returncode == EXIT_OK
        return welcome

    monkeypatch.setattr(Remote, "_discover", discover_before)
    with StoreProcess("--shards", "2") as process, psstore.connect(process.url, role="client") as store:
        assert store.num_shards == 3


@pytest.mark.one_loop
def test_a_port_that_is_taken_is_said_before_anybody_waits() -> None:
    port = consecutive_ports(2)
    with (
        socket.create_server(("127.0.0.1", port + 1)),
        StoreProcess(port=port) as process,
        psstore.connect(process.url, wait_s=PATIENCE_S) as store,
    ):
        training = Training(store)
        training.step()
        said = psstore_reshard(process.url, 2)
        assert said.returncode == EXIT_MISSING
        assert f"port {port + 1} is taken" in said.stderr
        training.step()
        training.check()
        assert not training.at


def test_a_place_where_no_token_can_be_left_is_said_before_anybody_waits() -> None:
    port = consecutive_ports(2)
    taken = token_directories()[0] / name_of(TcpAddress("127.0.0.1", port + 1))
    with StoreProcess(port=port) as process, psstore.connect(process.url, wait_s=PATIENCE_S) as store:
        training = Training(store)
        training.step()
        taken.mkdir()
        try:
            said = psstore_reshard(process.url, 2)
        finally:
            taken.rmdir()
        assert said.returncode == EXIT_MISSING
        assert str(taken) in said.stderr
        training.step()
        training.check()
        assert not training.at
        with resharded(process, 2) as done:
            training.until(done)
        training.check()


def stopped_writer(process: StoreProcess) -> psutil.Process:
    """What is writing the store down, made to stand still."""
    found: list[psutil.Process] = []

    def begun() -> bool:
        found[:] = [one for one in process.shards() if "psstore.launch.resharding" in one.cmdline()]
        return bool(found)

    assert eventually(begun)
    found[0].suspend()
    return found[0]


@contextmanager
def on_its_way(process: StoreProcess, why: str) -> Iterator[psutil.Process]:
    """In the block the store is written down, to go on with 3 shards, by that process, which stands still; somebody
    trains. Afterwards the store goes on as it was, and says why."""
    with psstore.connect(process.url, wait_s=PATIENCE_S) as store:
        training = Training(store)
        training.step()
        stop = threading.Event()
        trains = threading.Thread(target=training.until, args=[stop])
        trains.start()
        said: list[subprocess.CompletedProcess[str]] = []
        asks = threading.Thread(target=lambda: said.append(psstore_reshard(process.url, 3)))
        asks.start()
        yield stopped_writer(process)
        asks.join()
        stop.set()
        trains.join()
        assert said[0].returncode == EXIT_MISSING
        assert why in said[0].stderr
        training.check()
        assert not training.at
        with resharded(process, 3) as done:
            training.until(done)
        training.check()


@pytest.mark.one_loop
def test_the_store_goes_on_as_it_was_if_what_writes_it_down_dies() -> None:
    why = "what writes the store down has ended"
    with StoreProcess("--shards", "2") as process, on_its_way(process, why) as writer:
        writer.kill()


@pytest.mark.one_loop
def test_nothing_is_left_of_what_could_not_be_written_down() -> None:
    with StoreProcess("--shards", "2") as process:
        with psstore.connect(process.url) as store:
            Training(store).step()
            for shard in process.shards():
                shard.rlimit(psutil.RLIMIT_FSIZE, (1 << 16, -1))
            said = psstore_reshard(process.url, 3)
        assert said.returncode == EXIT_MISSING
        assert "could not be written: File too large" in said.stderr
        (folder,) = re.findall(r"the store is written down to (\S+)", process.log())
        Path(folder).mkdir(exist_ok=True)  # as what says there that the store lives may do, once it is removed
        assert process.stop() == EXIT_OK
    assert not Path(folder).exists()


@pytest.mark.one_loop
def test_the_store_goes_on_as_it_was_if_a_standby_takes_over_meanwhile() -> None:
    why = "a standby has taken over meanwhile"
    with StoreProcess("--shards", "2", "--standbys", "1") as process:
        leader = leaders(process)[1]
        with on_its_way(process, why):
            os.kill(leader, signal.SIGKILL)


@pytest.mark.one_loop
def test_a_store_that_ends_with_its_workers_may_stand_still_for_longer_than_they_may_be_away(tmp_path: Path) -> None:
    patience_s, go_on = 3.0, tmp_path / "writer"
    flags = ("--workers", "1", "--until-done", "--patience-s", str(patience_s))
    environ = {"PYTHONPATH": str(HELD_WRITER), "HELD_WRITER": str(go_on)}
    with (
        StoreProcess(*flags, environ=environ) as process,
        psstore.connect(process.url, rank=0, wait_s=PATIENCE_S) as store,
    ):
        training = Training(store)
        training.step()
        with resharded(process, 2) as done:
            assert eventually(go_on.with_suffix(".frozen").exists)
            time.sleep(1.5 * patience_s)
            go_on.touch()
            training.until(done)
        training.check()


@pytest.mark.one_loop
def test_what_a_killed_supervisor_has_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    """It lies in memory, which would be gone for good."""
    go_on = tmp_path / "writer"
    environ = {"PYTHONPATH": str(HELD_WRITER), "HELD_WRITER": str(go_on)}
    with StoreProcess("--shards", "1", environ=environ) as process:
        asking = ServedPopen(reshard_command(process.url, 2), stderr=subprocess.DEVNULL)
        assert eventually(go_on.with_suffix(".frozen").exists)
        folder = Path(process.log().partition("the store is written down to ")[2].split("\n")[0])
        assert folder.is_dir()
        with StoreProcess():
            assert folder.is_dir()
        process.process.kill()
        asking.kill()
        asking.wait()
        process.wait()
    with StoreProcess():
        assert eventually(lambda: not folder.exists()), "another store may be at it"


@pytest.mark.one_loop
def test_who_has_left_is_waited_for_no_more_than_before() -> None:
    with (
        StoreProcess("--workers", "2", "--until-done") as process,
        psstore.connect(process.url, rank=0, wait_s=PATIENCE_S) as store,
    ):
        with psstore.connect(process.url, rank=1) as other:
            training = Training(store)
            other.create("w", shape=(ELEMS,), rule="sgd", reduction="median")
            other.push("w", np.full(ELEMS, 1.0, F32))
            with ThreadPoolExecutor(1) as beside:
                done = beside.submit(other.commit, {"lr": 1.0})
                training.step()
                done.result()
        training.step()
        with resharded(process, 2) as ended:
            training.until(ended)
        training.step()
        training.check()
        assert len(training.at) == 1
        store.close()
        assert process.wait() == EXIT_OK


@pytest.mark.one_loop
def test_a_store_that_is_on_its_way_stands_still_whoever_goes_and_whoever_asks_again() -> None:
    with (
        StoreProcess("--shards", "2") as process,
        psstore.connect(process.url, wait_s=PATIENCE_S) as store,
    ):
        training, stop = Training(store), threading.Event()
        training.step()
        trains = threading.Thread(target=training.until, args=[stop])
        trains.start()
        asking = ServedPopen(reshard_command(process.url, 3), stderr=subprocess.DEVNULL)
        writer = stopped_writer(process)
        asking.send_signal(signal.SIGINT)
        asking.wait()
        said = psstore_reshard(process.url, 3)
        assert said.returncode == EXIT_MISSING
        assert "somebody else has asked" in said.stderr
        writer.resume()
        assert eventually(lambda: len(training.at) == 1)
        stop.set()
        trains.join()
        training.check()
        assert len(store.stats()) == 3


@pytest.mark.one_loop
def test_the_standby_of_the_shard_that_was_asked_is_asked_again() -> None:
    with (
        StoreProcess("--shards", "2", "--standbys", "1") as process,
        psstore.connect(process.url, wait_s=PATIENCE_S) as store,
    ):
        training = Training(store)
        training.step()
        leader = leaders(process)[0]
        with resharded(process, 3) as done:
            stopped_writer(process)
            os.kill(leader, signal.SIGKILL)
            training.until(done)
        training.check()
        assert len(training.at) == 1


def leaders(process: StoreProcess) -> list[int]:
    """The processes that lead the shards, once every shard has a standby."""
    with psstore.connect(process.url, role="client") as store:
        assert eventually(lambda: all(shard["standbys"] == 1 for shard in store.stats()))
        return [int(shard["process"]) for shard in store.stats()]


@pytest.mark.one_loop
def test_a_store_whose_shards_have_hosts_of_their_own_says_what_to_do_instead(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("t" * 40)
    token.chmod(0o600)
    places = ",".join(f"127.0.0.1:{port}" for port in free_ports(2))
    flags = ("--shards-at", places, "--token-file", str(token))
    environ = {"PSSTORE_TOKEN_FILE": str(token)}
    others = StoreProcess(*flags, "--shard-index", "1", port=None)
    try:
        with StoreProcess(*flags, "--shard-index", "0", port=None) as process:
            for url, num_shards, why in (
                (process.url, 3, "can't go on with 3 shards while it runs"),
                (process.url, 2, "has 2 shards already"),
            ):
                said = psstore_reshard(url, num_shards, environ)
                assert said.returncode == EXIT_MISSING
                assert why in said.stderr
    finally:
        others.end()


def saying(*lines: str) -> ShardProcess:
    """A shard's process that has reported these."""
    child = mock.create_autospec(ShardProcess, instance=True)
    child.told.return_value = list(lines)
    return cast(ShardProcess, child)


def test_a_wish_for_other_numbers_may_come_before_a_shard_is_ready() -> None:
    wishes: list[int] = []
    assert says_ready(saying("ready", "reshard 1"), wishes)
    assert not says_ready(saying("reshard 2"), wishes)
    assert not says_ready(saying(), wishes)
    with pytest.raises(BadArgument, match="no room"):
        says_ready(saying("no room"), wishes)
    assert wishes == [1, 2]


def test_a_standby_that_has_taken_over_is_not_told_what_became_of_an_attempt_that_it_never_stood_still_for(
    tmp_path: Path,
) -> None:
    """Whoever has asked it meanwhile wishes for another one."""
    died, stays, leads = (mock.create_autospec(ShardProcess, instance=True) for _ in range(3))
    settings = ServerSettings(shards=2, checkpoint=str(tmp_path))
    site = mock.create_autospec(Site, instance=True, settings=settings, endpoints=[mock.Mock()])
    token = mock.create_autospec(StoreToken, instance=True, credentials=NO_CREDENTIALS)
    with mock.patch.object(resharding, "ReshardProcess"):
        attempt = Resharding(3, site=site, token=token, leaders=[died, stays])
    leads.tell.assert_not_called()
    attempt.come_to_nothing("of that", [leads, stays])
    leads.tell.assert_not_called()
    assert stays.tell.mock_calls[-1] == mock.call("not-resharded of that")


@pytest.mark.one_loop
def test_a_wish_that_comes_while_other_shards_begin_is_granted_when_all_are_ready() -> None:
    port = consecutive_ports(3)
    address = f"ps://127.0.0.1:{port}"
    process = StoreProcess("--shards", "2", port=port)

    def serves() -> bool:
        with contextlib.suppress(AvailabilityError):
            look_at(address, NO_CREDENTIALS)
            return True
        return False

    def has_three() -> bool:
        with contextlib.suppress(AvailabilityError):  # the shard that it asks ends just then
            return len(look_at(address, NO_CREDENTIALS).welcome.addresses) == 3
        return False

    def is_asked() -> bool:
        """Whether somebody's word was heard before."""
        try:
            other_member.reshard(address, NO_CREDENTIALS, 3, timeout_s=POLL_S)
        except Overloaded:
            return True
        except StoreUnreachable:  # this one's was, perhaps, and its connection has ended
            pass
        return False

    try:
        assert eventually(lambda: len(process.shards()) == 2)
        late = max(process.shards(), key=psutil.Process.create_time)
        late.suspend()
        assert eventually(serves)
        assert eventually(is_asked)
        late.resume()
        with process:
            assert eventually(has_three)
            assert eventually(lambda: "the store serves again" in process.log())  # and what it was is not needed
    finally:
        process.end()
