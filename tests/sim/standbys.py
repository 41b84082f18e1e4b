"""Every shard's standby, and who watches both: as a supervisor on their machine, who knows which processes are dead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from psstore.protocol import state_copy
from psstore.types import Tensor, record_bytes

from . import rows
from .plan import ShardDeath
from .server import Server

if TYPE_CHECKING:
    from .scenario import Scenario

AGAIN_S = 0.05
"""A death waits so long for its occasion."""

START_S = 0.1
"""How long a new standby's process takes to start."""

LOOK_S = 0.3
"""How long whoever watches takes to hear of what is no death."""


class Standbys:
    """One standby each, another one when it is gone; and deaths, one after the other."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._world = scenario.world
        self._of: dict[int, Server] = {}
        self._apart = {shard for shard in range(scenario.plan.num_shards) if (scenario.plan.seed + shard) % 2}
        """Shards whose standbys run on another host."""
        self._cut_at: dict[Server, float] = {}
        """Standbys that have lost their shard, and when: the shard may hear of it later."""
        self._in_sync: set[str] = set()
        """Standbys that may lead, by the word of their shards, as clients."""
        self._held_back_since: dict[Server, float] = {}
        """Standbys that the coordinator's shard has lost, and since when it tells nobody anything."""
        self.num_promotions = 0
        for shard in range(scenario.plan.num_shards):
            self._start(shard)
        self._schedule(list(scenario.plan.shard_deaths))

    # ---- who watches ----

    def _start(self, shard: int) -> None:
        """A new standby, of whoever leads."""
        leader, standby = self._scenario.servers[shard], self._scenario.make_server(shard)
        self._of[shard] = standby
        leader.service.leadership.standbys.on_in_sync = self._in_sync.add
        if shard not in self._apart:
            standby.follow(leader, self._scenario.network)
            leader.service.leadership.standbys.on_lost = lambda client: self._lost(shard, standby)
            standby.on_leader_lost = lambda: self._cut(standby)
        else:  # nobody where the leader is can end it
            standby.follow(leader, self._scenario.network, place="there")
            standby.on_leader_lost = lambda: self._start_over(shard, standby)

    def _start_over(self, shard: int, standby: Server) -> None:
        """A standby has lost its shard: its host starts another one, once it has seen that the shard lives."""
        leader = self._scenario.servers[shard]

        def start() -> None:
            if self._of.get(shard) is standby and not standby.dead and not leader.dead:
                del self._of[shard]
                standby.kill()
                self._start_soon(shard)

        self._world.after(self._world.rng.expovariate(1.0 / LOOK_S), start)

    def _start_soon(self, shard: int) -> None:
        leader = self._scenario.servers[shard]

        def start() -> None:
            if not leader.dead:
                self._start(shard)

        self._world.after(self._world.rng.expovariate(1.0 / START_S), start)

    def _cut(self, standby: Server) -> None:
        """Notes when a standby has lost its shard. Who watches both hears of it from the leader."""
        self._cut_at[standby] = self._world.now

    def _lost(self, shard: int, standby: Server) -> None:
        """A leader has lost its connection to a standby that may lead. Who watches ends it, and says so.

        Answers are held back since that one could answer nothing: a leader may hear of it as late as the network is,
        and no later.
        """
        if shard == 0:
            now = self._world.now
            since = max(self._cut_at.get(standby, now), now - self._scenario.plan.late_s)
            self._held_back_since.setdefault(standby, since)
        self._world.after(self._world.rng.expovariate(1.0 / LOOK_S), lambda: self._do_without(shard, standby))

    def _do_without(self, shard: int, standby: Server) -> None:
        leader = self._scenario.servers[shard]
        if self._of.get(shard) is not standby:
            return  # it leads by now, or both have told us
        if leader.dead:
            return  # it has told nobody anything since, and the standby is going to lead
        self._world.say(f"shard {shard}'s standby is done without")
        self._answers_again(standby)
        del self._of[shard]
        standby.kill()
        if shard in self._apart:  # the other host starts another one in the same place
            self._start_soon(shard)
            return
        leader.service.leadership.standbys.done_without(standby.follows_as)
        leader.carry_out([])
        self._start_soon(shard)

    def _promote(self, shard: int) -> None:
        scenario, standby = self._scenario, self._of.pop(shard)
        assert not standby.dead, "one process of a group dies at a time"
        self._world.say(f"shard {shard}'s standby leads")
        self._answers_again(standby)
        self.num_promotions += 1
        scenario.servers[shard] = standby
        standby.lead()
        if shard == 0:
            scenario.notary.forget_after(scenario.coordinator.rounds.log.last)
        for actor in scenario.actors:
            actor.machine.move(scenario.servers)
        self._start_soon(shard)

    def _answers_again(self, standby: Server) -> None:
        """Notes that the shard whose standby was lost may tell what it knows: that one is ended, or leads."""
        if standby in self._held_back_since:
            self._scenario.history.held_back.append((self._held_back_since.pop(standby), self._world.now))

    # ---- at the end ----

    def differences(self) -> list[str]:
        """What standbys have otherwise than their shards, of those that may lead and have all that was sent to them."""
        found = []
        for shard, standby in self._of.items():
            found += differences_between(self._scenario, self._scenario.servers[shard], standby)
        return found

    # ---- deaths ----

    def _schedule(self, deaths: list[ShardDeath]) -> None:
        if deaths:
            self._world.after(deaths[0].after_s, lambda: self._die(deaths))

    def _die(self, deaths: list[ShardDeath]) -> None:
        scenario, death = self._scenario, deaths[0]
        if any(reader.stopped for reader in scenario.readers):
            return  # training is over
        leader, standby = scenario.servers[death.shard], self._of.get(death.shard)
        if standby is None or standby.dead or leader.dead or not self._is_ready(death.shard, standby):
            self._world.after(AGAIN_S, lambda: self._die(deaths))
            return
        self._world.say(f"shard {death.shard}'s {'standby' if death.of_standby else 'leader'} is killed")
        if death.of_standby:
            standby.kill()
            self._world.after(death.noticed_after_s, lambda: self._do_without(death.shard, standby))
        else:
            leader.kill()
            self._world.after(death.noticed_after_s, lambda: self._promote(death.shard))
        self._schedule(deaths[1:])

    def _is_ready(self, shard: int, standby: Server) -> bool:
        """Whether it may lead, as far as who watches knows: on another host the standby is asked itself."""
        return may_lead(standby) if shard in self._apart else standby.follows_as in self._in_sync


