"""How often a wrong proof of a token may come from one address.

A token of 16 random bytes can't be guessed at any rate; one that a person made up can, and each wrong proof is a line
in the log. After BURST wrong ones within a while, no handshake is heard from that address for LOCK_S; after that, one
wrong one is enough. So 17,000 guesses a day can be made from an address, and not 100 million.

Workers behind the same address, a NAT or a cluster's proxy, are not to suffer from a neighbour with an old token. A
client that has proved a token here is heard at once when it comes back: its id is as random as a token, and one wrong
proof under that id ends the privilege. One that is new waits for LOCK_S, which is less than a client's patience (10 s
by default), and tries again by itself. A neighbour that never ceases is for a firewall, or for another address.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

BURST = 10
"""Wrong proofs before the first pause: a launcher that starts eight workers with a wrong token is told eight times."""

FORGET_S = 60.0
"""After so long without a wrong proof an address has all of BURST again."""

LOCK_S = 5.0

MAX_KNOWN = 4096
"""Addresses, and clients, that are remembered: the oldest are forgotten first."""


@dataclass
class _Record:
    count: int
    last: float
    locked_until: float = 0.0


class ProofLimits:
    """Counts wrong proofs for one shard. Sans-IO: times are its caller's."""

    def __init__(self) -> None:
        self._wrong: OrderedDict[str, _Record] = OrderedDict()
        """By address, the latest last."""
        self._right: OrderedDict[str, None] = OrderedDict()
        """Clients that have proved a token."""

    def wait_s(self, address: str, client: str, now: float) -> float:
        """How long this client has to wait until it is heard; 0: not at all."""
        record = self._wrong.get(address)
        if record is None or client in self._right:
            return 0.0
        return max(0.0, record.locked_until - now)

    def failed(self, address: str, client: str, now: float) -> None:
        self._right.pop(client, None)
        record = self._wrong.pop(address, None)
        if record is None or now - record.last > FORGET_S:
            record = _Record(0, now)
        record.count, record.last = record.count + 1, now
        if record.count >= BURST:
            record.locked_until = now + LOCK_S
        self._wrong[address] = record
        while len(self._wrong) > MAX_KNOWN:
            self._wrong.popitem(last=False)

    def proved(self, client: str) -> None:
        self._right.pop(client, None)
        self._right[client] = None
        while len(self._right) > MAX_KNOWN:
            self._right.popitem(last=False)
