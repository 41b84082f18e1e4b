"""Shards whose standbys run on other hosts, each a `psstore-server` of its own: one dies, and the training goes on."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import psutil
import pytest
from numpy.testing import assert_array_equal
from typer.testing import CliRunner

import psstore
from psstore.checkpoint.place import open_place
from psstore.cli.main import app
from psstore.client.store import Store
from psstore.config import Credentials
from psstore.net.address import parse_addresses
from psstore.protocol.connection import HANDSHAKE_S
from psstore.server.other_member import look_at, why_not_begin
from psstore.server.settings import ServerSettings
from psstore.server.shard_settings import LEASE_S
from psstore.server.site import Site
from tests.launch.test_metrics import get
from tests.server.test_standbys import ELEMS, await_standbys, create, expected, leader, train
from tests.support.cluster import PATIENCE_S
from tests.support.free_ports import free_ports
from tests.support.server_process import StoreProcess, eventually, failed_start

F32 = np.float32

pytestmark = [pytest.mark.sockets, pytest.mark.one_loop]

TOKEN = "0123456789abcdef" * 4

STILL_S = 4.0
"""Of hosts that hear late that the workers are done."""


class Hosts:
    """Each has one process: a shard's, or its standby's."""

    def __init__(self, folder: Path, *, num_shards: int = 2, flags: Sequence[str] = ()) -> None:
        self._ends = contextlib.ExitStack()
        self._num_shards = num_shards
        self._flags = flags
        places = [f"127.0.0.1:{port}" for port in free_ports(2 * num_shards)]
        self.leaders, self.standbys = places[:num_shards], places[num_shards:]
        token = folder / "token"
        token.write_text(TOKEN)
        token.chmod(0o600)
        self.environ = {"PSSTORE_TOKEN_FILE": str(token)}
        self.of: dict[tuple[int, bool], StoreProcess] = {}
        """By shard, and whether its place is the standby's."""

    def __enter__(self) -> Hosts:
        for standby in (False, True):
            for shard in range(self._num_shards):
                self.start(shard, standby=standby)
        for server in self.of.values():
            assert server.wait_ready(), server.log()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    def start(self, shard: int, *, standby: bool, flags: Sequence[str] = ()) -> StoreProcess:
        flags = [*self._flags, *flags, "--shards-at", ",".join(self.leaders), "--standbys-at", ",".join(self.standbys)]
        flags += ["--shard-index", str(shard + self._num_shards * standby)]
        server = self.of[shard, standby] = StoreProcess(*flags, port=None, environ=self.environ)
        self._ends.callback(server.end)
        return server

    @property
    def url(self) -> str:
        return f"ps://{self.leaders[0]},{self.standbys[0]}"

    def place(self, shard: int, *, standby: bool) -> str:
        return f"ps://{(self.standbys if standby else self.leaders)[shard]}"

    def connect(self, **options: object) -> Store:
        return psstore.connect(self.url, token=TOKEN, wait_s=PATIENCE_S, **options)  # type: ignore[arg-type]

    def kill(self, shard: int, *, standby: bool) -> None:
        """All at once, as with the host."""
        server = self.of[shard, standby]
        for one in self.stop(shard, standby=standby):
            one.kill()
        server.wait()

    def stop(self, shard: int, *, standby: bool) -> list[psutil.Process]:
        """Nothing there does anything until it is resumed."""
        server = self.of[shard, standby]
        processes = [*server.shards(), psutil.Process(server.process.pid)]
        for one in processes:
            one.suspend()
        return processes


def has_ended(hosts: Hosts) -> bool:
    """Whether shard 0 says that the workers are done."""
    credentials = Credentials(token=TOKEN.encode())
    return bool(look_at(hosts.place(0, standby=False), credentials).counters["has_ended"])


def resume(processes: Sequence[psutil.Process]) -> None:
    for one in processes:
        one.resume()


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with Hosts(tmp_path) as hosts:
        yield hosts


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Hosts]:
    """Of a store with one shard: there is nobody to say which of the two leads."""
    with Hosts(tmp_path, num_shards=1) as hosts:
        yield hosts


