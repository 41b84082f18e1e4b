"""Who drives a store's event loop: callers that wait, one at a time, and a thread of its own when there are none."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import FrameType

import pytest

from psstore.client.loop_thread import LoopThread
from psstore.errors import StoreClosed, UsageError
from psstore.net.client_connection import ClientConnection
from psstore.protocol.decision_cache import DecisionCache
from psstore.protocol.handshake import ClientIdentity
from psstore.protocol.session import Session
from psstore.protocol.states import LinkState
from tests.support.cluster import PATIENCE_S
from tests.support.server_process import eventually


@pytest.fixture
def driver() -> Iterator[LoopThread]:
    made = LoopThread()
    yield made
    made.stop()


async def thread_here() -> int:
    return threading.get_ident()


async def thread_after(gate: asyncio.Future[None]) -> int:
    await gate
    return threading.get_ident()


def led(driver: LoopThread) -> bool:
    """Somebody waits in `run`, and polls."""
    return eventually(lambda: driver._leader != 0 and driver._holder == 0)


def open_gate(driver: LoopThread, gate: asyncio.Future[None]) -> None:
    driver.loop.call_soon_threadsafe(gate.set_result, None)


def test_a_blocking_call_runs_on_its_callers_thread(driver: LoopThread) -> None:
    async def wait() -> int:
        await driver.loop.create_task(asyncio.sleep(0.001))
        return threading.get_ident()

    assert driver.run(thread_here()) == threading.get_ident()
    assert driver.run(wait()) == threading.get_ident()


def test_what_is_started_needs_nobody_who_waits(driver: LoopThread) -> None:
    assert driver.submit(thread_here()).result(PATIENCE_S) == driver._thread.ident
    driver.submit(asyncio.sleep(0.001)).result(PATIENCE_S)


def test_what_is_started_runs_before_the_next_call(driver: LoopThread) -> None:
    order: list[int] = []

    async def note(number: int) -> None:
        order.append(number)

    for number in range(50):
        driver.submit(note(number))
    driver.run(note(50))
    assert order == list(range(51))


def test_a_caller_that_waits_does_what_others_have_started(driver: LoopThread) -> None:
    gate = driver.loop.create_future()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(driver.run, thread_after(gate))
        assert led(driver)
        leader = driver.submit(thread_here()).result(PATIENCE_S)
        open_gate(driver, gate)
        assert waiting.result(PATIENCE_S) == leader


def test_calls_of_many_threads_end_in_any_order(driver: LoopThread) -> None:
    gates = [driver.loop.create_future() for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(driver.run, thread_after(gate)) for gate in gates]
        assert eventually(lambda: len(driver._callers) == 4)
        for number in (2, 0, 3, 1):
            open_gate(driver, gates[number])
            waiting[number].result(PATIENCE_S)
    assert driver.submit(thread_here()).result(PATIENCE_S) == driver._thread.ident


def test_a_timer_rings_for_a_follower_too(driver: LoopThread) -> None:
    gate = driver.loop.create_future()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(driver.run, thread_after(gate))
        assert led(driver)
        driver.run_task(asyncio.sleep(0.01))
        open_gate(driver, gate)
        waiting.result(PATIENCE_S)


def test_a_call_from_another_event_loop_is_handed_over(driver: LoopThread) -> None:
    async def call() -> int:
        return driver.run(thread_here())

    assert asyncio.run(call()) == driver._thread.ident


def test_a_call_from_inside_a_call_of_the_same_store_is_refused(driver: LoopThread) -> None:
    async def call() -> int:
        return driver.run(thread_here())

    with pytest.raises(UsageError, match="can't call the same store"):
        driver.run(call())


def test_stopping_ends_calls_under_way(driver: LoopThread) -> None:
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(driver.run, thread_after(driver.loop.create_future())) for _ in range(2)]
        assert eventually(lambda: len(driver._callers) == 2)
        driver.stop()
        for call in waiting:
            with pytest.raises(StoreClosed):
                call.result(PATIENCE_S)
    with pytest.raises(StoreClosed):
        driver.run(thread_here())


def test_stopping_ends_what_was_started(driver: LoopThread) -> None:
    started = driver.submit(asyncio.sleep(PATIENCE_S))
    driver.catch_up()  # it is under way
    driver.stop()
    with pytest.raises(StoreClosed):
        started.result(PATIENCE_S)


def test_stopping_ends_what_was_started_just_before(driver: LoopThread) -> None:
    driver._take()  # nothing begins
    started = driver.submit(asyncio.sleep(PATIENCE_S))
    stopping = threading.Thread(target=driver.stop)
    stopping.start()
    assert eventually(lambda: driver._stopping)
    driver._give()
    stopping.join()
    with pytest.raises(StoreClosed):
        started.result(PATIENCE_S)


def test_a_stop_that_comes_while_the_own_thread_looks_for_events_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The turn takes the wake that was meant for its sleep."""
    driver = LoopThread()
    poll = driver._loop.poll

    def stopped_meanwhile(timeout_s: float | None) -> Sequence[tuple[int, int]]:
        driver.stop()  # on its own thread, which it does not wait for
        return poll(timeout_s)

    monkeypatch.setattr(driver._loop, "poll", stopped_meanwhile)
    driver._loop.wake()
    driver._thread.join(PATIENCE_S)
    assert not driver._thread.is_alive()


