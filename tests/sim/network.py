"""Connections: ordered bytes in each direction, until they break as TCP's do.

What was sent and has not arrived when a connection breaks is cut anywhere, inside a frame too; what is
before the cut may arrive much later, when the client's next connection has long been talking.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from psstore.protocol.frames import Piece

from .world import Action, World


class End(Protocol):
    """Who reads a connection."""

    def received(self, data: bytes) -> None: ...
    def lost(self) -> None:
        """The other side is gone; nothing more will be received."""


@dataclass
class Network:
    """How bad it is. May change while the world runs."""

    world: World
    latency_s: float
    """Mean of each write."""
    break_chance: float = 0.0
    """That a write breaks its connection, while it is in flight or soon after."""
    late_s: float = 0.0
    """How late the last bytes of a broken connection may be."""


class Wire:
    """One direction. Delivers in order, each write after a delay of its own."""

    def __init__(self, network: Network, end: End, break_off: Action) -> None:
        self._network = network
        self._world = world = network.world
        self._end = end
        self._break_off = break_off
        self._in_flight: list[Sequence[Piece]] = []
        self._last_delivery = world.now
        self._broken = False
        self._deaf = False
        self.held_until = 0.0
        """Nothing arrives before: the way is closed, and neither side hears of it."""

    def write(self, pieces: Sequence[Piece]) -> None:
        """Takes the pieces as they are: they are read when they are delivered, as late as a slow reader would."""
        if self._broken:
            return
        self._in_flight.append(pieces)
        rng, latency_s = self._world.rng, self._network.latency_s
        self._last_delivery = max(self._last_delivery, self._world.now + rng.expovariate(1.0 / latency_s))
        self._world.at(self._last_delivery, self._deliver_one)
        if rng.random() < self._network.break_chance:
            self._world.after(rng.uniform(0.0, 2.0 * latency_s), self._break_off)

    def shut(self, *, lose: bool = False, late_s: float = 0.0) -> None:
        """No more writes. `lose`: what is in flight is cut somewhere, and the rest comes up to `late_s` late."""
        if self._broken:
            return
        self._broken = True
        rng = self._world.rng
        if lose:
            flat = b"".join(b"".join(pieces) for pieces in self._in_flight)
            self._in_flight = [[flat[: rng.choice((0, rng.randint(0, len(flat)), len(flat)))]]]
        delay_s = rng.uniform(0.0, late_s) if late_s else 0.0
        when = max(self._last_delivery, self._world.now) + delay_s
        self._world.at(when, self._drain)

    def stop_reading(self) -> None:
        """The reader is gone: it hears nothing any more."""
        self._deaf = True

    def _deliver_one(self) -> None:
        if self._world.now < self.held_until:
            self._world.at(self.held_until, self._deliver_one)
        elif not self._broken:
            self._deliver(b"".join(self._in_flight.pop(0)))

    def _drain(self) -> None:
        if self._world.now < self.held_until:
            self._world.at(self.held_until, self._drain)
            return
        rest, self._in_flight = self._in_flight, []
        self._deliver(b"".join(b"".join(pieces) for pieces in rest))
        if not self._deaf:
            self._deaf = True
            self._end.lost()

    def _deliver(self, data: bytes) -> None:
        """In two reads as often as in one, so that frames are cut everywhere."""
        cut = self._world.rng.randint(0, len(data)) if self._world.rng.random() < 0.5 else 0
        for part in (data[:cut], data[cut:]):
            if part and not self._deaf:
                self._end.received(part)


class Connection:
    """Two wires."""

    def __init__(self, network: Network, *, client: End, server: End) -> None:
        self._network = network
        self.to_server = Wire(network, server, self.break_off)
        self.to_client = Wire(network, client, self.break_off)

    def hold(self, for_s: float) -> None:
        """Nothing passes for so long, and neither side hears of it."""
        for wire in (self.to_server, self.to_client):
            wire.held_until = max(wire.held_until, self._network.world.now + for_s)

    def break_off(self) -> None:
        """The network loses it. The client notices at once or soon, the server whenever the last bytes are in."""
        self.to_client.shut(lose=True, late_s=2.0 * self._network.latency_s)
        self.to_server.shut(lose=True, late_s=self._network.late_s)

    def close_from_client(self, *, killed: bool) -> None:
        """`killed`: what the kernel had not sent yet is gone."""
        self.to_client.stop_reading()
        self.to_client.shut()
        self.to_server.shut(lose=killed)

    def cut_from_server(self) -> None:
        """The server's process was killed."""
        self.to_server.stop_reading()
        self.to_server.shut()
        self.to_client.shut(lose=True)

    def close_from_server(self) -> None:
        self.to_server.stop_reading()
        self.to_server.shut()
        self.to_client.shut()
