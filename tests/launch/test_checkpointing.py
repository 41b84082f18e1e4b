"""When a store's checkpoints are written, and which of them is rather not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, cast
from unittest import mock

import msgspec
import pytest

from psstore.checkpoint.interval import CheckpointInterval
from psstore.client.store import Store
from psstore.config import NO_CREDENTIALS
from psstore.errors import DeadlineExceeded, StorageFailed, StoreUnreachable
from psstore.exit_codes import EXIT_FAILED
from psstore.launch import checkpointing
from psstore.launch.checkpointing import LOOK_S, Schedule
from psstore.server.processes import CheckpointDuty


class FakeStore:
    """A store at version 7, with a checkpoint or without, whose workers hand in or do not."""

    def __init__(self, *, has_one: bool, hands_in: bool, lost: str = "", fails: bool = False) -> None:
        self.asked: list[bool] = []
        """Of each checkpoint, whether it was to be whole."""
        self._counters = {"version": 7, "checkpoint": 3 if has_one else -1, "ranks_lost": lost}
        self._hands_in = hands_in
        self._fails = fails

    def __enter__(self) -> FakeStore:
        return self

    def __exit__(self, *_: object) -> None: ...

    def stats(self) -> Sequence[dict[str, Any]]:
        return [self._counters]

    def checkpoint(self, *, whole: bool = False) -> int:
        self.asked.append(whole)
        if self._fails:
            raise StorageFailed("No space left on device")
        if whole and not self._hands_in:
            raise DeadlineExceeded("it would be without what ranks 1 hand in")
        return 7


DUTY = CheckpointDuty(
    url="",
    credentials=NO_CREDENTIALS,
    place="run",
    interval=CheckpointInterval(decisions=1),
    began_at=0,
    log_level="info",
    log_format="text",
)


def schedule(store: FakeStore) -> Schedule:
    is_over = threading.Event()
    is_over.set()
    return Schedule(cast(Store, store), DUTY, is_over)


@pytest.mark.parametrize(
    ("store", "is_written", "asked"),
    [
        (FakeStore(has_one=True, hands_in=True), True, [True]),
        (FakeStore(has_one=False, hands_in=False), True, [False]),
        (FakeStore(has_one=True, hands_in=False), True, [True, False]),
        (FakeStore(has_one=True, hands_in=False, lost="1"), False, [True]),
        (FakeStore(has_one=True, hands_in=True, fails=True), False, [True]),
    ],
    ids=["whole", "the first", "slow workers", "a lost worker", "storage fails"],
)
def test_a_checkpoint_that_nobody_could_go_on_from_takes_the_place_of_none(
    store: FakeStore, is_written: bool, asked: Sequence[bool]
) -> None:
    assert schedule(store)._write() == is_written
    assert store.asked == asked


@pytest.mark.parametrize(
    ("store", "is_right"),
    [
        (FakeStore(has_one=True, hands_in=True), True),
        (FakeStore(has_one=True, hands_in=False, lost="1"), True),
        (FakeStore(has_one=False, hands_in=False), True),
        (FakeStore(has_one=True, hands_in=True, fails=True), False),
    ],
    ids=["whole", "a lost worker", "the first", "storage fails"],
)
def test_an_end_without_its_last_checkpoint_is_told_unless_one_before_is_better(
    store: FakeStore, is_right: bool
) -> None:
    assert schedule(store).run() == is_right


@pytest.mark.parametrize("is_reached", [True, False])
def test_a_store_that_is_out_of_reach_is_tried_once_more_at_the_end_which_tells_if_there_is_no_checkpoint(
    monkeypatch: pytest.MonkeyPatch, is_reached: bool
) -> None:
    store, ends = FakeStore(has_one=True, hands_in=True), list[Callable[[], None]]()

    def take_duty(*_: object, on_last_word: Callable[[], None], **__: object) -> CheckpointDuty:
        ends.append(on_last_word)
        return DUTY

    def open_store(*_: object) -> FakeStore:
        if ends:
            ends.pop()()
        elif is_reached:
            return store
        raise StoreUnreachable("nobody answers")

    monkeypatch.setattr(checkpointing, "take_duty", take_duty)
    monkeypatch.setattr(checkpointing, "open_store", open_store)
    monkeypatch.setattr("psstore.server.logs.configure", mock.Mock())
    with pytest.raises(SystemExit) as ended:
        checkpointing.main()
    assert (ended.value.code, store.asked) == ((0, [True]) if is_reached else (EXIT_FAILED, []))


class Waits(threading.Event):
    """Over once it was waited for twice."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.seconds.append(timeout or 0.0)
        return len(self.seconds) == 2


@pytest.mark.parametrize(("interval", "least_s"), [({"seconds": 60.0}, 50.0), ({"decisions": 500}, 0.0)])
def test_a_store_is_not_asked_before_the_time_of_its_next_checkpoint(interval: dict[str, Any], least_s: float) -> None:
    waits = Waits()
    store = cast(Store, FakeStore(has_one=True, hands_in=True))
    Schedule(store, msgspec.structs.replace(DUTY, interval=CheckpointInterval(**interval)), waits).run()
    assert all(least_s <= seconds <= max(LOOK_S, least_s + 10.0) for seconds in waits.seconds)
