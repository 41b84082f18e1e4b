"""The two faces of a store: `Store` blocks, `AsyncStore` is awaited. What they do is in operations.py."""

from __future__ import annotations

import _thread
import asyncio
import concurrent.futures
import functools
import gc
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from types import TracebackType
from typing import Any, Concatenate, NoReturn, ParamSpec, Protocol, TypeVar, cast

from psstore._core import DirectCalls
from psstore.client import fork_safety
from psstore.client.arrays import Array
from psstore.client.changes import Version
from psstore.client.device.arrays import OnDevice, seen
from psstore.client.direct import Direct
from psstore.client.loop_thread import LoopThread
from psstore.client.operations import Operations
from psstore.client.paced import PacedCalls
from psstore.client.pull_types import AwaitedKeys, AwaitedPullsMany, AwaitedPullsOne, Keys, PullsMany, PullsOne
from psstore.client.snapshot import AsyncSnapshot, Snapshot
from psstore.client.versions import AwaitedVersions, Versions
from psstore.client.zero_copy import Borrowed, Debt
from psstore.errors import PsstoreError, StoreClosed, UsageError
from psstore.protocol.holds import Hold
from psstore.text import counted
from psstore.types import Consistency
from psstore.wire.messages import Members

P = ParamSpec("P")
T = TypeVar("T")

_CLOSED = "this store is closed; connect again"

Again = Callable[[int | None], "tuple[Operations, Backend]"]

LEAVE_S = 5.0
"""How long closing may take to say good-bye."""


class Backend(Protocol):
    """The connections of a store, which end with it."""

    thread: LoopThread

    direct: Direct
    """Its direct calls."""

    async def close(self) -> None:
        """Ends the connections. Runs on the thread's loop."""

    def release(self) -> None:
        """After `close`, from another thread: ends the thread, if it is this store's own."""

    def abandon(self) -> None:
        """In a forked child: lets go of the sockets."""


