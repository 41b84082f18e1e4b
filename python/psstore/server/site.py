"""What of a store runs on this host: all of its shards, or one of several that each have a host of their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from psstore.config import Resolved
from psstore.net.address import Address, TcpAddress, is_loopback, join_addresses
from psstore.server.listening import Endpoint, bind_shards
from psstore.server.settings import ServerSettings


def addresses_of(endpoints: Iterable[Endpoint]) -> list[Address]:
    """Where shards listen, and where clients are told to find them."""
    return [address for endpoint in endpoints for address in (*endpoint.bound, *endpoint.addresses)]


@dataclass
class Site:
    """Owns the endpoints of the shards that run here."""

    settings: ServerSettings
    """What the store was told, with the number of shards that it has by now."""
    tcp: TcpAddress | None
    """Where to listen, see `tcp_address`."""
    first: int
    """Index of the first of them."""
    endpoints: list[Endpoint]
    addresses: tuple[tuple[str, ...], ...]
    """All addresses of every shard of the store, as clients are told; last that of its standby, if it has one on
    another host."""
    other: str | None = None
    """Where the other process of this host's shard is, of which one leads; None: there is none on another host."""
    former: list[Endpoint] = field(default_factory=list)
    """Endpoints of shards that are no more, in their order: who looks for them there finds shard 0."""

    @property
    def is_whole(self) -> bool:
        """No other host has a process of this store."""
        return self.other is None and len(self.endpoints) == len(self.addresses)

    @property
    def url(self) -> str:
        """What clients are to connect to: shard 0, at both of its places if it has two."""
        first = self.addresses[0]
        return first[0] if self.other is None else join_addresses(first)

    def own(self) -> list[Address]:
        """Where the shards that run here listen, and where clients are told to find them."""
        return addresses_of([*self.endpoints, *self.former])

    def watched(self) -> Mapping[int, Sequence[str]]:
        """Shards whose life concerns this host, and where they are asked: shard 0; from its own host, all others too.
        Those that run here are the supervisor's business but for what shard 0 counts."""
        if self.first != 0:
            return {0: self.addresses[0]}
        others = range(len(self.endpoints), len(self.addresses))
        own = [str(self.endpoints[0].local), *([] if self.other is None else [self.other])]
        return {0: own, **{shard: self.addresses[shard] for shard in others}}

    def ended_before(self, *, leads: bool) -> list[str]:
        """Where processes of the store are that end before those of this host when the job is over: they hear of it
        from the one that leads shard 0, which is the last to go. `leads`: what runs here is that one."""
        if self.first != 0:
            return []
        others = [place for shard in self.addresses[len(self.endpoints) :] for place in shard]
        return others if self.other is None or not leads else [*others, self.other]

    def refuse(self) -> None:
        """Until `listen`, whoever connects hears at once that nobody is there."""
        for endpoint in self.endpoints:
            endpoint.close()

    def listen(self) -> None:
        """Again, where it did before. Raises BadArgument."""
        self.endpoints[:] = open_site(self.settings, self.tcp).endpoints

    def sockets(self, index: int) -> tuple[int, ...]:
        """File descriptors of what the process of a shard listens at."""
        own = [self.endpoints[index - self.first], *(self.former if index == 0 else ())]
        return tuple(sock.fileno() for endpoint in own for sock in endpoint.sockets)

    def more(self, settings: ServerSettings) -> list[Endpoint]:
        """Endpoints that are missing for as many shards as the settings have. Raises BadArgument, with nothing left
        bound. REQUIRES: `is_whole`."""
        have = len(self.endpoints) + len(self.former)
        return _bind(range(have, settings.shards), settings, self.tcp)

    def reshard(self, settings: ServerSettings, more: Sequence[Endpoint]) -> None:
        """From now on as many shards run here as the settings have. `more`: what was missing for that."""
        endpoints = [*self.endpoints, *self.former, *more]
        self.settings = settings
        self.endpoints, self.former = endpoints[: settings.shards], endpoints[settings.shards :]
        self.addresses = _addresses(self.endpoints)

    def close(self) -> None:
        """Nobody finds the store here any more. The processes of its shards have the sockets as long as they drain."""
        for endpoint in (*self.endpoints, *self.former):
            endpoint.remove_files()
            endpoint.close()


def _bind(indices: Sequence[int], settings: ServerSettings, tcp: TcpAddress | None) -> list[Endpoint]:
    return bind_shards(
        indices,
        tcp=tcp,
        uds=settings.uds,
        advertise=settings.advertised(),
        congestion_control=settings.congestion_control,
        tls=settings.has_tls(),
    )


def _addresses(endpoints: Sequence[Endpoint]) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(str(address) for address in endpoint.addresses) for endpoint in endpoints)


def open_site(settings: ServerSettings, tcp: TcpAddress | None) -> Site:
    """Binds what is to run here. Raises BadArgument, with nothing left bound."""
    hosts = settings.hosts()
    if hosts is None:
        endpoints = _bind(range(settings.shards), settings, tcp)
        return Site(settings, tcp, 0, endpoints, _addresses(endpoints))
    places = list(zip(hosts, *filter(None, [settings.standby_hosts()]), strict=True))
    index, own = (settings.shard_index or 0) % len(hosts), member_place(settings)
    endpoints = bind_shards(
        range(1),
        tcp=tcp,
        uds=None,
        advertise=[(own.host, own.port)],
        congestion_control=settings.congestion_control,
        tls=own.tls,
    )
    other = next((str(place) for place in places[index] if place != own), None)
    return Site(settings, tcp, index, endpoints, tuple(tuple(map(str, place)) for place in places), other)


def member_place(settings: ServerSettings) -> TcpAddress:
    """Where clients find what runs here. REQUIRES: it is one shard of several hosts'."""
    return [*(settings.hosts() or ()), *settings.standby_hosts()][settings.shard_index or 0]


def tcp_address(resolved: Resolved[ServerSettings]) -> TcpAddress | None:
    """Where to listen: as the settings say; None if a unix socket was asked for and TCP was not. Raises BadArgument.

    A shard among several hosts listens at its own place in the list: on all of the host's addresses if others must
    reach it, since its name may stand for a loopback address in the host's own eyes (/etc/hosts of Debian).
    """
    settings = resolved.settings
    settings.check()
    host_given, port_given = not resolved.is_default("host"), not resolved.is_default("port")
    if settings.hosts() is None:
        wanted = settings.uds is None or host_given or port_given
        return TcpAddress(settings.host, settings.port) if wanted else None
    own = member_place(settings)
    host = (
        settings.host if host_given else own.host if is_loopback(own.host) else "::" if ":" in own.host else "0.0.0.0"
    )
    return TcpAddress(host, settings.port if port_given else own.port)
