"""Shard services called directly, frame by frame, with time by hand: for tests of the protocol's state machines."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from psstore import _core
from psstore.errors import ProtocolError, PsstoreError, from_code
from psstore.protocol import auth
from psstore.protocol.coordinator import Coordinator
from psstore.protocol.frames import Output, Piece, Send
from psstore.protocol.membership import Liveness
from psstore.protocol.roles import Tokens
from psstore.protocol.service import ShardService
from psstore.protocol.sharing import MAX_LEASED_BYTES, Lender
from psstore.protocol.signing import Signer
from psstore.protocol.welcoming import ShardIdentity
from psstore.types import Consistency, Tensor, TensorSpec
from psstore.wire import messages as m
from psstore.wire.ranges import to_ranges

M = TypeVar("M", bound=m.Message)
OPS = _core.OPS
F32 = _core.DTYPES["float32"]
SIGNER = Signer(b"the store's own key")
LIVENESS = Liveness()
NONCE = b"n" * auth.NONCE_BYTES


class FakeStore:
    """All shards of one store. `now` moves when a test moves it."""

    def __init__(
        self,
        *,
        num_workers: int = 2,
        quorum: int | None = None,
        staleness: int = 0,
        num_shards: int = 1,
        token: bytes | None = None,
        arena: _core.ValueArena | None = None,
        lender: Lender | None = None,
        max_leased_bytes: int = MAX_LEASED_BYTES,
        liveness: Liveness = LIVENESS,
        max_handed_bytes: int | None = None,
        fewest: int | None = None,
        grace_s: float = 0.0,
        refuse_norm: float | None = None,
    ) -> None:
        self.now = 100.0
        consistency = Consistency(
            num_workers=num_workers,
            quorum=num_workers if quorum is None else quorum,
            staleness=staleness,
            fewest=fewest,
            grace_s=grace_s,
            refuse_norm=refuse_norm,
        )
        self.coordinator = Coordinator(
            consistency=consistency,
            liveness=liveness,
            num_shards=num_shards,
            signer=SIGNER,
            max_handed_bytes=max_handed_bytes,
        )
        self.shards = [_core.Shard(index=index, arena=arena) for index in range(num_shards)]
        self.services = [
            ShardService(
                identity=ShardIdentity(
                    store="fake",
                    shard=index,
                    addresses=((f"fake://{index}",),) * num_shards,
                    consistency=consistency,
                    heartbeat_s=1.0,
                    tokens=Tokens.single(token),
                ),
                shard=shard,
                signer=SIGNER,
                coordinator=self.coordinator if index == 0 else None,
                make_nonce=lambda: NONCE,
                lender=lender,
                max_leased_bytes=max_leased_bytes,
            )
            for index, shard in enumerate(self.shards)
        ]
        self.peers: dict[tuple[int, int], Peer] = {}
        self._ids = itertools.count(1)

    def dial(self, *, client: str | None = None, shard: int = 0) -> Peer:
        """A connection that has said nothing yet."""
        conn = next(self._ids)
        peer = Peer(self, shard, conn, client or f"{conn:032x}")
        self.peers[shard, conn] = peer
        peer.protocol = self.services[shard].opened(conn, self.now)
        return peer

    def connect(self, *, client: str | None = None, shard: int = 0, role: m.Role = "client", channel: int = 0) -> Peer:
        """A connection after its handshake."""
        peer = self.dial(client=client, shard=shard)
        peer.ask("HELLO", m.Hello(client=peer.client, role=role, channel=channel))
        return peer

    def worker(self, rank: int | None = None, *, client: str | None = None) -> Peer:
        """A connection to shard 0 that has joined and may push there."""
        peer = self.connect(client=client, role="worker")
        peer.join(rank)
        return peer

    def pass_time(self, seconds: float) -> None:
        """Ticks as a driver would: whenever a service wants it."""
        end = self.now + seconds
        for index, service in enumerate(self.services):
            while (wake := service.next_wake()) is not None and wake <= end:
                self.now = max(self.now, wake)
                self.carry_out(index, service.tick(self.now))
        self.now = end

    def carry_out(self, shard: int, outputs: Sequence[Output]) -> None:
        for output in outputs:
            peer = self.peers.get((shard, output.conn))
            if peer is None:
                continue
            if isinstance(output, Send):
                peer.receive(output.pieces)
            else:
                peer.hang_up()
                peer.closed_because = output.reason


class Peer:
    """A client's end of one connection, that says whatever a test wants."""

    protocol: _core.ServerProtocol
    """The shard's end."""

    def __init__(self, store: FakeStore, shard: int, conn: int, client: str) -> None:
        self.client = client
        self.rank = 0
        self.incarnation = 0
        self.ticket: m.Signed | None = None
        self.closed_because: str | None = None
        self.inbox: list[_core.Frame] = []
        self.payloads: dict[int, bytearray] = {}
        """Of replies, by request."""
        self._store = store
        self._shard = shard
        self._conn = conn
        self._requests = itertools.count(1)
        self._incoming = _core.FrameDecoder()

    # ---- frames ----

    def send(
        self,
        op: str,
        body: m.Message | bytes = b"",
        *,
        values: Sequence[float] | None = None,
        request: int | None = None,
        **header: Any,
    ) -> int:
        """Returns the request's number. `values`: a float32 payload."""
        number = next(self._requests) if request is None else request
        payload = b"" if values is None else np.asarray(values, np.float32).tobytes()
        encoded = body if isinstance(body, bytes) else m.encode_body(body)
        usual = {"rank": self.rank, "incarnation": self.incarnation, "payload_bytes": len(payload)}
        head = _core.encode_frame(OPS[op], request=number, body=encoded, **{**usual, **header})
        self.feed(head + payload)
        return number

    def feed(self, data: bytes) -> None:
        """What the shard's end of the connection gets."""
        service, store = self._store.services[self._shard], self._store
        self.protocol.feed(data)
        try:
            while self.closed_because is None:
                frame = self.protocol.next_frame(store.now)
                replies = self.protocol.take_replies()
                if replies:
                    self.receive(replies)
                store.carry_out(self._shard, service.woken(store.now))
                if frame is not None:
                    store.carry_out(self._shard, service.frame(self._conn, frame, store.now))
                elif not replies:
                    break
        except ProtocolError as error:
            store.carry_out(self._shard, service.failed(self._conn, error))

    def receive(self, pieces: Sequence[Piece]) -> None:
        self._incoming.feed(b"".join(bytes(piece) for piece in pieces))
        while (frame := self._incoming.next_frame()) is not None:
            if frame.complete:
                self.inbox.append(frame)
            else:
                memory = bytearray(frame.payload_bytes)
                ends = list(itertools.accumulate(frame.table.num_bytes(), initial=0))
                ranges = [memoryview(memory)[begin:end] for begin, end in itertools.pairwise(ends)]
                self._incoming.accept(_core.Segments(ranges, writable=True))
                self.payloads[frame.request] = memory

    def ask(self, op: str, body: m.Message | bytes = b"", **parts: Any) -> _core.Frame:
        """The reply, which must be there at once. Raises what an ERROR says."""
        return self.answer(self.send(op, body, **parts))

    def answer(self, request: int) -> _core.Frame:
        """Takes the reply to `request` out of the inbox. Raises what an ERROR says."""
        for frame in self.inbox:
            if frame.request == request or (frame.request == 0 and frame.op == OPS["ERROR"]):
                self.inbox.remove(frame)
                return frame if frame.op != OPS["ERROR"] else self._raise(frame)
        raise AssertionError(f"no answer to request {request} yet")

    def is_answered(self, request: int) -> bool:
        return any(frame.request == request for frame in self.inbox)

    def hang_up(self) -> None:
        self._store.peers.pop((self._shard, self._conn), None)
        self._store.services[self._shard].closed(self._conn, self._store.now)

    @staticmethod
    def _raise(frame: _core.Frame) -> _core.Frame:
        failure = m.decode_body(m.Failure, frame.body)
        raise from_code(failure.code, failure.message, **failure.details)

    # ---- what most tests say ----

    def control(self, op: str, body: m.Message, kind: type[M]) -> M:
        return m.decode_body(kind, self.ask(op, body).body)

    def join(self, rank: int | None = None, *, num_workers: int | None = None) -> m.Joined:
        return self.joined(self.send("JOIN", m.Join(rank=rank, num_workers=num_workers)))

    def joined(self, request: int) -> m.Joined:
        joined = m.decode_body(m.Joined, self.answer(request).body)
        self.rank, self.incarnation, self.ticket = joined.rank, joined.incarnation, joined.ticket
        self.ask("ATTACH", m.Attach(ticket=joined.ticket))
        return joined

    def create(self, *specs: TensorSpec, exist: m.Exist = "match", offer: bool = True) -> m.Created:
        """Creates and defines tensors on this connection's shard."""
        created = self.control("CREATE", m.Create(specs=specs, exist=exist, offer=offer), m.Created)
        self.ask("DEFINE", m.Define(facts=(*created.dropped, *created.tensors)))
        return created

    def commit(self, round: int, present: Sequence[int] = (), **fields: Any) -> int:
        """The number of the request: the answer may take its time."""
        return self.send("COMMIT", m.Commit(round=round, present=to_ranges(present), **fields))

    def committed(self, request: int) -> m.Committed:
        return m.decode_body(m.Committed, self.answer(request).body)

    def finish(self, round: int, **fields: Any) -> int:
        """The number of the request."""
        return self.send("FINISH", m.Finish(round=round, **fields))

    def finished(self, request: int) -> m.Finished:
        return m.decode_body(m.Finished, self.answer(request).body)

    def push(
        self, tensor: Tensor, values: Sequence[float], carry: m.Carry | None = None, **header: Any
    ) -> _core.SliceTable:
        table = _core.SliceTable([(tensor.key(0), 4 * len(values), F32)])
        return self.ask("PUSH", carry or m.Carry(), values=values, table=table, **header).table

    def pull(self, *tensors: Tensor, **fields: Any) -> int:
        """The number of the request for the tensors' values."""
        table = _core.SliceTable([(tensor.key(0), 0, F32) for tensor in tensors])
        return self.send("PULL", carrying(**fields), table=table)

    def pulled(self, request: int) -> list[float]:
        """The values that came, one tensor after the other."""
        self.answer(request)
        return list(np.frombuffer(self.payloads.pop(request, b""), np.float32))


