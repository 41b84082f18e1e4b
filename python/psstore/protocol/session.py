"""The client's link to one shard. It survives reconnects: what was not answered is sent again, in order.

Every request is harmless to repeat (the shard knows staged rounds, sequences and commits), so that 'connection lost' is
nothing a caller ever sees, until the deadline of its request, or until the driver says that the shard is gone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec.structs import replace

from psstore import _core
from psstore.errors import (
    BadChecksum,
    DeadlineExceeded,
    HandshakeTimeout,
    Overloaded,
    ProtocolError,
    PsstoreError,
    ShuttingDown,
    StoreUnreachable,
    UnexpectedMessage,
    from_code,
)
from psstore.protocol.decision_cache import DecisionCache
from psstore.protocol.frames import Piece
from psstore.protocol.handshake import ClientIdentity, Handshake
from psstore.protocol.keepalive import Keepalive
from psstore.protocol.requests import (
    IGNORED,
    NUMBERED,
    OPS,
    PATIENT,
    READS,
    REPLIES,
    Answer,
    Destination,
    Future,
    Payload,
    Request,
)
from psstore.protocol.sharing import SHARED_FROM_BYTES, Borrow, Borrower, Landing, Lease, Near, OwnShard
from psstore.protocol.states import LINK, LinkEvent, LinkState
from psstore.wire import messages as m

MAX_RELEASES = 64
"""How many RELEASEs may wait for the next request: a shard lends 1024 answers at most."""


@dataclass(kw_only=True)
class Session:
    """Sans-IO: the driver feeds frames in and writes `take_output()` out."""

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
    device: bytes = b""
    """The device that the shard of this connection offers to share; empty: none."""
    own_shard: OwnShard | None = None
    """The shard itself, if it is in this process and shares a device."""
    near: Near | None = None
    """What this connection shares with the shard on a device."""
    connection: int = 0
    """Number of this connection, or of the pause after it: connecting and disconnecting each add one."""
    failure: PsstoreError | None = None
    """Why this link can't be again; every request gets it."""
    last_word: str = ""
    """Why the last connection ended, in the words of the side that ended it; empty once the link is UP again."""
    keepalive: Keepalive = field(default_factory=Keepalive)
    """Whether the shard speaks while it is waited for."""
    line: _core.RequestLine = field(init=False)
    """The state that the session shares with the compiled code that sends requests past it."""
    _requests: dict[int, Request] = field(default_factory=dict)
    _handshake: Handshake | None = None
    _out: list[list[Piece]] = field(default_factory=list)
    _question: int = 0
    """Number of the request that only asks for a sign of life; 0: none."""
    _memory: _core.ClientMemory | None = None
    """What this connection shares with the shard."""

    def __post_init__(self) -> None:
        self.line = _core.RequestLine(self._requests)

    @property
    def version(self) -> int:
        """The shard's version, as last heard."""
        return self.line.version

    @property
    def scaled(self) -> int:
        """The last decision whose scale the shard is known to have been told by us."""
        return self.line.scaled

    # ---- what the driver calls ----

    def connected(self) -> None:
        """A connection stands: say hello. The fresh link answers nothing until WELCOME."""
        self.state = LINK.after(self.state, LinkEvent.CONNECTED)
        self._out.clear()
        self.connection += 1
        self._handshake = Handshake(self.identity, nonce=self.make_nonce(), address=self.address)
        self._out.append([self._handshake.hello(self.channel)])

    def disconnected(self) -> None:
        """The connection is gone. Requests stay, to be sent again on the next one."""
        self.state = LINK.after(self.state, LinkEvent.DISCONNECTED)
        self.line.disconnect()
        self.keepalive.disconnected()
        self._memory = None
        self.device, self.near = b"", None
        self.connection += 1
        self._out.clear()

    def take_output(self) -> list[list[Piece]]:
        """Frames to write, oldest first."""
        out, self._out = self._out, []
        return out

    def head(self, frame: _core.Frame) -> _core.Segments | None:
        """Where the payload of this reply goes; None: its request has given up, discard."""
        destination = self._destination(frame)
        return destination(frame.table) if callable(destination) else destination

    def frame(self, frame: _core.Frame, now: float) -> None:
        """A whole reply. Raises PsstoreError if this connection can't go on: the driver closes it, and
        reconnects or gives up (`is_final`)."""
        self.line.last_heard = now
        if self.state is not LinkState.UP:
            self._handshake_frame(frame, now)
            return
        lease = self._read_shared(frame) if frame.shared else None
        request = self._requests.get(frame.request)
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
        answer = self._understood(request, frame, lease, now)
        del self._requests[frame.request]  # no sooner: nobody would end a request whose answer does not decode
        request.finish(answer)

    def tick(self, now: float, taken_bytes: Callable[[], int | None] = lambda: None) -> None:
        """Ends the requests whose deadline is past, and asks a shard that says nothing. The driver ends the connection
        if its `keepalive` says that it `is_broken`.

        `taken_bytes`: how much the far end's system has taken of what the connection has to send, if not all."""
        self.line.looks_at = math.inf
        expired = [request for request in self._all() if request.deadline <= now]
        if self.state is LinkState.UP and (expired or now >= self._looks_at):
            self.keepalive.sent(taken_bytes(), now)
        for request in expired:
            del self._requests[request.id]
            request.fail(self._missed(request, now))
        if now >= self._looks_at:
            self._look(now)

    def next_wake(self) -> float | None:
        """When the driver is to call `tick`, or earlier; None: not before there is another request."""
        wakes = [request.deadline for request in self._requests.values()]
        if (wake := self.line.next_deadline()) is not None:
            wakes.append(wake)
        if not wakes:
            return None
        wakes.append(self._looks_at)
        self.line.looks_at = min(self.line.looks_at, *wakes)
        return min(wakes)

    def give_up(self, error: PsstoreError) -> None:
        """This link can't be again: every request, now and later, fails with `error`."""
        self.state = LINK.after(self.state, LinkEvent.GIVEN_UP)
        self.failure = error
        self.fail_requests(error)

    def fail_requests(self, error: PsstoreError) -> None:
        """Every request that is under way fails with `error`; the link may come back for later ones."""
        requests = self._all()
        self._requests.clear()
        for request in requests:
            request.fail(error)

    def abandon_reads(self, error: PsstoreError) -> None:
        """What is being read will never be there: those requests fail with `error` now."""
        for request in [r for r in self._all() if r.op in READS]:
            del self._requests[request.id]
            request.fail(error)

    @property
    def shares_memory(self) -> bool:
        """Values in main memory need not go over the connection that there is now."""
        return self._memory is not None

    @property
    def owes_releases(self) -> bool:
        """The driver calls `release` a little later, whatever else is said until then."""
        return self.line.num_releases > 0

    def release(self) -> None:
        """Has the shard be told of all that was read."""
        if self.line.num_releases:
            self._out.append([self.line.take_releases()])

    def end_lease(self, lease: Lease) -> bool:
        """The shard may have that memory again. False: it had so already, since the connection was lost, and what was
        read may be anything."""
        if lease.connection != self.connection:
            return False
        self._out.append([_release(lease.request)])
        return True

    @property
    def idle(self) -> bool:
        """True if no request is under way."""
        return not self._requests and not self.line.has_started

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
        round: int = 0,
    ) -> None:
        """Sends a request, now or when the link is up. `future` gets a message body, None, or an `Answer`."""
        request = Request(
            id=self.line.next_request,
            op=OPS[op],
            future=future,
            deadline=now + timeout_s,
            started=now,
            table=table,
            body=body,
            payload=payload,
            destination=destination,
            round=round,
        )
        if self.failure is not None:
            request.fail(self.failure)
            return
        self.line.next_request += 1
        if op in NUMBERED:
            self.line.last_write += 1
            request.sequence = self.line.last_write
        self._requests[request.id] = request
        self.keepalive.begin(now)
        if self.state is LinkState.UP:
            self._send(request, now)

    def attach(self, timeout_s: float, *, now: float, future: Future) -> None:
        """Presents the ticket on a link that was up before there was one."""
        assert self.identity.ticket is not None, "join before attach"
        self.request("ATTACH", future, body=m.Attach(ticket=self.identity.ticket), now=now, timeout_s=timeout_s)

    # ---- how ----

    def _missed(self, request: Request, now: float) -> PsstoreError:
        """The error of a request whose deadline is past."""
        waited = now - request.started
        if self.welcome is None or self.state is not LinkState.UP:
            why = f": {self.last_word}" if self.last_word else ""
            return StoreUnreachable(
                f"shard {self.shard} at {self.address} can't be reached{why}; tried for {waited:.1f} s",
                address=self.address,
                tried_s=waited,
            )
        self.keepalive.missed(now, began=request.started, heard_at=self.line.last_heard)
        return DeadlineExceeded(
            f"shard {self.shard} at {self.address} did not answer within {waited:.1f} s;"
            f" last heard {now - self.line.last_heard:.1f} s ago",
            peer=self.address,
            waited_s=waited,
        )

    @property
    def _looks_at(self) -> float:
        """When to look whether the shard speaks. Of calls that were made without the session it is not known when."""
        looks_at = self.keepalive.looks_at
        return looks_at if looks_at < math.inf else self.line.last_heard + self.keepalive.interval_s

    def _look(self, now: float) -> None:
        waiting = [request for request in self._all() if request.id != self._question]
        if not waiting:
            self._requests.pop(self._question, None)
            self.keepalive.end()
            return
        if self.state is not LinkState.UP:
            self.keepalive.looks_at = now + self.keepalive.interval_s
            return
        if self.keepalive.look(now, heard_at=self.line.last_heard):
            self._ask_for_a_word(now)

    def _ask_for_a_word(self, now: float) -> None:
        """Sends a read of nothing. One such request is enough, however often the connection is lost."""
        if self._question not in self._requests:
            self._question = self.line.next_request
            self.request("PULL", IGNORED, now=now, timeout_s=math.inf, body=m.Carry())

    def _send(self, request: Request, now: float) -> None:
        body = request.body
        if isinstance(body, PATIENT):
            # The shard's wait began with ours, however often it is asked: its error says more, and must come first.
            body = replace(body, wait_s=max(0.0, body.wait_s - (now - request.started)))
        if isinstance(body, m.Carry):
            told = self.decisions.last
            body = self.completed(body)
            self.line.told = max(self.line.told, told)
            request.scaled = body.scaled
        placed, payload = self._place(request)
        table = request.table if placed is None else placed
        shared = placed is not None or self._may_be_lent(request)
        checksum = payload is not None and self.identity.features
        head = _core.encode_frame(
            request.op,
            flags=_core.FLAG_SHARED if shared else 0,
            request=request.id,
            round=request.round,
            rank=self.identity.rank,
            incarnation=self.identity.incarnation,
            sequence=request.sequence,
            table=table,
            body=m.encode_body(body) if body is not None else b"",
            payload_bytes=request.payload.nbytes if request.payload is not None else 0,
            payload_crc=payload.crc32c() if payload is not None and checksum else None,
        )
        releases = (self.line.take_releases(),) if self.line.num_releases else ()
        self._out.append([*releases, head, *(payload.pieces() if payload is not None else ())])

    def _place(self, request: Request) -> tuple[_core.SliceTable | None, _core.Segments | None]:
        """The table that says where the payload lies, or else what to send of it."""
        payload, table = request.payload, request.table
        if payload is None or table is None:
            return None, None
        if not isinstance(payload, _core.Segments):
            placed = payload.told(self.near, table, request.id)
            return (placed, None) if placed is not None else (None, payload.in_main_memory())
        if self._memory is None or self.line.carries(payload.nbytes):
            return None, payload
        placed = self._memory.write(table, payload, request.id)
        return (placed, None) if placed is not None else (None, payload)

    def _may_be_lent(self, request: Request) -> bool:
        """Its answer's values need not come over the stream."""
        if request.op != OPS["PULL"] or request.table is None:
            return False
        if isinstance(request.destination, _core.Segments):
            return not self.line.carries(request.destination.nbytes)
        return self._memory is not None or (self.near is not None and isinstance(request.destination, Landing))

    def completed(self, body: m.Carry) -> m.Carry:
        """`body` with the decisions and the scale that the shard was not told yet on this connection."""
        newest, decisions = self.decisions.last, self.decisions.since(self.line.told)
        return replace(body, decisions=decisions, newest=newest if decisions else 0, scale=self.decisions.scale)

    def _offered(self, shared: m.Shared) -> None:
        if shared.blocks:
            if self.near is not None and not self.near.learn(shared.blocks):
                self.device, self.near = b"", None
        elif shared.device:
            self.device = shared.device
        else:
            assert self.borrow is not None, "nothing was asked for"
            self._memory = self.borrow(shared)
            if self._memory is not None:
                self.line.share(self._memory, SHARED_FROM_BYTES)

    def _destination(self, frame: _core.Frame) -> Destination | None:
        """Where the values of a reply go; None: nobody wants them any more."""
        request = self._requests.get(frame.request)
        asked = frame.op - 1 if request is None else request.op
        if asked not in READS or frame.op != asked + 1:
            raise UnexpectedMessage(f"shard {self.shard} sent a payload with operation {frame.op}")
        return None if request is None or request.future.done() else request.destination

    def _understood(self, request: Request, frame: _core.Frame, lease: Lease | None, now: float) -> object:
        """What the request's future gets. Raises BadBody."""
        if frame.op in REPLIES:
            body = REPLIES[frame.op]
            return m.decode_body(body, frame.body) if body is not None else None
        self.line.heard(frame.sequence, request.scaled, now)
        self.decisions.heard(self.shard, self.version)
        return Answer(frame.table, frame.sequence, lease)

    def _read_shared(self, frame: _core.Frame) -> Lease | None:
        """Copies an answer's values from where they lie, and lets the shard have that memory again; or leaves both to
        who asked, if they lie on a device, or are borrowed."""
        request = self._requests.get(frame.request)
        lease = Lease(self.shard, self.connection, frame.request)
        if self._memory is not None:
            destination = self._destination(frame)
            if isinstance(destination, Borrower):
                if destination.borrow(self._memory, frame.table, lease):
                    return None
            elif destination is not None:
                self._memory.read(frame.table, destination(frame.table) if callable(destination) else destination)
        elif request is not None and isinstance(request.destination, Landing) and not request.future.done():
            return lease
        elif request is not None and not request.future.done():
            raise UnexpectedMessage(f"shard {self.shard} refers to shared memory that this connection does not have")
        self.line.add_release(frame.request)
        if not self.keeps_releases or self.line.num_releases >= MAX_RELEASES:
            self.release()
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

    def _handshake_frame(self, frame: _core.Frame, now: float) -> None:
        if self.state is LinkState.FAILED:
            return
        assert self._handshake is not None, "said when the connection stood"
        answer = self._handshake.heard(frame)
        if isinstance(answer, m.Welcome):
            self._welcomed(answer, now)
        else:
            self._out.append([answer])

    def _welcomed(self, welcome: m.Welcome, now: float) -> None:
        if self.welcome is not None and welcome.store != self.welcome.store:
            raise StoreUnreachable(
                f"the store at {self.address} was restarted and has lost what it held; connect again",
                address=self.address,
            )
        self.state = LINK.after(self.state, LinkEvent.WELCOMED)
        self.welcome, self.shard, self.last_word = welcome, welcome.shard, ""
        self.keepalive.end()
        self.keepalive.begin(now)
        self.line.version = self.line.told = welcome.version
        self.decisions.resize(len(welcome.addresses))
        self.decisions.heard(self.shard, welcome.version)
        self._renumber_writes(welcome.last_sequence)
        if self.identity.ticket is not None:
            body = m.encode_body(m.Attach(ticket=self.identity.ticket))
            self._out.append([_core.encode_frame(OPS["ATTACH"], body=body)])
        if self.borrow is not None:
            self._out.append([_core.encode_frame(OPS["SHARE"])])
        for request in self._all():
            self._send(request, now)

    def _all(self) -> list[Request]:
        """Every request, in order: also those that were made without the session, which are its own from now on."""
        self.line.hand_over()
        return [self._requests[number] for number in sorted(self._requests)]

    def _renumber_writes(self, last_applied: int) -> None:
        """Closes the gaps of writes that gave up before they arrived: a shard takes no number out of turn.

        Safe here only: the shard reads nothing more from the connections before this one.
        """
        waiting = [request for request in self._all() if request.sequence > last_applied]
        for sequence, request in enumerate(waiting, start=last_applied + 1):
            request.sequence = sequence
        self.line.last_write = last_applied + len(waiting)

    def _failed(self, request_id: int, failure: m.Failure) -> None:
        """Request 0 stands for the whole connection: the driver decides what becomes of it."""
        error = from_code(failure.code, failure.message, **failure.details)
        if request_id == 0 or isinstance(error, ProtocolError):
            raise error
        request = self._requests.pop(request_id, None)
        if request is not None:
            request.fail(error)


def _release(request: int) -> Piece:
    return _core.encode_frame(OPS["RELEASE"], request=request)


def is_final(error: PsstoreError) -> bool:
    """True if a new connection would meet the same end; else it is worth another try."""
    return not isinstance(error, (BadChecksum, ShuttingDown, HandshakeTimeout, Overloaded))
