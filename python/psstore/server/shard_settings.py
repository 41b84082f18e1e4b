"""What the supervisor tells one shard's process through its stdin: secrets never stand on a command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from psstore.config import Credentials
from psstore.net.token_files import TokenSources
from psstore.protocol.membership import OfLost
from psstore.server.settings import LogFormat, LogLevel, Loop
from psstore.server.store_life import RestoreFrom, StoreLife
from psstore.types import Consistency, place_shards

if TYPE_CHECKING:  # a shard's process does without
    from psstore.server.site import Site
    from psstore.server.store_token import StoreToken

LEASE_S = 3.0
"""How long after its standby's last answer a shard tells others anything, where other shards say who leads. A process
that gets no processor for so long is done without."""


class CheckpointSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a shard process is told about checkpoints."""

    url: str | None = None
    keep: int = 3
    full_every: int = 1
    every_s: float | None = None
    """How often they are to be written, if that is by the clock."""
    any_place: bool = False
    """Clients may name another place than `url`."""
    restore: RestoreFrom | None = None
    goes_on: bool = False
    """The store has served before: it does again while its place can't be had, to the workers that have not left."""


class Follows(msgspec.Struct, frozen=True, kw_only=True):
    """What a standby is told."""

    address: str
    """Its shard's, as this host reaches it."""
    client: str
    """The client id that it connects with."""
    place: str = ""
    """Where this process listens, if its shard is on another host: for who says that it is to lead. Whoever followed
    from there before is dead. '': it listens where its shard did, once that is dead."""


class ShardSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a shard process is told."""

    index: int
    store: str
    """Id of this run of the store."""
    signing_key: bytes
    tokens: TokenSources
    certificates: Credentials | None
    """None: what comes by TCP does so without TLS."""
    credentials: Credentials
    """What it connects to its shard with, as a standby."""
    for_all_users: bool
    """The token was given to the store: other users of this machine may have it, too."""
    lineage: str
    """Id of the first of the runs of which each was restored from the one before, as shard 0 has it; '': this one."""
    returns: bool
    """The store starts again by itself when a shard dies."""
    addresses: tuple[tuple[str, ...], ...]
    """All addresses of every shard."""
    is_whole: bool
    """All shards are children of one supervisor, which can have the store go on with another number of them."""
    sockets: tuple[int, ...]
    """Inherited file descriptors of this shard's bound sockets; on shard 0 also those of shards that are no more."""
    standbys: int
    """How many the shard is to have."""
    lease_s: float | None
    """See StandbyList; None: no vote makes a standby lead."""
    follows: Follows | None
    """The process is a standby, and serves only once it leads."""
    consistency: Consistency
    heartbeat_s: float
    silence_s: float
    rejoin_s: float
    lost: OfLost
    device: str
    num_sharing: int
    """Shards of this host that share the device, this one included."""
    max_memory_bytes: int
    """Main memory that this shard may take."""
    max_kept_bytes: int
    """The part of it that older versions may take while snapshots read them."""
    max_store_bytes: int | None
    """What all values together may take, as far as this host can tell."""
    checkpoint: CheckpointSettings
    refuse_non_finite: bool
    max_connections: int
    busy_poll_us: float
    loop: Loop
    log_level: LogLevel
    log_format: LogFormat


def shard_settings(
    site: Site,
    life: StoreLife,
    index: int,
    *,
    token: StoreToken,
    goes_on: bool,
    follows: Follows | None,
) -> ShardSettings:
    """`follows`: of a standby."""
    settings = site.settings
    devices = place_shards(settings.device, len(site.endpoints))
    max_memory_bytes = settings.max_memory_bytes()
    num_processes = len(site.endpoints) * (1 + settings.standbys)
    device = devices[index - site.first]
    return ShardSettings(
        index=index,
        store=life.store,
        lineage=life.lineage,
        returns=settings.restarts > 0,
        signing_key=life.signing_key,
        tokens=settings.token_sources(token.own),
        certificates=settings.certificates() if settings.has_tls() else None,
        credentials=token.credentials,
        for_all_users=settings.token_file is not None,
        addresses=site.addresses,
        is_whole=site.is_whole,
        sockets=site.sockets(index),
        standbys=settings.standbys,
        lease_s=None if site.other is None else LEASE_S,
        follows=follows,
        consistency=settings.consistency(),
        heartbeat_s=settings.heartbeat_s,
        silence_s=settings.silence_s,
        rejoin_s=settings.rejoin_s,
        lost=settings.of_lost(),
        device=device,
        num_sharing=devices.count(device),
        max_memory_bytes=max_memory_bytes // num_processes,
        max_kept_bytes=settings.snapshot_memory_bytes() // num_processes,
        max_store_bytes=max_memory_bytes // (1 + settings.standbys)
        if site.is_whole and set(devices) == {"cpu"}
        else None,
        checkpoint=CheckpointSettings(
            url=settings.checkpoint,
            keep=settings.keep,
            full_every=settings.full_every,
            every_s=settings.checkpoint_interval().seconds if settings.checkpoint is not None else None,
            any_place=settings.token_file is None,
            restore=life.restore,
            goes_on=goes_on,
        ),
        refuse_non_finite=settings.refuse_non_finite,
        max_connections=settings.max_connections,
        busy_poll_us=settings.busy_poll_us,
        loop=settings.loop,
        log_level=settings.log_level,
        log_format=settings.log_format,
    )
