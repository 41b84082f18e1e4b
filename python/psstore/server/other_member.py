"""The other process of a shard, on another host: how it is, and the word that it is to lead. Both block."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple, TypeVar

from psstore.config import Credentials
from psstore.errors import PsstoreError, StoreUnreachable
from psstore.net import loops
from psstore.net.address import TcpAddress, parse_address
from psstore.net.asking import ask, counters, greeted, tie
from psstore.net.client import Reconnector
from psstore.net.names import current_host, telling
from psstore.net.user_token import find
from psstore.protocol.handshake import ClientIdentity
from psstore.wire import messages as m

T = TypeVar("T")

LOOK_S = 2.0
"""How long it may take to answer."""

REFUSED_S = 0.1
"""How long a host may refuse connections: then nobody is there."""


class FoundMember(NamedTuple):
    """What a process of a shard says of itself."""

    welcome: m.Welcome
    counters: Mapping[str, int | float | str]

    @property
    def leads(self) -> bool:
        return bool(self.counters["leads"])

    @property
    def may_lead(self) -> bool:
        """Whether it leads, or is a standby that has all that anybody was told."""
        return bool(self.counters["may_lead"])


def look_at(address: str, credentials: Credentials, *, timeout_s: float = LOOK_S) -> FoundMember:
    """Raises StoreUnreachable, AuthFailed, DeadlineExceeded."""

    async def look(reconnector: Reconnector) -> FoundMember:
        return FoundMember(await greeted(reconnector), await counters(reconnector, timeout_s=timeout_s))

    return loops.run(visit(address, credentials, timeout_s, look, role="operator"), "asyncio")


def refuses(address: str, *, timeout_s: float = LOOK_S) -> bool:
    """Whether its host is there, and says that nobody listens: else nobody can know from here what there is."""
    place = parse_address(address)
    assert isinstance(place, TcpAddress), "it is on another host"
    troubles: list[OSError] = []
    try:
        for family, kind, _, _, where in socket.getaddrinfo(
            current_host(place.host), place.port, type=socket.SOCK_STREAM
        ):
            try:
                with socket.socket(family, kind) as sock:
                    sock.settimeout(timeout_s)
                    sock.connect(where)
                return False
            except OSError as error:
                troubles.append(error)
    except OSError:  # nobody knows the name
        return False
    return all(isinstance(one, ConnectionRefusedError) for one in telling(troubles))


def has_begun(others: Sequence[Sequence[str]], credentials: Credentials) -> bool | None:
    """Whether one of these shards says that the store has something in it: no client defines anything before it has
    been at every shard. None: none is in reach, or there are none, and nobody knows."""
    found: bool | None = None
    for place in chain.from_iterable(others):
        try:
            told = look_at(place, credentials).counters
        except PsstoreError:
            found = False if refuses(place) else found
            continue
        if told["version"] or told["slots"]:
            return True
        found = False
    return found


def why_not_begin(shard: int, other: str, others: Sequence[Sequence[str]], credentials: Credentials) -> str | None:
    """Why a process of the shard must not begin with nothing while nobody answers at its other place. None: it may."""
    if refuses(other):
        return None
    begun = has_begun(others, credentials)
    if begun is False:
        return None
    if begun:
        known, mend = "other shards have", "end all shards, and start them with --restore auto"
    else:
        known, mend = "nobody is in reach to say whether there is", "start another process in its place"
    return (
        f"{known} something of this store, and {other}, which may have all of shard {shard}, is out of reach: to begin"
        f" with nothing here would lose that. Mend the way there; or, if it is gone for good, {mend}"
    )


def promote(address: str, credentials: Credentials, *, force: bool = False, timeout_s: float = LOOK_S) -> None:
    """Says there that the other process of the shard is dead: a standby leads from now on, and a leader does without
    the standby that it has lost. REQUIRES: it is. Raises BadArgument if it can't lead, and as `look_at`.

    `force`: although the two are connected."""

    async def say(reconnector: Reconnector) -> None:
        await greeted(reconnector)
        await ask(reconnector, "PROMOTE", m.Promote(force=force), timeout_s=timeout_s)

    loops.run(visit(address, credentials, timeout_s, say, role="operator"), "asyncio")


def reshard(address: str, credentials: Credentials, num_shards: int, *, timeout_s: float) -> None:
    """Says at shard 0 that the store is to go on with so many shards. Never returns: raises BadArgument if it does not,
    and RolledBack or StoreUnreachable when the shard that was asked has ended, as it does then."""

    async def say(reconnector: Reconnector) -> None:
        await greeted(reconnector)
        await ask(reconnector, "RESHARD", m.Reshard(shards=num_shards), timeout_s=timeout_s)

    loops.run(visit(address, credentials, timeout_s, say, role="operator"), "asyncio")


async def visit(
    address: str, credentials: Credentials, timeout_s: float, do: Callable[[Reconnector], Awaitable[T]], *, role: m.Role
) -> T:
    """What `do` finds out over a connection of its own. Raises StoreUnreachable if nobody has answered in that time, at
    the latest."""
    identity = ClientIdentity(client=secrets.token_hex(16), role=role, credentials=credentials, find_token=find)
    reconnector = tie(identity, address, patience_s=min(REFUSED_S, timeout_s))
    try:
        return await asyncio.wait_for(do(reconnector), timeout_s)
    except asyncio.TimeoutError:
        raise StoreUnreachable(
            f"nobody answers at {address} within {timeout_s:g} s", address=address, tried_s=timeout_s
        ) from None
    finally:
        await reconnector.close()
