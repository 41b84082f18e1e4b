"""A store on Ray: which processes it has, how they are named, and which of them go together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from psstore.config import PREFIX, check_seconds, resolve
from psstore.errors import BadArgument
from psstore.launch.environment import TOLD_S
from psstore.net.address import join_addresses
from psstore.server.settings import ServerSettings

RESTARTS = 1000
"""How often a store without standbys goes back to a checkpoint: as often as nodes come and go."""

REJOIN_S = 600.0
"""How long the others wait for a lost worker's next life: a node that is added takes minutes."""

PLANNED = ("shards", "standbys", "shards_at", "standbys_at", "shard_index", "host", "port", "uds", "advertise")
"""Settings of psstore-server that say where shards are, which is Ray's to say; and its token is made here."""


@dataclass(frozen=True, kw_only=True)
class StorePlan:
    """Members are the store's processes, numbered: shards first, then the standby of each."""

    name: str
    """No other store has it: its members' host names end with it."""
    shards: int
    standbys: int
    """How many each shard has: 0 or 1."""
    port: int
    """MemberActor i listens at port + i, on whatever node it is: two lives of one member never listen on one node."""
    token: str = field(repr=False)
    settings: Mapping[str, object]
    """What psstore-server is told, by its settings' names."""

    def check(self) -> None:
        """Raises BadArgument for what psstore-server would refuse."""
        if self.shards < 1 or self.standbys not in (0, 1):
            raise BadArgument(
                f"shards is {self.shards}, standbys {self.standbys}; expected 1 or more, and 0 or 1 for each shard"
            )
        if not 0 < self.port <= 65536 - self.num_members:
            raise BadArgument(f"port is {self.port}; expected one from which {self.num_members} go up to 65535")
        names = {one.name for one in msgspec.structs.fields(ServerSettings)} - {*PLANNED, "token_file", "until_done"}
        unknown = sorted(self.settings.keys() - names)
        if unknown:
            raise BadArgument(f"psstore.ray has no setting {unknown[0]!r}; there are {', '.join(sorted(names))}")
        resolve(ServerSettings, flags={}, file=None, environ=self.environ(0, "127.0.0.1")).settings.check()

    @property
    def num_members(self) -> int:
        return self.shards * (1 + self.standbys)

    @property
    def num_bundles(self) -> int:
        """Bundles of the placement group: one for each shard, and a second one for the standby of a single shard."""
        return max(self.shards, 1 + self.standbys)

    def bundle(self, member: int) -> int:
        """Which one it is in: a standby is with the next shard, so that each other shard outlives a node that has the
        two, and says who leads instead."""
        return member if member < self.shards else (member - self.shards + 1) % self.num_bundles

    def host(self, member: int) -> str:
        """The name that it is found by, wherever it is."""
        role = "shard" if member < self.shards else "standby"
        return f"{role}-{member % self.shards}.{self.name}"

    @property
    def directory(self) -> str:
        """The name of the actor that knows where members are."""
        return f"directory.{self.name}"

    def place(self, member: int) -> str:
        return f"{self.host(member)}:{self.port + member}"

    @property
    def url(self) -> str:
        """Both places of shard 0, if it has two."""
        return join_addresses([f"ps://{self.place(member)}" for member in range(0, self.num_members, self.shards)])

    @property
    def wait_s(self) -> float:
        """How long a worker waits for others."""
        return check_seconds("rejoin_s", self.settings.get("rejoin_s", REJOIN_S)) + TOLD_S

    def environ(self, member: int, address: str) -> dict[str, str]:
        """What psstore-server is told. `address`: of the node that it is on."""
        places = [self.place(one) for one in range(self.num_members)]
        told: dict[str, object] = {
            "shards_at": ",".join(places[: self.shards]),
            "shard_index": member,
            "host": address,
            "rejoin_s": REJOIN_S,
            "log_level": "warning",
        }
        if self.standbys:
            told["standbys_at"] = ",".join(places[self.shards :])
        if "checkpoint" in self.settings:
            told["restore"] = "auto"
            told["restarts"] = 0 if self.standbys else RESTARTS
        told.update(self.settings)
        return {PREFIX + name.upper(): _spelled(value) for name, value in told.items() if value is not None}


def _spelled(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
