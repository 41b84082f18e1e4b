"""A client written from docs/protocol.md alone (and docs/wire.md, in docs_wire.py): the reference for other languages.

It imports nothing of psstore. It blocks, has one request on the way, and takes and gives values as bytes: a tensor's
elements in row-major order, little-endian. A fast client asks all shards at once; its frames are the same.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import math
import os
import secrets
import socket
import struct
import threading
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from tests.docs.docs_wire import (
    CHANGES,
    CHECKSUM,
    DATA_REPLIES,
    DTYPES,
    Body,
    Frame,
    KeptRow,
    Op,
    Slice,
    asked_rows,
    carry,
    changed,
    come_rows,
    partition_of,
    receive,
    require,
    send,
)

WAIT_S = 20.0
"""How long the store may wait for others on our behalf."""

REPLY_TIMEOUT_S = 30.0

NOT_MODIFIED = 40
"""An error's number in wire.md that is none."""

DTYPES_BY_NUMBER = dict(DTYPES.values())


class Refused(Exception):
    """The store answered with an error: its number in wire.md, and what it said."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


def prove(token: bytes, prover: bytes, client: str, client_nonce: bytes, shard_nonce: bytes) -> bytes:
    parts = (b"psstore-1", prover, client.encode(), client_nonce, shard_nonce)
    return hmac.digest(token, b"".join(struct.pack("<I", len(part)) + part for part in parts), "sha256")


def own_token(address: str) -> bytes | None:
    """That of a store that was given none, if it is on this machine, and this user's."""
    host, port = host_and_port(address)
    network = os.stat("/proc/self/ns/net").st_ino
    try:
        with open(f"/tmp/psstore-{os.geteuid()}/{network}-{host}-{port}", "rb") as file:
            return file.read()
    except OSError:
        return None


def host_and_port(address: str) -> tuple[str, int]:
    host, port = address.removeprefix("ps://").rsplit(":", 1)
    return host.strip("[]"), int(port)


class Link:
    """What a client has with one shard: one connection at a time, and what outlives it."""

    def __init__(self, address: str, client: str, role: str, token: bytes | None) -> None:
        self.address, self.client, self.role, self.token = address, client, role, token or own_token(address)
        self.attach: Frame | None = None  # a worker's first request on every connection
        self.version = 0  # the newest that the shard told
        self.store: str | None = None
        self.connect()
        self.sequence: int = self.welcome["last_sequence"]  # of our last plain write here

    def connect(self) -> None:
        self.stream = socket.create_connection(host_and_port(self.address), REPLY_TIMEOUT_S)
        self.stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.welcome = self._shake_hands()
        require(self.store in (None, self.welcome["store"]), "the store was started anew, and has lost everything")
        self.store = self.welcome["store"]
        self.version = max(self.version, self.welcome["version"])
        if self.attach is not None:
            self._try(self.attach)

    def _shake_hands(self) -> Body:
        nonce = secrets.token_bytes(32)
        hello = {"client": self.client, "role": self.role, "nonce": nonce, "features": CHECKSUM}
        reply = self._try(Frame(Op.HELLO, 1, hello))
        if self.token is None:
            require(reply.op == Op.WELCOME, "the store asks for a token")
            return reply.fields
        require(reply.op == Op.CHALLENGE, "a store that asks for no token is not ours")
        nonces = (nonce, reply.fields["nonce"])
        auth = {"proof": prove(self.token, b"client", self.client, *nonces)}
        welcome = self._try(Frame(Op.AUTH, 2, auth)).fields
        expected = prove(self.token, b"shard", self.client, *nonces)
        require(hmac.compare_digest(welcome.get("proof", b""), expected), "the shard has another token")
        return welcome

    def ask(self, request: Frame) -> Frame:
        """The answer, on this connection or on a new one: a request that is repeated has the effect of one."""
        while True:
            try:
                return self._try(request)
            except ConnectionError:
                self.stream.close()
                self.connect()  # raises when nobody is there any more

    def _try(self, request: Frame) -> Frame:
        send(self.stream, request)
        reply = receive(self.stream)
        if reply.op == Op.ERROR:
            raise Refused(reply.fields["code"], reply.fields["message"])
        require(reply.request == request.request, "an answer to something else")
        if reply.op in DATA_REPLIES:
            self.version = max(self.version, reply.sequence)
        return reply


