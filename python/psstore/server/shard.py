"""One shard's process: `python -m psstore.server.shard`, started by the supervisor and bound to it by two pipes.

stdin brings the settings as one line of JSON, and orders (orders.py); its end is the supervisor's death, and ours.
stdout carries the line `ready`, or what went wrong at the start, and what becomes of standbys. SIGTERM asks to drain
and end. A standby is the same process, which listens only once it leads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import resource
import signal
import socket
import sys
from collections.abc import Sequence
from functools import partial

import msgspec

from psstore import _core
from psstore.errors import BadArgument, DeviceFailed, PsstoreError, ShuttingDown, StorageFailed, StoreUnreachable
from psstore.memory import HANDED_PART
from psstore.net import loops
from psstore.net.address import UnixAddress, parse_address
from psstore.net.certificates import Certificates
from psstore.net.fd_server import DeviceMemoryServer, FdServer, MemoryServer
from psstore.net.limits import ServerLimits
from psstore.net.names import current_host
from psstore.net.server import Server
from psstore.net.token_files import TokenWatch
from psstore.protocol.auth import NONCE_BYTES
from psstore.protocol.connection import FEATURE_CHECKSUM
from psstore.protocol.coordinator import Coordinator
from psstore.protocol.handshake import ClientIdentity
from psstore.protocol.membership import Liveness
from psstore.protocol.service import ShardIdentity, ShardService
from psstore.protocol.signing import Signer
from psstore.server import logs
from psstore.server.checkpoint_keeper import CheckpointKeeper
from psstore.server.checkpoint_place import StoragePlace
from psstore.server.host_counters import host_counters
from psstore.server.leave import leave
from psstore.server.member_log import MemberLog
from psstore.server.orders import Orders, report
from psstore.server.pipe_words import CUT, IN_SYNC, LOST, OVER, READY, RESHARD, RETIRED
from psstore.server.refusal_log import RefusalLog
from psstore.server.restoring import restore
from psstore.server.shard_saver import ShardSaver
from psstore.server.shard_settings import CheckpointSettings, Follows, ShardSettings

RETIRE_S = 1.0
"""How long a standby that ends waits until its shard has heard so."""

CONNECT_S = 5.0
"""How long a standby tries to connect to its shard: two lost SYNs, and a slow answer."""

OTHER_FILES = 128
"""Open files of a shard that are no connections it serves: the loop's own, and refusals under way."""

FILES_PER_CONNECTION = 4
"""Where there are few: that of a client on this machine comes with those of shared memory."""

FEWEST_FILES = 48
"""What two workers and the shard itself need."""

LEASED_SHARE = 0.25
"""Share of a shard's memory for values that one client may read where they lie: each may have to be kept beside a newer
one. What is more is sent to it."""

_log = logging.getLogger("psstore.server")


def main() -> None:
    """Exits with 0 after a drain, with 1 if it can't start or its device failed."""
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=ShardSettings)
    logs.configure(who=f"shard {settings.index}", level=settings.log_level, form=settings.log_format)
    try:
        loops.run(serve(settings), settings.loop)
    except (OSError, ImportError, PsstoreError) as error:
        _log.debug("can't start", exc_info=True)
        report(f"shard {settings.index} can't start: {error}")
        leave(1)
    leave(0)


async def serve(settings: ShardSettings) -> None:
    """Serves until SIGTERM or the supervisor's end."""
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stopped.set)
    orders = Orders(loop, stopped)
    coordinator = make_coordinator(settings) if settings.index == 0 else None
    arena = make_arena() if settings.device == "cpu" else None
    shard = make_shard(settings, arena)
    lender = (
        MemoryServer(arena, for_all_users=settings.for_all_users)
        if arena is not None
        else make_device_lender(settings, shard)
    )
    limits = ServerLimits(max_connections=make_room(settings.max_connections))
    keeper = make_keeper(settings, coordinator)
    tokens = TokenWatch(settings.tokens)
    service = make_service(settings, coordinator, shard, lender, keeper, tokens, max_connections=limits.max_connections)
    service.host_counters = host_counters(settings, max_connections=limits.max_connections)
    server = Server(
        service,
        loop=loop,
        limits=limits,
        busy_poll_s=1e-6 * settings.busy_poll_us,
        for_all_users=settings.for_all_users,
        tokens=tokens,
        certificates=None if settings.certificates is None else Certificates(settings.certificates, server=True),
    )
    failures: list[DeviceFailed] = []

    def give_up(error: DeviceFailed) -> None:
        if not failures:
            _log.critical("%s; what this shard held is lost", error.message)
        failures.append(error)
        stopped.set()

    server.on_device_failed = give_up
    if settings.is_whole:
        service.on_reshard = lambda shards: report(RESHARD, str(shards))
        orders.on_stand_still = service.standstill.allow  # which may come with the order to lead
        orders.on_not_resharded = server.not_resharded
    sockets = [socket.socket(fileno=descriptor) for descriptor in settings.sockets]
    if settings.follows is None:
        begin_at(settings, service, keeper)
    elif not await stand_by(settings, settings.follows, server, service, orders, stopped, sockets):
        return
    else:
        own_place(settings, keeper)
    service.standbys.on_in_sync = lambda client: report(IN_SYNC, client)
    service.standbys.on_lost = lambda client: report(LOST, client)
    service.standbys.on_retired = lambda client: report(RETIRED, client)
    orders.on_without = server.done_without
    orders.on_over = server.store_ends
    if coordinator is not None:
        members, refusals = MemberLog(coordinator.membership), RefusalLog(coordinator.rounds.norm_guard)

        def log(now: float) -> None:
            members.update(now)
            refusals.update()

        server.on_turn = log
    if lender is not None:
        lender.start(loop)
    unix_paths = [sock.getsockname() for sock in sockets if sock.family == socket.AF_UNIX]
    if settings.follows is None or not settings.follows.place:
        listen(server, sockets)
    report(READY, str(service.shard.version))
    await stopped.wait()
    service.standbys.on_lost = lambda client: None  # it is this process that goes, and a standby may lead
    orders.catch_up()
    orders.close()
    if orders.is_orphan:  # else the supervisor may have another process go on there, and removes the file at the end
        for path in unix_paths:  # before others can bind it: from here on it might be theirs
            with contextlib.suppress(OSError):
                os.unlink(path)
    if lender is not None:
        lender.close()
    await server.drain(failures[0] if failures else None)
    if keeper is not None:
        keeper.close()
    if failures:
        leave(1)


