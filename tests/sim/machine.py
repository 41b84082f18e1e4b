"""One client process: the real Client and Sessions over simulated connections. It can be killed at any point."""

from __future__ import annotations

from collections.abc import Sequence

from psstore import _core
from psstore.config import Credentials
from psstore.errors import PsstoreError, RolledBack, StoreUnreachable
from psstore.protocol.client import Client
from psstore.protocol.decision_cache import DecisionCache
from psstore.protocol.handshake import ClientIdentity
from psstore.protocol.keepalive import Keepalive
from psstore.protocol.session import Session, is_final
from psstore.protocol.states import LinkState
from psstore.wire.messages import Role

from .memory import SHARED_FROM_BYTES
from .network import Connection, Network
from .server import Server
from .world import Action, Future, Task

FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 2.0

LOOK_S = 1.5
"""Between two looks whether a shard speaks: short enough that connections which are only slow are given up, too."""

GREETED_S = 5.0
"""How long a shard may take to greet who has connected."""

TIMEOUT_S = 40.0
"""Per request that waits for nobody: longer than any run of breaks that a plan makes."""


class SessionLink:
    """Keeps one session connected, as the driver of the real client does."""

    def __init__(self, machine: Machine, session: Session, server: Server, *, on_up: Action = lambda: None) -> None:
        """`on_up`: called whenever a new connection is up."""
        self.session = session
        self.connection: Connection | None = None
        self._machine = machine
        self._on_up = on_up
        self.server = server
        self._world = machine.world
        self._backoff_s = FIRST_BACKOFF_S
        self._armed = float("inf")

    def connect(self) -> None:
        if self._machine.dead or self.session.failure is not None or self.connection is not None:
            return
        if self._world.now < self._machine.partitioned_until or self.server.dead:
            self._retry()
            return
        end = self.server.accept()
        incoming = Incoming(self)
        self.connection = end.connection = Connection(self._machine.network, client=incoming, server=end)
        self._machine.connections.append(self.connection)
        self.session.connected()
        self.flush()
        connection = self.connection
        self._world.after(GREETED_S, lambda: self._give_up_unless_greeted(connection))

    def _give_up_unless_greeted(self, connection: Connection | None) -> None:
        if self.connection is connection is not None and self.session.state is not LinkState.UP:
            self.lost()

    def flush(self) -> None:
        if self.connection is not None:
            for pieces in self.session.core.take_output():
                self._machine.sent()
                if self._machine.dead:
                    return
                # Copied now, as the kernel does: the caller may change its memory once it is answered.
                self.connection.to_server.write([b"".join(pieces)])
        self._arm()

    def received(self, data: bytes) -> None:
        if self.connection is None:
            return
        was_up = self.session.state is LinkState.UP
        try:
            self.session.feed([data], self._world.now)
            if self.session.state is LinkState.UP:
                self._backoff_s = FIRST_BACKOFF_S
            self.flush()
            if self.session.state is LinkState.UP and not was_up:
                self._on_up()
        except PsstoreError as error:
            self._world.say(f"{self._machine.name} shard {self.session.shard}: {type(error).__name__}: {error}")
            self.drop()
            if is_final(error):
                self.session.give_up(error)
            else:
                self._retry()

    def lost(self) -> None:
        self.drop()
        self._retry()

    def drop(self, *, killed: bool = False) -> None:
        """Closes the connection, if there is one."""
        if self.connection is not None:
            self.connection.close_from_client(killed=killed)
            self._machine.connections.remove(self.connection)
            self.connection = None
            self.session.disconnected()

    def _retry(self) -> None:
        rng = self._world.rng
        self._world.after(self._backoff_s * rng.uniform(0.5, 1.5), self.connect)
        self._backoff_s = min(MAX_BACKOFF_S, 2 * self._backoff_s)

    def _arm(self) -> None:
        wake = self.session.next_wake()
        if wake is not None and wake < self._armed:
            self._armed = wake
            self._world.at(wake, self._tick)

    def _tick(self) -> None:
        self._armed = float("inf")
        if not self._machine.dead:
            self.session.tick(self._world.now)
            if self.session.keepalive.is_broken and self.connection is not None:
                self._world.say(f"{self._machine.name} shard {self.session.shard}: silent")
                self.lost()
            self.flush()


class Incoming:
    """The client's end of one connection: what an earlier connection still brings is nobody's."""

    def __init__(self, link: SessionLink) -> None:
        self._link = link

    def received(self, data: bytes) -> None:
        self._link.received(data)

    def lost(self) -> None:
        self._link.lost()


