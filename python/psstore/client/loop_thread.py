"""A store's event loop, driven by whoever waits for it: by its callers, one at a time, else by a thread of its own.

A blocking call needs no other thread: it sends, polls and receives itself, until its answer is there. Meanwhile it
also does what others have under way. Three things pass between threads, each with one owner at a time:

- the *loop*, whoever holds `_mutex`: never while waiting;
- the *lead*, whoever polls the loop's sockets: a caller that waits, or nobody;
- the *watch*: while nobody has the lead, the store's own thread sleeps on the same sockets. One system call mutes it:
  it sleeps on an epoll that has the loop's epoll in it, with an interest that the lead sets to nothing. After a direct
  call with nothing else under way it stays so for 100 ms, as the next call may follow; whatever another thread asks
  the loop for ends that.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import inspect
import logging
import math
import os
import select
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from psstore import _core
from psstore.errors import StoreClosed, UsageError
from psstore.net.client_connection import ClientConnection
from psstore.net.interrupts import Interrupts
from psstore.net.manual_loop import ManualLoop

T = TypeVar("T")

LONGEST_POLL_S = 86_400.0
"""No system takes any number of seconds: a poll with 25 days is refused."""

LONGEST_DEAF_S = 1.0
"""How long the main thread sleeps at most. A signal that comes between its last look for one and its sleep does not end
that, and it stands just there until another thread has taken the GIL."""

_log = logging.getLogger("psstore.client")

_CLOSED = "this store is closed; connect again"


class Submitted(concurrent.futures.Future[T]):
    """What `asyncio.run_coroutine_threadsafe` returns, but that nothing is done any more for what was cancelled when
    `cancel` returns, unless it is called in an event loop: arrays are their callers' again then."""

    def __init__(self, thread: LoopThread) -> None:
        super().__init__()
        self._thread = thread

    def begin(self, work: Coroutine[Any, Any, T]) -> None:
        """Called on the loop."""
        task = self._thread.loop.create_task(self._thread.until_stopped(work))
        task.add_done_callback(_no_matter)  # of one that was cancelled
        asyncio.futures._chain_future(task, self)  # type: ignore[attr-defined]

    def cancel(self) -> bool:
        cancelled = super().cancel()
        if cancelled:
            with contextlib.suppress(StoreClosed):
                self._thread.catch_up()
        return cancelled