def listen(server: Server, sockets: Sequence[socket.socket]) -> None:
    for sock in sockets:
        server.listen(sock)


async def stand_by(
    settings: ShardSettings,
    follows: Follows,
    server: Server,
    service: ShardService,
    orders: Orders,
    stopped: asyncio.Event,
    sockets: Sequence[socket.socket],
) -> bool:
    """Follows the shard until this process is to lead. False: it has ended before. Raises PsstoreError, OSError."""
    failed, cut, over = asyncio.Event(), asyncio.Event(), asyncio.Event()
    why: list[Exception] = []

    def lost(error: Exception | None) -> None:
        if error is not None:
            why.append(error)
        standby = service.standby
        assert standby is not None, "it follows"
        standby.is_cut = True
        cut.set()
        # The shard may be dead, or says that it ends: this one leads.
        if standby.may_lead and (error is None or isinstance(error, (OSError, ShuttingDown))):
            if follows.place and isinstance(error, ShuttingDown) and not over.is_set():
                orders.lead.set()  # it refuses whatever is asked from then on; who watches it may be dead
            elif follows.place:  # who watches both knows anyhow
                report(CUT, f"{max(0.0, standby.may_ask_at - server.now()):.3f}")
        else:
            failed.set()

    def store_ends() -> None:
        over.set()
        report(OVER)

    server.on_leader_lost = lost
    address, tls = parse_address(follows.address), None
    if isinstance(address, UnixAddress):
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(address.path)
    else:
        sock = socket.create_connection((current_host(address.host), address.port), timeout=CONNECT_S)
        if address.tls:
            tls = Certificates(settings.credentials, server=False).session(address.name or address.host)
    sock.setblocking(False)
    client = ClientIdentity(
        client=follows.client,
        role="standby",
        credentials=settings.credentials,
        features=FEATURE_CHECKSUM if follows.place else 0,
    )
    server.follow(sock, client=client, address=follows.address, place=follows.place, tls=tls)
    if follows.place:
        assert service.standby is not None, "it follows"
        service.standby.on_in_sync = lambda: report(IN_SYNC)
        service.standby.on_over = store_ends
        service.standby.on_silent = server.lose_leader
        service.on_promoted = orders.lead.set
        listen(server, sockets)
    waits = [asyncio.ensure_future(event.wait()) for event in (orders.lead, stopped, failed)]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    if stopped.is_set():
        if server.retire():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(cut.wait(), RETIRE_S)
        return False
    if not orders.lead.is_set():
        raise (
            why[0] if why else StoreUnreachable(f"the shard at {follows.address} is gone, and this has not all it had")
        )
    server.lead()
    return True


def make_room(num_connections: int) -> int:
    """Raises this process's limit on open files as far as it may; returns for how many connections it is enough.

    Raises BadArgument if that is none."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num_connections * FILES_PER_CONNECTION + OTHER_FILES
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if allowed < FEWEST_FILES:
        raise BadArgument(f"the system allows {hard} open files, and a shard needs {FEWEST_FILES}: raise ulimit -n")
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    granted = min(num_connections, max(allowed - OTHER_FILES, allowed // FILES_PER_CONNECTION))
    if granted < num_connections:
        _log.warning("the system allows %d open files: connections are limited to %d", hard, granted)
    return granted


def make_arena() -> _core.ValueArena | None:
    """Memory for values that clients of this machine may read; None where the system has no such thing."""
    try:
        return _core.ValueArena()
    except OSError as error:
        _log.warning("no shared memory on this machine: %s; clients use sockets", error)
        return None


def make_device_lender(settings: ShardSettings, shard: _core.Shard) -> DeviceMemoryServer | None:
    """A way to the shard's device for clients that have it, too. None for a shard in main memory; and where what is
    pushed has to be looked at, which the host can't while it lies on a device."""
    if settings.device == "cpu" or settings.refuse_non_finite:
        return None
    return DeviceMemoryServer(shard, for_all_users=settings.for_all_users)