@contextlib.contextmanager
def trained(hosts: Hosts) -> Iterator[tuple[Store, Store]]:
    """A worker's store after two steps, and a reader's; each shard has a standby that may lead."""
    with hosts.connect() as store, hosts.connect(role="client") as reader:
        create(store)
        await_standbys(store, len(hosts.leaders))
        train(store, 2)
        yield store, reader


def check(store: Store, reader: Store, rounds: int) -> None:
    assert store.version == rounds
    assert_array_equal(store.pull("count"), np.full(8, rounds, F32))
    assert_array_equal(reader.pull("w"), np.full(ELEMS, expected(rounds), F32))


def test_a_shard_whose_process_dies_is_led_on_the_other_host(hosts: Hosts) -> None:
    """Its own supervisor knows that it is dead, and starts it again, as a standby; so both lead by turns."""
    with hosts.connect() as store, hosts.connect(role="client") as reader:
        create(store)
        for killed, shard in enumerate((1, 0, 0, 1), start=1):
            await_standbys(store)
            train(store, 3)
            os.kill(leader(store, shard), signal.SIGKILL)
            train(store, 2)
            check(store, reader, 5 * killed)
        assert [one["led_before"] for one in store.stats()] == [2, 2]

    def handed_over() -> int:
        """How often a supervisor has said so, which it does once the other one leads."""
        logs = "".join(server.log() for server in hosts.of.values())
        return logs.count("was killed by signal 9 (SIGKILL); its standby at")

    assert eventually(lambda: handed_over() == 4)


def test_a_standby_whose_process_dies_is_started_again_and_nobody_waits(hosts: Hosts) -> None:
    with hosts.connect() as store, hosts.connect(role="client") as reader:
        create(store)
        await_standbys(store)
        for shard in range(2):
            (process,) = hosts.of[shard, True].shards()
            process.kill()
        train(store, 3)
        await_standbys(store)
        for shard in range(2):  # and they have all that there was
            os.kill(leader(store, shard), signal.SIGKILL)
        train(store, 2)
        check(store, reader, 5)


@pytest.mark.parametrize("shard", [0, 1])
def test_a_host_that_is_asked_to_end_hands_over(hosts: Hosts, shard: int) -> None:
    with trained(hosts) as (store, reader):
        assert hosts.of[shard, False].stop() == 0
        train(store, 2)
        check(store, reader, 4)
        assert f"is led at {hosts.place(shard, standby=True)} from now on" in hosts.of[shard, False].log()
        hosts.start(shard, standby=False)  # comes back, and stands by
        await_standbys(store)
        assert hosts.of[shard, True].stop() == 0
        train(store, 2)
        check(store, reader, 6)


def test_a_shard_whose_process_is_told_to_end_is_led_on_the_other_host(hosts: Hosts) -> None:
    """As by what signals all processes of a service at once: it says goodbye, and is as dead then as one that did
    not."""
    with trained(hosts) as (store, reader):
        os.kill(leader(store, 1), signal.SIGTERM)
        train(store, 2)
        check(store, reader, 4)


def test_a_shard_whose_supervisor_is_killed_alone_is_led_on_the_other_host(pair: Hosts) -> None:
    """Its process says that it ends, and nobody else is there to say anything."""
    with trained(pair) as (store, reader):
        pair.of[0, False].process.kill()
        train(store, 2)
        check(store, reader, 4)
        pair.of[0, False].wait()
        assert eventually(lambda: "shard 0 is led here" in pair.of[0, True].log())


def test_a_host_that_is_asked_to_end_hands_over_to_a_standby_that_it_has_just_not_heard_of(hosts: Hosts) -> None:
    with trained(hosts) as (store, reader):
        hosts.kill(1, standby=True)
        assert eventually(lambda: "goes on without its standby" in hosts.of[1, False].log())
        train(store, 2)
        supervisor = psutil.Process(hosts.of[1, False].process.pid)
        supervisor.suspend()
        hosts.start(1, standby=True)
        assert eventually(lambda: "the standby of shard 1 here may lead" in hosts.of[1, True].log())
        hosts.of[1, False].signal(signal.SIGTERM)
        supervisor.resume()
        train(store, 2)
        check(store, reader, 6)
        assert hosts.of[1, False].wait() == 0


