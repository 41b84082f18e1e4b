"""A client of the store on the supervisor's side: how one host knows what becomes of the others.

Shards never talk to each other. Where each runs on a host of its own, its supervisor asks as any client would:
shard 0, whether the workers are done and whether it is still the one that this shard began with; the supervisor of
shard 0 asks all. So the shards of a store end together, as they do on one host: a shard's values are gone with it,
and one that came back empty would be a wrong answer.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import secrets
import socket
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass

from psstore.config import Credentials
from psstore.errors import (
    AuthFailed,
    BadArgument,
    DeadlineExceeded,
    PsstoreError,
    RolledBack,
    ShuttingDown,
    StoreUnreachable,
)
from psstore.net import asking
from psstore.net.address import parse_address
from psstore.net.client import Reconnector
from psstore.protocol.auth import NONCE_BYTES
from psstore.protocol.decision_cache import DecisionCache
from psstore.protocol.handshake import ClientIdentity
from psstore.protocol.keepalive import MIN_LOOK_S, Keepalive, look_interval_s
from psstore.protocol.session import Session
from psstore.protocol.states import LinkState
from psstore.server.job_state import REMIND_S, JobState, Verdict
from psstore.types import Consistency, grace_text
from psstore.wire.messages import Role, Welcome

POLL_S = 1.0
"""How often the counters are asked for: how late an end is noticed."""

LAST_WORD_S = 660.0
"""How long shard 0's host may take until it says that all may go: it has the last checkpoint written."""

GONE_S = 0.5
"""A shard whose host refuses every connection for so long is gone, where the store goes back then; and how often a host
looks whether it has."""

NEXT_ATTEMPT_LOOKS = 30
"""Tenths of POLL_S in which there is another attempt to connect, whatever it comes to."""

SOON_S = 5.0
"""When it is said for the first time that a shard is not there yet; then every REMIND_S."""

_log = logging.getLogger("psstore.supervisor")


@dataclass(frozen=True, kw_only=True)
class Duty:
    """What is to be watched, and what for."""

    index: int
    """The first shard that runs here."""
    addresses: tuple[str, ...]
    """Addresses of every shard, as clients are told."""
    asked_at: Mapping[int, Sequence[str]]
    """Shards to watch, and where each is asked: at the first address that answers."""
    consistency: Consistency
    credentials: Credentials
    restored: int
    """The version that this host's shards began with; -1: none."""
    goes_back: bool
    """The store starts again when a shard is lost: whoever is there of a life before will go."""
    store: str
    """This host's id of this life, on the host of shard 0."""
    former: str
    """Shard 0's id of the life before, on other hosts: that one is over."""
    joined: str
    """Shard 0's id of the life in which this host's shard goes on with what another process of it has; '': it begins
    with the store."""
    is_whole: bool
    """All shards run here: the store may stand still, and is to be asked meanwhile, too."""
    has_last_word: Callable[[], bool]
    """Whether the others end when it is said here that they may. Called on the monitor's thread."""
    until_done: bool
    """True if the job is over when all workers have joined and left, or are lost for `patience_s`."""
    patience_s: float
    """How long a shard that was there may be out of reach."""


@dataclass(frozen=True)
class PeerEvent:
    """First, where shard 0 is on another host, that it is there: `store`. Then that it is over, and why."""

    store: str | None = None
    """Shard 0's id of this life of the store."""
    restored: int = -1
    """The version that shard 0 began with; -1: none."""
    lineage: str = ""
    """Id of the first of its runs of which each was restored from the one before."""
    is_lost: bool = False
    """A shard is: the others may go back."""
    reason: str | None = None
    """Why it failed; None with no store: the workers are done."""


