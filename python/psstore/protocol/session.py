"""The client's link to one shard. It survives reconnects: what was not answered is sent again, in order.

Every request is harmless to repeat (the shard knows staged rounds, sequences and commits), so that 'connection lost' is
nothing a caller ever sees, until the deadline of its request, or until the driver says that the shard is gone.

Requests and their plain answers are csrc/client/session.h's, `Session.core`; here is what becomes of a connection: the
handshake, control messages, errors, deadlines, silence, and the answers whose values are lent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from psstore import _core
from psstore.errors import (
    BadChecksum,
    DeadlineExceeded,
    HandshakeTimeout,
    NotLeading,
    Overloaded,
    ProtocolError,
    PsstoreError,
    RolledBack,
    ShuttingDown,
    StoreUnreachable,
    TooManyProofs,
    UnexpectedMessage,
    from_code,
)
from psstore.protocol.decision_cache import DecisionCache
from psstore.protocol.frames import Piece
from psstore.protocol.handshake import ClientIdentity, Handshake
from psstore.protocol.keepalive import Keepalive
from psstore.protocol.requests import (
    IGNORED,
    OPS,
    READS,
    Answer,
    Destination,
    Future,
    Payload,
    encoded,
    understood,
)
from psstore.protocol.sharing import SHARED_FROM_BYTES, Borrow, Borrower, Landing, Lease, Near, OwnShard
from psstore.protocol.states import LINK, LinkEvent, LinkState
from psstore.wire import messages as m


@dataclass(kw_only=True)
class Session:
    """Sans-IO: the driver feeds bytes in and sends what the core has to send."""

    identity: ClientIdentity
    decisions: DecisionCache
    make_nonce: Callable[[], bytes]
    address: str
    shard: int = 0
    channel: int = 0
    """Which of the client's connections to that shard."""
    state: LinkState = LinkState.DOWN
    welcome: m.Welcome | None = None
    borrow: Borrow | None = None
    """How to get at the memory that the shard offers; None: everything goes over the stream."""
    shared_from_bytes: int = SHARED_FROM_BYTES
    device: bytes = b""
    """The device that the shard of this connection offers to share; empty: none."""
    own_shard: OwnShard | None = None
    """The shard itself, if it is in this process and shares a device."""
    connection: int = 0
    """Number of this connection, or of the pause after it: connecting and disconnecting each add one."""
    failure: PsstoreError | None = None
    """Why this link can't be again; every request gets it."""
    last_word: str = ""
    """Why the last connection ended, in the words of the side that ended it; empty once the link is UP again."""
    keepalive: Keepalive = field(default_factory=Keepalive)
    """Whether the shard speaks while it is waited for."""
    is_watched: bool = False
    """Whether it is to speak while nothing is asked for, too."""
    core: _core.ClientSession = field(init=False)
    _handshake: Handshake | None = None
    _question: int = 0
    """Number of the request that only asks for a sign of life; 0: none."""

    def __post_init__(self) -> None:
        self.core = _core.ClientSession(self.decisions.carried, answer=Answer, understand=understood, encode=encoded)

    @property
    def version(self) -> int:
        """The shard's version, as last heard."""
        return self.core.version

    @property
    def scaled(self) -> int:
        """The last decision whose scale the shard is known to have been told by us."""
        return self.core.scaled

    @property
    def near(self) -> Near | None:
        """What this connection shares with the shard on a device."""
        near: Near | None = self.core.near
        return near

    @near.setter
    def near(self, near: Near | None) -> None:
        self.core.near = near

    # ---- what the driver calls ----

    def connected(self) -> None:
        """A connection stands: say hello. The fresh link answers nothing until WELCOME. Raises BadArgument for a file
        that has no token just now, with nothing changed."""
        handshake = Handshake(self.identity, nonce=self.make_nonce(), address=self.address)
        self.state = LINK.after(self.state, LinkEvent.CONNECTED)
        self.core.connected()
        self.connection += 1
        self._handshake = handshake
        self.core.say(self._handshake.hello(self.channel))

    def disconnected(self) -> None:
        """The connection is gone. Requests stay, to be sent again on the next one."""
        self.state = LINK.after(self.state, LinkEvent.DISCONNECTED)
        self.core.disconnected()
        self.keepalive.disconnected()
        self.device = b""
        self.connection += 1

    def feed(self, pieces: Iterable[Piece], now: float) -> None:
        """Bytes that came, for a driver that has no socket. Raises what `take_frames` raises."""
        self.core.last_heard = now
        for piece in pieces:
            self.core.feed(piece)
            while (frame := self.core.next_frame()) is not None:
                self._take(frame, now)

    def take_frames(self, now: float) -> None:
        """Deals with the frames that have come and are no plain answers. Raises PsstoreError if this connection can't
        go on: the driver closes it, and reconnects or gives up (`is_final`)."""
        while (frame := self.core.next_frame()) is not None:
            self._take(frame, now)

    def _take(self, frame: _core.Frame, now: float) -> None:
        if frame.complete:
            self._frame(frame, now)
        elif (destination := self._destination(frame)) is None:
            self.core.discard()
        else:
            self.core.accept(destination(frame.table) if callable(destination) else destination)

    def tick(self, now: float, taken_bytes: Callable[[], int | None] = lambda: None) -> None:
        """Ends the requests whose deadline is past, and asks a shard that says nothing. The driver ends the connection
        if its `keepalive` says that it `is_broken`.

        `taken_bytes`: how much the far end's system has taken of what the connection has to send, if not all."""
        self.core.looks_at = math.inf
        expired = self.core.expired(now)
        if self.state is LinkState.UP and (expired or now >= self._looks_at):
            self.keepalive.sent(taken_bytes(), now)
        for number in expired:
            if (request := self.core.request(number)) is not None:
                self.core.fail(number, self._missed(request.began, now))
        if now >= self._looks_at:
            self._look(now)

    def next_wake(self) -> float | None:
        """When the driver is to call `tick`, or earlier; None: not before there is another request."""
        deadline = self.core.next_deadline()
        if deadline is None and not (self.is_watched and self.state is LinkState.UP):
            return None
        wake = self._looks_at if deadline is None else min(deadline, self._looks_at)
        self.core.looks_at = min(self.core.looks_at, wake)
        return wake

    def give_up(self, error: PsstoreError) -> None:
        """This link can't be again: every request, now and later, fails with `error`."""
        self.state = LINK.after(self.state, LinkEvent.GIVEN_UP)
        self.failure = error
        self.fail_requests(error)

    def fail_requests(self, error: PsstoreError) -> None:
        """Every request that is under way fails with `error`; the link may come back for later ones."""
        self._fail_all(self.core.numbers(), error)

    def abandon_reads(self, error: PsstoreError) -> None:
        """What is being read will never be there: those requests fail with `error` now."""
        self._fail_all(self.core.numbers(reads_only=True), error)

    @property
    def shares_memory(self) -> bool:
        """Values in main memory need not go over the connection that there is now."""
        return self.core.memory is not None

    @property
    def owes_releases(self) -> bool:
        """The driver has the core `release` a little later, whatever else is said until then."""
        return self.core.num_releases > 0

    def holds(self, lease: Lease) -> bool:
        """The shard has kept what it leased as it was until now. A shard closes the connection before it takes a step
        there; that may be known to the system, and to nobody here yet."""
        return lease.connection == self.connection and not self.core.is_hung_up

    def end_lease(self, lease: Lease) -> bool:
        """The shard may have that memory again. False: it had so already, since the connection was lost, and what was
        read may be anything."""
        if not self.holds(lease):
            return False
        self.core.say(_core.encode_frame(OPS["RELEASE"], request=lease.request))
        return True

    @property
    def idle(self) -> bool:
        """True if no request is under way."""
        return not self.core.num_requests

    # ---- what the client calls ----

    def request(
        self,
        op: str,
        future: Future,
        *,
        now: float,
        timeout_s: float,
        table: _core.SliceTable | None = None,
        body: m.Message | None = None,
        payload: Payload | None = None,
        destination: Destination | None = None,
        ids: bytes | None = None,
        round: int = 0,
        sequence: int = 0,
    ) -> None:
        """Sends a request, now or when the link is up. `future` gets a message body, None, or an `Answer`. `ids`: of
        the rows that a PULL_ROWS is for."""
        if self.failure is not None:
            if not future.done():
                future.set_exception(self.failure)
            return
        carry = (body.at_least, body.wait_s) if type(body) is m.Carry else None
        message = body if carry is None else ids
        memory = destination if payload is None else payload
        may_land = isinstance(memory, Landing) and self.near is not None
        # By position, as keywords would take as long as all else here.
        self.core.ask(OPS[op], future, now, timeout_s, table, carry, message, memory, may_land, round, sequence)
        self.keepalive.begin(now)

    def attach(self, timeout_s: float, *, now: float, future: Future) -> None:
        """Presents the ticket on a link that was up before there was one."""
        assert self.identity.ticket is not None, "join before attach"
        self.request("ATTACH", future, body=m.Attach(ticket=self.identity.ticket), now=now, timeout_s=timeout_s)

    def identified(self) -> None:
        """Who this client is has changed: its frames say so from now on."""
        who = self.identity
        self.core.speaks_as(
            rank=who.rank,
            incarnation=who.incarnation,
            checksum=who.features != 0,
            keeps_releases=self.keeps_releases,
        )

    # ---- deadlines and silence ----

    def _missed(self, began: float, now: float) -> PsstoreError:
        """The error of a request that was made then, and whose deadline is past."""
        waited, heard_at = now - began, self.core.last_heard
        if self.welcome is None or self.state is not LinkState.UP:
            why = f": {self.last_word}" if self.last_word else ""
            return StoreUnreachable(
                f"shard {self.shard} at {self.address} can't be reached{why}; tried for {waited:.1f} s",
                address=self.address,
                tried_s=waited,
            )
        self.keepalive.missed(now, began=began, heard_at=heard_at)
        return DeadlineExceeded(
            f"shard {self.shard} at {self.address} did not answer within {waited:.1f} s;"
            f" last heard {now - heard_at:.1f} s ago",
            peer=self.address,
            waited_s=waited,
        )

    @property
    def _looks_at(self) -> float:
        """When to look whether the shard speaks. Of calls that were made without the session it is not known when."""
        looks_at = self.keepalive.looks_at
        return looks_at if looks_at < math.inf else self.core.last_heard + self.keepalive.interval_s

    def _look(self, now: float) -> None:
        asked = self.core.request(self._question) is not None
        if self.core.num_requests == asked and not self.is_watched:  # nothing but that question
            self.core.finish(self._question, None)
            self.keepalive.end()
            return
        if self.state is not LinkState.UP:
            self.keepalive.looks_at = now + self.keepalive.interval_s
            return
        if self.keepalive.look(now, heard_at=self.core.last_heard) and not asked:
            # A read of nothing. One such request is enough, however often the connection is lost.
            self._question = self.core.next_request
            self.request("PULL", IGNORED, now=now, timeout_s=math.inf, body=m.Carry())

    def _fail_all(self, numbers: Sequence[int], error: PsstoreError) -> None:
        for number in numbers:
            self.core.fail(number, error)

    # ---- frames ----

    def _frame(self, frame: _core.Frame, now: float) -> None:
        self.core.last_heard = now
        if self.state is not LinkState.UP:
            self._handshake_frame(frame, now)
            return
        lease = self._read_shared(frame) if frame.shared else None
        if frame.shared and self.core.is_hung_up:
            return  # the shard may have taken steps in what was read: it is asked anew
        request = self.core.request(frame.request)
        if frame.op == OPS["SHARED"] and frame.request == 0 and self.borrow is not None:
            self._offered(m.decode_body(m.Shared, frame.body))
            return
        if frame.op == OPS["ERROR"]:
            self._failed(frame.request, m.decode_body(m.Failure, frame.body))
            return
        if request is None:
            return  # it gave up before the answer came
        if frame.op != request.op + 1:
            raise UnexpectedMessage(f"shard {self.shard} answered operation {request.op} with {frame.op}")
        self.core.heard(frame.sequence, request.scaled)
        self.core.finish(frame.request, Answer(frame.table, frame.sequence, lease, frame.round != 0))

    def _destination(self, frame: _core.Frame) -> Destination | None:
        """Where the values of a reply go; None: nobody wants them any more."""
        request = self.core.request(frame.request)
        asked = frame.op - 1 if request is None else request.op
        if asked not in READS or frame.op != asked + 1:
            raise UnexpectedMessage(f"shard {self.shard} sent a payload with operation {frame.op}")
        return None if request is None or request.forgotten else request.memory

    def _offered(self, shared: m.Shared) -> None:
        if shared.blocks:
            if self.near is not None and not self.near.learn(shared.blocks):
                self.device, self.near = b"", None
        elif shared.device:
            self.device = shared.device
        else:
            assert self.borrow is not None, "nothing was asked for"
            memory = self.borrow(shared)
            if memory is not None:
                self.core.share(memory, self.shared_from_bytes)

    def _read_shared(self, frame: _core.Frame) -> Lease | None:
        """Copies an answer's values from where they lie, and lets the shard have that memory again; or leaves both to
        who asked, if they lie on a device, or are borrowed."""
        request, memory = self.core.request(frame.request), self.core.memory
        lease = Lease(self.shard, self.connection, frame.request)
        wanted = request is not None and not request.forgotten
        if memory is not None:
            destination = self._destination(frame)
            if isinstance(destination, Borrower):
                if destination.borrow(memory, frame.table, lease):
                    return None
            elif destination is not None:
                memory.read(frame.table, destination(frame.table) if callable(destination) else destination)
        elif wanted and request is not None and isinstance(request.memory, Landing):
            return lease
        elif wanted:
            raise UnexpectedMessage(f"shard {self.shard} refers to shared memory that this connection does not have")
        self.core.add_release(frame.request)
        self.core.release_if_due()
        return None

    @property
    def keeps_releases(self) -> bool:
        """No value takes a step before this client asks for something again, so that nothing is to be gained by telling
        before that what was read."""
        welcome = self.welcome
        return (
            welcome is not None
            and self.identity.ticket is not None
            and welcome.staleness == 0
            and welcome.quorum == welcome.num_workers
        )

    # ---- the handshake ----

    def _handshake_frame(self, frame: _core.Frame, now: float) -> None:
        if self.state is LinkState.FAILED:
            return
        assert self._handshake is not None, "said when the connection stood"
        answer = self._handshake.heard(frame)
        if isinstance(answer, m.Welcome):
            self._welcomed(answer, now)
        else:
            self.core.say(answer)

    def _welcomed(self, welcome: m.Welcome, now: float) -> None:
        if self.welcome is not None and welcome.store != self.welcome.store:
            if welcome.restored >= 0 and welcome.lineage == self.welcome.lineage:
                known = max(self.decisions.last, welcome.restored)
                raise RolledBack(
                    f"the store at {self.address} ended, and was restored at version {welcome.restored}: what was done"
                    f" after that is undone (this client knew of version {known}); reconnect, and go on from there",
                    version=welcome.restored,
                    undone=known - welcome.restored,
                )
            raise StoreUnreachable(
                f"the store at {self.address} was restarted and has lost what it held; connect again",
                address=self.address,
            )
        self.state = LINK.after(self.state, LinkEvent.WELCOMED)
        self.welcome, self.shard, self.last_word = welcome, welcome.shard, ""
        self.keepalive.end()
        self.keepalive.begin(now)
        self.decisions.resize(len(welcome.addresses))
        self.decisions.heard(self.shard, welcome.version)
        self.identified()
        if self.identity.ticket is not None:
            body = m.encode_body(m.Attach(ticket=self.identity.ticket))
            self.core.say(_core.encode_frame(OPS["ATTACH"], body=body))
        if self.borrow is not None:
            self.core.say(_core.encode_frame(OPS["SHARE"]))
        self.core.welcomed(welcome.version, welcome.last_sequence, now)

    def _failed(self, request_id: int, failure: m.Failure) -> None:
        """Request 0 stands for the whole connection: the driver decides what becomes of it."""
        error = from_code(failure.code, failure.message, **failure.details)
        if request_id == 0 or isinstance(error, ProtocolError):
            raise error
        self.core.fail(request_id, error)


def is_final(error: PsstoreError) -> bool:
    """True if a new connection would meet the same end; else it is worth another try."""
    return not isinstance(error, (BadChecksum, ShuttingDown, HandshakeTimeout, NotLeading, Overloaded, TooManyProofs))