def test_a_standby_whose_host_dies_and_comes_back_at_its_place_is_waited_for_no_more(hosts: Hosts) -> None:
    with hosts.connect() as store, hosts.connect(role="client") as reader:
        create(store)
        await_standbys(store)
        hosts.kill(0, standby=True)
        training = threading.Thread(target=train, args=(store, 3))
        training.start()
        hosts.start(0, standby=True)
        training.join()
        await_standbys(store)
        os.kill(leader(store, 0), signal.SIGKILL)  # it has all that there was
        train(store, 2)
        check(store, reader, 5)


@pytest.mark.parametrize("shard", [0, 1])
def test_a_host_that_dies_and_comes_back_at_its_place_has_its_standby_lead(hosts: Hosts, shard: int) -> None:
    with trained(hosts) as (store, reader):
        hosts.kill(shard, standby=False)
        hosts.start(shard, standby=False)
        train(store, 2)
        check(store, reader, 4)
        await_standbys(store)
        server = hosts.of[shard, False]
        assert server.wait_ready()
        assert (server.ready["standby"], server.ready["place"]) == (True, hosts.place(shard, standby=False))


def test_a_host_comes_back_to_a_store_that_has_begun_with_nothing_and_has_checkpoints_since(tmp_path: Path) -> None:
    """It goes on with what its other place has, and not with what `--restore auto` finds."""
    run = str(tmp_path / "run")
    flags = ("--checkpoint", run, "--checkpoint-every", "1000000", "--restore", "auto")
    with Hosts(tmp_path, flags=flags) as hosts, trained(hosts) as (store, reader):
        store.checkpoint(run)
        for standby in (False, True):
            hosts.kill(1, standby=standby)
            hosts.start(1, standby=standby)
            await_standbys(store)
            train(store, 2)
        check(store, reader, 6)
        assert all(one.process.poll() is None for one in hosts.of.values())


def test_a_host_that_is_back_before_shard_0_hears_that_this_has_begun_anew(hosts: Hosts) -> None:
    """The other place of its shard knows the shard 0 that was; and none of the two goes on beside the new one."""
    with trained(hosts):
        for standby in (False, True):
            hosts.kill(0, standby=standby)
        hosts.kill(1, standby=True)
        back = hosts.start(1, standby=True)
        assert back.wait_ready()
        hosts.start(0, standby=False)
        assert [hosts.of[1, standby].wait() for standby in (False, True)] == [1, 1]
    assert "has begun anew" in back.log()


@pytest.mark.parametrize("shard", [0, 1])
def test_a_host_that_comes_back_begins_nothing_as_long_as_it_can_not_ask_its_standby(hosts: Hosts, shard: int) -> None:
    """Which may have all that the shard had: other shards say that there was something."""
    with trained(hosts) as (store, reader):
        silent = hosts.stop(shard, standby=True)
        hosts.kill(shard, standby=False)
        back = hosts.start(shard, standby=False)
        assert eventually(lambda: f"waiting for shard {shard}" in back.log()), back.log()
        resume(silent)
        train(store, 2)
        check(store, reader, 4)
        await_standbys(store)


def test_a_host_that_comes_back_begins_nothing_where_nobody_else_can_be_asked(pair: Hosts) -> None:
    with trained(pair) as (store, reader):
        silent = pair.stop(0, standby=True)
        pair.kill(0, standby=False)
        back = pair.start(0, standby=False)
        assert eventually(lambda: "waiting for shard 0" in back.log()), back.log()
        resume(silent)
        train(store, 2)
        check(store, reader, 4)


def test_nobody_begins_with_nothing_where_nobody_says_that_there_was_nothing() -> None:
    credentials = Credentials(token=TOKEN.encode())
    (port,) = free_ports(1)
    nobody = f"ps://127.0.0.1:{port}"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        silent = f"ps://127.0.0.1:{listener.getsockname()[1]}"
        assert why_not_begin(0, nobody, [], credentials) is None
        assert why_not_begin(0, silent, [[silent, nobody]], credentials) is None
        for others in ([], [[silent]]):
            why_not = why_not_begin(0, silent, others, credentials)
            assert why_not is not None
            assert why_not.startswith("nobody is in reach to say whether there is something of this store, and ps://")


