"""`psstore.connect`: from a URL to a store."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from psstore.client.local import LocalStore, parse_local
from psstore.client.loop_thread import LoopThread
from psstore.client.operations import Operations
from psstore.client.options import Options
from psstore.client.remote import Remote
from psstore.client.store import AsyncStore, Store
from psstore.config import Transport, check_busy_poll, check_transport, worker_environment
from psstore.errors import BadArgument
from psstore.net.address import parse_address
from psstore.net.sockets import check_congestion_control
from psstore.protocol.connection import MAX_CHANNELS
from psstore.wire.messages import Role

S = TypeVar("S", Store, AsyncStore)


def connect(
    url: str | None = None,
    *,
    role: Role = "worker",
    rank: int | None = None,
    num_workers: int | None = None,
    token: bytes | str | None = None,
    timeout_s: float = 30.0,
    wait_s: float = 300.0,
    connect_timeout_s: float = 10.0,
    transport: Transport | None = None,
    busy_poll_us: float | None = None,
    connections: int | None = None,
    congestion_control: str | None = None,
) -> Store:
    """Connects to a store and, as a worker, joins it. Blocks.

    `url`: `ps://host:port` or `unix:///path` of any shard, or `local://?shards=2` for a store inside this process
    (default: PSSTORE_URL).
    `role`: 'worker' trains and is waited for; 'client' reads, and writes plain tensors.
    `rank`, `num_workers`: of this worker (default: RANK and WORLD_SIZE, else the lowest free rank).
    `token`: the store's secret, if it has one (default: what is in the file that PSSTORE_TOKEN_FILE names).
    `timeout_s`: how long the store may take to answer. `wait_s`: how long to wait for other workers in commits,
    pulls and barriers. `connect_timeout_s`: how long to try to reach the store.
    `transport`: 'auto' uses shared memory with shards on this machine, else unix sockets that are here, else TCP; 'shm'
    is the same, but fails without shared memory; 'unix' and 'tcp' use such sockets only (default: PSSTORE_TRANSPORT,
    else 'auto').
    `connections`: how many to have side by side with each shard on another machine, where one TCP connection can't fill
    the link: it has much delay, or a cloud caps each (default: PSSTORE_CONNECTIONS, else 1).
    `congestion_control`: TCP's, of what this store sends, as `psstore-server --congestion-control` is for the way back.
    'bbr' fills long links that lose packets (default: PSSTORE_CONGESTION_CONTROL, else the system's).
    `busy_poll_us`: how long a call that blocks asks for its answer, on a core of its own, before it sleeps (default:
    PSSTORE_BUSY_POLL_US, else 0). With `psstore-server --busy-poll-us` it is what an idle machine's latency can be.

    Raises StoreUnreachable, AuthFailed, RankTaken, TooManyWorkers, BadArgument.
    """
    options = _options(
        role,
        rank,
        num_workers,
        token,
        timeout_s,
        wait_s,
        connect_timeout_s,
        transport,
        busy_poll_us,
        connections,
        congestion_control,
    )
    return _connect(Store, url, options)


async def connect_async(
    url: str | None = None,
    *,
    role: Role = "worker",
    rank: int | None = None,
    num_workers: int | None = None,
    token: bytes | str | None = None,
    timeout_s: float = 30.0,
    wait_s: float = 300.0,
    connect_timeout_s: float = 10.0,
    transport: Transport | None = None,
    busy_poll_us: float | None = None,
    connections: int | None = None,
    congestion_control: str | None = None,
) -> AsyncStore:
    """`connect` for asyncio: the same arguments, and a store whose calls are awaited."""
    options = _options(
        role,
        rank,
        num_workers,
        token,
        timeout_s,
        wait_s,
        connect_timeout_s,
        transport,
        busy_poll_us,
        connections,
        congestion_control,
    )
    return await asyncio.to_thread(_connect, AsyncStore, url, options)


def _options(
    role: Role,
    rank: int | None,
    num_workers: int | None,
    token: bytes | str | None,
    timeout_s: float,
    wait_s: float,
    connect_timeout_s: float,
    transport: Transport | None,
    busy_poll_us: float | None,
    connections: int | None,
    congestion_control: str | None,
) -> Options:
    told = worker_environment()
    control = told.congestion_control if congestion_control is None else congestion_control
    if role not in ("worker", "client"):
        raise BadArgument(f"role is {role!r}; expected 'worker' or 'client'")
    for name, seconds in (("timeout_s", timeout_s), ("wait_s", wait_s), ("connect_timeout_s", connect_timeout_s)):
        if not seconds > 0:
            raise BadArgument(f"{name} is {seconds}; expected a positive number of seconds")
    return Options(
        role=role,
        rank=told.rank if rank is None else rank,
        num_workers=told.num_workers if num_workers is None else num_workers,
        token=told.token if token is None else token.encode() if isinstance(token, str) else token,
        timeout_s=timeout_s,
        wait_s=wait_s,
        connect_timeout_s=connect_timeout_s,
        transport=told.transport if transport is None else check_transport("transport", transport),
        busy_poll_us=told.busy_poll_us if busy_poll_us is None else check_busy_poll("busy_poll_us", busy_poll_us),
        connections=_checked(connections if connections is not None else told.connections),
        congestion_control=None if control is None else check_congestion_control("congestion_control", control),
    )


def _checked(connections: int | None) -> int:
    if connections is None:
        return 1
    if not 1 <= connections <= MAX_CHANNELS:
        raise BadArgument(f"connections is {connections}; expected 1 to {MAX_CHANNELS}, to each shard")
    return connections


def _connect(face: type[S], url: str | None, options: Options) -> S:
    chosen = url or worker_environment().url
    if chosen is None:
        raise BadArgument(
            "no store to connect to: give a URL or set PSSTORE_URL. `psstore-server --shards 1` starts a store at"
            " ps://127.0.0.1:5700, `psstore run` starts one with its workers, and local:// is one inside this process"
        )
    if chosen.startswith("local:"):
        return LocalStore(**parse_local(chosen)).open(face, options, private=True)
    seed = parse_address(chosen)
    thread = LoopThread(busy_s=1e-6 * options.busy_poll_us)
    remote = Remote(thread)
    opening = thread.submit(remote.open(seed, options))
    try:
        operations: Operations = opening.result()
    except BaseException:
        opening.cancel()
        thread.submit(remote.close()).result()
        thread.stop()
        raise
    return face(operations, remote, chosen)
