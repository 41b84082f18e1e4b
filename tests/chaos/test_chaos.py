"""A few runs of the chaos program; `python -m tests.chaos --runs 300` for many."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench import virtual_hosts

from tests.chaos import disk
from tests.chaos.ledger import account
from tests.chaos.links import TRICKLE_BYTES, Links
from tests.chaos.notes import BEGINS, FOUND, HANDED, NOTHING, SENDS, STEPPED, WRONG, Notes
from tests.chaos.plan import RUN_S, STEPS, ChaosPlan, Fault, Scene, plan_of
from tests.chaos.run import ChaosRun, expected_end, run

pytestmark = [pytest.mark.sockets, pytest.mark.one_loop, pytest.mark.timeout(3 * RUN_S)]

ON_HOSTS = pytest.mark.skipif(virtual_hosts.why_not() is not None, reason=str(virtual_hosts.why_not()))
ON_DISK = pytest.mark.skipif(disk.why_not() is not None, reason=str(disk.why_not()))


def hold(plan: ChaosPlan) -> ChaosRun:
    """Runs it; it must end as if nothing had happened, and something must have."""
    result = run(plan)
    assert not result.problems(expected_end(result)), result.output
    assert result.done, "nothing went wrong in it"
    return result


@pytest.mark.parametrize(
    ("scene", "seed"),
    [
        ("processes", 1),
        ("standbys", 3),
        ("links", 1),
        pytest.param("hosts", 1, marks=ON_HOSTS),
        pytest.param("disk", 1, marks=ON_DISK),
    ],
)
def test_a_disturbed_training_ends_with_the_undisturbed_bytes(scene: Scene, seed: int) -> None:
    hold(plan_of(seed, scene))


def test_a_disturbed_session_ends_with_the_undisturbed_bytes() -> None:
    killed = (Fault(20, "kill", "worker 1"), Fault(30, "kill", "shard 1"), Fault(40, "kill", "shard 0"))
    hold(ChaosPlan(0, 2, 2, "backward", killed))


def test_a_training_goes_on_with_other_numbers_of_shards_of_which_some_die() -> None:
    number = (Fault(15, "reshard", "store to 3"), Fault(30, "kill", "shard 1"), Fault(45, "reshard", "store to 1"))
    result = hold(ChaosPlan(0, 2, 2, "plain", number))
    assert any("goes on with 3 shards" in line for line in result.output), result.output


def test_a_training_ends_with_the_undisturbed_bytes_where_workers_come_and_go() -> None:
    """Who was in which step is as the log of members has it, also once the store went back and on with other shards."""
    faults = (Fault(12, "kill", "worker 1"), Fault(20, "kill", "shard 1"), Fault(40, "reshard", "store to 3"))
    result = hold(ChaosPlan(0, 2, 3, "plain", faults, fewest=1))
    assert any("is away for a while" in line for line in result.output), result.output


def test_a_session_ends_as_its_log_of_members_says_where_workers_come_and_go() -> None:
    """The first is not waited for until it is started again; each epoch has each sample once all the same."""
    faults = (Fault(12, "kill", "worker 1"), Fault(20, "kill", "shard 1"), Fault(40, "reshard", "store to 3"))
    result = hold(ChaosPlan(0, 2, 3, "backward", faults, fewest=1, drops=True))
    assert any("is away for a while" in line for line in result.output), result.output
    assert any(one.absent for one in result.log), result.log


def test_a_training_outlives_every_fault_of_a_link() -> None:
    faults = (
        Fault(10, "cut", "link 0"),
        Fault(20, "trickle", "link 1", 0.5),
        Fault(30, "delay", "link 0", 0.5),
        Fault(40, "half-open", "link 1 of 1"),
    )
    assert len(hold(ChaosPlan(0, 2, 2, "plain", faults, "links")).done) == len(faults)


@ON_HOSTS
def test_a_training_outlives_the_hosts_of_different_shards_by_turns() -> None:
    """The first stands still for so long that the others have its standby lead, and wakes up; the second is dead and
    back before they have."""
    faults = (
        Fault(10, "stop", "host of leader 0", 6.0),
        Fault(20, "kill", "standby 1"),
        Fault(30, "crash", "host of leader 1", 0.5),
    )
    result = hold(ChaosPlan(0, 2, 1, "plain", faults, "apart"))
    assert len(result.done) == len(faults)
    assert any("shard 0 is led at" in line for line in result.output), result.output  # says who woke up


@ON_DISK
def test_a_training_goes_on_beside_a_full_disk_with_a_warning() -> None:
    """Rank 0 stands still first, so that the disk is full when the next checkpoint is due."""
    full = Fault(12, "fill", "disk", 4.0)
    result = hold(ChaosPlan(0, 2, 2, "plain", (full,), "disk"))
    assert any("no checkpoint was written to" in line for line in result.output), result.output


# ---- what it would notice ----


def test_a_run_that_ends_otherwise_is_noticed() -> None:
    plan, end = plan_of(1), f"version {STEPS} sha256 00"
    good = ChaosRun(plan, ends={f"rank {rank}": end for rank in range(plan.num_workers)}, exit_codes={"": 0})
    assert not good.problems(end)
    assert good.problems(f"version {STEPS} sha256 01")
    assert replace(good, ends={"rank 0": end, "rank 9": end}).problems(end)
    assert replace(good, exit_codes={"": 0, "rank 1": 1}).problems(end)
    found = ["something"]
    for bad in (
        replace(good, lost=found),
        replace(good, doubled=found),
        replace(good, damaged=found),
        replace(good, left=found),
    ):
        assert bad.problems(end)
    assert replace(good, hangs=True).problems(end)


def told(folder: Path, rounds: list[float], writes: list[float], **found: Any) -> tuple[int, int]:
    """How much one worker has lost, and doubled, in three steps."""
    Notes(folder, 0).end(rounds=[rounds], writes=[writes], **{"log": [], **found})
    account_of = account(folder, 1, 3, num_samples=4 if "used" in found else 0)
    return len(account_of.lost), len(account_of.doubled)


def test_the_ledger_tells_what_was_lost_and_what_was_doubled(tmp_path: Path) -> None:
    notes = Notes(tmp_path, 0)
    for step in (1, 2, 2, 3):
        notes.note(SENDS, step)
        notes.note(STEPPED, step)
    in_all = [1.0, 1.0, 1.0]
    assert told(tmp_path, in_all, [1, 2, 1]) == (0, 0)
    assert told(tmp_path, in_all, [1, 1, 1]) == (0, 0)  # it was taken again after the store had forgotten the first
    assert told(tmp_path, [1, 0, 1], in_all) == (1, 0)
    assert told(tmp_path, [1, 2, 1], in_all) == (0, 1)
    assert told(tmp_path, in_all, [1, 3, 2]) == (0, 2)
    assert told(tmp_path, in_all, [0, 1, 1]) == (1, 0)
    assert told(tmp_path, [1, 1.5, 1], in_all) == (0, 1)
    assert len(account(tmp_path, 1, 3).waits) == 3


def test_the_ledger_holds_steps_against_the_log_of_members(tmp_path: Path) -> None:
    notes = Notes(tmp_path, 0)
    for step in (1, 2, 3):
        notes.note(SENDS, step)
    not_in_2 = [{"version": 0, "came": [0]}, {"version": 2, "absent": [0]}]
    assert told(tmp_path, [1, 0, 1], [1, 0, 1], log=not_in_2) == (0, 0)
    assert told(tmp_path, [1, 0, 1], [1, 1, 1], log=not_in_2) == (0, 0)  # of a step that never was
    assert told(tmp_path, [1, 1, 1], [1, 1, 1], log=not_in_2) == (0, 1)
    assert told(tmp_path, [1, 0, 0], [1, 1, 1], log=not_in_2) == (1, 0)
    notes.note(STEPPED, 2)
    assert told(tmp_path, [1, 0, 1], [1, 1, 1], log=not_in_2) == (1, 0)
    notes.note(BEGINS, 1)  # and was not in the step that was taken in its place
    assert told(tmp_path, [1, 0, 1], [1, 1, 1], log=not_in_2) == (0, 0)


def test_the_ledger_has_each_epoch_have_each_sample_once(tmp_path: Path) -> None:
    notes, in_all = Notes(tmp_path, 0), [1.0, 1.0, 1.0]
    for step in (1, 2, 3):
        notes.note(SENDS, step)
    assert told(tmp_path, in_all, in_all, used=[[0, 3], [1, 2], [3, 0]]) == (0, 0)
    assert told(tmp_path, in_all, in_all, used=[[0, 3], [1, 2], [3, 3]]) == (0, 1)
    assert told(tmp_path, in_all, in_all, used=[[0, 3], [1], [3, 2]]) == (0, 1)


def test_the_ledger_looks_for_what_was_handed_in(tmp_path: Path) -> None:
    notes, in_all = Notes(tmp_path, 0), [1.0, 1.0, 1.0]
    for step in (1, 2, 3):
        notes.note(SENDS, step)

    def num_lost() -> int:
        return told(tmp_path, in_all, in_all)[0]

    notes.note(FOUND, NOTHING, "a", -1)
    notes.note(HANDED, 0, "a", False)
    notes.note(HANDED, 2, "a", True)
    notes.note(FOUND, 2, "a", -1)
    assert num_lost() == 0
    notes.note(FOUND, 0, "a", -1)
    assert num_lost() == 1
    notes.note(FOUND, NOTHING, "b", 1)  # which began with another checkpoint
    notes.note(FOUND, 2, "c", 2)
    assert num_lost() == 1
    notes.note(FOUND, NOTHING, "d", 2)
    notes.note(FOUND, WRONG, "e", 1)
    assert num_lost() == 3
    notes.note(BEGINS, 1)  # and from there to another version 2
    notes.note(FOUND, NOTHING, "f", 2)
    assert num_lost() == 3


class Echo:
    """A server that sends back what it gets, behind a proxy."""

    def __init__(self) -> None:
        self.server = socket.create_server(("127.0.0.1", 0))
        self.links = Links(1, lambda: [self.server.getsockname()[1]], seed=1)
        self.sizes: list[int] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def _serve(self) -> None:
        with self.server.accept()[0] as one:
            try:
                while data := one.recv(1 << 16):
                    self.sizes.append(len(data))
                    one.sendall(data)
            except OSError:
                pass

    def connect(self) -> socket.socket:
        self._thread.start()
        return socket.create_connection(("127.0.0.1", self.links.ports[0]), 20.0)


@pytest.fixture
def echo() -> Iterator[Echo]:
    echo = Echo()
    with echo.links:
        yield echo
    echo.server.close()


def received(client: socket.socket, num_bytes: int) -> bytes:
    found = b""
    while len(found) < num_bytes:
        found += client.recv(num_bytes - len(found))
    return found


def is_closed(client: socket.socket) -> bool:
    """True once it is, within the socket's time-out."""
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


def test_links_pass_on_slowly_and_whole(echo: Echo) -> None:
    data = bytes(range(256)) * 4
    with echo.connect() as client:
        for manner in ("pass", "trickle", "delay"):
            client.sendall(b"!")
            assert received(client, 1) == b"!"
            assert echo.links.set_manner(0, [client.getsockname()[1]], manner) == 1
            client.sendall(data)
            assert received(client, len(data)) == data
        assert echo.links.set_manner(0, [1], "trickle") == 0, "nobody comes from there"
    assert min(echo.sizes) <= TRICKLE_BYTES


def test_links_are_cut(echo: Echo) -> None:
    with echo.connect() as client:
        client.sendall(b"!")
        assert received(client, 1) == b"!"
        assert echo.links.cut(0, None) == 1
        assert is_closed(client)


def test_links_that_are_half_open_take_everything_and_answer_nothing(echo: Echo) -> None:
    with echo.connect() as client:
        client.sendall(b"!")
        assert received(client, 1) == b"!"
        assert echo.links.set_manner(0, None, "swallow") == 1
        client.sendall(bytes(1 << 20))
        client.settimeout(0.2)
        with pytest.raises(TimeoutError):
            client.recv(1)
    assert sum(echo.sizes) == 1