def test_who_knows_says_that_a_host_is_dead(pair: Hosts) -> None:
    """Neither of the two does by itself: its connection is lost, and that is all."""
    with trained(pair) as (store, reader):
        pair.kill(0, standby=False)
        done = threading.Event()

        def go_on() -> None:
            train(store, 2)
            done.set()

        training = threading.Thread(target=go_on)
        training.start()
        assert not done.wait(3.0 * LEASE_S)  # it waits, and nobody guesses
        result = CliRunner().invoke(app, ["promote", pair.place(0, standby=True)], env=pair.environ)
        assert result.exit_code == 0, result.output
        assert result.output == f"shard 0 is led at {pair.place(0, standby=True)}\n"
        training.join()
        check(store, reader, 4)


def test_a_leader_is_told_that_its_standby_is_dead(pair: Hosts) -> None:
    with trained(pair) as (store, reader):
        pair.kill(0, standby=True)
        assert eventually(lambda: "nobody is told anything" in pair.of[0, False].log())
        training = threading.Thread(target=train, args=(store, 2))
        training.start()
        training.join(3.0 * LEASE_S)
        assert training.is_alive()
        result = CliRunner().invoke(app, ["promote", pair.place(0, standby=False)], env=pair.environ)
        assert result.exit_code == 0, result.output
        training.join()
        check(store, reader, 4)


@pytest.mark.parametrize("shard", [0, 1])
def test_a_shard_whose_host_is_silent_is_led_on_the_other_one_by_the_word_of_the_other_shards(
    hosts: Hosts, shard: int
) -> None:
    with trained(hosts) as (store, reader):
        hosts.kill(shard, standby=False)
        train(store, 2)
        check(store, reader, 4)
        assert "its standby here leads" in hosts.of[shard, True].log()
        hosts.start(shard, standby=False)  # comes back, and stands by
        await_standbys(store)
        train(store, 2)
        check(store, reader, 6)


def test_a_shard_goes_on_without_a_standby_whose_host_is_silent(hosts: Hosts) -> None:
    with trained(hosts) as (store, reader):
        stopped = hosts.stop(1, standby=True)
        train(store, 2)
        assert "goes on without its standby" in hosts.of[1, False].log()
        resume(stopped)
        await_standbys(store)  # it has seen that it was done without, and was filled again
        os.kill(leader(store, 1), signal.SIGKILL)
        train(store, 2)
        check(store, reader, 6)


def test_a_leader_that_stood_still_while_another_one_came_to_lead_tells_nobody_anything(hosts: Hosts) -> None:
    with trained(hosts) as (store, reader):
        stopped = hosts.stop(0, standby=False)
        train(store, 3)
        check(store, reader, 5)
        resume(stopped)
        with hosts.connect(role="client") as fresh:  # asks the place first that woke up
            assert_array_equal(fresh.pull("w"), np.full(ELEMS, expected(5), F32))
        train(store, 2)
        await_standbys(store)
        check(store, reader, 7)
        assert "its process here ends, and stands by" in hosts.of[0, False].log()


