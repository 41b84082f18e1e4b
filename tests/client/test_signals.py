"""Signals whose handlers raise, wherever they strike in a call: each arrives once, and the store is as it was."""

from __future__ import annotations

import multiprocessing
import multiprocessing.process
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import psstore
from psstore.client.store import Store
from psstore.errors import PsstoreError
from tests.support.cluster import clusters
from tests.support.server_process import eventually

JOIN_S = 20.0

PACKAGE = str(Path(psstore.__file__).parent)


class Struck(BaseException):
    """What the handler raises."""


@pytest.fixture(params=[signal.SIGTERM, signal.SIGALRM, signal.SIGINT, signal.SIGCHLD])
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


def test_a_thread_whose_wait_is_struck_is_not_woken_for_the_others() -> None:
    """By a signal that is not put off, while another thread does the work."""

    def handle(number: int, frame: FrameType | None) -> None:
        raise Struck

    local = psstore.LocalStore(workers=2)
    one, other = local.connect(rank=0), local.connect(rank=1)
    waits = threading.Thread(target=one.barrier, args=("one",))
    waits.start()
    assert eventually(lambda: local.thread._leader == waits.ident)
    before = signal.signal(signal.SIGWINCH, handle)
    try:
        threading.Timer(0.3, signal.pthread_kill, (threading.get_ident(), signal.SIGWINCH)).start()
        with pytest.raises(Struck):
            one.barrier("another")
    finally:
        signal.signal(signal.SIGWINCH, before)
    assert not local.thread._followers
    other.barrier("one")
    waits.join()
    closes = threading.Thread(target=local.close, daemon=True)
    closes.start()
    closes.join(JOIN_S)
    assert not closes.is_alive()


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


@pytest.mark.sockets
@pytest.mark.parametrize("raising", [signal.SIGTERM], indirect=True)
def test_closing_a_store_that_a_signal_interrupts_leaves_nothing(raising: signal.Signals) -> None:
    with clusters("tcp") as start:
        cluster = start()
        threads = set(threading.enumerate())
        store = cluster.connect()
        assert cluster.process is not None
        with cluster.process.stopped():
            threading.Timer(0.2, signal.pthread_kill, (threading.get_ident(), raising)).start()
            with pytest.raises(Struck):
                store.close()
        assert eventually(lambda: set(threading.enumerate()) <= threads)


def test_a_child_that_another_thread_forks_during_a_call_heeds_signals() -> None:
    """As of a pool that an evaluation makes on a thread of its own. In a process without torch: what that keeps for the
    main thread ends in such a child, and hangs there if it is a process group of Gloo."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as fresh:
        code = fresh.submit(how_a_child_forked_during_a_call_ends).result()
    assert code == 1, "it ends by KeyboardInterrupt"


def how_a_child_forked_during_a_call_ends() -> int | None:
    """On SIGINT: its exit code, or None if it does not."""
    fork = multiprocessing.get_context("fork")
    begins = fork.Event()  # what is raised while Python itself begins there is lost

    def sleep() -> None:
        begins.set()
        time.sleep(JOIN_S)

    def forked() -> multiprocessing.process.BaseProcess:
        child = fork.Process(target=sleep)
        child.start()
        return child

    with psstore.LocalStore(workers=2) as local, ThreadPoolExecutor(1) as thread:
        one, other = local.connect(rank=0), local.connect(rank=1)
        begun = threading.get_ident()
        forking = thread.submit(lambda: eventually(lambda: local.thread._leader == begun) and forked())
        ending = thread.submit(other.barrier)
        one.barrier()
        ending.result()
        child = forking.result()
        assert isinstance(child, multiprocessing.process.BaseProcess)
        assert child.pid is not None
        assert begins.wait(JOIN_S)
        assert eventually(lambda: is_asleep(child.pid))
        os.kill(child.pid, signal.SIGINT)
        child.join(JOIN_S / 4)
        code = child.exitcode
        child.kill()
        child.join()
    return code


def is_asleep(pid: int | None) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"
