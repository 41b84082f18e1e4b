"""Shards whose two processes have a host each, of which some fall silent: the other shards say who leads.

Who watches a process, on its host, asks them: whether the standby there leads, whose shard is silent; whether the shard
there goes on without its standby, which is. A host that is silent may be dead, or cut off, or stand still and go on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from psstore import _core
from psstore.config import Credentials
from psstore.errors import PsstoreError
from psstore.protocol.election import Succession, succession
from psstore.protocol.handshake import ClientIdentity, Handshake
from psstore.wire import messages as m

from .machine import Machine
from .network import Connection
from .plan import Silence
from .server import Mouthpiece, Server
from .standbys import differences_between

if TYPE_CHECKING:
    from .scenario import Scenario

LEASE_S = 2.0

ASK_S = 0.5
"""Between two questions of one who waits for words."""

ANSWERS_S = 1.0
"""How long answers are waited for."""

START_S = 0.3
"""How long a process takes to start."""

NOTICE_S = 0.7
"""How long clients of a shard take to look for it elsewhere."""

ALONE_S = 5.0
"""How long a host that goes on may still not hear of the other one."""

SUCCEEDS_S = 5.0
"""How long a shard may answer nobody once a host of it has fallen silent, or its two have lost each other: that is
noticed, and words are asked for."""

RETIRES_S = 0.3
"""When a shard may stand still whose standby has been told to end: it has heard so, or not."""

RETIRED_S = 1.0
"""How long that one waits for its shard to hear so."""

BEGINS_S = 1.0
"""When the first silence may begin."""


@dataclass(eq=False)
class Host:
    """A place of a shard."""

    shard: int
    name: str
    server: Server | None = None
    silent_until: float = 0.0
    """It reaches no other host, nor they it."""
    stands_still_until: float = 0.0
    lost: set[str] = field(default_factory=set)
    """Standbys that the process here has lost, as its watch knows."""
    asked: set[str] = field(default_factory=set)
    """Those of them that others were asked about: they may have said that they are gone."""


class Elections:
    """Two hosts for each shard."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._world = scenario.world
        self._apart_until: dict[int, float] = {}
        """By shard: its two hosts don't reach each other, and all others do."""
        self._hosts = {
            shard: (Host(shard, f"host {shard}a", server), Host(shard, f"host {shard}b"))
            for shard, server in enumerate(scenario.servers)
        }
        self.num_promotions = 0
        self.num_done_without = 0
        self.num_retired = 0
        for shard, (leader, standby) in self._hosts.items():
            self._watch_leader(leader)
            self._start_standby(shard, standby)
        self._schedule(list(scenario.plan.silences), BEGINS_S)

    # ---- hosts ----

    def _leader(self, shard: int) -> Host:
        """Of the process that leads in truth, which may be dead."""
        led = self._scenario.servers[shard]
        return next((host for host in self._hosts[shard] if host.server is led), self._hosts[shard][0])

    def _other(self, host: Host) -> Host:
        first, second = self._hosts[host.shard]
        return second if host is first else first

    def _reach(self, one: Host, other: Host) -> bool:
        now = self._world.now
        if max(one.silent_until, other.silent_until) > now:
            return False
        return one.shard != other.shard or self._apart_until.get(one.shard, 0.0) <= now

    def _works(self, host: Host) -> bool:
        return host.server is not None and not host.server.dead and host.stands_still_until <= self._world.now

    # ---- processes ----

    def _start_standby_soon(self, host: Host) -> None:
        """As soon as the other host's process leads, and is reached."""
        self._world.after(self._world.rng.expovariate(1.0 / START_S), lambda: self._start_standby(host.shard, host))

    def _start_standby(self, shard: int, host: Host) -> None:
        if host.server is not None and not host.server.dead:
            return
        leader = self._leader(shard)
        if leader is host:
            return  # it has led, and is dead: what has been said to nobody is gone with both
        if not (self._works(leader) and self._reach(host, leader)):
            self._start_standby_soon(host)
            return
        assert leader.server is not None
        standby = host.server = self._scenario.make_server(shard)
        standby.follow(leader.server, self._scenario.network, place=host.name)
        assert standby.service.leadership.standby is not None
        standby.service.leadership.standby.on_silent = standby.on_leader_lost = lambda: self._cut(host, standby)

    def _end(self, host: Host) -> None:
        """The process there ends, and a standby is started in its place."""
        assert host.server is not None
        host.server.kill()
        host.lost.clear()
        self._start_standby_soon(host)

    # ---- who watches a standby ----

    def _cut(self, host: Host, standby: Server) -> None:
        """The standby has lost its shard, or hears nothing: from now on it answers nothing either."""
        found = standby.service.leadership.standby
        if standby.dead or found is None or found.is_cut:
            return
        found.is_cut = True
        if standby.leader is not None:
            standby.leader.connection.close_from_client(killed=True)
            standby.leader = None
        self._world.at(found.may_ask_at if found.may_lead else 0.0, lambda: self._ask_to_lead(host, standby))

    def _ask_to_lead(self, host: Host, standby: Server) -> None:
        if standby.dead or standby.service.leadership.standby is None or host.server is not standby:
            return
        if not self._works(host):
            self._world.at(host.stands_still_until, lambda: self._ask_to_lead(host, standby))
            return
        other = self._other(host)
        is_led = self._leader(host.shard) is other and self._works(other) and self._reach(host, other)
        if is_led or not standby.service.leadership.standby.may_lead:
            self._end(host)
            return

        def heard(found: Succession) -> None:
            if standby.dead or standby.service.leadership.standby is None:
                return
            if found is Succession.LEADS:
                self._promote(host, standby)
            elif found is Succession.GONE:
                self._end(host)
            else:
                self._world.after(ASK_S, lambda: self._ask_to_lead(host, standby))

        Question(self, host, m.AskWord(client=standby.follows_as, leads=True), heard)

    def _promote(self, host: Host, standby: Server) -> None:
        scenario, deposed = self._scenario, self._scenario.servers[host.shard]
        self._world.say(f"shard {host.shard} is led on {host.name}")
        self.num_promotions += 1
        if isinstance(deposed.signer, Mouthpiece):
            deposed.signer.is_deposed = True
        scenario.servers[host.shard] = standby
        standby.lead()
        if host.shard == 0:
            scenario.notary.forget_after(scenario.coordinator.rounds.log.last)
        self._watch_leader(host)
        for actor in scenario.actors:
            self._find(actor.machine, deposed)
        if deposed.dead:
            self._start_standby_soon(self._other(host))

    def _find(self, machine: Machine, deposed: Server) -> None:
        """Clients have both addresses, and find out which one answers: some at once, as their connections break just
        now; others still ask the one that led."""
        rng = self._world.rng
        if rng.random() < 0.5:
            self._world.after(rng.expovariate(1.0 / NOTICE_S), lambda: machine.move(self._scenario.servers))
            return
        machine.move(self._scenario.servers)
        for link in machine.links:
            if link.session.shard == deposed.service.identity.shard and link.connection is not None:
                link.connection.break_off()

    # ---- who watches a leader ----

    def _watch_leader(self, host: Host) -> None:
        assert host.server is not None
        leader, standbys = host.server, host.server.service.leadership.standbys

        def lost(client: str) -> None:
            host.lost.add(client)
            self._note_standstill()
            self._ask_to_do_without(host, leader, client)

        def in_sync(client: str) -> None:
            if client not in host.asked:
                host.lost.discard(client)

        standbys.on_lost, standbys.on_in_sync = lost, in_sync

    def _ask_to_do_without(self, host: Host, leader: Server, client: str) -> None:
        if leader.dead or client not in host.lost:
            return
        if not self._works(host):
            self._world.at(host.stands_still_until, lambda: self._ask_to_do_without(host, leader, client))
            return
        other = self._other(host)
        if self._leader(host.shard) is other and self._works(other) and self._reach(host, other):
            self._world.say(f"{host.name} sees that shard {host.shard} is led elsewhere")
            self._end(host)
            return

        def heard(found: Succession) -> None:
            if leader.dead or client not in host.lost:
                return
            if not self._works(host):
                self._world.at(host.stands_still_until, lambda: heard(found))
                return
            if found is not Succession.GONE:
                self._world.after(ASK_S, lambda: self._ask_to_do_without(host, leader, client))
                return
            self._world.say(f"shard {host.shard} goes on without its standby")
            self.num_done_without += 1
            host.lost.discard(client)
            leader.service.leadership.standbys.done_without(client)
            leader.carry_out([])

        host.asked.add(client)
        Question(self, host, m.AskWord(client=client, leads=False), heard)

    # ---- words ----

    def members(self, asker: Host) -> list[list[Server]]:
        """Processes of each other shard that it reaches."""
        return [
            [host.server for host in hosts if host.server and not host.server.dead and self._reach(asker, host)]
            for shard, hosts in self._hosts.items()
            if shard != asker.shard
        ]

    def connect(self, server: Server, end: Answer) -> Connection:
        accepted = server.accept()
        accepted.connection = Connection(self._scenario.network, client=end, server=accepted)
        return accepted.connection

    @property
    def scenario(self) -> Scenario:
        return self._scenario

    # ---- silences ----

    def _schedule(self, silences: list[Silence], at_least_s: float = 0.0) -> None:
        if silences:
            self._world.after(max(at_least_s, silences[0].after_s), lambda: self._fall_silent(silences))

    def _fall_silent(self, silences: list[Silence]) -> None:
        if any(reader.stopped for reader in self._scenario.readers):
            return  # training is over
        silence = silences[0]
        if not self._is_well():
            self._world.after(ASK_S, lambda: self._fall_silent(silences))
            return
        leader = self._leader(silence.shard)
        host = leader if silence.of_leader else self._other(leader)
        assert host.server is not None
        self._world.say(f"{host.name} of shard {silence.shard} {silence.kind} for {silence.for_s:g} s")
        until = self._world.now + silence.for_s
        self._note_standstill()
        if silence.kind in ("stands still", "wakes up alone"):
            self._stand_still(host, silence.for_s)
            if silence.kind == "wakes up alone":
                self._apart_until[silence.shard] = until + ALONE_S
                self._hold(silence.shard, silence.for_s + ALONE_S)
        elif silence.kind == "is cut off":
            host.silent_until = until
            self._hold(silence.shard, silence.for_s)
        elif silence.kind == "retires":
            self._retire(host, host.server)
            self._world.after(RETIRES_S, lambda: self._stand_still(leader, silence.for_s))
        elif silence.kind == "loses the other":
            self._apart_until[silence.shard] = until
            self._hold(silence.shard, silence.for_s)
        else:
            if silence.for_s > 1.0:  # no word of it leaves its host
                self._hold(silence.shard, silence.for_s)
            self._die(host)
        self._schedule(silences[1:])

    def _stand_still(self, host: Host, for_s: float) -> None:
        if host.server is not None:
            host.server.stands_still_until = host.stands_still_until = self._world.now + for_s
            self._note_standstill(for_s)  # and nobody may lead in its place, if its standby has retired

    def _retire(self, host: Host, standby: Server) -> None:
        """It is told to end, and does so once its shard has heard it, or a little later."""
        self.num_retired += 1
        standby.retire()
        self._world.after(RETIRED_S, lambda: self._cut(host, standby))

    def _note_standstill(self, for_s: float = 0.0) -> None:
        history, now = self._scenario.history, self._world.now
        history.standstills.append((now, now + for_s + SUCCEEDS_S))

    def _hold(self, shard: int, for_s: float) -> None:
        """What its two processes send each other arrives so much later."""
        for host in self._hosts[shard]:
            if host.server is not None and host.server.leader is not None:
                host.server.leader.connection.hold(for_s)

    def _die(self, host: Host) -> None:
        assert host.server is not None
        was_led = self._leader(host.shard) is host
        host.server.kill()
        host.lost.clear()
        if not was_led:
            self._start_standby_soon(host)

    def _is_well(self) -> bool:
        """Every shard has one that leads, and another one that may: the two have not just lost each other."""
        now = self._world.now
        for shard, hosts in self._hosts.items():
            leader = self._leader(shard)
            standby = self._other(leader).server
            if any(host.silent_until > now or not self._works(host) for host in hosts) or standby is None:
                return False
            found = standby.service.leadership.standby
            if found is None or not found.may_lead or found.is_cut or leader.lost:
                return False
            if self._apart_until.get(shard, 0.0) > now:
                return False
        return True

    # ---- at the end ----

    def differences(self) -> list[str]:
        """What standbys have otherwise than their shards."""
        found = []
        for shard in self._hosts:
            leader = self._leader(shard)
            standby = self._other(leader).server
            if standby is not None and leader.server is not None:
                found += differences_between(self._scenario, leader.server, standby)
        return found