class PeerMonitor:
    """Runs on a thread of its own; `readable` can be read from when there is news to take. Owns both."""

    def __init__(self, duty: Duty) -> None:
        self.readable, self._sent = socket.socketpair()
        self._news: queue.SimpleQueue[PeerEvent] = queue.SimpleQueue()
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, args=(duty,), name="psstore-monitor", daemon=True)
        self._thread.start()

    def take(self) -> PeerEvent:
        """The next news; blocks while there is none."""
        self.readable.recv(1)
        return self._news.get()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._cancel)
        self._thread.join()
        self._loop.close()
        self.readable.close()
        self._sent.close()

    def tell(self, news: PeerEvent) -> None:
        self._news.put(news)
        self._sent.send(b"!")

    def _run(self, duty: Duty) -> None:
        asyncio.set_event_loop(self._loop)
        self._task = self._loop.create_task(_observe(duty, self))
        self._loop.run_until_complete(asyncio.wait([self._task]))
        for ending in (left := asyncio.all_tasks(self._loop)):  # it may have been told to end while it closed them
            ending.cancel()
        if left:
            self._loop.run_until_complete(asyncio.wait(left))
        if not self._task.cancelled():
            self._task.result()
        self._loop.run_until_complete(self._loop.shutdown_default_executor())

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()


# ---- what runs on the thread ----


async def _observe(duty: Duty, monitor: PeerMonitor) -> None:
    """Tells of shard 0's life, where it is elsewhere, and of the end."""
    peers = [_Peer(shard, addresses, duty) for shard, addresses in duty.asked_at.items()]
    try:
        if duty.index != 0 and not duty.joined:
            welcome = await _begin(peers[0], duty)
            monitor.tell(PeerEvent(store=welcome.store, restored=welcome.restored, lineage=welcome.lineage))
        monitor.tell(PeerEvent(reason=(await _follow(duty, peers)).reason))
    except PsstoreError as error:
        is_lost = isinstance(error, (StoreUnreachable, RolledBack))
        monitor.tell(PeerEvent(reason=error.message, is_lost=is_lost))
    except Exception as error:
        _log.exception("a bug in psstore")
        monitor.tell(PeerEvent(reason=f"the monitor of the other hosts failed: {error!r}; please report it"))
    finally:
        for peer in peers:
            await peer.close()


async def _follow(duty: Duty, peers: list[_Peer]) -> Verdict:
    coordinator, terms = peers[0], duty.consistency
    job_state = JobState(num_workers=terms.num_workers, patience_s=duty.patience_s, elastic=terms.elastic)
    attending = _attend(peers, job_state if duty.until_done else None, duty.has_last_word)
    try:
        return await _first_of([attending, *(_keep(peer, coordinator, duty) for peer in peers[1:])])
    except StoreUnreachable:
        # Its host may have heard before this one that the workers are done, and have ended it.
        if not (duty.until_done and coordinator.is_up):
            raise
        verdict = job_state.update(await coordinator.counters(), asyncio.get_running_loop().time())
        if verdict is None:
            raise
        return verdict


