"""Signals whose handlers raise, wherever they strike in a call: each arrives once, and the store is as it was."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import psstore
from psstore.client.store import Store
from psstore.errors import PsstoreError

PACKAGE = str(Path(psstore.__file__).parent)


class Struck(BaseException):
    """What the handler raises."""


@pytest.fixture(params=[signal.SIGTERM, signal.SIGALRM, signal.SIGINT])
def raising(request: pytest.FixtureRequest) -> Iterator[signal.Signals]:
    """A signal whose handler raises, as a program has it that makes an exception of a request to end."""

    def handle(number: int, frame: FrameType | None) -> None:
        raise Struck

    before = signal.signal(request.param, handle)
    yield request.param
    assert signal.getsignal(request.param) is handle
    signal.signal(request.param, before)


@contextmanager
def striking(at_call: int, number: signal.Signals) -> Iterator[list[str]]:
    """The signal comes as that function of psstore is called, counted from 1. Yields where: empty so far."""
    calls, struck_at = 0, list[str]()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            calls += 1
            if calls == at_call:
                sys.setprofile(None)
                struck_at.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
                signal.raise_signal(number)

    sys.setprofile(count)
    try:
        yield struck_at
    finally:
        sys.setprofile(None)


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_wherever_a_signal_strikes_its_exception_arrives_and_the_store_is_as_it_was(
    store: Store, raising: signal.Signals
) -> None:
    number = 0

    def publish() -> None:
        nonlocal number
        number += 1
        store.publish({name: np.full(4, number, np.float32) for name in "ab"})

    def pull() -> None:
        assert store.pull("a").tolist() == store.pull("b").tolist()

    operations: tuple[Callable[[], object], ...] = (publish, store.stats, pull, store.keys)
    for operation in operations:
        operation()  # what a store does the first time alone
        at_call = 1
        while True:
            arrived = False
            with striking(at_call, raising) as struck_at:
                try:
                    operation()
                except Struck:
                    arrived = True
            if not struck_at:
                break
            assert arrived, struck_at
            try:
                pull()
            except PsstoreError as error:
                pytest.fail(f"after a signal at {struck_at}: {error}")
            at_call += 1
        assert at_call > 1