def carrying(decisions: Sequence[m.Signed] = (), **fields: Any) -> m.Carry:
    """What brings these decisions; one that is no decision goes by the number 1."""
    last = m.decode_fact(decisions[-1].blob) if decisions else None
    newest = last.number if isinstance(last, m.DecisionFact) else len(decisions)
    return m.Carry(decisions=tuple(decisions), newest=newest, **fields)


def decisions_in(committed: m.Committed) -> list[m.DecisionFact]:
    facts = [m.decode_fact(signed.blob) for signed in committed.decisions]
    assert all(isinstance(fact, m.DecisionFact) for fact in facts)
    return facts  # type: ignore[return-value]


def tensor_of(signed: m.Signed) -> Tensor:
    fact = m.decode_fact(signed.blob)
    assert isinstance(fact, Tensor)
    return fact


def sgd(name: str, size: int = 4, **fields: Any) -> TensorSpec:
    return TensorSpec(name=name, shape=(size,), rule="sgd", **fields)


def failure_of(peer: Peer, request: int) -> PsstoreError:
    """The error that the request was answered with."""
    try:
        peer.answer(request)
    except PsstoreError as error:
        return error
    raise AssertionError("the request succeeded")


def table_of(tensor: Tensor, *, num_bytes: int = 0) -> _core.SliceTable:
    return _core.SliceTable([(tensor.key(0), num_bytes, F32)])