class Part(NamedTuple):
    """A slice of a tensor: where it lives, and which of the tensor's bytes it is."""

    name: str
    shard: int
    key: int
    dtype: int
    begin: int
    end: int


def num_bytes_of(tensor: Body) -> int:
    spec = tensor["spec"]
    num_elems: int = math.prod(spec["shape"])
    return num_elems * DTYPES[spec["dtype"]][1]


def parts_of(tensor: Body) -> list[Part]:
    dtype, item_bytes = DTYPES[tensor["spec"]["dtype"]]
    slice_bytes = tensor["slice_elems"] * item_bytes
    parts = []
    for i, shard in enumerate(tensor["shards"]):
        begin, end = i * slice_bytes, min((i + 1) * slice_bytes, num_bytes_of(tensor))
        parts.append(Part(tensor["spec"]["name"], shard, tensor["id"] << 24 | i, dtype, begin, end))
    return parts


class Client:
    """A worker joins, creates, then pushes, commits and pulls in turn, and leaves. Others need not join."""

    link_type = Link

    def __init__(self, address: str, *, role: str = "worker", token: bytes | None = None) -> None:
        self._identity = (secrets.token_hex(16), token)
        seed = self._link(address, role)
        seed.stream.close()
        self.links = [self._link(addresses[0], role) for addresses in seed.welcome["addresses"]]
        self.tensors: dict[str, Body] = {}
        self.round = 0
        self.rank = self._incarnation = 0
        self._pushed: list[int] = []  # ids of this round's tensors
        self._decisions: dict[int, Body] = {}  # by number: those that some shard may lack
        self._last_decision = 0
        self._applied: list[Body] = []  # what shards attest, for the next commit
        self._requests = itertools.count(1)
        self._closed = threading.Event()

    def _link(self, address: str, role: str) -> Link:
        client, token = self._identity
        return self.link_type(address, client, role, token)

    def close(self) -> None:
        self._closed.set()
        for link in self.links:
            link.stream.close()

    # ---- membership ----

    def join(self, rank: int | None = None) -> int:
        joined = self._coordinator(Op.JOIN, {"rank": rank})
        self.rank, self._incarnation = joined["rank"], joined["incarnation"]
        self.round, self._last_decision = joined["round"], joined["decision"]
        self._keep(joined["decisions"])
        for link in self.links:
            link.attach = Frame(Op.ATTACH, next(self._requests), {"ticket": joined["ticket"]})
            link.ask(link.attach)
        threading.Thread(target=self._beat, daemon=True).start()
        return self.rank

    def _beat(self) -> None:
        with contextlib.suppress(ConnectionError):
            link = self._link(self.links[0].address, "heartbeat")
            with link.stream:
                while not self._closed.wait(link.welcome.get("heartbeat_s", 1.0)):
                    send(link.stream, Frame(Op.HEARTBEAT, rank=self.rank, incarnation=self._incarnation))

    def leave(self) -> None:
        self._coordinator(Op.LEAVE)
        self.close()

    # ---- tensors ----

    def create(self, specs: Iterable[Body], values: Mapping[str, bytes]) -> None:
        """`values`: first ones of those that are not `zeros`, sent if the store asks for ours."""
        created = self._coordinator(Op.CREATE, {"specs": list(specs)})
        self._define([*created.get("dropped", []), *created["tensors"]])
        initialise = created.get("initialise", [])
        if initialise:
            self._write(Op.INIT, {name: values[name] for name, t in self.tensors.items() if t["id"] in initialise})
            self._coordinator(Op.READY, {"ids": initialise})

    def describe(self) -> list[str]:
        """The names of all tensors, which are then known to every shard and to us."""
        described = self._coordinator(Op.DESCRIBE, {})
        self._define(described.get("tensors", []))
        return list(described.get("names", []))

    def _define(self, facts: list[Body]) -> None:
        for link in self.links:
            self._ask(link, Frame(Op.DEFINE, body={"facts": facts}))
        for fact in map(read_fact, facts):
            if fact["type"] == "tensor":
                fact["spec"] = {"dtype": "float32"} | fact["spec"]
                self.tensors[fact["spec"]["name"]] = fact

    # ---- rounds ----

    def push(self, gradients: Mapping[str, bytes]) -> None:
        self._write(Op.PUSH, gradients)
        self._pushed = sorted(self.tensors[name]["id"] for name in gradients)

    def commit(self, hypers: Mapping[int, Mapping[str, float]], *, weight: float = 1.0) -> Body:
        """Ends the round that was pushed; COMMITTED's body, once the round is decided."""
        heard = min(link.version for link in self.links)
        self._decisions = {number: signed for number, signed in self._decisions.items() if number > heard}
        body = {"round": self.round, "hypers": hypers, "weight": weight, "present": as_ranges(self._pushed)}
        if self._pushed and self.links[0].welcome.get("refuse_norm") is not None:
            body["measured"] = self._measured(body["present"])
        known = {"since": self._last_decision, "applied": self._applied, "wait_s": WAIT_S}
        committed = self._coordinator(Op.COMMIT, body | known)
        self._keep(committed["decisions"])
        self._last_decision, self.round, self._pushed = committed["last"], committed["next_round"], []
        asked = self.links if committed.get("attest") else []
        self._applied = [self._ask(link, Frame(Op.ATTEST)).fields["applied"] for link in asked]
        return committed

    def _measured(self, present: object) -> list[Body]:
        attest = {"round": self.round, "present": present}
        return [self._ask(link, Frame(Op.ATTEST, body=attest)).fields["measured"] for link in self.links]

    def pull(self, names: Iterable[str]) -> dict[str, bytes]:
        """Values that have all decisions that anybody was told of; on the way every shard learns of these."""
        if not self.round:
            self._learn_decisions()
        values = {name: bytearray(num_bytes_of(self.tensors[name])) for name in names}
        for link, parts in self._by_shard(values):
            body = carry(self._lacks(link), self._last_decision, WAIT_S)
            table = tuple(Slice(part.key, dtype=part.dtype) for part in parts)
            reply = accepted(self._ask(link, Frame(Op.PULL, body=body, slices=table)))
            begin = 0
            for part, entry in zip(parts, reply.slices, strict=True):
                values[part.name][part.begin : part.end] = reply.payload[begin : begin + entry.num_bytes]
                begin += entry.num_bytes
        return {name: bytes(value) for name, value in values.items()}

    def follow(self, names: Iterable[str], copies: dict[int, tuple[int, bytes]], half: int | None = None) -> list[bool]:
        """Brings copies, version and bytes by key, to what is there now, in that half precision if there is one.
        Whether what came of each slice was what has changed, and not the whole."""
        if not self.round:
            self._learn_decisions()
        were_changes = []
        for link, parts in self._by_shard(names):
            dtypes = [half or part.dtype for part in parts]
            asked = [0 if part.key not in copies else copies[part.key][0] + 1 for part in parts]
            table = tuple(
                Slice(part.key, version=version, dtype=dtype + CHANGES)
                for part, version, dtype in zip(parts, asked, dtypes, strict=True)
            )
            body = carry(self._lacks(link), self._last_decision, WAIT_S)
            reply = self._ask(link, Frame(Op.PULL, body=body, slices=table))
            begin = 0
            for entry in reply.slices:
                payload, begin = reply.payload[begin : begin + entry.num_bytes], begin + entry.num_bytes
                require(entry.status in (0, NOT_MODIFIED), f"status {entry.status}")
                if entry.status == NOT_MODIFIED:
                    continue
                were_changes.append(entry.dtype >= CHANGES)
                if entry.dtype >= CHANGES:
                    item_bytes = 2 if half else DTYPES_BY_NUMBER[entry.dtype - CHANGES]
                    payload = changed(copies[entry.key][1], payload, item_bytes)
                copies[entry.key] = entry.version, payload
        return were_changes

    def keep_rows(self, name: str, ids: Iterable[int], kept: dict[int, KeptRow]) -> int:
        """Brings rows of a table, by id, to what they are now, in float32. Returns how many of them came."""
        if not self.round:
            self._learn_decisions()
        of_key: dict[int, list[int]] = {}
        for one in ids:
            of_key.setdefault(self.tensors[name]["id"] << 24 | partition_of(one), []).append(one)
        row_bytes = 4 * self.tensors[name]["spec"]["shape"][1]
        num_came = 0
        for link, parts in self._by_shard([name]):
            asked = {part.key: of_key[part.key] for part in parts if part.key in of_key}
            body = carry(self._lacks(link), self._last_decision, WAIT_S) + asked_rows(list(asked.values()), kept)
            dtype = DTYPES["float32"][0] + CHANGES
            table = tuple(Slice(key, version=len(of_one), dtype=dtype) for key, of_one in asked.items())
            reply = accepted(self._ask(link, Frame(Op.PULL_ROWS, body=body, slices=table)))
            begin = 0
            for entry in reply.slices:
                payload, begin = reply.payload[begin : begin + entry.num_bytes], begin + entry.num_bytes
                num_came += come_rows(payload, asked[entry.key], row_bytes, kept)
        return num_came

    def _learn_decisions(self) -> None:
        """Who has not joined asks the coordinator's shard for the last one."""
        reply = self._ask(self.links[0], Frame(Op.PULL))
        if reply.sequence > max(self._last_decision, min(link.version for link in self.links)):
            decided = self._coordinator(Op.DECISIONS, {"since": self._last_decision})
            self._keep(decided["decisions"])
            self._last_decision = decided["last"]

    def _keep(self, decisions: list[Body]) -> None:
        self._decisions |= {read_fact(signed)["number"]: signed for signed in decisions}

    def _lacks(self, link: Link) -> dict[int, Body]:
        """The decisions that this shard may lack, by number; it skips what it has."""
        return {number: signed for number, signed in self._decisions.items() if number > link.version}

    # ---- plain writes, counters ----

    def assign(self, values: Mapping[str, bytes]) -> None:
        self._write(Op.ASSIGN, values)

    def add(self, values: Mapping[str, bytes]) -> None:
        self._write(Op.ADD, values)

    def stats(self, shard: int) -> Body:
        return dict(self._ask(self.links[shard], Frame(Op.STATS)).fields["counters"])

    # ---- requests ----

    def _write(self, op: Op, values: Mapping[str, bytes]) -> None:
        for link, parts in self._by_shard(values):
            table = tuple(Slice(part.key, num_bytes=part.end - part.begin, dtype=part.dtype) for part in parts)
            request = Frame(op, slices=table, payload=b"".join(values[p.name][p.begin : p.end] for p in parts))
            if op == Op.PUSH:
                request = request._replace(body=carry(self._lacks(link)), round=self.round)
                request = request._replace(rank=self.rank, incarnation=self._incarnation)
            elif op in (Op.ASSIGN, Op.ADD):
                request = request._replace(sequence=link.sequence + 1)
            if parts:
                reply = self._ask(link, request)
                link.sequence = max(link.sequence, request.sequence)
                accepted(reply)

    def _by_shard(self, names: Iterable[str]) -> list[tuple[Link, list[Part]]]:
        parts = [part for name in names for part in parts_of(self.tensors[name])]
        return [(link, [part for part in parts if part.shard == shard]) for shard, link in enumerate(self.links)]

    def _coordinator(self, op: Op, body: Body | None = None) -> Body:
        return self._ask(self.links[0], Frame(op, body=body)).fields

    def _ask(self, link: Link, request: Frame) -> Frame:
        return link.ask(request._replace(request=next(self._requests)))


def read_fact(signed: Body) -> Body:
    return dict(msgspec.msgpack.decode(signed["blob"]))


def accepted(reply: Frame) -> Frame:
    """The reply, if no slice of it was refused."""
    for entry in reply.slices:
        if entry.status:
            raise Refused(entry.status, f"slice {entry.key:#x}")
    return reply


def as_ranges(ids: list[int]) -> list[tuple[int, int]]:
    """Ascending ids as [first, last] ranges that don't touch."""
    runs = itertools.groupby(enumerate(ids), key=lambda numbered: numbered[1] - numbered[0])
    return [(run[0][1], run[-1][1]) for run in (list(run) for _, run in runs)]
