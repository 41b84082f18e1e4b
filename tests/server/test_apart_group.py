"""What a supervisor does about its process of a shard whose other process is on another host, as that one reports."""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from psstore.config import NO_CREDENTIALS
from psstore.errors import StoreUnreachable
from psstore.protocol.election import Succession
from psstore.server import apart_group, standing_by
from psstore.server.apart_group import ApartGroup
from psstore.server.other_member import look_at, refuses
from psstore.server.pipe_words import CUT, IN_SYNC, LOST, RETIRED, WITHOUT
from psstore.server.voting import vote
from tests.support.server_process import eventually


class FakeProcess:
    """Reports what it is told to."""

    def __init__(self) -> None:
        self.name, self.client = "the standby of shard 1", "client"
        read_fd, self._write_fd = os.pipe()
        self.report = os.fdopen(read_fd, "rb")
        self.is_alive = True
        self._lines: list[str] = []
        self.heard: list[str] = []

    def say(self, *lines: str) -> None:
        self._lines += lines

    def told(self) -> list[str] | None:
        lines, self._lines = self._lines, []
        return lines if self.is_alive else None

    def tell(self, line: str) -> None:
        self.heard.append(line)

    def fate(self) -> str:
        return f"{self.name} ended with exit status 1"

    def kill(self) -> None:
        os.close(self._write_fd)
        self.report.close()


class Host:
    """A group, which begins as a standby of one that is gone, or as the shard."""

    def __init__(self, selector: selectors.BaseSelector, *, leads: bool = False, patience_s: float = 60.0) -> None:
        self.processes: list[Any] = []
        self.group = ApartGroup(
            index=1,
            other="ps://127.0.0.1:1",
            others=(),
            credentials=NO_CREDENTIALS,
            patience_s=patience_s,
            start=self._start,
            selector=selector,
        )
        self.group.begin(leads=leads)

    def _start(self, leads: bool) -> Any:
        self.processes.append(FakeProcess())
        return self.processes[-1]


def hear(host: Host, *lines: str) -> None:
    host.processes[0].say(*lines)
    assert host.group.heard(host.processes[0]) is None


@pytest.fixture
def host() -> Iterator[Host]:
    with selectors.DefaultSelector() as selector:
        host = Host(selector)
        yield host
        host.processes[-1].kill()


def test_a_standby_that_is_cut_off_and_dies_is_started_again(host: Host) -> None:
    """What it had asked for is nobody's business any more."""
    (first,) = host.processes
    first.say(IN_SYNC, f"{CUT} 0.000")
    assert host.group.heard(first) is None
    for lives in range(1, 5):  # with longer pauses, so that the question would come in one of them
        host.processes[-1].is_alive = False
        assert host.group.heard(host.processes[-1]) is None

        def starts(lives: int = lives) -> bool:
            assert host.group.tick() is None
            return len(host.processes) > lives

        assert eventually(starts)


def test_nobody_waits_longer_than_said_for_a_name_that_no_server_answers_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a cluster's DNS is out of reach: a resolver tries for as long as half a minute."""
    over = threading.Event()

    def never(*_: object, type: int, flags: int = 0) -> list[object]:  # noqa: A002 (getaddrinfo's own)
        if not flags & socket.AI_NUMERICHOST:
            over.wait(15)
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", never)
    begin = time.monotonic()
    try:
        with pytest.raises(StoreUnreachable, match=r"store-1\.store"):
            look_at("ps://store-1.store:5700", NO_CREDENTIALS, timeout_s=0.2)
        assert vote([["ps://store-0.store:5700"]], "client", leads=True, credentials=NO_CREDENTIALS) is Succession.OPEN
        assert time.monotonic() - begin < 10.0
    finally:
        over.set()


def test_nobody_listens_at_a_host_if_none_of_its_addresses_that_can_be_reached_has_who_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def place(host: str, port: int) -> tuple[Any, ...]:
        return (socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port))

    with (
        socket.socket() as refusing,
        socket.create_server(("127.0.0.1", 0)) as listening,
        contextlib.ExitStack() as full,
    ):
        refusing.bind(("127.0.0.1", 0))
        silent = full.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(2):  # the system drops what comes behind them
            behind = full.enter_context(socket.socket())
            behind.setblocking(False)
            behind.connect_ex(silent.getsockname())
        refused, taken, dropped = (place(*one.getsockname()) for one in (refusing, listening, silent))
        no_way = place("224.0.0.1", 5700)
        for found, nobody in [
            ([refused], True),
            ([refused, no_way], True),
            ([no_way, refused], True),
            ([refused, taken], False),
            ([dropped, refused], False),
            ([no_way], False),
        ]:
            monkeypatch.setattr(socket, "getaddrinfo", lambda *_, found=found, **__: found)
            assert refuses("ps://store-1.store:5700", timeout_s=0.3) is nobody, found


def test_a_standby_that_does_not_reach_its_shard_says_where_that_was_to_be() -> None:
    with socket.socket() as refusing:
        refusing.bind(("127.0.0.1", 0))
        place = f"ps://127.0.0.1:{refusing.getsockname()[1]}"
        with pytest.raises(StoreUnreachable, match=f"no connection to the shard at {place}: .*refused"):
            standing_by._connect(place, NO_CREDENTIALS)