def make_shard(settings: ShardSettings, arena: _core.ValueArena | None) -> _core.Shard:
    return _core.Shard(
        index=settings.index,
        refuse_non_finite=settings.refuse_non_finite,
        arena=arena,
        device=settings.device,
        num_sharing=settings.num_sharing,
        max_memory_bytes=settings.max_memory_bytes,
        max_kept_bytes=settings.max_kept_bytes,
        notes_row_decisions=settings.checkpoint.full_every > 1,
    )


def make_service(
    settings: ShardSettings,
    coordinator: Coordinator | None,
    shard: _core.Shard,
    lender: FdServer | None,
    keeper: CheckpointKeeper | None,
    tokens: TokenWatch,
    *,
    max_connections: int,
) -> ShardService:
    begun = settings.checkpoint.restore
    identity = ShardIdentity(
        store=settings.store,
        shard=settings.index,
        addresses=settings.addresses,
        consistency=settings.consistency,
        heartbeat_s=settings.heartbeat_s,
        tokens=tokens.tokens,
        lineage=settings.lineage,
        returns=settings.returns,
        process=os.getpid(),
        restored=begun.version if begun is not None else -1,
    )
    return ShardService(
        identity=identity,
        shard=shard,
        signer=Signer(settings.signing_key),
        coordinator=coordinator,
        make_nonce=lambda: os.urandom(NONCE_BYTES),
        lender=lender,
        saver=ShardSaver(shard, index=settings.index, num_shards=len(settings.addresses)),
        keeper=keeper,
        max_connections=max_connections,
        max_leased_bytes=int(settings.max_memory_bytes * LEASED_SHARE),
        lease_s=math.inf if settings.lease_s is None else settings.lease_s,
    )


def own_place(settings: ShardSettings, keeper: CheckpointKeeper | None) -> StoragePlace | None:
    """Takes the place where the store's checkpoints go, on the shard that keeps them."""
    chosen = settings.checkpoint
    if keeper is None or chosen.url is None:
        return None
    place = open_place(chosen, chosen.url)
    keeper.has_place(place)
    return place


def open_place(chosen: CheckpointSettings, url: str, at: int | None = None) -> StoragePlace:
    """Takes a place, for a store that is under way `at` that version; how many checkpoints are kept is chosen for the
    store's own."""
    if url != chosen.url:
        return StoragePlace(url, at=at)
    return StoragePlace(url, at=at, keep=chosen.keep, full_every=chosen.full_every)


def make_keeper(settings: ShardSettings, coordinator: Coordinator | None) -> CheckpointKeeper | None:
    if coordinator is None:
        return None
    chosen = settings.checkpoint
    return CheckpointKeeper(
        coordinator,
        num_shards=len(settings.addresses),
        signer=Signer(settings.signing_key),
        lineage=settings.lineage or settings.store,
        own=None,
        open_place=partial(open_place, chosen),
        any_place=chosen.any_place,
    )


def begin_at(settings: ShardSettings, service: ShardService, keeper: CheckpointKeeper | None) -> None:
    """Restores what is to be restored, and waits for the place of checkpoints to come, which a store that goes on can
    do without until storage is well again. Raises StorageError, BadArgument."""
    place = own_place(settings, keeper)
    begun = settings.checkpoint.restore
    if begun is not None:
        restore(
            begun.url,
            begun.version,
            service.facts,
            service.coordinator,
            index=settings.index,
            num_shards=len(settings.addresses),
            goes_on=settings.checkpoint.goes_on,
        )
    if place is None:
        return
    try:
        place.start_at(begun.version if begun is not None else 0)
    except StorageFailed as error:
        if not settings.checkpoint.goes_on:
            raise
        _log.warning("no checkpoint can be written for now: %s", error.message)
        if keeper is not None and place.has_failed:
            keeper.forget(place)


def make_coordinator(settings: ShardSettings) -> Coordinator:
    usual = Liveness()
    return Coordinator(
        consistency=settings.consistency,
        liveness=Liveness(
            heartbeat_s=settings.heartbeat_s,
            silence_s=settings.silence_s,
            detached_s=min(usual.detached_s, settings.silence_s),
            rejoin_s=settings.rejoin_s,
            lost=settings.lost,
        ),
        num_shards=len(settings.addresses),
        signer=Signer(settings.signing_key),
        max_bytes=settings.max_store_bytes,
        max_handed_bytes=settings.max_memory_bytes // HANDED_PART,
    )


if __name__ == "__main__":
    main()
