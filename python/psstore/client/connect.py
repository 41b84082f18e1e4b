"""`psstore.connect`: from a URL to a store."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ParamSpec

from psstore.client.arguments import Options, whole
from psstore.client.fork_safety import ranks_held
from psstore.client.local import LocalStore, parse_local
from psstore.client.operations import Operations
from psstore.client.remote import Remote, open_remote
from psstore.client.store import AsyncStore, Store, as_async
from psstore.config import (
    Credentials,
    Transport,
    check_busy_poll,
    check_connections,
    check_seconds,
    check_transport,
    was_restarted,
    worker_environment,
)
from psstore.errors import BadArgument, RankTaken, TooManyWorkers
from psstore.net.address import parse_addresses
from psstore.net.sockets import check_congestion_control
from psstore.types import is_text
from psstore.wire.messages import Role

if TYPE_CHECKING:
    from psstore.client.traced import Notes

P = ParamSpec("P")


def connect(
    url: str | None = None,
    *,
    role: Role = "worker",
    rank: int | None = None,
    num_workers: int | None = None,
    token: bytes | str | None = None,
    tls_ca: str | os.PathLike[str] | None = None,
    tls_cert: str | os.PathLike[str] | None = None,
    tls_key: str | os.PathLike[str] | None = None,
    timeout_s: float = 30.0,
    wait_s: float | None = None,
    connect_timeout_s: float = 10.0,
    transport: Transport | None = None,
    busy_poll_us: float | None = None,
    connections: int | None = None,
    congestion_control: str | None = None,
) -> Store:
    """Connects to a store and, as a worker, joins it. Blocks.

    `url`: `ps://host:port` or `unix:///path` of any shard, `pss://host:port` of one with TLS, `ps://host:port,host:port`
    of one and its standby on another host, or `local://?shards=2` for a store inside this process (default:
    PSSTORE_URL).
    `role`: 'worker' trains and is waited for; 'client' reads, and writes plain tensors.
    `rank`, `num_workers`: of this worker (default: RANK and WORLD_SIZE, else the lowest free rank). Those are of the
    training that this process was started for, and say nothing of a `local://` store that is asked for by `url`.
    `token`: the store's secret, if it was given one (default: what is in the file that PSSTORE_TOKEN_FILE names). That
    of a store of this user on this machine is found without.
    `tls_ca`: of a store at `pss://`, the file with the CA that its certificate has to be of (default: PSSTORE_TLS_CA,
    else the system's CAs). `tls_cert`, `tls_key`: files with this client's own certificate and key, for a store that
    asks for one (default: PSSTORE_TLS_CERT and PSSTORE_TLS_KEY). Files are read again for each connection.
    `timeout_s`: how long the store may take to answer, also when it is asked whether it still lives. `wait_s`: how long
    to wait for other workers in commits, pulls and barriers, and for a rank whose last worker may be gone without a
    word (default: PSSTORE_WAIT_S, else 300). `connect_timeout_s`: how long to try to reach the store.
    `transport`: 'auto' uses shared memory with shards on this machine, else unix sockets that are here, else TCP; 'shm'
    is the same, but fails without shared memory; 'unix' and 'tcp' use such sockets only (default: PSSTORE_TRANSPORT,
    else 'auto').
    `connections`: how many to have side by side with each shard on another machine, where one TCP connection can't fill
    the link: it has much delay, or a cloud caps each (default: PSSTORE_CONNECTIONS, else 1).
    `congestion_control`: TCP's, of what this store sends, as `psstore-server --congestion-control` is for the way back.
    'bbr' fills long links that lose packets (default: PSSTORE_CONGESTION_CONTROL, else the system's).
    `busy_poll_us`: how long a call that blocks asks for its answer, on a core of its own, before it sleeps (default:
    PSSTORE_BUSY_POLL_US, else 0). With `psstore-server --busy-poll-us` it is what an idle machine's latency can be.

    Raises StoreUnreachable, AuthFailed, TlsFailed, NotAllowed, RankTaken, TooManyWorkers, BadArgument.
    """
    if role not in ("worker", "client"):
        raise BadArgument(f"role is {role!r}; expected 'worker' or 'client'")
    told = worker_environment()
    told_rank, told_workers = (None, None) if _is_own(url) else (told.rank, told.num_workers)
    options = Options(
        role=role,
        rank=told_rank if rank is None else whole("rank", rank),
        num_workers=told_workers if num_workers is None else whole("num_workers", num_workers),
        goes_on=role == "worker" and was_restarted() and not _has_joined,
        credentials=_credentials(told.credentials, token=token, ca=tls_ca, cert=tls_cert, key=tls_key),
        timeout_s=check_seconds("timeout_s", timeout_s),
        wait_s=told.wait_s if wait_s is None else check_seconds("wait_s", wait_s),
        connect_timeout_s=check_seconds("connect_timeout_s", connect_timeout_s),
        transport=told.transport if transport is None else check_transport("transport", transport),
        busy_poll_us=told.busy_poll_us if busy_poll_us is None else check_busy_poll("busy_poll_us", busy_poll_us),
        connections=told.connections if connections is None else check_connections("connections", connections),
        congestion_control=_congestion_control(congestion_control, told.congestion_control),
        trace=told.trace,
        otel=told.otel,
    )
    return open_store(url or told.url, options)


def _is_own(url: object) -> bool:
    """Whether that is a store which begins and ends with this process's connection."""
    return isinstance(url, str) and url.startswith("local:")


def _awaited(connect: Callable[P, Store]) -> Callable[P, Coroutine[Any, Any, AsyncStore]]:
    @functools.wraps(connect)
    async def connect_async(*args: P.args, **kwargs: P.kwargs) -> AsyncStore:
        return as_async(await asyncio.to_thread(connect, *args, **kwargs))

    connect_async.__name__ = connect_async.__qualname__ = "connect_async"
    connect_async.__doc__ = "`connect` for asyncio: the same arguments, and a store whose calls are awaited."
    return connect_async


connect_async = _awaited(connect)


def _credentials(
    told: Credentials,
    *,
    token: bytes | str | None,
    ca: str | os.PathLike[str] | None,
    cert: str | os.PathLike[str] | None,
    key: str | os.PathLike[str] | None,
) -> Credentials:
    """What was given, and of the rest what the environment says. A key is of the certificate that comes with it."""
    return Credentials(
        token=None if token is None else _token(token),
        token_file=told.token_file,
        tls_ca=told.tls_ca if ca is None else os.fspath(ca),
        tls_cert=told.tls_cert if cert is None else os.fspath(cert),
        tls_key=os.fspath(key) if key is not None else told.tls_key if cert is None else None,
    )


def _token(given: bytes | str) -> bytes:
    if isinstance(given, bytes):
        return given
    if not isinstance(given, str) or not is_text(given):  # which is not for messages
        raise BadArgument("token: expected bytes, or text that UTF-8 can say")
    return given.encode()


def _congestion_control(asked: str | None, told: str | None) -> str | None:
    if asked is not None:
        return check_congestion_control("congestion_control", asked)
    return None if told is None else check_congestion_control("environment variable PSSTORE_CONGESTION_CONTROL", told)


def open_store(url: str | None, options: Options) -> Store:
    """`connect`, without a look at the environment. Raises as that does."""
    if url is None:
        raise BadArgument(
            "no store to connect to: give a URL or set PSSTORE_URL. `psstore-server --shards 1` starts a store at"
            " ps://127.0.0.1:5700, `psstore run` starts one with its workers, and local:// is one inside this process"
        )
    if not isinstance(url, str):
        raise BadArgument(f"url is {url!r}; expected a string, as ps://127.0.0.1:5700")
    if _is_own(url):
        return LocalStore(**parse_local(url)).open(Store, options, private=True)
    seeds = parse_addresses(url)
    notes = _notes(options)

    def again(rank: int | None) -> tuple[Operations, Remote]:
        return open_remote(seeds, replace(options, rank=rank))

    try:
        operations, remote = open_remote(seeds, options)
        _note_worker(options)
    except (RankTaken, TooManyWorkers) as error:
        if held := ranks_held(str(error.details["store"])):
            raise type(error)(f"{error.message}; {_own(held)}", **error.details) from None
        raise
    if not notes:
        return Store(operations, remote, url, again)
    from psstore.client.traced import TracedStore

    rank = operations.client.identity.rank
    assert rank is not None, "it is a worker, and has joined"
    return TracedStore(operations, remote, url, again, notes=[make(rank) for make in notes])


_has_joined = False
"""This process has been a worker: what it joins next is a training of its own, whatever place it was started in."""


def _note_worker(options: Options) -> None:
    global _has_joined
    _has_joined |= options.role == "worker"


def _notes(options: Options) -> list[Callable[[int], Notes]]:
    """Makes, of a rank, what its calls are to be noted in. Raises BadArgument."""
    made: list[Callable[[int], Notes]] = []
    if options.role == "worker" and options.trace is not None:
        from psstore.client.traced import SpanFile

        made.append(functools.partial(SpanFile, options.trace))
    if options.role == "worker" and options.otel:
        from psstore.client.otel_spans import StepSpans

        made.append(StepSpans)
    return made


def _own(ranks: Sequence[int]) -> str:
    return (
        f"this process has rank {', '.join(map(str, ranks))} already, by an earlier connect(): close() that store"
        " first, as in a notebook's cell that is run again, or use it"
    )
