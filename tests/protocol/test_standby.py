"""What a standby is sent and what it becomes; the simulator has the rest, under a network that breaks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from psstore import _core, errors
from psstore.protocol import state_copy
from psstore.protocol.coordinator import Coordinator
from psstore.protocol.coordinator_feed import Told, feed
from psstore.protocol.election import Succession, succession
from psstore.protocol.frames import Close
from psstore.protocol.handshake import ClientIdentity
from psstore.protocol.membership import Liveness
from psstore.protocol.service import ShardService
from psstore.protocol.signing import Signer
from psstore.protocol.states import StandbyState
from psstore.protocol.welcoming import ShardIdentity
from psstore.protocol.words import MAX_WORDS, Words
from psstore.types import Consistency, Tensor, TensorSpec
from psstore.wire import messages as m
from psstore.wire import records as r
from tests.protocol.support import OPS
from tests.shard.frames import floats, key_of, write

TERMS = Consistency(num_workers=2, quorum=2)
KEY = b"a key of the store's own"
FIRST, SECOND = "a" * 32, "b" * 32


def coordinator() -> Coordinator:
    return Coordinator(consistency=TERMS, liveness=Liveness(), num_shards=1, signer=Signer(KEY))


def asked(op: str, message: m.Message, *, conn: int, request: int, client: str, now: float = 1.0) -> r.ClientAsked:
    return r.ClientAsked(conn, request, OPS[op], m.encode_body(message), client, now)


def with_a_commit() -> Coordinator:
    """Rank 0 has joined, created a tensor, and waits for the other one at the end of its round."""
    one = coordinator()
    spec = TensorSpec(name="w", shape=(3,), rule="sgd")
    feed(one, r.ClientCame(1, FIRST, 0.0))
    for request, (op, message) in enumerate(
        [("JOIN", m.Join(rank=0)), ("CREATE", m.Create(specs=(spec,))), ("COMMIT", m.Commit(round=1))], start=1
    ):
        feed(one, asked(op, message, conn=1, request=request, client=FIRST))
    return one


def test_a_copy_of_a_coordinator_goes_on_as_it_would() -> None:
    one, other = with_a_commit(), coordinator()
    state_copy.load(other, state_copy.dump(one))
    assert state_copy.dump(other) == state_copy.dump(one)
    rest: list[Told] = [
        r.ClientCame(2, SECOND, 1.0),
        asked("JOIN", m.Join(rank=1), conn=2, request=1, client=SECOND),
        asked("COMMIT", m.Commit(round=1), conn=2, request=2, client=SECOND),
    ]
    replies = [[feed(each, told) for told in rest] for each in (one, other)]
    assert replies[0] == replies[1]
    assert len(replies[0][-1]) == 2, "both commits are answered, the one that was waiting before the copy too"
    assert one.rounds.log.since(0) == other.rounds.log.since(0)


def test_what_many_were_answered_is_copied_once() -> None:
    specs = tuple(TensorSpec(name=f"w{number}", shape=(3,), rule="sgd") for number in range(100))

    def copied(num_clients: int) -> int:
        """Bytes of the state once so many have asked for the same tensors."""
        one = coordinator()
        for conn in range(num_clients):
            client = f"{conn:032x}"
            feed(one, r.ClientCame(conn, client, 0.0))
            feed(one, asked("CREATE", m.Create(specs=specs, offer=False), conn=conn, request=1, client=client))
        return len(state_copy.dump(one))

    assert copied(100) - copied(2) < 98 * 300


@pytest.mark.parametrize(
    "tree",
    [
        ["i", 0, "os:system", {}],
        ["v", 0, "builtins:eval", b"\x80"],
        ["e", "psstore.types:MAX_DIMS", "X"],
        ["?"],
        ["r", 7],
    ],
)
def test_what_is_no_state_of_a_coordinator_is_refused(tree: list[object]) -> None:
    with pytest.raises(errors.BadBody):
        state_copy.load(coordinator(), msgspec.msgpack.encode(tree))


class Pair:
    """A shard and its standby, and the bytes between them."""

    LEASE_S = math.inf

    def __init__(self) -> None:
        self.leader, self.standby = self._service(), self._service()
        self.end = self.leader.opened(1, 0.0)
        identity = ClientIdentity(client=FIRST, role="standby")
        self.protocol, hello = self.standby.follow(0, client=identity, address="there", place="here")
        self.end.feed(hello)

    def _service(self) -> ShardService:
        identity = ShardIdentity(store="this one", shard=0, addresses=(("there",),), consistency=TERMS, heartbeat_s=1.0)
        return ShardService(
            identity=identity,
            shard=_core.Shard(index=0),
            signer=Signer(KEY),
            coordinator=coordinator(),
            make_nonce=lambda: bytes(32),
            lease_s=self.LEASE_S,
        )

    def talk(self, *, conn: int = 1) -> None:
        """Until neither has anything to say."""
        while self._serve(self.leader, conn, self.end, self.protocol) | self._serve(
            self.standby, 0, self.protocol, self.end
        ):
            pass

    @staticmethod
    def _serve(service: ShardService, conn: int, mine: _core.ServerProtocol, other: _core.ServerProtocol) -> bool:
        said = False
        while True:
            frame = mine.next_frame(0.0)
            for output in [] if frame is None else service.frame(conn, frame, 0.0):
                mine.reply(getattr(output, "pieces", []))
            service.catch_up(0.0)
            replies = mine.take_replies()
            if replies:
                other.feed(b"".join(replies))
                said = True
            if frame is None and not replies:
                return said


def test_a_standby_follows_and_may_lead_once_its_shard_counts_on_it() -> None:
    """Its shard says so when it has heard that the standby knows: until then it could not lead."""
    pair = Pair()
    standby = pair.standby.leadership.standby
    assert standby is not None
    in_sync: list[tuple[str, StandbyState]] = []
    pair.leader.leadership.standbys.on_in_sync = lambda client: in_sync.append((client, standby.state))
    pair.talk()
    assert in_sync == [(FIRST, StandbyState.IN_SYNC)]
    assert pair.leader.leadership.standbys.clients == [FIRST]


def test_a_standby_that_has_not_all_that_it_needs_refuses_to_lead() -> None:
    pair = Pair()
    with pytest.raises(errors.BadArgument, match="has not all that the shard at there has told others"):
        pair.standby.lead(1.0)


def test_replies_wait_until_a_standby_has_what_came_before_and_go_when_it_is_done_without() -> None:
    pair = Pair()
    pair.talk()
    client = pair.leader.opened(2, 0.0)
    client.feed(_core.encode_frame(OPS["HELLO"], body=m.encode_body(m.Hello(client=SECOND))))
    frame = client.next_frame(0.0)
    assert frame is not None
    for output in pair.leader.frame(2, frame, 0.0):
        client.reply(getattr(output, "pieces", []))
    assert not client.take_replies(), "the coordinator was told who came, and the standby does not know yet"
    pair.talk()
    assert client.take_replies(), "it does"
    lost: list[str] = []
    pair.leader.leadership.standbys.on_lost = lost.append
    pair.leader.closed(1, 0.0)
    assert lost == [FIRST]
    pair.leader.closed(2, 0.0)
    third = pair.leader.opened(3, 0.0)
    third.feed(_core.encode_frame(OPS["HELLO"], body=m.encode_body(m.Hello(client=SECOND))))
    frame = third.next_frame(0.0)
    assert frame is not None
    for output in pair.leader.frame(3, frame, 0.0):
        third.reply(getattr(output, "pieces", []))
    assert not third.take_replies(), "who is lost may lead"
    pair.leader.leadership.standbys.done_without(FIRST)
    assert third.take_replies()


def test_a_standby_that_is_told_to_end_says_that_it_will_never_lead() -> None:
    pair = Pair()
    assert pair.standby.leadership.retire() is None, "nobody counts on it"
    pair.talk()
    gone: list[str] = []
    pair.leader.leadership.standbys.on_lost = pair.leader.leadership.standbys.on_retired = gone.append
    word = pair.standby.leadership.retire()
    assert word is not None
    pair.end.feed(word)
    frame = pair.end.next_frame(0.0)
    assert frame is not None
    (closed,) = pair.leader.frame(1, frame, 0.0)
    assert isinstance(closed, Close)
    assert gone == [FIRST]
    pair.leader.closed(1, 0.0)
    assert gone == [FIRST]
    assert not pair.leader.leadership.standbys.clients
    operator = pair.standby.opened(2, 0.0)
    exchange(pair.standby, 2, operator, hello("operator"))
    (refusal,) = exchange(pair.standby, 2, operator, PROMOTE)
    assert "it can't lead" in m.decode_body(m.Failure, refusal.body).message
    assert pair.standby.leadership.retire() is None


def exchange(
    service: ShardService, conn: int, end: _core.ServerProtocol, sent: bytes, now: float = 0.0
) -> list[_core.Frame]:
    """What a client gets for what it sends."""
    end.feed(sent)
    while (frame := end.next_frame(now)) is not None:
        for output in service.frame(conn, frame, now):
            end.reply(getattr(output, "pieces", []))
    return frames_of(b"".join(end.take_replies()))


def frames_of(data: bytes) -> list[_core.Frame]:
    decoder = _core.FrameDecoder(max_body_bytes=1 << 20, max_payload_bytes=0)
    decoder.feed(data)
    return list(iter(decoder.next_frame, None))


def hello(role: m.Role, client: str = SECOND) -> bytes:
    return _core.encode_frame(OPS["HELLO"], body=m.encode_body(m.Hello(client=client, role=role)))


STATS = _core.encode_frame(OPS["STATS"], request=1)
PROMOTE = _core.encode_frame(OPS["PROMOTE"], request=2, body=m.encode_body(m.Promote()))


def test_nothing_is_read_of_a_shard_whose_standby_might_lead() -> None:
    """Although nothing has changed since: what the other one tells others would not be in it."""
    pair = Pair()
    pair.talk()
    client = pair.leader.opened(2, 0.0)
    client.feed(hello("client"))
    exchange(pair.leader, 2, client, b"")
    pair.talk()
    client.take_replies()
    assert exchange(pair.leader, 2, client, STATS)
    pair.leader.closed(1, 0.0)
    assert not exchange(pair.leader, 2, client, STATS)
    third = pair.leader.opened(3, 0.0)
    (welcome,) = exchange(pair.leader, 3, third, hello("operator"))
    assert welcome.op == OPS["WELCOME"], "who sees to standbys is heard"
    gone: list[str] = []
    pair.leader.leadership.standbys.on_retired = gone.append
    (promoted,) = exchange(pair.leader, 3, third, PROMOTE)
    assert promoted.op == OPS["PROMOTED"]
    assert client.take_replies()
    assert gone == [FIRST], "its supervisor must not hand over to that one"


def test_a_standby_that_comes_in_the_place_of_a_lost_one_sets_its_shard_free() -> None:
    pair = Pair()
    pair.talk()
    pair.leader.closed(1, 0.0)
    assert pair.leader.leadership.standbys.lost == [FIRST]
    other = pair._service()
    pair.standby, pair.end = other, pair.leader.opened(1, 0.0)
    identity = ClientIdentity(client=SECOND, role="standby")
    pair.protocol, said = other.follow(0, client=identity, address="there", place="here")
    pair.end.feed(said)
    pair.talk()
    assert pair.leader.leadership.standbys.lost == []
    assert pair.leader.leadership.standbys.clients == [SECOND]


def test_a_process_that_was_ended_and_is_heard_late_does_not_take_the_place_of_its_successor() -> None:
    pair = Pair()
    ended, end_of_it, its_end = pair.standby, pair.end, pair.protocol
    successor = pair._service()
    identity = ClientIdentity(client=SECOND, role="standby")
    pair.standby, pair.end = successor, pair.leader.opened(2, 0.0)
    pair.protocol, said = successor.follow(0, client=identity, address="there", place="here")
    pair.end.feed(said)
    pair.talk(conn=2)
    assert pair.leader.leadership.standbys.clients == [SECOND]
    dropped: list[int] = []
    pair.leader.leadership.standbys.on_dropped = lambda conn, error: dropped.append(conn)
    pair.standby, pair.end, pair.protocol = ended, end_of_it, its_end
    pair.talk()
    assert pair.leader.leadership.standbys.clients == [SECOND]
    assert dropped == [1]


def test_clients_go_elsewhere_and_operators_are_heard_by_a_standby() -> None:
    pair = Pair()
    promoted: list[int] = []
    pair.standby.leadership.on_promoted = lambda: promoted.append(1)
    client = pair.standby.opened(1, 0.0)
    (refusal,) = exchange(pair.standby, 1, client, hello("client"))
    failure = m.decode_body(m.Failure, refusal.body)
    assert failure.code == errors.NotLeading.code
    assert "this is a standby of shard 0, which is at there" in failure.message
    operator = pair.standby.opened(2, 0.0)
    (welcome,) = exchange(pair.standby, 2, operator, hello("operator"))
    assert welcome.op == OPS["WELCOME"]
    for said in ("it can't lead", "two would lead"):
        (refusal,) = exchange(pair.standby, 2, operator, PROMOTE)
        assert said in m.decode_body(m.Failure, refusal.body).message
        assert not promoted
        pair.talk()
    force = _core.encode_frame(OPS["PROMOTE"], request=3, body=m.encode_body(m.Promote(force=True)))
    (done,) = exchange(pair.standby, 2, operator, force)
    assert done.op == OPS["PROMOTED"]
    assert promoted == [1]


@pytest.mark.parametrize(
    ("role", "op"),
    [
        *(("operator", op) for op in ("JOIN", "PULL", "FOLLOW")),
        *(("elector", op) for op in ("JOIN", "PULL", "STATS", "PROMOTE")),
    ],
)
def test_who_sees_to_standbys_does_nothing_else(role: m.Role, op: str) -> None:
    pair = Pair()
    end = pair.leader.opened(2, 0.0)
    exchange(pair.leader, 2, end, hello(role))
    (refusal,) = exchange(pair.leader, 2, end, _core.encode_frame(OPS[op], request=1))
    assert m.decode_body(m.Failure, refusal.body).code == errors.UnexpectedMessage.code


def test_who_leads_numbers_connections_beyond_all_of_those_before() -> None:
    """A commit that waits was asked over a connection of the process before: its answer must reach nobody else."""
    pair = Pair()
    pair.talk()
    pair.standby.lead(1.0)
    assert pair.standby.leadership.first_connection == (1 << 32) + 1
    assert pair.standby.leadership.standbys.epoch == 1


@pytest.mark.parametrize("role", ["worker", "client", "operator", "elector"])
def test_a_client_that_came_before_it_led_has_to_come_again(role: m.Role) -> None:
    """Its connection has a number that one of the process before may have had, to which an answer is owed."""
    pair = Pair()
    pair.talk()
    early = pair.standby.opened(2, 1.0)
    pair.standby.lead(1.0)
    (answer,) = exchange(pair.standby, 2, early, hello(role), 1.0)
    if role in ("operator", "elector"):
        assert answer.op == OPS["WELCOME"]
    else:
        assert m.decode_body(m.Failure, answer.body).code == errors.NotLeading.code
    conn = pair.standby.leadership.first_connection
    (answer,) = exchange(pair.standby, conn, pair.standby.opened(conn, 1.0), hello(role), 1.0)
    assert answer.op == OPS["WELCOME"]


@pytest.mark.parametrize(
    ("fact", "error"),
    [
        (m.FollowFact(client=SECOND, shard=0), errors.BadSignature),
        (m.FollowFact(client=FIRST, shard=1), errors.BadArgument),
        (m.DropFact(ids=(1,)), errors.BadSignature),
    ],
)
def test_only_a_process_of_the_store_may_follow_and_only_its_own_shard(
    fact: m.FollowFact | m.DropFact, error: type[errors.PsstoreError]
) -> None:
    pair = Pair()
    frame = pair.end.next_frame(0.0)
    assert frame is not None
    pair.leader.frame(1, frame, 0.0)
    connection = pair.leader._connections.of[1]
    with pytest.raises(error):
        pair.leader.facts.may_follow(connection, m.Follow(fact=Signer(KEY).sign(fact)))
    with pytest.raises(errors.BadSignature):
        pair.leader.facts.may_follow(connection, m.Follow(fact=Signer(b"another key").sign(fact)))


# ---- words on other shards' standbys, and the lease of this one's ----

OTHERS = "c" * 32


def ask_word(pair: Pair, service: ShardService, conn: int, *, leads: bool, client: str = OTHERS) -> list[m.Word]:
    """What an elector is told at once."""
    end = service.opened(conn, 0.0)
    body = m.encode_body(m.AskWord(client=client, leads=leads))
    exchange(service, conn, end, hello("elector", client=f"{conn:032x}"))
    pair.talk()
    frames = exchange(service, conn, end, _core.encode_frame(OPS["ASK_WORD"], request=1, body=body))
    pair.talk()
    frames += frames_of(b"".join(end.take_replies()))
    return [m.decode_body(m.Word, frame.body) for frame in frames if frame.op == OPS["WORD"]]


def test_the_first_word_stays_and_outlives_the_shard() -> None:
    pair = Pair()
    pair.talk()
    assert [word.leads for word in ask_word(pair, pair.leader, 2, leads=False)] == [False]
    assert [word.leads for word in ask_word(pair, pair.leader, 3, leads=True)] == [False]
    pair.standby.lead(1.0)
    (word,) = ask_word(pair, pair.standby, (1 << 32) + 1, leads=True)
    assert word == m.Word(leads=False, gone=(OTHERS,))


def test_a_word_is_told_when_the_shards_own_standby_has_it() -> None:
    pair = Pair()
    pair.talk()
    pair.leader.closed(1, 0.0)  # it may lead: whatever is said here now, it does not know
    assert not ask_word(pair, pair.leader, 2, leads=True)


def test_a_new_standby_is_filled_with_words() -> None:
    pair = Pair()
    pair.leader.facts.give_word(OTHERS, leads=True)
    pair.talk()
    pair.standby.lead(1.0)
    (word,) = ask_word(pair, pair.standby, (1 << 32) + 1, leads=False)
    assert word.leads


def test_a_new_standby_is_filled_with_the_last_decision_that_was_applied() -> None:
    facts = Pair().leader.facts
    taken, failed = (m.DecisionFact(number=number, members=(), divisor=1.0, hypers={}) for number in (1, 3))
    blob = Signer(KEY).sign(taken).blob
    facts.take(taken, blob)
    with pytest.raises(errors.DecisionGap):
        facts.take(failed, Signer(KEY).sign(failed).blob)
    begins = next(facts.as_it_is(epoch=0, coordinator=b""))
    assert isinstance(begins, r.FillBegins)
    assert (begins.version, begins.last) == (1, blob)


def test_a_new_standby_is_filled_with_what_was_refused_of_plain_writes() -> None:
    pair = Pair()
    leader, standby = pair.leader.facts.shard, pair.standby.facts.shard
    for client in (FIRST, SECOND):
        write(leader, "ADD", {key_of(8): floats(1), key_of(9): floats(1)}, sequence=1, client=client)
        write(leader, "ADD", {}, sequence=2, client=client)
    pair.talk()
    refused = [(1, 0, 2, errors.UnknownKey.code)]
    assert standby.refusals() == leader.refusals() == [(FIRST, 0, refused), (SECOND, 0, refused)]


LARGE = m.HandIn(version=0, state=bytes(_core.MAX_BODY_BYTES - 40))
"""A frame holds it, and does not hold what a record says of it, too."""


def hand_in(pair: Pair) -> None:
    """A worker comes, and hands in all that one message may bring."""
    coming = r.ClientCame(5, SECOND, 0.0)
    joining = asked("JOIN", m.Join(rank=0), conn=5, request=1, client=SECOND)
    for told in (coming, joining, asked("HAND_IN", LARGE, conn=5, request=2, client=SECOND)):
        pair.leader._host.tell(told)


@pytest.mark.parametrize("is_new", [True, False])
def test_what_is_larger_than_a_frame_comes_to_a_standby_in_parts(is_new: bool) -> None:
    pair = Pair()
    if not is_new:
        pair.talk()
    hand_in(pair)
    pair.talk()
    assert pair.standby.leadership.standby is not None
    assert pair.standby.leadership.standby.state is StandbyState.IN_SYNC
    assert pair.standby.coordinator is not None
    assert pair.standby.coordinator.rounds.hand_ins.of[0].state == LARGE.state


def test_who_cannot_be_filled_is_dropped_and_nobody_else_hears_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    dropped: list[tuple[int, Exception | None]] = []
    pair.leader.leadership.standbys.on_dropped = lambda conn, error: dropped.append((conn, error))
    why = RuntimeError("no state can be had")

    def fail(root: object) -> bytes:
        raise why

    with monkeypatch.context() as broken:
        broken.setattr(state_copy, "dump", fail)
        pair.talk()
    assert dropped == [(1, why)]
    assert not pair.leader.data.is_followed
    client = pair.leader.opened(2, 0.0)
    (welcome,) = exchange(pair.leader, 2, client, hello("client"))
    assert welcome.op == OPS["WELCOME"]


def filled_with_one_writer() -> _core.Shard:
    shard = _core.Shard(index=0)
    shard.resume(([], [(FIRST, 3)], [], False), None)
    return shard


@pytest.mark.parametrize("runs", [[(4, 0, 1, 21)], [(2, 1, 1, 21)], [(2, 0, 1, 0)], [(2, 0, 1, 250)]])
def test_what_can_not_have_been_refused_is_no_record(runs: list[tuple[int, int, int, int]]) -> None:
    shard = filled_with_one_writer()
    with pytest.raises(errors.BadBody, match=f"writes of client {FIRST}"):
        shard.resume_refusals(FIRST, 0, runs)
    assert shard.refusals() == []


def test_refusals_of_who_has_written_nothing_are_no_record() -> None:
    with pytest.raises(errors.BadBody, match="which has written nothing"):
        filled_with_one_writer().resume_refusals(SECOND, 0, [])


@pytest.mark.parametrize("numbers", [(-1, 0, 1, 21), (1, -1, 1, 21), (1, 0, 1 << 32, 21), (1, 0, 1, 256)])
def test_numbers_that_no_refusal_has_are_a_bad_body(numbers: tuple[int, int, int, int]) -> None:
    body = r.encode_record(r.WritesRefused(FIRST, 0, (numbers,)))
    with pytest.raises(errors.BadBody):
        r.decode_record(body)


def test_a_standby_has_no_word_and_says_what_its_shard_had_said() -> None:
    pair = Pair()
    pair.talk()
    ask_word(pair, pair.leader, 2, leads=False)
    (word,) = ask_word(pair, pair.standby, 5, leads=True)
    assert word == m.Word(gone=(OTHERS,), standby=FIRST, may_lead=False)
    assert pair.standby.leadership.standby is not None
    pair.standby.leadership.standby.is_cut = True
    (word,) = ask_word(pair, pair.standby, 6, leads=True)
    assert word == m.Word(gone=(OTHERS,), standby=FIRST, may_lead=True)


def test_a_shard_gives_only_so_many_words() -> None:
    words = Words()
    for number in range(MAX_WORDS):
        assert words.give(f"{number:032x}", leads=True)
    with pytest.raises(errors.Overloaded, match="gives no other"):
        words.give(OTHERS, leads=True)
    assert not words.give(f"{0:032x}", leads=False)


def word(leads: bool | None) -> m.Word:
    return m.Word(leads=leads)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ([], Succession.OPEN),
        ([word(True)], Succession.LEADS),
        ([word(True), word(True)], Succession.LEADS),
        ([word(True), None], Succession.OPEN),
        ([word(True), word(None)], Succession.OPEN),
        ([None, word(False)], Succession.GONE),
        ([word(True), word(False)], Succession.GONE),
    ],
)
def test_what_words_come_to(words: list[m.Word | None], found: Succession) -> None:
    assert succession(words) is found


class Leased(Pair):
    """With a lease of 2 seconds."""

    LEASE_S = 2.0


def test_nothing_is_told_once_the_standby_may_lead_by_vote_and_it_does_not_ask_before() -> None:
    pair = Leased()
    pair.talk()
    standby = pair.standby.leadership.standby
    assert standby is not None
    silent: list[float] = []
    standby.on_silent = lambda: silent.append(1.0)
    client = pair.leader.opened(2, 0.0)
    exchange(pair.leader, 2, client, hello("client"))
    pair.talk()
    client.take_replies()
    for now, is_told in ((1.9, True), (2.1, False)):  # since it was told that it counts, at 0.0
        assert bool(exchange(pair.leader, 2, client, STATS, now=now)) is is_told
        pair.standby.tick(now)
        assert not silent
    pair.standby.tick(3.1)
    assert silent


def test_beats_that_a_standby_answers_prolong_the_lease_from_when_they_were_made() -> None:
    pair = Leased()
    pair.talk()
    client = pair.leader.opened(2, 0.0)
    exchange(pair.leader, 2, client, hello("client"))
    pair.talk()
    client.take_replies()
    pair.leader.catch_up(1.0)  # a beat is made, and stays on its way for 3 seconds
    beat = pair.end.take_replies()
    assert beat
    exchange(pair.leader, 2, client, b"", now=4.0)
    pair.protocol.feed(b"".join(beat))
    pair.talk()
    assert not exchange(pair.leader, 2, client, STATS, now=4.0), "what was answered at 4 was made at 1"


@pytest.mark.parametrize("is_new", [True, False])
def test_a_standby_keeps_what_was_measured_as_it_is_too(is_new: bool) -> None:
    """One that comes later, and one that was there."""
    pair = Pair()
    if not is_new:
        pair.talk()
    worker = pair.leader.opened(2, 0.0)
    requests = itertools.count(1)

    def ask(op: str, body: m.Message, payload: bytes = b"", **header: Any) -> _core.Frame:
        request = next(requests)
        head = _core.encode_frame(OPS[op], request=request, body=m.encode_body(body), **header)
        found = exchange(pair.leader, 2, worker, head + payload)
        while not found:
            pair.talk()
            found = frames_of(b"".join(worker.take_replies()))
        assert found[-1].request == request
        return found[-1]

    def push(key: int, values: Sequence[float]) -> None:
        table = _core.SliceTable([(key, 4 * len(values), _core.DTYPES["float32"])])
        sender = {"rank": 0, "incarnation": 1, "round": 1, "table": table, "payload_bytes": 4 * len(values)}
        ask("PUSH", m.Carry(), floats(*values).tobytes(), **sender)

    ask("HELLO", m.Hello(client=SECOND, role="worker"))
    joined = m.decode_body(m.Joined, ask("JOIN", m.Join(rank=0)).body)
    specs = (TensorSpec(name="w", shape=(2,), rule="sgd"),)
    created = m.decode_body(m.Created, ask("CREATE", m.Create(specs=specs)).body)
    (tensor,) = (m.decode_fact(signed.blob) for signed in created.tensors)
    assert isinstance(tensor, Tensor)
    ask("DEFINE", m.Define(facts=created.tensors))
    ask("ATTACH", m.Attach(ticket=joined.ticket))
    push(tensor.key(0), [3.0, 4.0])
    present = ((tensor.id, tensor.id),)
    ask("ATTEST", m.Attest(round=1, present=present))
    if is_new:
        pair.talk()
    push(tensor.key(0), [100.0, 100.0])
    shards = (pair.leader.shard, pair.standby.shard)
    assert [shard.staged_squares(0, 1, 1, tensors=present) for shard in shards] == [25.0, 25.0]
    assert pair.standby.shard.history() == pair.leader.shard.history()
