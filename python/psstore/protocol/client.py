"""One client of a store: what it reads and writes there, as requests over its links, and all else that it has.

Coroutines without asyncio: all they await are the driver's futures, so that the same code runs over sockets and in the
simulator.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import NamedTuple

from psstore import _core
from psstore.errors import DeadlineExceeded, NotInitialised, TornRound
from psstore.partition.router import Router
from psstore.protocol.checkpoint_leader import CheckpointLeader
from psstore.protocol.decision_cache import DecisionCache
from psstore.protocol.decision_carrier import DecisionCarrier
from psstore.protocol.definitions import Definitions
from psstore.protocol.handshake import ClientIdentity
from psstore.protocol.holds import Hold, Holds
from psstore.protocol.links import GRACE_S, Driver, Links, check_wait, collect, ended, expect
from psstore.protocol.participation import Participation
from psstore.protocol.requests import Answer, Destination, Future
from psstore.protocol.session import Session
from psstore.protocol.sharing import Lease, Placed
from psstore.protocol.statuses import check
from psstore.wire import messages as m


class Transfer(NamedTuple):
    """Slices of one frame to or from one shard, with the memory that they come from or go to."""

    way: int
    """The session that it goes over."""
    table: _core.SliceTable
    memory: Destination | Placed | None
    """To send from: `Segments` or what is `Placed`."""
    ids: bytes | None = None
    """Ids of the rows that are read: u64 each, in the order of the table."""


class Client:
    """One client of one store. Not thread-safe."""

    def __init__(
        self,
        *,
        driver: Driver,
        identity: ClientIdentity,
        decisions: DecisionCache,
        sessions: Sequence[Session],
        timeout_s: float,
    ) -> None:
        """`sessions`, `timeout_s`: see `Links`."""
        self.identity = identity
        self.links = links = Links(sessions, driver=driver, timeout_s=timeout_s)
        self.sessions, self.shards = links.sessions, links.shards
        num_channels = 1 + max((session.channel for session in sessions), default=0)
        self.ways = Router(len(self.shards), num_channels=num_channels)
        self.carrier = DecisionCarrier(links, decisions)
        self.tensors = Definitions(links)
        self.worker = Participation(identity, links, self.carrier)
        self.holds = Holds(identity.client, links, self.carrier)
        self.checkpoints = CheckpointLeader(links, self.carrier, self.holds)

    # ---- writing ----

    async def write(self, op: str, transfers: Iterable[Transfer], *, trained: bool = False) -> None:
        """ASSIGN, ADD, RESTORE or INIT; `trained`: of what decisions change, too. Returns when all is applied. Raises
        the first failure."""
        if trained:
            await self._bring_up_to_date()
        await self._send(op, transfers, body=None)

    async def _bring_up_to_date(self) -> None:
        """Every shard has applied what anybody was told of when this returns: else a step of before would be taken of
        what is written now."""
        if not self.worker.is_current:
            await self.carrier.learn_last()
        await self.answers(self.carrier.tell(self.carrier.behind()))

    async def push(self, transfers: Iterable[Transfer]) -> None:
        """Stages contributions for the current round. Returns when every one is acknowledged.

        Raises BadArgument while the last round is `unscaled`: shards still need what was pushed for it; and while it
        `is_sealed`."""
        self.worker.check_push()
        await self._send("PUSH", transfers, body=m.Carry())

    # ---- reading ----

    async def pull(
        self,
        transfers: Iterable[Transfer],
        *,
        at_least: int | None = None,
        trained: bool = True,
        wait_s: float,
        timeout_s: float = 0.0,
    ) -> list[Answer]:
        """Reads slices into their memory, each shard at `at_least` or later (default: this worker's last round), and
        at every decision that anybody was told of before.

        `wait_s`: how long a shard may wait until it answers; `timeout_s`: how long it may take till the answers are
        here, if that is more.

        Carries the decisions to every shard, also to those from which nothing is read. `trained`: False if no decision
        changes what is read; then nobody is asked for the last one. Answers are in the order of the transfers;
        NOT_MODIFIED and NO_STATE are no failures.
        """
        if trained and not self.worker.is_current:
            at_least = max(at_least or 0, await self.carrier.learn_last())
        return await self._read("PULL", transfers, at_least=at_least, wait_s=wait_s, timeout_s=timeout_s)

    async def pull_held(
        self, hold: Hold, transfers: Iterable[Transfer], *, wait_s: float, timeout_s: float = 0.0
    ) -> list[Answer]:
        """Reads slices as of the decision that is held; those of tensors that no decision changes as they are. Times
        are those of `pull`. Raises VersionGone, DeadlineExceeded."""
        at = hold.version
        return await self._read("PULL", transfers, at_least=at, wait_s=wait_s, timeout_s=timeout_s, hold=hold)

    async def pull_rows(
        self, transfers: Iterable[Transfer], *, wait_s: float, hold: Hold | None = None
    ) -> list[Answer]:
        """`pull` of rows of tables, which are trained, or `pull_held`. The `version` of an entry of the transfers'
        tables says how many of the `ids` are its."""
        at_least = None if hold is None else hold.version
        if hold is None and not self.worker.is_current:
            at_least = await self.carrier.learn_last()
        return await self._read("PULL_ROWS", transfers, at_least=at_least, wait_s=wait_s, hold=hold)

    async def list_rows(self, hold: Hold, transfers: Iterable[Transfer], *, wait_s: float) -> list[Answer]:
        """Reads which rows partitions of tables have as of the decision that is held: of each from the number on that
        its entry's `version` says, as much as fits a frame; of part 0 the ids, of part 1 the records. An answer's
        `version` says how many there are. Raises VersionGone, DeadlineExceeded."""
        return await self._read("LIST_ROWS", transfers, at_least=hold.version, wait_s=wait_s, hold=hold)

    async def norm(self, transfers: Iterable[Transfer], *, wait_s: float) -> list[Answer]:
        """Reads a float64 per slice into the transfers' memory: the sum of squares of the gradient that the last
        decision reduced. NOT_MODIFIED, without a value: no member has a gradient there."""
        return await self._read("NORM", transfers, at_least=self.carrier.known.last, wait_s=wait_s)

    async def without_value(self, transfers: Sequence[Transfer], *, wait_s: float) -> list[Transfer]:
        """The transfers that find a slice without its first value. Waits `wait_s` for first values, and for no step."""
        carry = m.Carry(wait_s=wait_s)
        timeout_s = max(self.links.timeout_s, wait_s + GRACE_S)
        requests = [
            self.links.request(
                self.sessions[one.way], "PULL", table=one.table, body=carry, destination=one.memory, timeout_s=timeout_s
            )
            for one in transfers
        ]
        answers = zip(transfers, await collect(requests), strict=True)
        return [transfer for transfer, answer in answers if answer.table.has_status(NotInitialised.code)]

    # ---- for those who send requests of data themselves ----

    def keep_cancelled(self) -> None:
        """What is to be sent for futures that were cancelled is kept: arrays are their owners' again."""
        for session in self.sessions:
            session.core.keep_cancelled()

    def may_pull(self, ways: Set[int], *, trained: bool) -> bool:
        """True if a pull that leads there may be sent at once: no scale has to be found first, and no shard to be told
        of a decision but those that they lead to. `trained`: see `pull`."""
        worker = self.worker
        if worker.torn is not None or worker.unscaled is not None or (trained and not worker.is_current):
            return False
        if len(ways) == len(self.sessions):
            return True
        asked = {self.sessions[way].shard for way in ways}
        return all(session.shard in asked for session in self.carrier.behind())

    @property
    def owes_decisions(self) -> bool:
        """Some shard to which not every call leads may lack the last decision, or its scale."""
        return len(self.sessions) > 1 and bool(self.carrier.behind())

    def ask_to_stage(self, transfer: Transfer, future: Future) -> None:
        """`push` of a frame; the future is told the answer. REQUIRES: the worker `may_push`."""
        links, session = self.links, self.sessions[transfer.way]
        body, round = m.Carry(), self.worker.round
        links.ask(session, "PUSH", future, table=transfer.table, body=body, payload=transfer.memory, round=round)
        links.driver.flush(session)

    def ask_to_read(self, transfers: Sequence[Transfer], futures: Sequence[Future], *, wait_s: float) -> None:
        """`pull` of these frames; the futures are told the answers. REQUIRES: `may_pull` where they lead."""
        wait_s = 0.0 if self.worker.torn is not None else wait_s
        carry = m.Carry(at_least=self.worker.decision, wait_s=wait_s)
        timeout_s = wait_s + GRACE_S
        for transfer, future in zip(transfers, futures, strict=True):
            session = self.sessions[transfer.way]
            memory = transfer.memory
            self.links.ask(
                session, "PULL", future, table=transfer.table, body=carry, destination=memory, timeout_s=timeout_s
            )
        self.links.flush()

    async def answers(self, futures: Sequence[Future]) -> list[Answer]:
        """The answers to requests of slices. Raises the first failure of a request or a slice, after all have ended."""
        answers, error = await ended(futures)
        self.check(answers, error)
        return answers

    def check(self, answers: Sequence[Answer | _core.Frame], error: BaseException | None) -> None:
        """Raises what a request of slices has failed with, if it is not None, or else the first failure of a slice."""
        try:
            if error is not None:
                raise error
            check(answers, self.tensors.names)
        except DeadlineExceeded:
            torn = self.worker.torn
            if torn is not None:
                raise TornRound(torn.message, **torn.details) from None
            raise

    # ---- values where they lie ----

    async def share(self, session: Session, *, push_bytes: int) -> m.Shared:
        """Where to get at the device that the session's shard offers to share."""
        reply = await self.links.request(session, "SHARE", body=m.Share(push_bytes=push_bytes))
        return expect(m.Shared, reply)

    def lender(self, lease: Lease) -> Session:
        """Over which the values were lent: who shares memory with a shard has one connection to it."""
        return self.shards[lease.shard]

    def end_leases(self, leases: Sequence[Lease]) -> bool:
        """`Session.end_lease` for each, and tells the shards. False: one was over already."""
        were_held = [self.lender(lease).end_lease(lease) for lease in leases]
        if were_held:
            self.links.flush()
        return all(were_held)

    # ---- how the store is ----

    async def stats(self) -> list[dict[str, int | float | str]]:
        """Counters of each shard."""
        return [reply.counters for reply in await self.links.ask_all("STATS")]

    async def waited_for(self) -> str:
        """Which workers are waited for at this moment, by this one if it waits at a barrier, described; '': nobody
        waits."""
        reply = await self.links.request(self.shards[0], "STATS")
        return str(reply.counters.get("waited_for", ""))

    # ---- how ----

    async def _send(self, op: str, transfers: Iterable[Transfer], *, body: m.Message | None) -> None:
        links = self.links
        futures: list[Future] = []
        try:
            for transfer in transfers:
                session = self.sessions[transfer.way]
                round = self.worker.round if op == "PUSH" else 0
                future = links.driver.future()
                links.ask(session, op, future, table=transfer.table, body=body, payload=transfer.memory, round=round)
                futures.append(future)
                if op != "PUSH" or self.worker.is_unfinished or not session.shares_memory:
                    links.driver.flush(session)  # others are copied and only staged: the shard need not wake for each
            links.flush()
            answers = await collect(futures)
        except BaseException:
            for future in futures:
                future.cancel()
            self.keep_cancelled()
            raise
        check(answers, self.tensors.names)

    async def _read(
        self,
        op: str,
        transfers: Iterable[Transfer],
        *,
        at_least: int | None,
        wait_s: float,
        timeout_s: float = 0.0,
        hold: Hold | None = None,
    ) -> list[Answer]:
        check_wait(wait_s)
        links, worker = self.links, self.worker
        if worker.torn is not None:
            wait_s = 0.0  # what is not there by now will never be
        carry = m.Carry(at_least=worker.decision if at_least is None else at_least, wait_s=wait_s)
        transfers = list(transfers)
        asked = {self.sessions[transfer.way].shard for transfer in transfers}
        behind = [session for session in self.carrier.behind() if session.shard not in asked]
        told = self.carrier.tell(behind, timeout_s=wait_s + GRACE_S)
        futures = [
            links.ask(
                self.sessions[transfer.way],
                op,
                links.driver.future(),
                table=transfer.table,
                body=carry,
                destination=transfer.memory,
                ids=transfer.ids,
                timeout_s=max(timeout_s, wait_s + GRACE_S),
                round=0 if hold is None else hold.version,
                sequence=0 if hold is None else hold.reader,
            )
            for transfer in transfers
        ]
        links.flush()
        return (await self.answers([*told, *futures]))[len(told) :]