async def _first_of(waits: list[Coroutine[None, None, Verdict]]) -> Verdict:
    """The result of the first to end, or its error; the others are cancelled."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _begin(coordinator: _Peer, duty: Duty) -> Welcome:
    """Shard 0's, of this life of the store. Raises BadArgument if this shard had a life in it before; where the store
    goes back by itself, waits for another one."""
    while True:
        with suppress(StoreUnreachable, RolledBack) if duty.goes_back else nullcontext():
            welcome = await coordinator.reach()
            if welcome.store != duty.former and not _is_in_use(welcome, await coordinator.counters()):
                return welcome
            if not duty.goes_back:
                raise BadArgument(
                    f"the store of {coordinator.name} is in use already: what this shard held of it is gone with its"
                    " former life; start all of its shards anew"
                )
        await coordinator.forget()
        await asyncio.sleep(GONE_S)


def _is_in_use(welcome: Welcome, counters: Mapping[str, int | float | str]) -> bool:
    """Whether anything was done there, which needs all shards."""
    return bool(
        counters["decisions"] != max(0, welcome.restored)
        or (counters["tensors"] and welcome.restored < 0)
        or counters["worker_changes"]  # those that it was restored with have done nothing there
    )


async def _attend(peers: Sequence[_Peer], job_state: JobState | None, has_last_word: Callable[[], bool]) -> Verdict:
    """Until the workers are done, and it was said that all may go. `job_state`: None if that is not to be noticed.
    Raises StoreUnreachable if shard 0 is gone."""
    coordinator = peers[0]
    welcome = await coordinator.reach()
    done_since = math.inf
    while True:
        counters, now = await coordinator.counters(), asyncio.get_running_loop().time()
        if job_state is not None:
            # One that went before it was seen here was there all the same, if anything was done.
            was_whole = all(peer.has_served for peer in peers) or _is_in_use(welcome, counters)
            verdict = job_state.update(counters, now, may_come=was_whole)
            reminder = job_state.reminder(counters, now)
            done_since = math.inf if verdict is None else min(done_since, now)
            may_go = counters["has_ended"] or has_last_word() or now > done_since + LAST_WORD_S
            if verdict is not None and may_go:
                return verdict
            if verdict is None and reminder is not None:
                _log.warning("%s", reminder)
        await asyncio.sleep(POLL_S)


async def _keep(peer: _Peer, coordinator: _Peer, duty: Duty) -> Verdict:
    """Never returns. Raises StoreUnreachable if the shard is gone, or is not the one that it was."""
    watching = asyncio.ensure_future(_watch(peer))
    try:
        while not (await asyncio.wait([watching], timeout=POLL_S))[0]:
            # It may have gone before it was seen here, and wait for another life of shard 0.
            # What is in use had all of its shards: one that comes late may be there since it was tried last.
            if duty.goes_back and peer.is_refused and await coordinator.is_in_use() and await peer.is_refused_again():
                raise peer.refused()
        return watching.result()
    finally:
        watching.cancel()


async def _watch(peer: _Peer) -> Verdict:
    await peer.reach()
    while True:
        await peer.counters()
        await asyncio.sleep(POLL_S)


class _Peer:
    """One watched shard."""

    def __init__(self, shard: int, addresses: Sequence[str], duty: Duty) -> None:
        self.shard = shard
        self.name = f"shard {shard} at {' or '.join(addresses)}"
        self._addresses = addresses
        # A shard that may be led elsewhere is waited for: what it held may be there.
        self._patience_s = math.inf if len(addresses) > 1 else duty.patience_s
        self._duty = duty
        # A standby answers operators; where hosts have standbys, who leads is to be asked.
        role: Role = "operator" if duty.is_whole else "client"
        self._identity = ClientIdentity(client=secrets.token_hex(16), role=role, credentials=duty.credentials)
        self._reconnector: Reconnector | None = None
        self._welcome: Welcome | None = None

    async def reach(self) -> Welcome:
        """Waits until it serves, however long that takes, unless the store was there before this host was and nobody
        listens any more; from then on it may be away for `patience_s`.

        Raises AuthFailed, BadArgument if it is not what it should be; StoreUnreachable.
        """
        while self._welcome is None:
            reconnector, waited_s, patience_s = self._tie(None, patience_s=math.inf), 0.0, SOON_S
            while not (await asyncio.wait([reconnector.first_up], timeout=patience_s))[0]:
                waited_s += patience_s
                if self._duty.joined and self.is_refused and waited_s >= self._duty.patience_s:
                    raise self.refused()
                _log.warning("waiting for %s (%s)", self.name, reconnector.trouble or "it does not answer")
                patience_s = REMIND_S
            try:
                reconnector.first_up.result()
            except AuthFailed as error:
                raise AuthFailed(f"{self.name}: {error.message}; give every host the same one") from None
            self._welcome = self._checked(reconnector.session.welcome)
            await reconnector.close()
            if self._welcome is None:
                await asyncio.sleep(GONE_S)
            else:
                self._tie(self._welcome, patience_s=self._patience_s)
        return self._welcome

    async def forget(self) -> None:
        """`reach` asks anew."""
        await self.close()
        self._reconnector = self._welcome = None

    @property
    def has_served(self) -> bool:
        """Whether it was there in this life of the store."""
        return self._welcome is not None

    @property
    def is_refused(self) -> bool:
        """Whether nobody listens there, as far as its host says."""
        one = self._reconnector
        return one is not None and not self.is_up and isinstance(one.trouble, ConnectionRefusedError)

    def refused(self) -> StoreUnreachable:
        return StoreUnreachable(f"{self.name} is lost, and the store with it: its host refuses connections")

    async def is_refused_again(self) -> bool:
        """Whether the next attempt finds nobody who listens."""
        assert self._reconnector is not None, "it was refused before"
        self._reconnector.trouble = None
        for _ in range(NEXT_ATTEMPT_LOOKS):
            if self._reconnector.trouble is not None or self.is_up:
                break
            await asyncio.sleep(POLL_S / 10)
        return self.is_refused

    async def is_in_use(self) -> bool:
        """Whether anything was done there, which needs all shards: of shard 0, once it was reached."""
        return self._welcome is not None and _is_in_use(self._welcome, await self.counters())

    @property
    def is_up(self) -> bool:
        return self._reconnector is not None and self._reconnector.session.state is LinkState.UP

    async def counters(self) -> Mapping[str, int | float | str]:
        """The shard's counters, as they are now. Raises StoreUnreachable."""
        assert self._reconnector is not None, "reach it first"
        while True:
            try:
                return await asking.counters(self._reconnector, timeout_s=self._patience_s)
            except ShuttingDown:  # whether it may is shard 0's to say; else it will soon be gone
                await asyncio.sleep(POLL_S)
            except (StoreUnreachable, DeadlineExceeded) as error:
                tried_s = error.details.get("tried_s")
                why = error.message if tried_s is None else f"no connection for {tried_s:.1f} s"
                raise StoreUnreachable(f"{self.name} is lost, and the store with it: {why}") from None

    async def close(self) -> None:
        if self._reconnector is not None:
            await self._reconnector.close()

    def _tie(self, welcome: Welcome | None, *, patience_s: float) -> Reconnector:
        session = Session(
            identity=self._identity,
            decisions=DecisionCache(),
            make_nonce=lambda: secrets.token_bytes(NONCE_BYTES),
            address=self._addresses[0],
            shard=self.shard,
            welcome=welcome,
            # A host that is gone without a word, or a firewall between, closes no connection: the next one tells.
            keepalive=Keepalive(
                interval_s=MIN_LOOK_S if len(self._addresses) > 1 else look_interval_s(self._patience_s)
            ),
        )
        loop = asyncio.get_running_loop()
        self._reconnector = Reconnector(
            session,
            [parse_address(address) for address in self._addresses],
            loop=loop,
            patience_s=patience_s,
            refused_s=patience_s if welcome is None else self._refused_s(),
        )
        self._reconnector.start()
        return self._reconnector

    def _refused_s(self) -> float:
        """How long all its places may refuse connections. A job that is over has ended with its shards, which a host
        that stood still may not have heard."""
        if self._duty.goes_back:
            return min(GONE_S, self._patience_s)
        return self._duty.patience_s if self._duty.until_done else self._patience_s

    def _checked(self, welcome: Welcome | None) -> Welcome | None:
        """None: it is still that of a life before. Raises BadArgument if the other host was told something else than
        this one, RolledBack if the life that this one has joined is over."""
        assert welcome is not None, "it was up"
        if welcome.shard != self.shard:
            raise BadArgument(f"{self.name} says that it is shard {welcome.shard}; give each host its own index")
        ours, theirs = self._duty.addresses, tuple(addresses[0] for addresses in welcome.addresses)
        if theirs != ours:
            raise BadArgument(
                f"{self.name} was told of the shards {', '.join(theirs)}, this host of {', '.join(ours)};"
                " give every host the same list"
            )
        if self.shard == 0 and self._duty.joined not in ("", welcome.store):
            raise RolledBack(
                f"{self.name} has begun anew, and the store that this host had a part in is lost: start it again",
                version=welcome.restored,
                undone=0,
            )
        terms = welcome.consistency
        is_of_this_life = self.shard == 0 or welcome.store.startswith(self._duty.store)
        if self._duty.goes_back and not is_of_this_life:
            return None
        if welcome.restored != self._duty.restored and not self._duty.goes_back:
            raise BadArgument(
                f"{self.name} began with {_version(welcome.restored)}, this host with {_version(self._duty.restored)};"
                " give every host the same --restore URL@VERSION"
            )
        if terms != self._duty.consistency:
            raise BadArgument(
                f"{self.name} was started for {_told(terms)}, this host for {_told(self._duty.consistency)};"
                " give every host the same workers and mode"
            )
        return welcome


def _version(restored: int) -> str:
    return "nothing" if restored < 0 else f"checkpoint {restored}"


def _told(terms: Consistency) -> str:
    told = f"{terms.num_workers} workers, quorum {terms.quorum}, staleness {terms.staleness}"
    told += f", grace_s {grace_text(terms.grace_s)}" if terms.grace_s else ""
    return told if terms.refuse_norm is None else f"{told}, norms refused beyond {terms.refuse_norm:g} times the median"