# ---- signals ----------------------------------------------------------------------------------------


def interrupt_once_waiting(driver: LoopThread, number: int) -> threading.Thread:
    def interrupt() -> None:
        main = threading.main_thread().ident
        assert eventually(lambda: main in driver._callers and driver._holder == 0)  # it waits
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt)
    thread.start()
    return thread


def test_interrupt_ends_the_wait_and_leaves_its_handler_in_place(driver: LoopThread) -> None:
    before = signal.getsignal(signal.SIGINT)
    interrupting = interrupt_once_waiting(driver, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        driver.run(thread_after(driver.loop.create_future()))
    interrupting.join()
    assert signal.getsignal(signal.SIGINT) == before
    assert driver.run(thread_here()) == threading.get_ident()


def test_interrupt_that_comes_just_before_the_sleep_ends_the_wait(
    driver: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python has looked for signals by then, and the system does not know of the sleep yet."""
    poll = driver._loop.poll

    def struck(timeout_s: float | None) -> Sequence[tuple[int, int]]:
        monkeypatch.undo()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
            return poll(timeout_s)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    monkeypatch.setattr(driver._loop, "poll", struck)
    with pytest.raises(KeyboardInterrupt):
        driver.run(thread_after(driver.loop.create_future()))


def test_interrupt_ends_the_wait_of_a_follower_alone(driver: LoopThread) -> None:
    gate = driver.loop.create_future()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(driver.run, thread_after(gate))
        assert led(driver)
        interrupting = interrupt_once_waiting(driver, signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            driver.run(thread_after(driver.loop.create_future()))
        interrupting.join()
        assert not waiting.done()
        open_gate(driver, gate)
        waiting.result(PATIENCE_S)


def test_handler_that_does_not_raise_lets_the_wait_go_on_and_may_use_the_store(
    driver: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = driver.loop.create_future()
    heard: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        heard.append(driver.run(thread_here()))
        open_gate(driver, gate)

    before = signal.signal(signal.SIGINT, handle)
    try:
        interrupting = interrupt_once_waiting(driver, signal.SIGINT)
        assert driver.run(thread_after(gate)) == threading.get_ident()
        interrupting.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == [threading.get_ident()]


def test_a_signal_that_raises_in_the_middle_of_a_send_ends_the_connection(driver: LoopThread) -> None:
    identity = ClientIdentity(client="c" * 32, role="client")
    session = Session(identity=identity, decisions=DecisionCache(), make_nonce=lambda: b"", address="here")
    ours, theirs = socket.socketpair()
    connections: list[ClientConnection] = []

    async def send() -> None:
        connections.append(ClientConnection(session, driver.loop, ours))
        raise SystemExit

    with theirs, pytest.raises(SystemExit):
        driver.run(send())
    assert eventually(connections[0].lost.done)
    assert session.state is LinkState.DOWN


def test_a_driver_for_which_there_are_not_files_enough_says_so() -> None:
    """Whichever of its files it is that there is no room for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held, errors = [], []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 16, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        made = None
        while made is None:
            try:
                made = LoopThread()
            except OSError as error:
                errors.append(error.errno)
                os.close(held.pop())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for one in held:
            os.close(one)
    made.stop()
    assert errors
    assert set(errors) == {errno.EMFILE}