class Other:
    """The other process, as it is found there; None: it is not. One that is asked to lead does, or is not fit to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *found: str | None) -> None:
        self._found = list(found)
        self.is_led = False
        monkeypatch.setattr(apart_group, "look_at", self._look)
        monkeypatch.setattr(apart_group, "promote", self._promote)
        monkeypatch.setattr(apart_group, "ASK_S", 0.01)

    def _look(self, *_: object, **__: object) -> SimpleNamespace:
        found = self._found.pop(0) if len(self._found) > 1 else self._found[0]
        if found is None:
            raise StoreUnreachable("nobody is there")
        return SimpleNamespace(leads=found == "leads", may_lead=found in ("leads", "may lead"))

    def _promote(self, *_: object, **__: object) -> None:
        assert self._found == ["may lead"]
        self.is_led = True


@pytest.mark.parametrize(
    ("said", "found"),
    [
        # Its pod is new, and names are kept by a cache for a while.
        ([IN_SYNC], [None, None, "may lead"]),
        # The next one at its place is being filled.
        ([IN_SYNC], ["is filled", "is filled", "may lead"]),
        ([IN_SYNC, f"{LOST} first"], [None, "is filled", "may lead"]),
        # The shard has just not heard of it.
        ([IN_SYNC, f"{LOST} first"], ["may lead"]),
    ],
)
def test_a_host_that_is_to_end_serves_until_the_other_one_can_lead(
    monkeypatch: pytest.MonkeyPatch, said: list[str], found: list[str | None]
) -> None:
    other = Other(monkeypatch, *found)
    with selectors.DefaultSelector() as selector:
        one = Host(selector, leads=True)
        hear(one, *said)
        one.group.resign()
        assert other.is_led
        assert one.processes[0].report.closed


@pytest.mark.parametrize("said", [[], [IN_SYNC, f"{RETIRED} first"]])
def test_a_host_that_is_to_end_waits_for_a_standby_that_comes_first(
    monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    """Until its shard says so: one that was done without says that it may lead, too."""
    other = Other(monkeypatch, "is filled", "may lead")
    with selectors.DefaultSelector() as selector:
        one = Host(selector, leads=True)
        hear(one, *said)
        look = other._look

        def look_and_say(*_: object, **__: object) -> SimpleNamespace:
            found = look()
            if found.may_lead:
                assert not one.processes[0].report.closed
                one.processes[0].say(IN_SYNC)
                os.write(one.processes[0]._write_fd, b"!")
            return found

        monkeypatch.setattr(apart_group, "look_at", look_and_say)
        one.group.resign()
        assert other.is_led


@pytest.mark.parametrize(
    ("said", "found"),
    [([], None), ([IN_SYNC, f"{RETIRED} first"], None), ([f"{LOST} first"], "leads")],
)
def test_a_host_that_is_to_end_waits_for_nobody_who_is_not_to_come(
    monkeypatch: pytest.MonkeyPatch, said: list[str], found: str | None
) -> None:
    other = Other(monkeypatch, found)
    with selectors.DefaultSelector() as selector:
        one = Host(selector, leads=True)
        hear(one, *said)
        begin = time.monotonic()
        one.group.resign()
        assert time.monotonic() - begin < 10.0
        assert not other.is_led
        one.processes[0].kill()


@pytest.mark.parametrize("found", [None, "is filled"])
def test_a_host_that_is_to_end_waits_no_longer_than_it_has_patience(
    monkeypatch: pytest.MonkeyPatch, found: str | None
) -> None:
    """Then its process drains: nobody may lead who has not all."""
    other = Other(monkeypatch, found)
    with selectors.DefaultSelector() as selector:
        one = Host(selector, leads=True, patience_s=0.1)
        hear(one, IN_SYNC)
        one.group.resign()
        assert not other.is_led
        assert not one.processes[0].report.closed
        one.processes[0].kill()


@pytest.fixture
def shard(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """The shard, which has a standby; nobody answers at the other host, where that one is."""

    def look(*_: object, **__: object) -> None:
        raise StoreUnreachable("silent")

    monkeypatch.setattr(apart_group, "look_at", look)
    monkeypatch.setattr(apart_group, "ASK_S", 0.01)
    with selectors.DefaultSelector() as selector:
        host = Host(selector, leads=True)
        hear(host, f"{IN_SYNC} first")
        yield host
        for process in host.group.processes:
            process.kill()


def test_a_standby_that_others_were_asked_about_is_done_without_although_it_answers_again(
    shard: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them may have said that it is gone, whose answer was lost: so it could never lead."""
    answers, asked = [Succession.OPEN, Succession.GONE], list[str]()

    def ask(others: object, client: str, **_: object) -> Succession:
        asked.append(client)
        return answers.pop(0)

    monkeypatch.setattr(apart_group, "vote", ask)
    hear(shard, f"{LOST} first")
    assert shard.group.tick() is None
    hear(shard, f"{IN_SYNC} first")

    def is_done_without() -> bool:
        assert shard.group.tick() is None
        return bool(shard.processes[0].heard)

    assert eventually(is_done_without)
    assert asked == ["first", "first"]
    assert shard.processes[0].heard == [f"{WITHOUT} first"]


def test_a_standby_that_nobody_was_asked_about_may_answer_again(shard: Host) -> None:
    hear(shard, f"{LOST} first", f"{IN_SYNC} first")
    assert shard.group.next_wake() == math.inf


def test_nobody_is_asked_about_a_standby_that_says_that_it_ends(shard: Host) -> None:
    hear(shard, f"{LOST} first", f"{RETIRED} first")
    assert shard.group.next_wake() == math.inf
    shard.processes[0].is_alive = False
    assert shard.group.heard(shard.processes[0]) == "the standby of shard 1 ended with exit status 1", "nobody leads it"
