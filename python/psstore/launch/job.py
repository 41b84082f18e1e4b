"""One run: a store and its workers, or workers alone, from start to end.

    store starts ─► ready ─► workers start ─► all end with 0          ─► store ends, exit code 0
                              ▲           ├─► one fails, or a signal  ─► all end, that one is named
                              └───────────┴─► one fails, and restarts are left: it alone starts again

The first process to fail for good is the cause; the others fail because of it, and are not reported. Output that can't
be shown, to a full disk or to nobody, ends a run, too, as it would end a script that writes there itself.
"""

from __future__ import annotations

import asyncio
import errno
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from psstore.errors import PsstoreError
from psstore.exit_codes import EXIT_FAILED, EXIT_MISSING, EXIT_NO_PROGRAM, EXIT_SIGNAL, signal_name
from psstore.launch.environment import worker_environ
from psstore.launch.group import Child, ProcessGroup, end
from psstore.launch.output import Deliver, Delivery, Line, pump
from psstore.launch.store import StoreProcess
from psstore.server.processes import requests_to_end
from psstore.types import Consistency

WORKER_GRACE_S = 5.0
"""For a worker that is told to end, unless the user says more; enough to write what it wants to keep."""

STORE_GRACE_S = 10.0
"""For the store to drain: longer than it gives its own shards (psstore.server.host_shards.STOP_S)."""

CHECKPOINT_GRACE_S = 600.0
"""STORE_GRACE_S for a store that writes a last checkpoint before."""

NO_ROOM = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
"""What keeps a process from being started, and may pass."""

START_AGAIN_S, LOOK_AGAIN_S = 60.0, 1.0
"""How long it is tried to start a worker again, and how often, where there is no room for it."""

DRAIN_S = 2.0
"""For the last output, when all processes are gone: it is in pipes of 64 KiB."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to run."""

    command: Sequence[str]
    """The command of each worker."""
    num_shards: int
    """0: no store; the workers talk among themselves."""
    consistency: Consistency
    environ: Mapping[str, str]
    gpus: Sequence[str] = ()
    restarts: int = 0
    """How often each worker that fails is started again."""
    grace_s: float = WORKER_GRACE_S

    @property
    def num_workers(self) -> int:
        return self.consistency.num_workers

    @property
    def num_spare(self) -> int:
        """Workers that may fail for good while the others go on: where they come and go, all but the fewest."""
        return 0 if self.consistency.fewest is None else self.num_workers - self.consistency.fewest


@dataclass(frozen=True)
class Outcome:
    """How it ended."""

    exit_code: int
    reason: str | None = None
    """A sentence about what failed; None if nothing did."""


@dataclass
class _Processes:
    """The processes that run, workers by their ranks."""

    store: StoreProcess | None
    workers: dict[int, Child] = field(default_factory=dict)

    @property
    def stores(self) -> list[Child]:
        """None or one."""
        return [] if self.store is None else [self.store.child]

    def hurry(self) -> None:
        """Has a store end that waits for its last checkpoint, as it does once the workers have ended."""
        for store in self.stores:
            if all(worker.ended.done() for worker in self.workers.values()) and not store.ended.done():
                store.process.terminate()


async def run_job(job: Job, *, deliver: Deliver) -> Outcome:
    """Runs to the end. `deliver` gets every line of output; the reason for a failure is in the outcome.

    SIGINT, SIGTERM and SIGHUP end the run, but the last not under `nohup`; the exit code is then 128 + the signal's
    number, as in a shell.
    """
    end_signals, running = requests_to_end(), _Processes(None)
    told_to_end = _on_signals(end_signals, again=running.hurry)
    delivery = Delivery(deliver)
    pumps: list[asyncio.Task[None]] = []
    try:
        async with ProcessGroup() as group:
            running.store = await _start_store(job, group)
            for store in running.stores:
                pumps += _pumps(store, "store", delivery)
            work = asyncio.create_task(_Work(job, group, running, pumps, delivery).run())
            ends: list[asyncio.Future[Any]] = [work, told_to_end, delivery.failed]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            work.cancel()
            await asyncio.wait([work])
            await end(list(running.workers.values()), grace_s=job.grace_s)
            writes_checkpoint = "PSSTORE_CHECKPOINT" in job.environ
            await end(running.stores, grace_s=CHECKPOINT_GRACE_S if writes_checkpoint else STORE_GRACE_S)
        await _drain(pumps)
    finally:
        _restore_signals(end_signals)
    if not work.cancelled() and work.result().exit_code != 0:
        return work.result()
    failed = [code for store in running.stores if (code := store.ended.result()) != 0]
    if failed and not work.cancelled():  # its last checkpoint was not written, say
        return Outcome(_exit_code(failed[0]), f"the store {_ending(failed[0])} once the workers were done")
    if work.cancelled() and told_to_end.done():
        return _interrupted(told_to_end.result())
    return _not_shown(delivery.failed.result()) if delivery.failed.done() else work.result()


async def _start_store(job: Job, group: ProcessGroup) -> StoreProcess | None:
    if job.num_shards == 0:
        return None
    return await StoreProcess.start(group, num_shards=job.num_shards, consistency=job.consistency, environ=job.environ)


