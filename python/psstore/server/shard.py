"""One shard's process: `python -m psstore.server.shard`, started by the supervisor and bound to it by two pipes.

stdin brings the settings as one line of JSON, and orders (orders.py); its end is the supervisor's death, and ours.
stdout carries the line `ready`, or what went wrong at the start, and what becomes of standbys. SIGTERM asks to drain
and end. A standby is the same process, which listens only once it leads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys

import msgspec

from psstore.errors import DeviceFailed, PsstoreError, StorageFailed
from psstore.net import loops
from psstore.net.certificates import Certificates
from psstore.net.fd_server import MemoryServer
from psstore.net.limits import ServerLimits
from psstore.net.server import Server
from psstore.net.token_files import TokenWatch
from psstore.protocol.service import ShardService
from psstore.server import logs
from psstore.server.checkpoint_keeper import CheckpointKeeper
from psstore.server.checkpoint_place import StoragePlace
from psstore.server.host_counters import host_counters
from psstore.server.leave import leave
from psstore.server.member_log import MemberLog
from psstore.server.orders import Orders, report
from psstore.server.pipe_words import IN_SYNC, LOST, READY, RESHARD, RETIRED
from psstore.server.refusal_log import RefusalLog
from psstore.server.restoring import restore
from psstore.server.shard_parts import (
    make_arena,
    make_coordinator,
    make_device_lender,
    make_keeper,
    make_room,
    make_service,
    make_shard,
    open_place,
)
from psstore.server.shard_settings import ShardSettings
from psstore.server.standing_by import stand_by

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
        service.reshard_request.on_asked = lambda shards: report(RESHARD, str(shards))
        orders.on_stand_still = service.standstill.allow  # which may come with the order to lead
        orders.on_not_resharded = server.not_resharded
    sockets = [socket.socket(fileno=descriptor) for descriptor in settings.sockets]
    if settings.follows is None:
        begin_at(settings, service, keeper)
    elif not await stand_by(settings, settings.follows, server, service, orders, stopped, sockets):
        return
    else:
        own_place(settings, keeper, led_before=service.leadership.standbys.epoch)
    service.leadership.standbys.on_in_sync = lambda client: report(IN_SYNC, client)
    service.leadership.standbys.on_lost = lambda client: report(LOST, client)
    service.leadership.standbys.on_retired = lambda client: report(RETIRED, client)
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
        for sock in sockets:
            server.listen(sock)
    report(READY, str(service.shard.version))
    await stopped.wait()
    service.leadership.standbys.on_lost = lambda client: None  # it is this process that goes, and a standby may lead
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


def own_place(settings: ShardSettings, keeper: CheckpointKeeper | None, *, led_before: int = 0) -> StoragePlace | None:
    """Takes the place where the store's checkpoints go, on the shard that keeps them. `led_before`: see open_place."""
    url = settings.checkpoint.url
    if keeper is None or url is None:
        return None
    place = open_place(settings, url, led_before=led_before)
    keeper.has_place(place)
    return place


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


if __name__ == "__main__":
    main()