def test_a_standby_that_leads_writes_checkpoints_where_the_one_before_may_live(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    with Hosts(tmp_path, flags=("--checkpoint", run)) as hosts, trained(hosts) as (store, _):
        store.checkpoint(run)
        hosts.stop(0, standby=False)
        train(store, 2)
        began = time.monotonic()
        store.checkpoint(run)
        assert time.monotonic() - began < 15.0  # before a lease is over
        assert open_place(run).place.latest() == 4
        hosts.kill(0, standby=False)


def test_a_standby_without_which_its_shard_went_on_does_not_lead_by_mistake(hosts: Hosts) -> None:
    """Its shard is dead by now; what it has is old."""
    with trained(hosts) as (store, _):
        stopped = hosts.stop(1, standby=True)
        train(store, 2)
        hosts.kill(1, standby=False)
        resume(stopped[:-1])  # who watches it does not see it
        result = CliRunner().invoke(app, ["promote", hosts.place(1, standby=True)], env=hosts.environ)
        assert result.exit_code == 3
        assert "has gone on without this standby: what it has is old" in result.stderr
        resume(stopped[-1:])
        assert eventually(lambda: "goes on without its standby here" in hosts.of[1, True].log())


def test_all_hosts_end_when_the_workers_are_done(tmp_path: Path) -> None:
    with Hosts(tmp_path, flags=("--until-done",)) as hosts:
        with hosts.connect() as store:
            create(store)
            await_standbys(store)
            train(store, 2)
        assert [server.wait() for server in hosts.of.values()] == [0, 0, 0, 0]


def test_all_hosts_end_when_the_workers_are_lost_after_a_last_checkpoint(tmp_path: Path) -> None:
    place = tmp_path / "run"
    flags = ("--until-done", "--patience-s", "1", "--checkpoint", str(place), "--checkpoint-every", "1000000")
    with Hosts(tmp_path, flags=flags) as hosts:
        store = hosts.connect()
        create(store)
        await_standbys(store)
        train(store, 2)
        store.end(leave=False)
        assert [server.wait() for server in hosts.of.values()] == [1, 1, 1, 1]
        assert all("rank 0 went without leaving" in server.log() for server in hosts.of.values())
    assert [one.version for one in open_place(str(place)).place.list()] == [2]


@pytest.mark.parametrize("place", [(1, True), (0, True), (0, False)])
def test_a_host_that_stands_still_as_the_workers_finish_ends_too(tmp_path: Path, place: tuple[int, bool]) -> None:
    """It hears of it where shard 0 is led, and from nobody else: so that one waits for it. If it leads shard 0 itself,
    that goes on without its standby, which has heard of it, and ended."""
    with Hosts(tmp_path, flags=("--until-done",)) as hosts:
        with trained(hosts):
            still = psutil.Process(hosts.of[place].process.pid)
            still.suspend()
        time.sleep(STILL_S)
        still.resume()
        assert [server.wait() for server in hosts.of.values()] == [0, 0, 0, 0]


def test_a_host_ends_too_that_asks_once_the_standby_of_shard_0_has_died(tmp_path: Path) -> None:
    """Without a word: shard 0 tells nobody anything before another shard says that it is gone, as at any time."""
    with Hosts(tmp_path, flags=("--until-done",)) as hosts:
        with trained(hosts):
            late, dies = (psutil.Process(hosts.of[place].process.pid) for place in ((1, False), (0, True)))
            late.suspend()
            dies.suspend()
        assert eventually(lambda: has_ended(hosts))
        hosts.kill(0, standby=True)
        assert eventually(lambda: "has lost its standby" in hosts.of[0, False].log())
        late.resume()
        assert [hosts.of[place].wait() for place in ((0, False), (1, False), (1, True))] == [0, 0, 0]


def test_a_host_that_nobody_waits_for_any_longer_hears_of_the_end_by_the_stream(tmp_path: Path) -> None:
    """Its standby has it from its shard, which nobody can be asked about any more when the host goes on."""
    with Hosts(tmp_path, flags=("--until-done",)) as hosts:
        with trained(hosts):
            late = psutil.Process(hosts.of[1, True].process.pid)
            late.suspend()
        assert hosts.of[0, False].wait() == hosts.of[1, False].wait() == 0
        late.resume()
        assert [server.wait() for server in hosts.of.values()] == [0, 0, 0, 0]


def test_a_host_that_is_just_back_as_the_workers_finish_ends_too(tmp_path: Path) -> None:
    """Its standby is not up before the shard is gone that it was to follow."""
    with Hosts(tmp_path, flags=("--until-done",)) as hosts:
        with trained(hosts) as (store, _):
            hosts.kill(1, standby=True)
            train(store, 2)
            back = hosts.start(1, standby=True)
            assert eventually(lambda: bool(back.shards()))
            (process,) = back.shards()
            process.suspend()
        assert hosts.of[1, False].wait() == 0
        process.resume()
        assert [server.wait() for server in hosts.of.values()] == [0, 0, 0, 0]


def test_a_standby_whose_host_is_asked_to_end_is_waited_for_by_nobody(pair: Hosts) -> None:
    """Nobody else could say that it will never lead."""
    with trained(pair) as (store, reader):
        assert pair.of[0, True].stop() == 0
        train(store, 2)
        check(store, reader, 4)
        assert "has lost its standby" not in pair.of[0, False].log()
        pair.start(0, standby=True)
        await_standbys(store, 1)
        assert pair.of[0, False].stop() == 0  # and it has all that there was
        train(store, 2)
        check(store, reader, 6)


def test_a_standby_is_live_and_ready_where_it_waits(hosts: Hosts) -> None:
    """Or its pod would be ended, and a Service send nobody there once it leads."""
    with hosts.connect() as store:
        await_standbys(store)
        hosts.of[1, True].stop()
        again = hosts.start(1, standby=True, flags=("--metrics", "0"))
        assert again.wait_ready()
        pages = again.ready["metrics"]
        assert eventually(lambda: get(f"{pages}/readyz") == (200, "ok: it stands by\n"))
        assert get(f"{pages}/livez") == (200, "ok\n")
        await_standbys(store)
        os.kill(leader(store, 1), signal.SIGKILL)
        assert eventually(lambda: get(f"{pages}/readyz") == (200, "ok: there are no tensors yet\n"))


def test_a_standby_that_is_connected_to_its_shard_does_not_lead_by_mistake(hosts: Hosts) -> None:
    with hosts.connect() as store:
        create(store)
        await_standbys(store)
        result = CliRunner().invoke(app, ["promote", hosts.place(1, standby=True)], env=hosts.environ)
        assert result.exit_code == 3
        assert "two would lead" in result.stderr
        train(store, 2)


def test_a_leader_that_was_taken_for_dead_ends_and_stands_by(hosts: Hosts) -> None:
    """It stood still, with its supervisor: an operator has said --force. It wakes up, tells nobody anything, and sees
    that another one leads."""
    with trained(hosts) as (store, reader):
        processes = hosts.stop(1, standby=False)
        result = CliRunner().invoke(app, ["promote", hosts.place(1, standby=True), "--force"], env=hosts.environ)
        assert result.exit_code == 0, result.output
        with hosts.connect(role="client", timeout_s=0.9 * HANDSHAKE_S) as fresh:  # less than a shard has to greet
            assert_array_equal(fresh.pull("w"), np.full(ELEMS, expected(2), F32))
        resume(processes)
        train(store, 2)
        check(store, reader, 4)
        await_standbys(store)
        assert "its process here ends, and stands by" in hosts.of[1, False].log()


def test_clients_are_sent_to_the_first_place_of_shard_0_and_to_its_standbys_on_another_host() -> None:
    assert Site(ServerSettings(), None, 0, [], (("unix:///run/store", "ps://h:5700"),)).url == "unix:///run/store"
    url = Site(ServerSettings(), None, 0, [], (("ps://h1:5700", "ps://h2:5701"),), "ps://h2:5701").url
    assert [str(one) for one in parse_addresses(url)] == ["ps://h1:5700", "ps://h2:5701"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--standbys-at", "b:1"), "--shards-at"),
        (("--shards-at", "a:1,b:1", "--standbys-at", "c:1", "--shard-index", "0"), "expected as many"),
        (("--shards-at", "a:1,b:1", "--standbys-at", "c:1,a:1", "--shard-index", "0"), "a place of its own"),
        (("--shards-at", "a:1", "--shard-index", "1"), "shards_at names 1"),
        (("--shards-at", "a:1", "--standbys-at", "b:1", "--shard-index", "2"), "shards_at and standbys_at name 2"),
        (("--shards-at", "a:1", "--standbys-at", "b:1", "--shard-index", "0", "--standbys", "1"), "--standbys-at"),
    ],
)
def test_places_that_do_not_fit_are_refused(flags: tuple[str, ...], said: str) -> None:
    status, text = failed_start(*flags, port=None)
    assert status == 3
    assert said in text
