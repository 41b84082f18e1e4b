"""What a shard's process is made of, by its settings."""

from __future__ import annotations

import logging
import math
import os
import resource
from functools import partial

from psstore import _core
from psstore.errors import BadArgument
from psstore.memory import HANDED_PART
from psstore.net.fd_server import DeviceMemoryServer, FdServer
from psstore.net.token_files import TokenWatch
from psstore.protocol.auth import NONCE_BYTES
from psstore.protocol.coordinator import Coordinator
from psstore.protocol.membership import Liveness
from psstore.protocol.service import ShardService
from psstore.protocol.signing import Signer
from psstore.protocol.welcoming import ShardIdentity
from psstore.server.checkpoint_keeper import CheckpointKeeper
from psstore.server.checkpoint_place import StoragePlace
from psstore.server.shard_saver import ShardSaver
from psstore.server.shard_settings import ShardSettings

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


def make_keeper(settings: ShardSettings, coordinator: Coordinator | None) -> CheckpointKeeper | None:
    if coordinator is None:
        return None
    return CheckpointKeeper(
        coordinator,
        num_shards=len(settings.addresses),
        signer=Signer(settings.signing_key),
        lineage=settings.lineage or settings.store,
        own=None,
        open_place=partial(open_place, settings),
        any_place=settings.checkpoint.any_place,
    )


def open_place(settings: ShardSettings, url: str, at: int | None = None, *, led_before: int = 0) -> StoragePlace:
    """Takes a place, for a store that is under way `at` that version; how many checkpoints are kept is chosen for the
    store's own. `led_before`: how many processes have led the store before this one."""
    chosen, place = settings.checkpoint, partial(StoragePlace, url, store=settings.store, led_before=led_before, at=at)
    return place(keep=chosen.keep, full_every=chosen.full_every) if url == chosen.url else place()


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