class _Face:
    """State and properties that both faces share. Made by psstore.connect."""

    def __init__(self, operations: Operations, backend: Backend, url: str, again: Again | None = None) -> None:
        """`again`: connects as before, as the worker of that rank; None: it can't be done."""
        self._url = url
        self._again = again
        self._told_to_end: bool | None = None
        """Whether it is to leave, as it was told last; None: not since it began to connect anew."""
        self._attach(operations, backend)
        fork_safety.watch(self)

    def _attach(self, operations: Operations, backend: Backend) -> None:
        self._operations = operations
        self._backend = backend
        self._direct = backend.direct
        self._calls: DirectCalls | None = self._direct.calls()
        """None: closed."""
        self._closed: str | None = None
        """Why it can't be used any more."""
        self._finalizer = weakref.finalize(self, _forgotten, operations, backend)

    def __getstate__(self) -> NoReturn:
        raise UsageError(
            "a store is a connection of one process and can't be copied or pickled: connect in each process, as in a"
            " dataset's first __getitem__ and not in its constructor"
        )

    def holds(self, store: str) -> int | None:
        """See fork_safety.py."""
        welcome = self._operations.client.shards[0].welcome
        is_of_it = welcome is not None and welcome.store == store and self._closed is None
        return self.rank if is_of_it else None

    @property
    def rank(self) -> int | None:
        """This worker's rank; None for a store that is not a worker, or has left."""
        client = self._operations.client
        return client.identity.rank if client.worker.joined else None

    @property
    def num_workers(self) -> int:
        """Workers that the store was started for; where they come and go, those that take part in the open round."""
        return self._operations.client.worker.num_workers

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks that take part in the open round: all of them, unless workers come and go."""
        return self._operations.client.worker.members or tuple(range(self.num_workers))

    @property
    def member_log(self) -> Sequence[Members]:
        """Where workers come and go, or did before: each change of who takes part, since the training began."""
        return self._operations.client.worker.member_log

    @property
    def is_first(self) -> bool:
        """Whether this worker has the lowest rank of those that take part."""
        return self.rank is not None and self.rank == min(self.members)

    @property
    def consistency(self) -> Consistency:
        """The mode that the store was started in: `.mode` names it."""
        welcome = self._operations.client.sessions[0].welcome
        assert welcome is not None, "a store has been connected"
        return welcome.consistency

    @property
    def restored(self) -> int | None:
        """The version of the checkpoint that the store began with; None: it began empty."""
        welcome = self._operations.client.sessions[0].welcome
        assert welcome is not None, "a store has been connected"
        return welcome.restored if welcome.restored >= 0 else None

    @property
    def num_shards(self) -> int:
        return len(self._operations.client.shards)

    @property
    def round(self) -> int:
        """The round that pushes belong to now, from 1 on; 0 for one that never joined."""
        return self._operations.client.worker.round

    @property
    def is_sealed(self) -> bool:
        """Whether this round was committed, and what became of it is not known here: `commit` goes on, has failed, or
        was interrupted. To commit again waits for that, and nothing can be pushed before."""
        return self._operations.client.worker.is_sealed

    @property
    def is_promised(self) -> bool:
        """Whether this round was committed early, and is not finished: who leaves now leaves it torn."""
        with suppress(StoreClosed):
            self._backend.thread.catch_up()  # that commit may have been started just before
        return self._operations.client.worker.is_promised

    @property
    def version(self) -> int:
        """Number of the last decision that is known here: the version of the whole model."""
        return self._operations.client.carrier.version

    @property
    def staleness(self) -> int:
        """Rounds that this worker was ahead of the slowest when its last commit was answered."""
        return self._operations.client.worker.staleness

    @property
    def hand_in_wanted(self) -> bool:
        """Whether a checkpoint is being written that is to have what this worker hands in now."""
        return self._operations.client.worker.hand_in_wanted

    @property
    def stopped(self) -> bool:
        """Whether this worker's training has come to its end: see `stop`."""
        return self._operations.client.worker.stopped

    @property
    def bytes_pushed(self) -> int:
        """Payload bytes sent so far."""
        return self._operations.writing.num_bytes

    @property
    def bytes_pulled(self) -> int:
        """Payload bytes received so far."""
        return self._operations.reading.num_bytes

    @property
    def closed(self) -> bool:
        return self._closed is not None

    @property
    def _is_lost(self) -> bool:
        """Whether nothing can be had over a connection of it any more, unless that is made anew by `reconnect`."""
        sessions = self._operations.client.sessions
        return self._again is not None and not self.closed and any(one.failure is not None for one in sessions)

    @property
    def shares_memory(self) -> bool:
        """What is pushed and pulled is copied to and from memory of every shard, not sent: all are on this machine."""
        return all(session.shares_memory for session in self._operations.client.shards)

    def shares_device(self, array: Array) -> bool:
        """True if the array is on a CUDA device that every shard is on and shares with this process."""
        (place,) = seen([array])
        shards = self._operations.client.shards
        return isinstance(place, OnDevice) and all(shard.device == place.device.identity for shard in shards)

    def version_of(self, name: str) -> int:
        return self._operations.version_of(name)

    version_of.__doc__ = Operations.version_of.__doc__

    def abandon(self) -> None:
        """Called in a forked child, see fork_safety.py."""
        self._closed = (
            "this store was connected before the process forked, and sockets do not survive a fork; connect again in"
            " the child, or use the store in the parent only"
        )
        self._calls = None
        self._finalizer.detach()
        self._backend.abandon()

    def _reconnect(self) -> None:
        rank = self.rank
        if self._again is None:
            raise UsageError(f"{self._url} is no store of other processes: it ends with what it holds")
        self._told_to_end = None
        self._end_connections(leave=False)
        if self._closed != _CLOSED:
            raise StoreClosed(self._closed or "")
        self._attach(*self._again(rank))
        if self._told_to_end is not None:
            self.end(leave=self._told_to_end)
            raise StoreClosed(_CLOSED)
        # What has ended has descriptors, and is in cycles: its own, and those of the error that told of its end.
        # A program that only trains hardly collects any.
        gc.collect()

    def __repr__(self) -> str:
        who = "client" if self.rank is None else f"rank {self.rank} of {self.num_workers}"
        where = f"{who}, {counted(self.num_shards, 'shard')}, round {self.round}, version {self.version}"
        return f"<{type(self).__name__} {self._url}: {'closed' if self.closed else where}>"

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        self._check_open(work)
        return self._backend.thread.run(work)

    def _submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        self._check_open(work)
        return self._backend.thread.submit(work)

    @contextmanager
    def _debt(self) -> Iterator[Debt]:
        """Ended with the block, if it has not been settled."""
        debt = Debt()
        try:
            yield debt
        finally:
            if debt.loan is not None:
                with suppress(StoreClosed):  # then all loans are over
                    self._backend.thread.at_once(lambda: self._operations.borrowing.end(debt))

    @contextmanager
    def _held(self) -> Iterator[list[Hold]]:
        """What the block holds is let go of with it, also what nobody has heard of, who was interrupted just then. The
        shards let go of it themselves if they can't be told."""
        held: list[Hold] = []

        def free() -> None:
            for hold in held:
                self._operations.client.holds.free(hold.reader)

        try:
            yield held
        finally:
            with suppress(StoreClosed):
                self._backend.thread.at_once(free)

    def _check_open(self, work: Coroutine[Any, Any, T]) -> None:
        if self._closed is not None:
            work.close()
            raise StoreClosed(self._closed)

    def end(self, *, leave: bool) -> None:
        """Closes the store; without `leave` a worker is lost to the others. Blocks for at most LEAVE_S and a little;
        called back by a future of its own, it does not wait. Does nothing the second time."""
        self._told_to_end = leave
        self._end_connections(leave=leave)

    def _end_connections(self, *, leave: bool) -> None:
        if self._closed is None:
            self._closed, self._calls = _CLOSED, None
            self._finalizer.detach()
            if asyncio._get_running_loop() is self._backend.thread.loop:
                _thread.start_new_thread(_end, (self._operations, self._backend, leave))
            else:
                _end(self._operations, self._backend, leave)


