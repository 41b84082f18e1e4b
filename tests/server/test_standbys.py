"""Shards with standbys, as processes: one of two dies or stands still, and who trains notices nothing but the delay."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator

import numpy as np
import psutil
import pytest
from numpy.testing import assert_array_equal
from typer.testing import CliRunner

import psstore
from psstore.cli.main import app
from psstore.client.store import Store
from psstore.errors import ShuttingDown
from psstore.server.shard_group import STOPPED_S
from tests.support.cluster import PATIENCE_S
from tests.support.raw_client import RawClient
from tests.support.server_process import StoreProcess, eventually, failed_start

F32 = np.float32
ELEMS = 300_000
"""Some slices, on every shard."""

pytestmark = [pytest.mark.sockets, pytest.mark.one_loop]


@pytest.fixture(params=["tcp", "unix", "shm"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    path = str(tmp_path_factory.mktemp("standbys") / "socket")
    with StoreProcess("--shards", "2", "--standbys", "1", "--host", "127.0.0.1", "--uds", path) as process:
        yield process


def connect(process: StoreProcess, transport: str = "auto", **options: object) -> Store:
    return psstore.connect(process.url, transport=transport, wait_s=PATIENCE_S, **options)  # type: ignore[arg-type]


def await_standbys(store: Store, num_shards: int = 2) -> None:
    """Until each shard has one that may lead."""
    assert eventually(lambda: [one["standbys"] for one in store.stats()] == [1] * num_shards)


def leader(store: Store, shard: int) -> int:
    return int(store.stats()[shard]["process"])


def status(process: StoreProcess) -> str:
    return CliRunner().invoke(app, ["status", process.url]).output


def train(store: Store, rounds: int) -> None:
    for _ in range(rounds):
        store.push("w", np.full(ELEMS, 1.0, F32))
        store.commit({"lr": 1.0, "momentum": 0.5})
        store.push("count", np.ones(8, F32))


def expected(rounds: int) -> float:
    value = momentum = 0.0
    for _ in range(rounds):
        momentum = 0.5 * momentum + 1.0
        value -= momentum
    return value


def create(store: Store) -> None:
    store.create("w", np.zeros(ELEMS, F32), rule="sgd", reduction="median")
    store.create("count", np.zeros(8, F32), rule="add")


def test_who_trains_notices_nothing_but_the_delay(
    served: StoreProcess, transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    with connect(served, transport) as store, connect(served, transport, role="client") as reader:
        create(store)
        for killed, shard in enumerate((1, 0, 0, 1), start=1):
            await_standbys(store)
            train(store, 3)
            os.kill(leader(store, shard), signal.SIGKILL)
            train(store, 2)
            rounds = 5 * killed
            assert store.version == rounds
            assert_array_equal(store.pull("count"), np.full(8, rounds, F32))
            assert_array_equal(reader.pull("w"), np.full(ELEMS, expected(rounds), F32))
        assert [one["led_before"] for one in store.stats()] == [2, 2]
    assert eventually(lambda: served.log().count("serves again, from version") == 4)
    log = served.log()
    assert log.count("was killed by signal 9 (SIGKILL); its standby leads") == 4
    since = [int(version) for version in re.findall(r"serves again, from version (\d+) on, \d+\.\d\d s after", log)]
    behind = [version - led for version, led in zip((3, 8, 13, 18), since, strict=True)]
    assert set(behind) <= {0, 1}, since  # a shard hears of the last decision with the next push
    said = [record.getMessage() for record in caplog.records if record.name == "psstore.client"]
    assert sorted(re.sub(r"[\d.]+ s after .*", "N s", line) for line in said) == [
        f"shard {k} serves again, N s"
        for k in (0, 1)
        for _ in range(2 * 2)  # deaths of its leader, who was connected
    ], said


def test_a_leader_that_is_told_to_end_alone_leaves_its_socket_to_its_standby(served: StoreProcess) -> None:
    with connect(served, "unix") as store:
        create(store)
        await_standbys(store)
        train(store, 1)
        os.kill(leader(store, 0), signal.SIGTERM)
        train(store, 1)  # answered by the one or by the other
        assert eventually(lambda: [one["led_before"] for one in store.stats()] == [1, 0])
        await_standbys(store)
        assert_array_equal(store.pull("w"), np.full(ELEMS, expected(2), F32))


def test_momentum_is_the_same_in_the_end(served: StoreProcess) -> None:
    with connect(served) as store:
        create(store)
        await_standbys(store)
        train(store, 3)
        os.kill(leader(store, 0), signal.SIGKILL)
        os.kill(leader(store, 1), signal.SIGKILL)
        train(store, 1)
        create(store)  # which would be refused if it were another tensor by now
        assert_array_equal(store.pull_state(["w"])[0].buffers["momentum_buffer"], np.full(ELEMS, 1.875, F32))


def test_who_follows_by_deltas_has_what_others_have_whoever_leads(served: StoreProcess) -> None:
    """What was published is nobody's but its process': a standby that leads publishes its values as they are."""
    rng = np.random.default_rng(0)

    def step(store: Store) -> None:
        store.push("w", rng.standard_normal(ELEMS, F32))
        store.commit({"lr": 0.1})

    with connect(served) as store, connect(served, role="client") as reader:
        create(store)
        await_standbys(store)
        store.pull("w", codec="sign")
        reader.pull("w", codec="sign")
        step(store)
        store.pull("w", codec="sign")  # and the reader has not asked yet
        for shard in (0, 1):
            os.kill(leader(store, shard), signal.SIGKILL)
        reader.pull("w", codec="sign")
        for _ in range(3):
            step(store)
            mine, its = store.pull("w", codec="sign"), reader.pull("w", codec="sign")
            assert_array_equal(mine, its)


def test_who_leads_knows_what_workers_were_sent() -> None:
    """A gradient of 1 that was taken at 0 is compensated by half of what the value is since: 2."""
    options = ("--shards", "2", "--standbys", "1", "--host", "127.0.0.1", "--workers", "2", "--mode", "async")
    with StoreProcess(*options) as process, connect(process, rank=0) as late, connect(process, rank=1) as early:
        late.create("w", shape=(ELEMS,), rule="sgd", compensation=0.5)
        await_standbys(late)
        late.pull("w")
        early.push("w", np.full(ELEMS, -2.0, F32))
        early.commit({"lr": 1.0})
        for shard in (0, 1):
            os.kill(leader(early, shard), signal.SIGKILL)
        late.push("w", np.full(ELEMS, 1.0, F32))
        late.commit({"lr": 1.0})
        assert_array_equal(early.pull("w"), np.full(ELEMS, 0.0, F32))


def test_a_leader_that_dies_in_the_middle_of_a_push_loses_nothing(served: StoreProcess) -> None:
    """The pushes of many workers are on their way all the time, and each counts once."""
    with connect(served) as store:
        create(store)
        await_standbys(store)
        done = threading.Event()
        counted = [0, 0, 0]

        def write(number: int) -> None:
            with connect(served, role="client") as writer:
                while not done.is_set():
                    writer.push("count", np.ones(8, F32))
                    counted[number] += 1

        threads = [threading.Thread(target=write, args=(number,)) for number in range(len(counted))]
        for thread in threads:
            thread.start()
        for shard in (0, 1, 0):
            await_standbys(store)
            before = sum(counted)
            eventually(lambda before=before: sum(counted) > before + 30)  # type: ignore[misc]
            os.kill(leader(store, shard), signal.SIGKILL)
        eventually(lambda: [one["led_before"] for one in store.stats()] == [2, 1])
        done.set()
        for thread in threads:
            thread.join()
        assert_array_equal(store.pull("count"), np.full(8, sum(counted), F32))


def seen(store: Store, what: str) -> list[int]:
    """How many files in memory of that name each process of the store has mapped."""
    supervisor = psutil.Process(psutil.Process(leader(store, 0)).ppid())
    maps = [child.memory_maps(grouped=False) for child in supervisor.children()]
    return sorted(sum(f"psstore-{what}" in one.path for one in each) for each in maps)


def test_a_standby_sees_what_its_shard_received_and_no_longer_than_it_follows(served: StoreProcess) -> None:
    with connect(served, role="client") as looking:
        with connect(served, "shm", rank=0) as store:
            create(store)
            await_standbys(store)
            assert eventually(lambda: seen(looking, "pushes") == [2] * 4), "two clients', by all"
            assert eventually(lambda: seen(looking, "values") == [1, 1, 2, 2]), "its own, and its shard's"
            train(store, 3)
            store.push("w", np.full(ELEMS, 1.0, F32))
            for shard in (0, 1):  # which leads with what was pushed
                os.kill(leader(store, shard), signal.SIGKILL)
                await_standbys(store)
            assert eventually(lambda: seen(looking, "pushes") == [2] * 4), "those of before are gone"
            assert eventually(lambda: seen(looking, "values") == [1, 1, 2, 2])
            store.commit({"lr": 1.0, "momentum": 0.5})
            train(store, 2)
            assert_array_equal(store.pull("w"), np.full(ELEMS, expected(6), F32))
        assert eventually(lambda: seen(looking, "pushes") == [1] * 4), "who is gone pushes nothing"


def test_a_standby_lets_go_of_what_a_scale_made_ready_without_a_word_more(served: StoreProcess) -> None:
    def held(store: Store) -> list[int]:
        """Bytes that each shard has beside its values."""
        return [int(one["memory_bytes"]) - int(one["value_bytes"]) for one in store.stats()]

    with connect(served, "tcp", rank=0) as store:
        store.create("w", np.zeros(2 << 20, F32), rule="sgd")
        await_standbys(store)
        before = held(store)
        store.push("w", np.full(2 << 20, 1.0, F32))
        store.commit({"lr": 1.0}, max_norm=1.0)
        store.pull("w")
        assert eventually(lambda: held(store) == before)


def test_a_standby_that_dies_is_replaced_and_nobody_waits_for_it(served: StoreProcess) -> None:
    with connect(served) as store:
        create(store)
        await_standbys(store)
        leaders = {leader(store, 0), leader(store, 1)}
        standbys = [one for one in served.shards() if one.pid not in leaders]
        assert len(standbys) == 2
        assert status(served).count(" leads, a standby may lead (") == 2
        standbys[0].kill()
        standbys[1].send_signal(signal.SIGRTMIN + 5)  # which has no name
        began = time.monotonic()
        train(store, 3)
        assert time.monotonic() - began < PATIENCE_S / 2
        eventually(lambda: served.log().count("may lead") == 4)
        assert {leader(store, 0), leader(store, 1)} == leaders
        for shard in (0, 1):  # and those that came later have all that there was
            os.kill(leader(store, shard), signal.SIGKILL)
        train(store, 1)
        assert status(served).count(" leads after 1 that died") == 2
        assert_array_equal(store.pull("w"), np.full(ELEMS, expected(4), F32))


def test_a_new_standby_has_all_that_workers_handed_in(served: StoreProcess) -> None:
    handed = bytes(range(256)) * (5 << 14)  # 20 MiB: more than a frame holds
    with connect(served) as store:
        create(store)
        await_standbys(store)
        train(store, 1)
        store.hand_in(handed)
        for _ in range(2):  # a standby that was told in parts, and one that was filled with it
            os.kill(leader(store, 0), signal.SIGKILL)
            await_standbys(store)
        back = store.handed_in()
        assert back is not None
        assert back.state == handed


def test_a_standby_for_which_there_is_no_room_is_started_later(served: StoreProcess) -> None:
    with connect(served) as store:
        create(store)
        await_standbys(store)
        supervisor = psutil.Process(served.process.pid)
        leaders = {leader(store, 0), leader(store, 1)}
        most, hard = supervisor.rlimit(psutil.RLIMIT_NOFILE)
        supervisor.rlimit(psutil.RLIMIT_NOFILE, (supervisor.num_fds() - 2, hard))
        for one in served.shards():
            if one.pid not in leaders:
                one.kill()
        assert eventually(lambda: "gets no standby for now" in served.log())
        train(store, 3)
        supervisor.rlimit(psutil.RLIMIT_NOFILE, (most, hard))
        await_standbys(store)
        assert {leader(store, 0), leader(store, 1)} == leaders
        assert_array_equal(store.pull("w"), np.full(ELEMS, expected(3), F32))


@pytest.mark.parametrize("who", ["leader", "standby"])
def test_who_stands_still_is_done_without(served: StoreProcess, who: str) -> None:
    with connect(served) as store:
        create(store)
        await_standbys(store)
        leaders = {leader(store, 0), leader(store, 1)}
        victim = psutil.Process(leader(store, 1))
        if who == "standby":
            victim = next(one for one in served.shards() if one.pid not in leaders)
        victim.suspend()
        train(store, 3)
        assert_array_equal(store.pull("w"), np.full(ELEMS, expected(3), F32))
        eventually(lambda: not victim.is_running() or victim.status() == psutil.STATUS_ZOMBIE)
    assert "has stood still for 2 s and is done without" in served.log()


@pytest.mark.parametrize("is_suspended", [False, True])
def test_a_shard_whose_processes_stand_still_together_waits_for_them(served: StoreProcess, is_suspended: bool) -> None:
    """As those of a job, or of a machine, that is suspended: when it goes on, its supervisor hears of both at once."""
    with connect(served) as store:
        create(store)
        await_standbys(store)
        train(store, 1)
        processes = served.shards()
        supervisor = [psutil.Process(served.process.pid)] if is_suspended else []
        for one in [*processes, *supervisor]:
            one.suspend()
        assert not eventually(lambda: "is done without" in served.log(), timeout_s=2 * STOPPED_S + 1.0)
        for one in [*supervisor, *processes]:
            one.resume()
        train(store, 2)
        assert_array_equal(store.pull("w"), np.full(ELEMS, expected(3), F32))
    assert "is done without" not in served.log()


def test_of_two_that_stand_still_whichever_goes_on_does_without_the_other(served: StoreProcess) -> None:
    with connect(served) as store:
        create(store)
        await_standbys(store)
        leaders = {leader(store, 0), leader(store, 1)}
        processes = served.shards()
        for one in processes:
            one.suspend()
        assert not eventually(lambda: "is done without" in served.log(), timeout_s=STOPPED_S + 1.0)
        for one in processes:
            if one.pid not in leaders:
                one.resume()
        train(store, 3)
        assert_array_equal(store.pull("w"), np.full(ELEMS, expected(3), F32))
    assert served.log().count("its standby leads") == 2


def test_a_snapshot_is_told_that_its_version_went_with_the_process(served: StoreProcess) -> None:
    with connect(served) as store, connect(served, role="client") as reader:
        create(store)
        train(store, 2)
        await_standbys(store)
        with reader.snapshot() as view:
            assert view.version == 2
            os.kill(leader(store, 0), signal.SIGKILL)
            with pytest.raises(psstore.errors.VersionGone):
                view.pull_many(["w"])
        assert_array_equal(reader.pull("w"), np.full(ELEMS, expected(2), F32))


def test_a_shard_that_dies_before_its_standby_may_lead_is_lost(served: StoreProcess) -> None:
    with connect(served) as store:
        create(store)
        await_standbys(store)
        leaders = {leader(store, 0), leader(store, 1)}
        for one in served.shards():
            if one.pid not in leaders:
                one.suspend()
        for pid in leaders:
            os.kill(pid, signal.SIGSTOP)  # so that it tells nobody that it has lost its standby
        for one in served.shards():
            one.kill()
        assert served.wait() == 1
    assert "the store is lost" in served.log()


def test_a_store_with_standbys_ends_as_any_other(served: StoreProcess) -> None:
    with connect(served) as store:
        create(store)
        await_standbys(store)
        processes = served.shards()
        train(store, 1)
    began = time.monotonic()
    assert served.stop() == 0
    assert time.monotonic() - began < 4.0
    assert not any(one.is_running() for one in processes)


def test_a_store_with_standbys_tells_its_clients_that_it_ends() -> None:
    """Also those that came after them: they are told what waits for nobody."""
    with StoreProcess("--standbys", "1") as process:
        with connect(process) as store:
            await_standbys(store, 1)
        with RawClient(process.url) as client:
            client.hello()
            began = time.monotonic()
            process.signal(signal.SIGTERM)
            with pytest.raises(ShuttingDown):
                client.reply("STATISTICS")
            client.close()
            assert process.wait() == 0
            assert time.monotonic() - began < 4.0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--standbys", "1", "--device", "cuda:0"), "--standbys is for shards in main memory"),
        (("--standbys", "2"), "standbys"),
    ],
)
def test_standbys_that_cannot_be_are_refused(flags: tuple[str, ...], said: str) -> None:
    status, text = failed_start(*flags)
    assert status == 3
    assert said in text
