"""A store inside this process: the same shards, coordinator and protocol, without sockets.

For tests, single-machine training with threads as workers, and trying things out. Frames go from one state machine
to the other as bytes, so that what works here works over a network. Shards, and the pipes between them and the clients,
run on one event loop, which orders them as locks would.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypedDict, TypeVar
from urllib.parse import parse_qsl

from psstore import _core
from psstore.client.arguments import Options
from psstore.client.direct import Direct
from psstore.client.loop_thread import LoopThread
from psstore.client.operations import Operations
from psstore.client.store import AsyncStore, Store
from psstore.client.wait_notices import WaitNotices
from psstore.config import WAIT_S
from psstore.errors import BadArgument, DeviceFailed, ProtocolError, PsstoreError, StoreClosed
from psstore.memory import DEFAULT_SNAPSHOT_PART, HANDED_PART, limit_bytes
from psstore.net.client import QuietFuture
from psstore.net.deadline_timer import DeadlineTimer
from psstore.protocol.client import Client
from psstore.protocol.coordinator import Coordinator
from psstore.protocol.decision_cache import DecisionCache
from psstore.protocol.frames import Output, Piece, Send
from psstore.protocol.handshake import ClientIdentity
from psstore.protocol.membership import Liveness
from psstore.protocol.requests import Future
from psstore.protocol.service import ShardService
from psstore.protocol.session import Session
from psstore.protocol.sharing import OwnShard
from psstore.protocol.signing import MAC_BYTES, Signer
from psstore.protocol.welcoming import ShardIdentity
from psstore.types import Consistency, GivenGrace, grace_seconds, parse_workers, place_shards
from psstore.wire.messages import Role

LIVENESS = Liveness(silence_s=math.inf, detached_s=0.0)
"""Never takes a worker for lost: one of this process lives as long as its store is open."""


SETTLES_AFTER_S = 0.01
"""How long idle work waits for calls that do it themselves, as pulls do, and go without the loop as long as nobody
wants it."""


class LocalCluster:
    """The shards of a LocalStore."""

    def __init__(
        self,
        thread: LoopThread,
        num_shards: int,
        consistency: Consistency,
        *,
        refuse_non_finite: bool,
        devices: Sequence[str],
        max_memory_bytes: int,
    ) -> None:
        """`devices`: one for each shard. `max_memory_bytes`: of main memory, that all of them may take together."""
        self.loop = loop = thread.loop
        self.consistency = consistency
        self._left: deque[Pipe] = deque()
        self._ring = thread.bell(self._go_on)
        signer = Signer(secrets.token_bytes(2 * MAC_BYTES))
        coordinator = Coordinator(
            consistency=consistency,
            liveness=replace(LIVENESS, lost="drop") if consistency.elastic else LIVENESS,
            num_shards=num_shards,
            signer=signer,
            max_bytes=max_memory_bytes if set(devices) == {"cpu"} else None,
            max_handed_bytes=max_memory_bytes // HANDED_PART,
        )
        store = secrets.token_hex(16)
        self.hosts = [
            ShardHost(
                ShardService(
                    identity=ShardIdentity(
                        store=store,
                        shard=index,
                        addresses=(("local://",),) * num_shards,
                        consistency=consistency,
                        heartbeat_s=LIVENESS.heartbeat_s,
                    ),
                    shard=_core.Shard(
                        index=index,
                        refuse_non_finite=refuse_non_finite,
                        device=devices[index],
                        num_sharing=devices.count(devices[index]),
                        max_memory_bytes=max_memory_bytes // num_shards,
                        max_kept_bytes=max_memory_bytes // num_shards // DEFAULT_SNAPSHOT_PART,
                    ),
                    signer=signer,
                    coordinator=coordinator if index == 0 else None,
                    make_nonce=lambda: b"",
                ),
                loop,
                shares_device=devices[index] != "cpu" and not refuse_non_finite,
            )
            for index in range(num_shards)
        ]

    def look_after(self, pipe: Pipe) -> None:
        """A call without the loop has left it something to do. Any thread may call it."""
        self._left.append(pipe)
        self._ring()

    def _go_on(self) -> None:
        for _ in range(len(self._left)):
            self._left.popleft().pump()

    async def close(self) -> None:
        for host in self.hosts:
            host.close()


class ShardHost:
    """Drives one shard's service: carries its outputs out, gives it its time."""

    def __init__(self, service: ShardService, loop: asyncio.AbstractEventLoop, *, shares_device: bool) -> None:
        """`shares_device`: the shard shares its device with clients; not if it has to look at what is pushed."""
        self._service = service
        self._loop = loop
        self._shares_device = shares_device
        self._wires: dict[int, Pipe] = {}
        self._next_conn = 1
        self._deadline_timer = DeadlineTimer(loop, next_wake=service.next_wake, tick=self._tick)
        self._settling = False

    def open(self, wire: Pipe) -> tuple[int, _core.ServerProtocol]:
        """Returns the wire's number, and where what it brings goes."""
        conn = self._next_conn
        self._next_conn += 1
        self._wires[conn] = wire
        return conn, self._service.opened(conn, self._loop.time())

    def share_within(self, conn: int) -> OwnShard | None:
        return self._service.share_within(conn) if self._shares_device else None

    def hang_up(self, conn: int) -> None:
        if self._wires.pop(conn, None) is not None:
            self._service.closed(conn, self._loop.time())
            self._deadline_timer.update()

    def hear(self, conn: int, frame: _core.Frame) -> None:
        """A frame has come that is not for data alone."""
        self._carry(self._service.frame(conn, frame, self._loop.time()))
        self._catch_up()

    def blame(self, conn: int, error: ProtocolError) -> None:
        """Its client is at fault."""
        self._carry(self._service.failed(conn, error))

    def attend(self) -> None:
        """Sees to what has become due by what was heard."""
        self._carry(self._service.woken(self._loop.time()))
        self._deadline_timer.update()
        with suppress(DeviceFailed):  # whoever asks for anything is told
            if not self._settling and not self._service.is_settled:
                self._settling = True
                self._loop.call_later(SETTLES_AFTER_S, self._settle)

    def close(self) -> None:
        self._deadline_timer.cancel()
        for wire in list(self._wires.values()):
            wire.session.give_up(StoreClosed("its LocalStore was closed; make another"))
            wire.close()

    def _catch_up(self) -> None:
        with suppress(DeviceFailed):  # whoever asks for anything is told
            self._carry(self._service.catch_up(self._loop.time()))

    def _carry(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            wire = self._wires.get(output.conn)
            if wire is None:
                continue
            if isinstance(output, Send):
                wire.to_client(output.pieces)
            else:
                wire.close()

    def _tick(self, now: float) -> None:
        self._carry(self._service.tick(now))
        self._catch_up()

    def _settle(self) -> None:
        """Does what the last decision left over, between other things."""
        try:
            self._settling = not self._service.settle()
        except DeviceFailed:  # whoever asks for anything is told
            self._settling = False
        if self._service.data.is_filling:
            self._carry(self._service.woken(self._loop.time()))
            self._settling = self._settling or self._service.data.is_filling
        if self._settling:
            self._loop.call_later(0.0, self._settle)


class Pipe:
    """The link of one session and one shard. What is said for data the shard answers at once, without Python."""

    def __init__(self, session: Session, host: ShardHost, loop: asyncio.AbstractEventLoop) -> None:
        self.session = session
        self._host = host
        self._loop = loop
        self._deadline_timer = DeadlineTimer(loop, next_wake=session.next_wake, tick=session.tick)
        self._is_open = True
        self._pumping = False
        self._conn, protocol = host.open(self)
        self._link = _core.LocalLink(protocol)
        session.connected()
        session.core.open_local(self._link)
        session.own_shard = host.share_within(self._conn)
        session.device = session.own_shard.shard.device_identity if session.own_shard is not None else b""
        self.pump()

    def flush(self) -> None:
        """There is something to say or to hear: soon, after what the caller is at."""
        self._deadline_timer.update()
        if not self._pumping:
            self._loop.call_soon(self.pump)  # first: a signal's handler may raise in between
            self._pumping = True

    def to_client(self, pieces: Sequence[Piece]) -> None:
        self._link.reply(pieces)
        self.flush()

    def close(self) -> None:
        self._receive()  # what it is closed for
        self._is_open = False
        self._deadline_timer.cancel()
        self.session.disconnected()
        self._host.hang_up(self._conn)

    def pump(self) -> None:
        """Has the shard hear what the session says, and the session what the shard has answered."""
        self._pumping = False
        while self._is_open:
            self.session.core.send()
            try:
                frame = self._link.take_event()
            except ProtocolError as error:
                self._host.blame(self._conn, error)
                return
            if frame is None:
                break
            self._host.hear(self._conn, frame)
        self._receive()
        self._host.attend()

    def _receive(self) -> None:
        now = self._loop.time()
        try:
            while self._is_open and self._link.has_answers and self.session.failure is None:
                self.session.core.receive(now)
                self.session.take_frames(now)
        except PsstoreError as error:
            self.session.give_up(error)
        if self._is_open and self.session.core.has_output:
            self.flush()
        self._deadline_timer.update()


class LocalDriver:
    """The backend and the driver of one client of a LocalStore."""

    def __init__(self, cluster: LocalCluster, thread: LoopThread, *, on_released: Callable[[], None] | None) -> None:
        self.thread = thread
        self.direct: Direct
        self._cluster = cluster
        self._wires: list[Pipe] = []
        self._on_released = on_released

    async def open(self, options: Options) -> Operations:
        """Connects to every shard and, as a worker, joins. Raises RankTaken, TooManyWorkers, BadArgument."""
        identity = ClientIdentity(client=secrets.token_hex(16), role=options.role)
        decisions = DecisionCache(len(self._cluster.hosts))
        sessions = [
            Session(identity=identity, decisions=decisions, make_nonce=lambda: b"", address="local://", shard=shard)
            for shard in range(len(self._cluster.hosts))
        ]
        self._wires = [
            Pipe(session, host, self._cluster.loop) for session, host in zip(sessions, self._cluster.hosts, strict=True)
        ]
        client = Client(
            driver=self, identity=identity, decisions=decisions, sessions=sessions, timeout_s=options.timeout_s
        )
        client.worker.num_workers = self._cluster.consistency.num_workers
        if options.role == "worker":
            await client.worker.join(rank=options.rank, num_workers=options.num_workers, wait_s=options.wait_s)
            WaitNotices(client, self._cluster.loop)
        operations = Operations(client, wait_s=options.wait_s)
        self.direct = Direct(operations, self, self.thread)
        return operations

    def now(self) -> float:
        return self._cluster.loop.time()

    def future(self) -> Future:
        return QuietFuture(loop=self._cluster.loop)

    def flush(self, session: Session) -> None:
        self._wires[session.shard].flush()

    await_answer = flush

    def resume(self, session: Session) -> None:
        """A call has been heard without the loop, and left the rest to it."""
        self._wires[session.shard].pump()

    def look_after(self, sessions: Collection[Session]) -> None:
        """A call that is over, or not waited for, has left them something to do. Any thread may call it."""
        for session in sessions:
            self._cluster.look_after(self._wires[session.shard])

    async def close(self) -> None:
        for wire in self._wires:
            wire.session.give_up(StoreClosed("this store is closed; connect again"))
            wire.close()

    def release(self) -> None:
        if self._on_released is not None:
            self._on_released()

    def abandon(self) -> None:
        """Does nothing in a forked child: there are no sockets to let go of, and no thread any more."""


S = TypeVar("S", Store, AsyncStore)


class LocalOptions(TypedDict, total=False):
    """Options of a local:// URL."""

    shards: int
    workers: int | str
    mode: str
    staleness: int
    grace_s: GivenGrace
    refuse_norm: float
    device: str
    max_memory: str


def parse_local(url: str) -> LocalOptions:
    """Parses `local://?shards=2&workers=4&mode=ssp&staleness=2`. Raises BadArgument naming what it can't read."""
    scheme, _, query = url.partition("?")
    if scheme not in ("local:", "local://"):
        raise BadArgument(f"URL {url!r}: expected local:// or local://?shards=2&workers=1&mode=sync")
    options = LocalOptions()
    for name, text in parse_qsl(query, keep_blank_values=True):
        if name in ("mode", "device", "max_memory"):
            options[name] = text  # type: ignore[literal-required]
        elif name in ("shards", "workers", "staleness"):
            try:
                is_range = name == "workers" and ":" in text
                options[name] = text if is_range else int(text)  # type: ignore[literal-required]
            except ValueError:
                raise BadArgument(f"URL {url!r}: {name} is {text!r}; expected an integer") from None
        elif name == "grace_s" and text == "auto":
            options["grace_s"] = "auto"
        elif name in ("grace_s", "refuse_norm"):
            try:
                options[name] = float(text)  # type: ignore[literal-required]
            except ValueError:
                expected = "a number of seconds, or auto" if name == "grace_s" else "a number"
                raise BadArgument(f"URL {url!r}: {name} is {text!r}; expected {expected}") from None
        else:
            there_are = "shards, workers, mode, staleness, grace_s, refuse_norm, device and max_memory"
            raise BadArgument(f"URL {url!r}: no option {name!r}; there are {there_are}")
    return options


class LocalStore:
    """A store inside this process, for the threads of it.

    >>> server = psstore.LocalStore(shards=2, workers=4)
    >>> store = server.connect(rank=0)      # in each worker's thread, with its rank
    """

    def __init__(
        self,
        shards: int = 1,
        *,
        workers: int | str = 1,
        mode: str = "sync",
        backups: int = 1,
        staleness: int = 2,
        grace_s: GivenGrace = 0.0,
        refuse_non_finite: bool = False,
        refuse_norm: float | None = None,
        device: str = "cpu",
        max_memory: str | None = None,
    ) -> None:
        """`workers`: how many, or 'FEWEST:MOST' where they come and go. `mode`: 'sync', 'backup' (a round does
        without `backups` late workers, which have `grace_s` from when the others have ended it; 'auto': as long as that
        pays), 'ssp' (a worker may be `staleness` rounds ahead) or 'async'.
        `refuse_non_finite`: refuse pushes that hold NaN or infinity. `refuse_norm`: have rounds go on without
        contributions whose norm is more than so many times the median of the last ones to the same tensors, or not
        finite (`CommitResult.refused`). `device`: where parameters live and steps are taken: 'cpu', 'cuda:0', or
        several, separated by commas, which the shards take in turn.
        `max_memory`: main memory that the shards may take together, as '8GiB' (default: four fifths of what the
        machine or its control group has); what goes beyond it is refused with OutOfMemory."""
        if shards < 1:
            raise BadArgument(f"shards is {shards}; a store needs at least 1")
        fewest, num_workers = parse_workers("workers", workers)
        consistency = Consistency.of_mode(
            mode,
            num_workers=num_workers,
            fewest=fewest,
            backups=backups,
            staleness=staleness,
            grace_s=grace_seconds(grace_s),
            refuse_norm=refuse_norm,
        )
        self.thread = LoopThread()
        self._cluster = LocalCluster(
            self.thread,
            shards,
            consistency,
            refuse_non_finite=refuse_non_finite,
            devices=place_shards(device, shards),
            max_memory_bytes=limit_bytes(max_memory),
        )
        self._closed = False
        self._what = f"local://?shards={shards}&workers={workers}&mode={consistency.mode}"

    def connect(
        self,
        *,
        role: Role = "worker",
        rank: int | None = None,
        timeout_s: float = 30.0,
        wait_s: float = WAIT_S,
    ) -> Store:
        """A worker of this store, or a client: the same as one of psstore.connect."""
        return self.open(Store, Options(role=role, rank=rank, timeout_s=timeout_s, wait_s=wait_s))

    def connect_async(
        self,
        *,
        role: Role = "worker",
        rank: int | None = None,
        timeout_s: float = 30.0,
        wait_s: float = WAIT_S,
    ) -> AsyncStore:
        """Opens a store whose calls are awaited. Connecting itself takes no time here."""
        return self.open(AsyncStore, Options(role=role, rank=rank, timeout_s=timeout_s, wait_s=wait_s))

    def open(self, face: type[S], options: Options, *, private: bool = False) -> S:
        """`private`: the store ends when this connection does."""
        if self._closed:
            raise StoreClosed("this store is closed; make another LocalStore")
        line = LocalDriver(self._cluster, self.thread, on_released=self.close if private else None)
        opening = self.thread.submit(line.open(options))
        try:
            operations = opening.result()
        except BaseException:
            opening.cancel()
            self.thread.submit(line.close()).result()
            line.release()
            raise
        return face(operations, line, self._what)

    def close(self) -> None:
        """Ends the store and what it holds. Calls under way fail with StoreClosed."""
        if not self._closed:
            self._closed = True
            with suppress(StoreClosed):  # in a forked child it is closed
                self.thread.run(self._cluster.close())
            self.thread.stop()

    def __enter__(self) -> LocalStore:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<LocalStore {self._what}{': closed' if self._closed else ''}>"