class Machine:
    """A process with a Client in it. Also the client's `Driver`."""

    def __init__(
        self,
        network: Network,
        servers: Sequence[Server],
        *,
        name: str,
        role: Role,
        token: bytes | None,
        num_channels: int = 1,
        has_two_hosts: bool = False,
    ) -> None:
        """`has_two_hosts`: each shard may be led at one of two places."""
        self.network = network
        self.world = network.world
        self.name = name
        self.has_two_hosts = has_two_hosts
        self.dead = False
        self.partitioned_until = 0.0
        """New connections fail until then."""
        self.connections: list[Connection] = []
        self.when_killed: Action = lambda: None
        self.tasks: list[Task] = []
        """What runs beside its actor, and ends with it."""
        self.frames_to_live: int | None = None
        """Dies when it has sent so many frames more."""
        self.heartbeats: SessionLink | None = None
        self._memory = servers[0].memory
        self.identity = ClientIdentity(
            client=f"{self.world.rng.getrandbits(128):032x}", role=role, credentials=Credentials(token=token)
        )
        decisions = DecisionCache(len(servers))
        self.links = [
            SessionLink(
                self,
                self._session(self.identity, decisions, shard, channel),
                server,
                on_up=self.renew_heartbeats if shard == channel == 0 else lambda: None,
            )
            for channel in range(num_channels)
            for shard, server in enumerate(servers)
        ]
        self.client = Client(
            driver=self,
            identity=self.identity,
            decisions=decisions,
            sessions=[link.session for link in self.links],
            timeout_s=TIMEOUT_S,
        )
        for link in self.links:
            link.connect()

    def _session(self, identity: ClientIdentity, decisions: DecisionCache, shard: int, channel: int = 0) -> Session:
        nonce = self.world.rng.randbytes
        return Session(
            identity=identity,
            decisions=decisions,
            make_nonce=lambda: nonce(32),
            address=f"sim://{shard}",
            shard=shard,
            channel=channel,
            is_watched=self.has_two_hosts and identity.role == "worker" and shard == channel == 0,
            keepalive=Keepalive(interval_s=LOOK_S),
            borrow=None if self._memory is None or identity.role == "heartbeat" else self._memory.borrow,
            shared_from_bytes=SHARED_FROM_BYTES,
        )

    # ---- the driver ----

    def now(self) -> float:
        return self.world.now

    def future(self) -> Future:
        return self.world.future()

    def flush(self, session: Session) -> None:
        self.links[session.channel * len(self.client.shards) + session.shard].flush()

    await_answer = flush

    # ---- its life ----

    def start_heartbeats(self, server: Server, interval_s: float) -> None:
        """On a connection of its own, as the native thread has one."""
        self._connect_heartbeats(server)

        def beat() -> None:
            if self.dead:
                return
            self.world.after(interval_s, beat)
            link = self.heartbeats
            assert link is not None
            if link.session.state is LinkState.UP and link.connection is not None:
                frame = _core.encode_frame(
                    _core.OPS["HEARTBEAT"], rank=self.identity.rank, incarnation=self.identity.incarnation
                )
                link.connection.to_server.write([frame])

        beat()

    def renew_heartbeats(self) -> None:
        """Over a new connection, as `psstore.client.remote` does: the one that is there may be to a silent process."""
        if self.heartbeats is not None and self.heartbeats.connection is not None:
            self.heartbeats.lost()

    def _connect_heartbeats(self, server: Server) -> None:
        identity = ClientIdentity(client=self.identity.client, role="heartbeat", credentials=self.identity.credentials)
        self.heartbeats = SessionLink(self, self._session(identity, DecisionCache(), 0), server)
        self.heartbeats.connect()

    def sent(self) -> None:
        """A frame is about to leave."""
        if self.frames_to_live is not None:
            self.frames_to_live -= 1
            if self.frames_to_live < 0:
                self.kill()

    @property
    def has_met_the_store(self) -> bool:
        return any(link.session.welcome is not None for link in self.links)

    def move(self, servers: Sequence[Server]) -> None:
        """Other servers are at the addresses from now on. Who has looked where they are, and has not met all, is told
        to look again if there is another number of them: whoever connects sees that they are of two lives."""
        has_met_all = all(link.session.welcome is not None for link in self.links)
        if len(servers) != len(self.client.shards) and not has_met_all:
            for link in self.links:
                link.drop()
                link.session.give_up(RolledBack("looked up before", version=0, undone=0))
        for link in self.links:
            link.server = servers[link.session.shard if link.session.shard < len(servers) else 0]
        if self.heartbeats is None:
            return
        self.heartbeats.server = servers[0]
        if self.heartbeats.session.welcome is not None and not self.has_met_the_store:
            # Heartbeats of a real worker begin when it has joined, and so with the store that it trains with.
            self.heartbeats.drop()
            self.heartbeats.session.give_up(StoreUnreachable("before anything was asked"))
            self._connect_heartbeats(servers[0])

    def kill(self) -> None:
        """kill -9: whatever it was doing, in the middle of a frame too."""
        if not self.dead:
            self.world.say(f"{self.name} is killed")
            self._end(killed=True)
            self.when_killed()

    def close(self) -> None:
        """An orderly exit."""
        if not self.dead:
            self._end(killed=False)

    def forget(self) -> None:
        """The run is over: what the machine has asked, nobody will answer. Its sessions, which Python's collector can't
        look into, would keep the futures, and these the world."""
        for link in self._all_links():
            link.session.fail_requests(StoreUnreachable("the run is over"))

    def _end(self, *, killed: bool) -> None:
        self.dead = True
        for task in self.tasks:
            task.kill()
        for link in self._all_links():
            link.drop(killed=killed)

    def _all_links(self) -> list[SessionLink]:
        return [*self.links, *([self.heartbeats] if self.heartbeats else [])]