class Question:
    """Asks all other shards for their words, and tells what they come to."""

    def __init__(self, elections: Elections, asker: Host, asked: m.AskWord, then: Callable[[Succession], None]) -> None:
        self._then: Callable[[Succession], None] | None = then
        self._answers = [
            [Answer(elections, server, asked, self._heard) for server in members]
            for members in elections.members(asker)
        ]
        elections.scenario.world.after(ANSWERS_S, self._end)

    def _heard(self) -> None:
        if all(self._words()):
            self._end()

    def _words(self) -> list[m.Word | None]:
        return [next((one.word for one in answers if one.word), None) for answers in self._answers]

    def _end(self) -> None:
        if self._then is not None:
            then, self._then = self._then, None
            for answers in self._answers:
                for answer in answers:
                    answer.connection.close_from_client(killed=False)
            then(succession(self._words()))


class Answer:
    """One process of another shard is asked."""

    def __init__(self, elections: Elections, server: Server, asked: m.AskWord, then: Callable[[], None]) -> None:
        scenario = elections.scenario
        rng = scenario.world.rng
        identity = ClientIdentity(
            client=f"{rng.getrandbits(128):032x}", role="elector", credentials=Credentials(token=scenario.token)
        )
        self.word: m.Word | None = None
        self._asked, self._then = asked, then
        self._handshake = Handshake(identity, nonce=rng.randbytes(32), address="sim://elsewhere")
        self._decoder = _core.FrameDecoder(max_body_bytes=_core.MAX_BODY_BYTES, max_payload_bytes=0)
        self.connection = elections.connect(server, self)
        self.connection.to_server.write([self._handshake.hello(0)])

    def received(self, data: bytes) -> None:
        self._decoder.feed(data)
        while (frame := self._decoder.next_frame()) is not None:
            if frame.op == _core.OPS["WORD"]:
                word = m.decode_body(m.Word, frame.body)
                if word.leads is not None:
                    self.word = word
                    self._then()
                continue
            try:
                answer = self._handshake.heard(frame)
            except PsstoreError:
                return
            if isinstance(answer, m.Welcome):
                answer = _core.encode_frame(_core.OPS["ASK_WORD"], request=1, body=m.encode_body(self._asked))
            self.connection.to_server.write([answer])

    def lost(self) -> None:
        pass