def _forgotten(operations: Operations, backend: Backend) -> None:
    """Nobody holds the store any more. A garbage collection may have led here from the middle of any store's work,
    which must not wait for itself."""
    if asyncio._get_running_loop() is None:
        _end(operations, backend, False)
    else:
        _thread.start_new_thread(_end, (operations, backend, False))


def _end(operations: Operations, backend: Backend, leave: bool) -> None:
    """Waits until all is ended."""
    try:
        backend.thread.run_task(_take_leave(operations, backend, leave))
    except StoreClosed:
        return  # its LocalStore was closed before it
    except BaseException:  # interrupted: what is left of it ends here all the same
        backend.release()
        raise
    backend.release()


async def _take_leave(operations: Operations, backend: Backend, leave: bool) -> None:
    try:
        if leave:
            await asyncio.wait_for(operations.leave(), LEAVE_S)
    except (PsstoreError, asyncio.TimeoutError):
        pass  # whoever can't be told will notice that the connection is gone
    finally:
        await backend.close()


Operation = Callable[Concatenate[Operations, P], Coroutine[Any, Any, T]]


def _blocking(operation: Operation[P, T]) -> Callable[Concatenate[Store, P], T]:
    """The operation as a method that waits. Ctrl-C ends the wait and the operation; the store stays usable."""

    @functools.wraps(operation)
    def call(self: Store, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._run(operation(self._operations, *args, **kwargs))

    return call


def _hasty(operation: Operation[P, T], at_once: Callable[..., Any]) -> Callable[Concatenate[Store, P], T]:
    """Wraps an operation, to be a direct call if that is possible now."""

    @functools.wraps(operation)
    def call(self: Store, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if self._calls is not None:
            result: T = at_once(self._calls, *args, **kwargs)
            if result is not NotImplemented:
                return result
        return self._run(operation(self._operations, *args, **kwargs))

    return call


def _started(
    operation: Operation[P, T], at_once: Callable[..., object] | None = None, paced: Callable[..., object] | None = None
) -> Callable[Concatenate[Store, P], concurrent.futures.Future[T]]:
    """The operation as a method that does not wait: it is under way when the call returns, after those started before
    it; a direct call if that is possible now. Arrays must stay alive and as they are until the future is
    done."""

    @functools.wraps(operation)
    def call(self: Store, /, *args: P.args, **kwargs: P.kwargs) -> concurrent.futures.Future[T]:
        if at_once is not None and paced is not None and self._calls is not None:
            started = at_once(self._calls, *args, **kwargs)
            if started is NotImplemented:
                started = paced(self._direct.paced, *args, **kwargs)
            if started is not None:
                return cast(concurrent.futures.Future[T], started)
        return self._submit(operation(self._operations, *args, **kwargs))

    return call


def _awaited(
    operation: Operation[P, T], at_once: Callable[..., object] | None = None
) -> Callable[Concatenate[AsyncStore, P], Coroutine[Any, Any, T]]:
    """The operation for the caller's event loop; a direct call if that is possible now. Cancelling ends the
    operation; the store stays usable."""

    @functools.wraps(operation)
    async def call(self: AsyncStore, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if at_once is not None and self._calls is not None:
            started = at_once(self._calls, *args, **kwargs)
            if started is not NotImplemented:
                self._backend.thread.calls.arm_now()  # nobody drives it but the own thread
                return await self._backend.thread.awaited(cast(concurrent.futures.Future[T], started))
        return await self._await(operation(self._operations, *args, **kwargs))

    return call


def _push_one(calls: DirectCalls, name: str, value: Array, **options: Any) -> object:
    """Starts `push` as `push_many`."""
    if not isinstance(name, str):
        return NotImplemented  # others complain of it
    return calls.start_push_many({name: value}, **options)


class Store(_Face):
    """A connection to a store, for one process. Calls block; any thread may make them.

    >>> with psstore.connect("ps://127.0.0.1:5700") as store:
    ...     store.create("w", np.zeros(4, dtype=np.float32), rule="sgd")
    ...     store.push("w", np.ones(4, dtype=np.float32))
    ...     store.commit({"lr": 0.1})
    ...     w = store.pull("w")

    Left by `with`, or closed, or when the program comes to its end, a worker leaves: the others no longer wait for it.
    With an exception it does not: they are told that it is lost.
    """

    create = _blocking(Operations.create)
    create_many = _blocking(Operations.create_many)
    describe = _blocking(Operations.describe)
    keys = cast(Keys, _blocking(Operations.keys))
    drop = _blocking(Operations.drop)
    create_table = _blocking(Operations.create_table)
    push_rows = _blocking(Operations.push_rows)
    pull_rows = _blocking(Operations.pull_rows)
    cache_rows = _blocking(Operations.cache_rows)
    row_cache = _blocking(Operations.row_cache)
    assign_rows = _blocking(Operations.assign_rows)
    export_table = _blocking(Operations.export_table)
    push = _hasty(Operations.push, DirectCalls.push)
    push_many = _hasty(Operations.push_many, DirectCalls.push_many)
    publish = _blocking(Operations.publish)
    settle = _blocking(Operations.settle)
    rehearse = _blocking(Operations.rehearse)
    commit = _blocking(Operations.commit)
    pull = cast(PullsOne, _hasty(Operations.pull, DirectCalls.pull))
    pull_many = cast(PullsMany, _hasty(Operations.pull_many, DirectCalls.pull_many))
    barrier = _blocking(Operations.barrier)
    leave = _blocking(Operations.leave)
    global_norm = _blocking(Operations.global_norm)
    finish = _blocking(Operations.finish)
    pull_state = _blocking(Operations.pull_state)
    restore = _blocking(Operations.restore)
    residuals = _blocking(Operations.residuals)
    set_residuals = _blocking(Operations.set_residuals)
    row_residuals = _blocking(Operations.row_residuals)
    set_row_residuals = _blocking(Operations.set_row_residuals)
    stats = _blocking(Operations.stats)
    checkpoint = _blocking(Operations.checkpoint)
    hand_in = _blocking(Operations.hand_in)
    handed_in = _blocking(Operations.handed_in)
    stop = _blocking(Operations.stop)

    start_push_many = _started(Operations.push_many, DirectCalls.start_push_many, PacedCalls.start_push_many)
    start_push_rows = _started(Operations.push_rows)
    start_commit = _started(Operations.commit)
    start_pull_many = _started(Operations.pull_many, DirectCalls.start_pull_many, PacedCalls.start_pull_many)
    start_finish = _started(Operations.finish)

    @contextmanager
    def borrow(
        self, names: Sequence[str], *, wait_s: float | None = None, consistent: bool | None = None
    ) -> Iterator[Borrowed]:
        """Arrays of these tensors by name, read-only, where they lie in the memory of shards on this machine, without a
        copy; they stay what they are until the block ends, while others train on.

        >>> with store.borrow(["w", "b"]) as values:
        ...     print(values["w"].sum())

        What is on another machine, or small, is received. `wait_s`: how long to wait for first values (default: the
        store's). `consistent`: all of one version, as for `pull_many` (default: for stores with `role="client"`); then
        too it is read in place, whatever changes meanwhile.

        Raises UnknownTensor, NotInitialised, DeadlineExceeded, and VersionGone if shards can't keep a version for as
        long as it is looked up; at the end of the block StoreUnreachable if a connection was lost, or what was borrowed
        was not given back for ten minutes: it may have changed then."""
        with self._debt() as debt:
            yield self._run(self._operations.one_version.borrow(debt, names, wait_s=wait_s, consistent=consistent))
            self._run(self._operations.borrowing.settle(debt))

    @contextmanager
    def snapshot(self, *, state: bool = False, wait_s: float | None = None) -> Iterator[Snapshot]:
        """All trained tensors at one version, which everything that anybody was told of before is in, while others
        train on: nobody waits for whoever reads.

        >>> with store.snapshot() as view:
        ...     w, b = view.pull_many(["w", "b"])

        `state`: keep rule state, too, for `view.pull_state`. `wait_s`: how long to wait for the shards (default: the
        store's). The shards keep what changes meanwhile, as long as there is memory for it (`psstore-server
        --snapshot-memory`) and somebody reads at least once a minute; then the view's calls raise VersionGone, as they
        do when a connection was lost. Tensors of rules 'assign' and 'add' are read as they are."""
        with self._held() as held:
            hold = self._run(self._operations.one_version.hold_in(held, state=state, wait_s=wait_s))
            yield Snapshot(self._operations, hold, self._run)

    def follow(
        self, names: Sequence[str], *, dtype: str | None = None, wait_s: float | None = None
    ) -> Iterator[Version]:
        """Yields whole versions of these tensors as they come, the newest there is each time, and says how many were
        skipped. Only what changes is sent; each version's values are arrays of its own (`psstore.follow` does without
        these copies). After `reconnect` all of it comes anew, and `restored` is true. `dtype`: as there. Raises
        DeadlineExceeded when there is no newer one for `wait_s` (default: the store's), and goes on with the next call,
        as after any error."""
        return Versions(self, names, dtype, wait_s)

    def reconnect(self) -> None:
        """Ends this connection and makes another one, as the same worker, to what is at the store's address now: to go
        on after RolledBack with the store as it was restored. Pushes that no decision counted are void; snapshots,
        borrowed values and calls under way end. Raises as `psstore.connect`, and may be called again then; UsageError
        for local://."""
        self._reconnect()

    def close(self) -> None:
        """Leaves, if it is a worker, and disconnects. Does nothing the second time."""
        self.end(leave=True)

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end(leave=kind is None)


class AsyncStore(_Face):
    """A connection to a store, for one process. Calls are awaited, in any event loop; several may be under way.

    >>> async with await psstore.connect_async("ps://127.0.0.1:5700") as store:
    ...     weights = await store.pull("w")
    """

    async def _await(self, work: Coroutine[Any, Any, T]) -> T:
        return await self._backend.thread.awaited(self._submit(work))

    create = _awaited(Operations.create)
    create_many = _awaited(Operations.create_many)
    describe = _awaited(Operations.describe)
    keys = cast(AwaitedKeys, _awaited(Operations.keys))
    drop = _awaited(Operations.drop)
    create_table = _awaited(Operations.create_table)
    push_rows = _awaited(Operations.push_rows)
    pull_rows = _awaited(Operations.pull_rows)
    cache_rows = _awaited(Operations.cache_rows)
    row_cache = _awaited(Operations.row_cache)
    assign_rows = _awaited(Operations.assign_rows)
    export_table = _awaited(Operations.export_table)
    push = _awaited(Operations.push, _push_one)
    push_many = _awaited(Operations.push_many, DirectCalls.start_push_many)
    publish = _awaited(Operations.publish)
    settle = _awaited(Operations.settle)
    rehearse = _awaited(Operations.rehearse)
    commit = _awaited(Operations.commit)
    pull = cast(AwaitedPullsOne, _awaited(Operations.pull))
    pull_many = cast(AwaitedPullsMany, _awaited(Operations.pull_many, DirectCalls.start_pull_many))
    barrier = _awaited(Operations.barrier)
    leave = _awaited(Operations.leave)
    global_norm = _awaited(Operations.global_norm)
    finish = _awaited(Operations.finish)
    pull_state = _awaited(Operations.pull_state)
    restore = _awaited(Operations.restore)
    residuals = _awaited(Operations.residuals)
    set_residuals = _awaited(Operations.set_residuals)
    row_residuals = _awaited(Operations.row_residuals)
    set_row_residuals = _awaited(Operations.set_row_residuals)
    stats = _awaited(Operations.stats)
    checkpoint = _awaited(Operations.checkpoint)
    hand_in = _awaited(Operations.hand_in)
    handed_in = _awaited(Operations.handed_in)
    stop = _awaited(Operations.stop)

    @asynccontextmanager
    async def borrow(
        self, names: Sequence[str], *, wait_s: float | None = None, consistent: bool | None = None
    ) -> AsyncIterator[Borrowed]:
        with self._debt() as debt:
            borrowed = self._operations.one_version.borrow(debt, names, wait_s=wait_s, consistent=consistent)
            yield await self._await(borrowed)
            await self._await(self._operations.borrowing.settle(debt))

    borrow.__doc__ = Store.borrow.__doc__

    @asynccontextmanager
    async def snapshot(self, *, state: bool = False, wait_s: float | None = None) -> AsyncIterator[AsyncSnapshot]:
        with self._held() as held:
            hold = await self._await(self._operations.one_version.hold_in(held, state=state, wait_s=wait_s))
            yield AsyncSnapshot(self._operations, hold, self._await)

    snapshot.__doc__ = Store.snapshot.__doc__

    def follow(
        self, names: Sequence[str], *, dtype: str | None = None, wait_s: float | None = None
    ) -> AsyncIterator[Version]:
        return AwaitedVersions(self, names, dtype, wait_s)

    follow.__doc__ = Store.follow.__doc__

    async def reconnect(self) -> None:
        await asyncio.to_thread(self._reconnect)

    reconnect.__doc__ = Store.reconnect.__doc__

    async def close(self) -> None:
        """Leaves, if it is a worker, and disconnects. Does nothing the second time."""
        await asyncio.to_thread(self.end, leave=True)

    async def __aenter__(self) -> AsyncStore:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.end, leave=kind is None)


def as_async(store: Store) -> AsyncStore:
    """Turns a store that blocks into one whose calls are awaited, over the same connection. The first is closed."""
    store._closed, store._calls = "this store became an AsyncStore", None
    store._finalizer.detach()
    return AsyncStore(store._operations, store._backend, store._url, store._again)