class LoopThread:
    """Runs until `stop`. Daemonic: a program that ends without closing its store ends all the same."""

    def __init__(self, *, busy_s: float = 0.0) -> None:
        """`busy_s`: how long a caller asks for what it waits for before it sleeps."""
        self._busy_s = busy_s
        self._loop = ManualLoop()
        self.loop = self._loop.as_asyncio
        self.bell = self._loop.bell
        self._queue = threading.Lock()
        """Held by the next one that gets the loop: who releases it does not take it again before others."""
        self._mutex = threading.Lock()
        """Guards the loop, all that runs on it, and what follows here."""
        self._holder = 0
        """The thread that has it."""
        self._leader = 0
        """The thread that has the lead; 0: none."""
        self._followers: list[threading.Lock] = []
        """Callers that wait while another leads. Each sleeps on its lock."""
        self._callers: list[int] = []
        """Threads of the calls of `run` that are under way."""
        self._starting = threading.RLock()
        """Orders `submit` and `stop`. Reentrant: a garbage collection inside `submit` may end another store here."""
        self._stopping = False
        self.terms: list[dict[object, dict[str, _core.CallTerms]]] = [{}]
        """What direct calls say besides their slices, by store and operation: one dictionary, and another one as soon
        as somebody has the loop, where all that changes by which they would say something else."""
        self._corked: list[_core.ClientSession] = []
        """On which something waits to go out: whoever has the loop next sends it first."""
        self._idle = select.epoll()
        self._idle.register(self._loop.fileno(), select.EPOLLIN)
        self.calls = _core.CallDriver(
            mutex=self._mutex,
            queue=self._queue,
            callers=self._callers,
            ready=self._loop.ready,
            corked=self._corked,
            loop=self.loop,
            wakeup_fd=self._loop.wakeup_fd,
            sockets=self._loop.fileno(),
            idle=self._idle.fileno(),
            busy_s=busy_s,
        )
        """For calls that need no turn of the loop, as long as nobody else needs one."""
        self._loop.on_call = self.calls.arm_now
        self._loop.on_distrust = partial(ClientConnection.abort_all, self.loop)
        self._polls_until, self._sleeps_until = 0.0, math.inf
        """When the leader's poll and the own thread's sleep end, if nothing comes."""
        self._process = os.getpid()
        self._main = threading.main_thread().ident
        self._thread = threading.Thread(target=self._serve, name="psstore", daemon=True)
        self._thread.start()

    # ---- from any thread ----

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` to its end, after what was submitted before. Blocks; all other work goes on meanwhile.

        Ctrl-C, or another signal whose handler raises, ends the wait and the work. Raises StoreClosed if the thread has
        ended or does so meanwhile.
        """
        outer = asyncio._get_running_loop()
        if outer is not None:
            return self._run_elsewhere(work, outer)
        if os.getpid() != self._process:  # in a forked child a lock may be held for good
            work.close()
            raise StoreClosed(_CLOSED)
        interrupts = Interrupts(self._loop.wake, main=self._main)
        try:
            interrupts.begin()
            self._take()
            try:
                return self._drive(work, interrupts)
            finally:
                self._give()
        finally:
            interrupts.end()

    def run_task(self, work: Coroutine[Any, Any, T]) -> T:
        """`run` for work that uses what asyncio has for tasks, such as its time-outs. Interrupted, it ends when that
        has."""
        made: asyncio.Task[T] | None = None

        async def task() -> T:
            nonlocal made
            made = self.loop.create_task(work)
            return await made

        async def end(task: asyncio.Task[T]) -> None:
            await asyncio.wait((task,))

        try:
            return self.run(task())
        except BaseException:
            if made is not None and not made.done():
                with contextlib.suppress(StoreClosed):
                    self.run(end(made))
            raise
        finally:
            if inspect.getcoroutinestate(work) == inspect.CORO_CREATED:
                work.close()

    def at_once(self, work: Callable[[], object]) -> None:
        """Does `work`, which does not wait, as soon as the loop is free: on this thread, or in the turn that it is in.

        Raises StoreClosed like `run`."""
        outer = asyncio._get_running_loop()
        if outer is None:
            self.run(_done(work))
        elif outer is self.loop:
            work()
        else:
            with self._starting:
                if self._stopping:
                    raise StoreClosed(_CLOSED)
                self.loop.call_soon_threadsafe(work)

    def catch_up(self) -> None:
        """Has all begin that was asked of the loop before, unless this thread is in an event loop itself."""
        if asyncio._get_running_loop() is None:
            self.run(_done(_nothing))

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Starts `work` and returns. Cancelling the future cancels the work, see `Submitted`.

        Raises StoreClosed if the thread has ended, or stayed behind in the process that this one was forked from.
        """
        if self._thread.is_alive():
            with self._starting:
                if not self._stopping:
                    submitted = Submitted[T](self)
                    self.loop.call_soon_threadsafe(submitted.begin, work)
                    return submitted
        work.close()
        raise StoreClosed(_CLOSED)

    async def awaited(self, future: concurrent.futures.Future[T]) -> T:
        """What a future of work here comes to, for a caller in another event loop. Cancelled, it ends as soon as
        nothing is done for it any more, however often that is: arrays are their callers' again then."""
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            with contextlib.suppress(StoreClosed):
                turn = asyncio.wrap_future(self._turn())
                turn.add_done_callback(_no_matter)
                while not turn.done():
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.wait((turn,))
            raise

    async def until_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        """What the work comes to, here. Raises StoreClosed if the thread ends before it."""
        try:
            return await work
        except asyncio.CancelledError:
            if self._stopping:
                raise StoreClosed(_CLOSED) from None
            raise

    def _turn(self) -> concurrent.futures.Future[None]:
        """Done when all has begun that was asked of the loop before."""
        return self.submit(_done(_nothing))

    def stop(self) -> None:
        """Ends the thread and closes the loop; work under way is cancelled. Does nothing the second time."""
        if self._thread.is_alive():
            with self._starting:
                self._stopping = True
                self._loop.wake()
                self.calls.arm_now()
            if threading.get_ident() not in (self._thread.ident, *self._callers):  # it waits for them
                self._thread.join()

    # ---- a caller's work ----

    def _run_elsewhere(self, work: Coroutine[Any, Any, T], outer: asyncio.AbstractEventLoop) -> T:
        """For a caller that is itself in an event loop, which can't run another one meanwhile."""
        if outer is self.loop:
            work.close()
            raise UsageError(
                "a signal handler or finalizer that interrupts a call of a store can't call the same store"
            )
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            if future.cancel():
                with contextlib.suppress(StoreClosed, concurrent.futures.CancelledError):
                    self._turn().result()  # as in `awaited`
            raise

    def _drive(self, work: Coroutine[Any, Any, T], interrupts: Interrupts) -> T:
        me, ready = threading.get_ident(), self._loop.ready
        nested = self._leader == me  # in a signal handler, while this thread waits further out
        self._callers.append(me)
        try:
            if self._stopping:
                raise StoreClosed(_CLOSED)
            if not self._leader:
                self._lead(me)  # before anything is sent: the answer shall not wake the own thread, too
            for _ in range(2):  # what was submitted becomes a task in one turn, and has its first step in the next
                if ready:
                    self._loop.turn(())
            while True:
                future = self._step(work)
                future._asyncio_future_blocking = False
                try:
                    self._wait(future, interrupts)
                except BaseException:
                    future.cancel()
                    future.add_done_callback(_no_matter)
                    raise
        except StopIteration as stop:
            if ready:  # whatever ended before it tells so before it
                self._loop.turn(())
            result: T = stop.value
            return result
        except asyncio.CancelledError:
            raise StoreClosed(_CLOSED) from None
        finally:
            work.close()
            self._callers.remove(me)
            if not nested:
                self._pass_on()

    def _step(self, work: Coroutine[Any, Any, Any]) -> Any:
        """To the next future that it awaits. No handler of a signal that is put off can strike here."""
        try:
            return work.send(None)
        except (Exception, asyncio.CancelledError):
            raise
        except BaseException:
            self._loop.distrust()
            raise

    def _wait(self, future: asyncio.Future[Any], interrupts: Interrupts) -> None:
        me = threading.get_ident()
        while not future.done():
            if interrupts.pending:
                self._deliver(interrupts)
            elif self._stopping:
                future.cancel()
            elif self._leader in (0, me):
                self._lead(me)
                self._loop.turn(self._poll())
            else:
                self._follow(future, interrupts)

    def _deliver(self, interrupts: Interrupts) -> None:
        """The program's handler may do anything, also call this store."""
        self._give()
        try:
            interrupts.deliver()
        finally:
            self._take()

    # ---- who has the loop ----

    def _take(self) -> None:
        with self._queue:
            if not self._mutex.acquire(blocking=False):
                if self.calls.busy:
                    self._loop.wake()  # it lets go of the mutex then
                self._mutex.acquire()
        self._holder = threading.get_ident()
        asyncio._set_running_loop(self.loop)
        self.terms[0] = {}
        if self._corked:
            self.calls.uncork()

    def _give(self) -> None:
        if self._holder == threading.get_ident():
            asyncio._set_running_loop(None)
            self._holder = 0
            self._mutex.release()

    # ---- who has the lead ----

    def _lead(self, me: int) -> None:
        self._leader = me
        self.calls.disarm()

    def _poll(self) -> Any:
        """Waits for the loop's next events, and lets others have it meanwhile."""
        self._polls_until, timeout_s = self._until_next()
        if timeout_s == 0.0:
            return self._loop.poll(0)
        if self._leader == self._main:
            timeout_s = LONGEST_DEAF_S if timeout_s is None else min(timeout_s, LONGEST_DEAF_S)
        self._give()
        try:
            return self._loop.poll(self._ask(timeout_s) if self._busy_s else timeout_s)
        finally:
            self._take()

    def _ask(self, timeout_s: float | None) -> float | None:
        """Waits without sleeping at first. Returns how much is left of the time."""
        if timeout_s is None:
            self.calls.ask(self._busy_s)
            return None
        until = self.loop.time() + timeout_s
        self.calls.ask(min(self._busy_s, timeout_s))
        return max(0.0, until - self.loop.time())

    def _until_next(self) -> tuple[float, float | None]:
        """When the loop wants its next turn at the latest, and how long to wait for it."""
        wake = self._loop.next_wake()
        return (math.inf, None) if wake is None else (wake, min(max(0.0, wake - self.loop.time()), LONGEST_POLL_S))

    def _hurry(self, until: float) -> None:
        """Whoever waits until then, shall not, if something is to be done before."""
        wake = self._loop.next_wake()
        if self._stopping or (wake is not None and wake < until):
            self._loop.wake()

    def _follow(self, future: asyncio.Future[Any], interrupts: Interrupts) -> None:
        """Sleeps until the future is done, the lead is free, or a signal came; or for a while."""
        sleep = threading.Lock()
        sleep.acquire()

        def wake(_: object = None) -> None:
            with contextlib.suppress(RuntimeError):  # it is awake
                sleep.release()

        self._followers.append(sleep)
        future.add_done_callback(wake)
        interrupts.wake = wake
        self._hurry(self._polls_until)
        try:
            if not interrupts.pending:
                self._give()
                try:
                    sleep.acquire(timeout=LONGEST_DEAF_S)  # a handler that is not put off may raise here
                finally:
                    self._take()
        finally:
            interrupts.wake = self._loop.wake
            future.remove_done_callback(wake)
            self._followers.remove(sleep)

    def _pass_on(self) -> None:
        """The lead to a caller that waits, else the watch to the own thread."""
        if self._leader not in (0, threading.get_ident()):
            self._hurry(self._polls_until)
            return
        self._leader = 0
        if self._followers:
            with contextlib.suppress(RuntimeError):  # it is awake already
                self._followers[0].release()
            return
        self.calls.arm()
        self._hurry(self._sleeps_until)

    # ---- the own thread ----

    def _serve(self) -> None:
        """Does what is due while nobody leads."""
        timeout_s: float | None = None  # so far nothing was asked for
        while True:
            self._idle.poll(timeout_s)
            self._take()
            try:
                if self._stopping and not self._callers:
                    self._end()
                    return
                self.calls.woken()
                if not self._leader:
                    self.calls.arm()
                    self._turn_alone()
                self._sleeps_until, timeout_s = self._until_next()
                if self._leader and timeout_s == 0.0:  # what is due is the leader's to do
                    self._sleeps_until, timeout_s = math.inf, None
                if self._stopping and not self._callers:  # since it was looked at: that turn may have taken the wake
                    timeout_s = 0.0
            finally:
                self._give()

    def _turn_alone(self) -> None:
        try:
            self._loop.turn(self._loop.poll(0))
        except BaseException:  # ours, whatever it is: the connections were ended, what was asked goes on
            _log.exception("a bug in psstore: all connections of this store were ended")

    def _end(self) -> None:
        for _ in range(2):  # what was submitted last becomes a task, and begins, so that it ends as the others
            self._loop.turn(())
        left = asyncio.all_tasks(self.loop)
        for task in left:
            task.cancel()
        while self._loop.ready or not all(task.done() for task in left):  # and tell those who wait
            self._loop.turn(self._loop.poll(self._until_next()[1]))
        self.loop.close()
        self._idle.close()


def _nothing() -> None: ...


def _no_matter(future: asyncio.Future[Any]) -> None:
    """What a future comes to that nobody waits for any more: asyncio tells of errors that nobody has looked at."""
    if not future.cancelled():
        future.exception()


async def _done(work: Callable[[], object]) -> None:
    work()