class _Work:
    """What the workers do, from the time that the store is ready."""

    def __init__(
        self, job: Job, group: ProcessGroup, running: _Processes, pumps: list[asyncio.Task[None]], deliver: Delivery
    ) -> None:
        self._job = job
        self._group = group
        self._running = running
        self._pumps = pumps
        self._deliver = deliver
        self._restarts: Counter[int] = Counter()
        """How often each worker was, by rank."""
        self._gone: set[int] = set()
        """Ranks that have failed for good."""
        self._again: list[asyncio.Task[int]] = []
        """What starts workers again, and waits for their ends."""

    async def run(self) -> Outcome:
        """Until every worker has ended well, or something failed for good."""
        store = self._running.store
        try:
            url = await store.url() if store else None
        except PsstoreError as error:
            return Outcome(EXIT_MISSING, error.message)
        try:
            for rank in range(self._job.num_workers):
                self._start(rank, url)
            return await self._first_failure(url)
        except OSError as error:
            return Outcome(EXIT_NO_PROGRAM, f"can't start {self._job.command[0]!r}: {error.strerror}")
        finally:
            for starting in self._again:
                starting.cancel()

    def _start(self, rank: int, url: str | None) -> Child:
        job = self._job
        environ = worker_environ(
            job.environ,
            url=url,
            rank=rank,
            num_workers=job.num_workers,
            gpus=job.gpus,
            restart=self._restarts[rank],
        )
        worker = self._group.spawn(job.command, environ=environ)
        self._running.workers[rank] = worker
        self._pumps += _pumps(worker, f"rank {rank}", self._deliver)
        return worker

    async def _start_again(self, rank: int, url: str | None) -> int:
        """Returns how it ends then. Raises OSError if it can't be started, now and for START_AGAIN_S."""
        loop = asyncio.get_running_loop()
        began, has_said = loop.time(), False
        while True:
            try:
                worker = self._start(rank, url)
            except OSError as error:
                if error.errno not in NO_ROOM or loop.time() - began >= START_AGAIN_S:
                    raise
                if not has_said:
                    self._say(f"rank {rank} can't be started yet, which is tried again: {error.strerror}")
                    has_said = True
                await asyncio.sleep(LOOK_AGAIN_S)
            else:
                return await asyncio.shield(worker.ended)

    async def _first_failure(self, url: str | None) -> Outcome:
        ranks: dict[asyncio.Future[int], int] = {worker.ended: rank for rank, worker in self._running.workers.items()}
        stores = {store.ended for store in self._running.stores}
        waiting = {*stores, *ranks}
        while waiting != stores:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for store in done & stores:
                return Outcome(_exit_code(store.result()) or EXIT_FAILED, f"the store {_ending(store.result())}")
            for one in sorted(done, key=lambda one: ranks[one]):
                if one.result() == 0:
                    continue
                failed = f"rank {ranks[one]} {_ending(one.result())}"
                rank = ranks[one]
                if self._restarts[rank] == self._job.restarts:
                    self._gone.add(rank)
                    if len(self._gone) > self._job.num_spare:
                        return Outcome(_exit_code(one.result()), failed)
                    self._say(f"{failed}; the others go on without it")
                    continue
                self._restarts[rank] += 1
                self._say(f"{failed}; it is started again ({self._restarts[rank]} of {self._job.restarts})")
                again = asyncio.create_task(self._start_again(rank, url))
                self._again.append(again)
                ranks[again] = rank
                waiting.add(again)
        return Outcome(0)

    def _say(self, text: str) -> None:
        """Once there is room: what is said of holds nobody up."""
        self._pumps.append(asyncio.create_task(self._deliver(Line("run", True, text.encode()))))


def _pumps(child: Child, source: str, deliver: Delivery) -> list[asyncio.Task[None]]:
    pipes = ((child.process.stdout, False), (child.process.stderr, True))
    return [
        asyncio.create_task(pump(pipe, source=source, is_error=is_error, deliver=deliver))
        for pipe, is_error in pipes
        if pipe is not None
    ]


async def _drain(pumps: Sequence[asyncio.Task[None]]) -> None:
    """Until all output is delivered, or only a process that left the group holds a pipe open."""
    _, held_open = await asyncio.wait(pumps, timeout=DRAIN_S)
    for one in held_open:
        one.cancel()


def _exit_code(returncode: int) -> int:
    """As a shell says it: 128 + the signal's number for one that was killed."""
    return returncode if returncode >= 0 else EXIT_SIGNAL - returncode


def _ending(returncode: int) -> str:
    if returncode < 0:
        return f"was killed by {signal_name(-returncode)}"
    return f"ended with exit code {returncode}"


def _interrupted(signum: int) -> Outcome:
    return Outcome(EXIT_SIGNAL + signum, f"interrupted by {signal_name(signum)}")


def _not_shown(error: OSError) -> Outcome:
    return Outcome(EXIT_FAILED, f"can't show what the workers print: {error.strerror}")


def _on_signals(numbers: Iterable[int], *, again: Callable[[], None]) -> asyncio.Future[int]:
    """Done with the number of the first of them that comes; `again` is called at each other one."""
    loop = asyncio.get_running_loop()
    came: asyncio.Future[int] = loop.create_future()

    def on_signal(signum: int) -> None:
        if came.done():
            again()
        else:
            came.set_result(signum)

    for signum in numbers:
        loop.add_signal_handler(signum, on_signal, signum)
    return came


def _restore_signals(numbers: Iterable[int]) -> None:
    loop = asyncio.get_running_loop()
    for signum in numbers:
        loop.remove_signal_handler(signum)