def may_lead(standby: Server) -> bool:
    found = standby.service.leadership.standby
    return found is not None and found.may_lead


def differences_between(scenario: Scenario, leader: Server, standby: Server) -> list[str]:
    """What a standby has otherwise than its shard, if it may lead and has all that was sent to it."""
    has = [number for _, counts, number in leader.service.data.followers() if counts]
    if leader.dead or not may_lead(standby) or has != [leader.service.data.last_record]:
        return []
    shard = leader.service.identity.shard
    found = list(_apart(_known(leader), _known(standby)))
    for tensor in scenario.history.tensors.values():
        for index, holder in enumerate(tensor.shards):
            key = tensor.key(index)
            if holder == shard and _state(leader, tensor, key) != _state(standby, tensor, key):
                found.append(f"slice {index} of {tensor.spec.name}")
    return [f"shard {shard}: {what}" for what in found]


def _state(server: Server, tensor: Tensor, key: int) -> dict[str, object]:
    """What it has of a slice. Records of rows lie as they came."""
    state = dict[str, object](server.shard.state(key))
    if rows.is_table(tensor):
        state["rows"] = rows.sorted_records(server.shard.state(key)["rows"], record_bytes(tensor.spec))
    return state


LOOKED_UP = frozenset(("_heap", "_asked", "_changed", "_decided", "_wanted_from", "_is_made", "_gathered"))
"""Fields of a coordinator that tell how it was asked, and what writers of checkpoints want of it."""

UNORDERED = frozenset(("_numbers",))
"""Mappings whose order tells how they were asked: of Earliest, which orders by number and rank."""


def _known(server: Server) -> dict[str, Any]:
    """What a process of a shard knows, its slices not counted."""
    service = server.service
    lives, writers, dropped, _ = server.shard.history()
    known = {
        "version": server.shard.version,
        "applied": service.data.applied,
        "lives": sorted(lives),
        "writers": sorted(writers),
        "refusals": sorted(server.shard.refusals()),
        "dropped": dropped,
        "tensors": sorted(service.facts.tensors),
        "attached": [service.data.newest_incarnation(rank) for rank in range(8)],
    }
    if service.coordinator is not None:
        service.coordinator.next_wake()
        tree = msgspec.msgpack.decode(state_copy.dump(service.coordinator), strict=False)
        known["coordinator"] = _without(tree)
    return known


def _apart(mine: Any, other: Any, at: str = "") -> Iterator[str]:
    """Where two such trees differ."""
    if isinstance(mine, dict) and isinstance(other, dict) and mine.keys() == other.keys():
        for name in mine:
            yield from _apart(mine[name], other[name], f"{at}.{name}")
    elif isinstance(mine, list) and isinstance(other, list) and len(mine) == len(other):
        for index, (one, two) in enumerate(zip(mine, other, strict=True)):
            yield from _apart(one, two, f"{at}[{index}]")
    elif mine != other:
        yield f"{at} is {mine!r}, and {other!r}"


def _without(tree: Any) -> Any:
    if isinstance(tree, dict):
        known = {name: _without(one) for name, one in tree.items() if name not in LOOKED_UP}
        for name in UNORDERED & known.keys():
            known[name][1].sort()
        return known
    if isinstance(tree, list):
        parts = [_without(one) for one in tree]
        if parts[:1] in (["i"], ["v"], ["r"]):
            parts[1] = 0  # numbers of objects depend on what is left out
        return [parts[0], sorted(parts[1], key=repr)] if parts[:1] in (["s"], ["f"]) else parts
    return tree
