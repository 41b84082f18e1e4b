"""The client's link to one shard: what it says, what it believes, and what it sends again."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np
import pytest

from psstore import _core, errors
from psstore.config import Credentials
from psstore.protocol import auth
from psstore.protocol.decision_cache import DecisionCache
from psstore.protocol.handshake import ClientIdentity
from psstore.protocol.keepalive import Keepalive
from psstore.protocol.requests import REPLIES, Answer
from psstore.protocol.session import Session, is_final
from psstore.protocol.states import LinkState
from psstore.wire import messages as m
from tests.protocol.support import F32, NONCE, OPS, SIGNER

CLIENT = "c" * 32
TOKEN = b"the token of the store"
SHARD_NONCE = b"s" * auth.NONCE_BYTES


class Promise:
    """A future that nobody awaits."""

    def __init__(self) -> None:
        self.result: Any = None
        self.error: BaseException | None = None

    def __await__(self) -> Generator[Any, Any, Any]:
        raise NotImplementedError
        yield

    def cancel(self) -> None:
        raise NotImplementedError

    def cancelled(self) -> bool:
        return False

    def done(self) -> bool:
        return self.result is not None or self.error is not None

    def set_result(self, result: Any, /) -> None:
        self.result = result if result is not None else "done"

    def set_exception(self, error: BaseException, /) -> None:
        self.error = error


class Far:
    """The far end of a session: reads what it sends, and answers."""

    def __init__(self, *, token: bytes | None = None, ticket: m.Signed | None = None) -> None:
        identity = ClientIdentity(client=CLIENT, role="worker", credentials=Credentials(token=token), ticket=ticket)
        self.session = Session(
            identity=identity, decisions=DecisionCache(), make_nonce=lambda: NONCE, address="fake://0"
        )

    def sent(self) -> list[_core.Frame]:
        decoder, frames = _core.FrameDecoder(), []
        for pieces in self.session.core.take_output():
            decoder.feed(b"".join(bytes(piece) for piece in pieces))
            while (frame := decoder.next_frame()) is not None:
                if frame.complete:
                    frames.append(frame)
                else:
                    decoder.discard()
        return frames

    def answer(self, op: str, body: m.Message | None = None, *, now: float = 0.0, **header: Any) -> None:
        self.answer_with(OPS[op], m.encode_body(body) if body else b"", now=now, **header)

    def answer_with(self, op: int, body: bytes, *, now: float = 0.0, **header: Any) -> None:
        self.session.feed([_core.encode_frame(op, body=body, **header)], now)

    def welcome(self, *, store: str = "a store", now: float = 0.0, **fields: Any) -> None:
        known = {"shard": 0, "addresses": (("fake://0",),), "num_workers": 1, "quorum": 1, "staleness": 0}
        self.answer(
            "WELCOME", m.Welcome(**{**known, "version": 0, "last_sequence": 0, "store": store, **fields}), now=now
        )

    def connect(self, **fields: Any) -> None:
        self.session.connected()
        self.sent()
        self.welcome(**fields)

    def request(self, op: str, **parts: Any) -> Promise:
        promise = Promise()
        self.session.request(op, promise, now=0.0, timeout_s=parts.pop("timeout_s", 10.0), **parts)
        return promise


def decision(number: int, **fields: Any) -> m.Signed:
    return SIGNER.sign(m.DecisionFact(number=number, members=(), divisor=1.0, hypers={}, **fields))


def one_value() -> dict[str, Any]:
    return {
        "table": _core.SliceTable([(1 << _core.SLICE_INDEX_BITS, 4, F32)]),
        "payload": _core.Segments([np.ones(1, np.float32)]),
    }


def payload_of(op: str, request: int) -> bytes:
    """A reply with a value."""
    table = _core.SliceTable([(1 << _core.SLICE_INDEX_BITS, 4, F32)])
    return _core.encode_frame(OPS[op], request=request, table=table, payload_bytes=4) + bytes(4)


# ---- the handshake ----


def test_token_is_proved_and_the_shards_proof_is_checked() -> None:
    far = Far(token=TOKEN)
    far.session.connected()
    far.sent()
    far.answer("CHALLENGE", m.Challenge(nonce=SHARD_NONCE))
    (frame,) = far.sent()
    sides = {"client": CLIENT, "client_nonce": NONCE, "shard_nonce": SHARD_NONCE}
    assert m.decode_body(m.Auth, frame.body).proof == auth.proof(TOKEN, "client", **sides)  # type: ignore[arg-type]
    far.welcome(proof=auth.proof(TOKEN, "shard", **sides))  # type: ignore[arg-type]
    assert far.session.state is LinkState.UP


@pytest.mark.parametrize("proof", [b"", b"x" * 32])
def test_store_that_does_not_prove_the_token_is_refused(proof: bytes) -> None:
    far = Far(token=TOKEN)
    far.session.connected()
    far.answer("CHALLENGE", m.Challenge(nonce=SHARD_NONCE))
    with pytest.raises(errors.AuthFailed, match="did not prove that it has the token") as caught:
        far.welcome(proof=proof)
    assert is_final(caught.value)


def test_store_that_asks_for_no_proof_is_refused_by_a_client_with_a_token() -> None:
    far = Far(token=TOKEN)
    far.session.connected()
    with pytest.raises(errors.AuthFailed):
        far.welcome()


def test_client_without_a_token_says_how_to_give_one() -> None:
    far = Far()
    far.session.connected()
    with pytest.raises(errors.AuthFailed, match="PSSTORE_TOKEN_FILE"):
        far.answer("CHALLENGE", m.Challenge(nonce=SHARD_NONCE))


def test_restarted_store_has_lost_everything_and_is_not_used() -> None:
    far = Far()
    far.connect()
    far.session.disconnected()
    far.session.connected()
    with pytest.raises(errors.StoreUnreachable, match="was restarted") as caught:
        far.welcome(store="another run")
    assert is_final(caught.value)


def test_error_in_the_handshake_is_raised_as_what_it_is() -> None:
    far = Far()
    far.session.connected()
    with pytest.raises(errors.Overloaded, match="too many") as caught:
        far.answer("ERROR", m.Failure(code=errors.Overloaded.code, message="too many"))
    assert not is_final(caught.value)


def test_worker_attaches_before_anything_else_on_a_new_connection() -> None:
    far = Far(ticket=decision(1))
    far.request("STATS")
    far.connect()
    assert [frame.op for frame in far.sent()] == [OPS["ATTACH"], OPS["STATS"]]


# ---- what is sent, and sent again ----


def test_request_waits_for_the_link() -> None:
    far = Far()
    far.request("STATS")
    assert far.sent() == []
    far.connect()
    assert [frame.op for frame in far.sent()] == [OPS["STATS"]]


def test_what_was_not_answered_is_sent_again_in_order_and_nothing_else() -> None:
    far = Far()
    far.connect()
    first, second, third = (far.request("STATS") for _ in range(3))
    far.sent()
    far.answer("STATISTICS", m.Statistics(counters={}), request=2)
    far.session.disconnected()
    far.connect()
    assert [frame.request for frame in far.sent()] == [1, 3]
    assert (first.done(), second.done(), third.done()) == (False, True, False)


def test_decisions_are_carried_once_per_connection() -> None:
    far = Far()
    far.connect()
    far.session.decisions.learn(2, [decision(1), decision(2)])
    for expected in (2, 0):
        far.request("PULL", body=m.Carry())
        (frame,) = far.sent()
        assert len(m.decode_body(m.Carry, frame.body).decisions) == expected
    far.session.disconnected()
    far.connect(version=1)
    carried = [len(m.decode_body(m.Carry, frame.body).decisions) for frame in far.sent()]
    assert carried == [1, 0]  # decision 2 again: the shard said that it has 1


def test_scale_is_carried_until_the_next_decision() -> None:
    far = Far()
    far.connect()
    decisions = far.session.decisions
    decisions.learn(1, [decision(1, max_norm=1.0)])
    scale = m.Scale(decision=1, factor=0.5)
    decisions.set_scale(scale)
    for expected in (scale, scale, None):
        far.request("PULL", body=m.Carry())
        (frame,) = far.sent()
        assert m.decode_body(m.Carry, frame.body).scale == expected
        if frame.request == 2:
            decisions.learn(2, [decision(2)])


def test_shard_has_the_scale_when_it_has_answered_what_carried_it() -> None:
    far = Far()
    far.connect()
    far.request("PULL", body=m.Carry())
    far.session.decisions.learn(3, [decision(3, max_norm=1.0)])
    far.session.decisions.set_scale(m.Scale(decision=3, factor=None))
    far.request("NORM", body=m.Carry())
    far.answer("PULLED", request=1)
    assert far.session.scaled == 0
    far.answer("NORMED", request=2)
    assert far.session.scaled == 3


def test_wait_at_the_store_began_with_ours_however_often_it_is_asked() -> None:
    far = Far()
    far.connect()
    far.request("BARRIER", body=m.Barrier(count=1, wait_s=20.0), timeout_s=25.0)
    far.request("FINISH", body=m.Finish(round=1, wait_s=20.0), timeout_s=25.0)
    far.sent()
    far.session.disconnected()
    far.session.connected()
    far.sent()
    far.welcome(now=15.0)
    barrier, finish = far.sent()
    assert m.decode_body(m.Barrier, barrier.body).wait_s == m.decode_body(m.Finish, finish.body).wait_s == 5.0


def test_writes_are_numbered_and_keep_their_numbers() -> None:
    far = Far()
    far.connect()
    for op in ("ASSIGN", "ADD", "INIT", "RESTORE"):
        far.request(op, **one_value())
    assert [frame.sequence for frame in far.sent()] == [1, 2, 0, 3]
    far.session.disconnected()
    far.connect(last_sequence=1)
    assert [frame.sequence for frame in far.sent()] == [1, 2, 0, 3]


def test_write_that_gave_up_before_it_arrived_leaves_no_gap() -> None:
    far = Far()
    far.connect()
    given_up = far.request("ADD", **one_value(), timeout_s=1.0)
    far.session.disconnected()
    far.session.tick(2.0)
    assert given_up.error is not None
    far.request("ADD", **one_value())
    far.connect(last_sequence=0)
    assert [frame.sequence for frame in far.sent()] == [1]


# ---- how waits end ----


def test_request_that_is_not_answered_says_who_was_silent() -> None:
    far = Far()
    far.connect()
    promise = far.request("STATS", timeout_s=3.0)
    assert far.session.next_wake() == 3.0
    far.session.tick(3.0)
    assert isinstance(promise.error, errors.DeadlineExceeded)
    assert "shard 0 at fake://0 did not answer within 3.0 s" in str(promise.error)
    assert far.session.idle


def test_store_that_is_not_there_is_unreachable() -> None:
    far = Far()
    promise = far.request("STATS", timeout_s=3.0)
    far.session.tick(3.0)
    assert isinstance(promise.error, errors.StoreUnreachable)
    assert promise.error.details == {"address": "fake://0", "tried_s": 3.0}
    assert promise.error.message == "shard 0 at fake://0 can't be reached; tried for 3.0 s"


def test_why_a_connection_ended_is_told_until_there_is_another() -> None:
    far = Far()
    far.session.last_word = "it has enough"
    promise = far.request("STATS", timeout_s=3.0)
    far.session.tick(3.0)
    assert promise.error is not None
    assert str(promise.error) == "shard 0 at fake://0 can't be reached: it has enough; tried for 3.0 s"
    far.connect()
    assert far.session.last_word == ""


def waiting(far: Far, **parts: Any) -> Promise:
    """For other workers, on a session that looks every second."""
    far.session.keepalive = Keepalive(interval_s=1.0)
    far.connect()
    promise = far.request("BARRIER", body=m.Barrier(count=1, wait_s=300.0), timeout_s=305.0, **parts)
    far.sent()
    return promise


def test_shard_that_is_silent_while_others_are_waited_for_is_asked_once() -> None:
    far = Far()
    promise = waiting(far)
    far.session.tick(0.9)
    assert far.sent() == []
    assert far.session.next_wake() == 1.0
    far.session.tick(1.0)
    (question,) = far.sent()
    assert (question.op, len(question.table)) == (OPS["PULL"], 0)
    for look in (2.0, 3.0, 4.0):
        assert not far.session.keepalive.is_broken
        far.session.tick(look)
    assert far.session.keepalive.is_broken
    assert far.session.keepalive.asked_at == 1.0
    assert far.sent() == []
    assert not promise.done()  # another connection may bring its answer


def test_any_byte_is_a_sign_of_life() -> None:
    far = Far()
    waiting(far)
    for look in range(1, 20):
        far.session.tick(look)
        if look % 3 == 0:
            far.session.core.last_heard = look + 0.5
    assert not far.session.keepalive.is_broken


def test_client_that_stood_still_itself_does_not_blame_the_shard() -> None:
    far = Far()
    waiting(far)
    far.session.tick(1.0)
    far.session.tick(100.0)
    assert not far.session.keepalive.is_broken
    far.answer("PULLED", request=2, now=100.5)
    for look in (101.0, 102.0, 103.0):
        far.session.tick(look)
    assert not far.session.keepalive.is_broken
    assert far.session.keepalive.asked_at == 102.0


def test_shard_need_not_speak_while_it_takes_what_it_is_sent() -> None:
    far = Far()
    waiting(far)
    far.request("PUSH", body=m.Carry(), timeout_s=50.0)
    far.sent()
    for look in range(1, 40):
        far.session.tick(look, lambda look=look: 1000 * (look // 2))  # type: ignore[misc]
    assert not far.session.keepalive.is_broken
    for look in range(40, 45):
        far.session.tick(look, lambda: 20_000)
    assert far.session.keepalive.is_broken


@pytest.mark.parametrize("op", ["PUSH", "PULL", "ADD", "ASSIGN", "INIT", "STATS", "CREATE", "JOIN", "DEFINE"])
def test_shard_that_is_silent_is_given_up_whatever_it_is_asked(op: str) -> None:
    far = Far()
    far.session.keepalive = Keepalive(interval_s=1.0)
    far.connect()
    promise = far.request(op, timeout_s=30.0)
    far.sent()
    for look in (1.0, 2.0, 3.0, 4.0):
        assert not far.session.keepalive.is_broken
        far.session.tick(look)
    assert far.session.keepalive.is_broken
    assert not promise.done()
    far.session.disconnected()
    far.connect()
    assert not far.session.keepalive.is_broken
    assert [frame.op for frame in far.sent()] == [OPS[op], OPS["PULL"]]


def test_deadline_that_passes_in_silence_ends_the_connection() -> None:
    far = Far()
    far.connect()
    promise = far.request("STATS", timeout_s=2.0)
    far.session.tick(2.0)
    assert isinstance(promise.error, errors.DeadlineExceeded)
    assert far.session.keepalive.is_broken


def test_deadlines_of_who_is_in_a_hurry_end_it_together() -> None:
    far = Far()
    far.connect()
    for now in (10.0, 10.4, 10.8):
        assert not far.session.keepalive.is_broken
        far.session.request("STATS", Promise(), now=now, timeout_s=0.4)
        far.session.tick(now + 0.4)
    assert far.session.keepalive.is_broken


@pytest.mark.parametrize("alive", ["a byte", "taken"])
def test_deadline_of_a_shard_that_lives_leaves_the_connection_alone(alive: str) -> None:
    far = Far()
    far.connect()
    promise = far.request("STATS", timeout_s=2.0)
    far.request("STATS", timeout_s=0.6)
    far.session.tick(0.6, lambda: 1000)
    if alive == "a byte":
        far.session.core.last_heard = 0.7
    far.session.tick(2.0, lambda: 1001 if alive == "taken" else 1000)
    assert promise.error is not None
    assert not far.session.keepalive.is_broken


def test_question_ends_with_the_wait() -> None:
    far = Far()
    waiting(far)
    far.session.tick(1.0)
    far.answer("PASSED", request=1)
    far.session.tick(2.0)
    assert far.session.idle
    assert far.session.next_wake() is None
    far.answer("PULLED", request=2)


def test_watched_shard_is_asked_while_nothing_is_wanted_of_it() -> None:
    far = Far()
    far.session.keepalive, far.session.is_watched = Keepalive(interval_s=1.0), True
    assert far.session.next_wake() is None  # it is not there yet
    far.connect()
    for look, request in ((1.0, 1), (3.0, 2)):
        assert far.session.next_wake() == look
        far.session.tick(look)
        (question,) = far.sent()
        assert (question.op, len(question.table)) == (OPS["PULL"], 0)
        far.answer("PULLED", request=request, now=look + 0.5)
        far.session.tick(look + 1.0)
    for look in (5.0, 6.0, 7.0, 8.0):
        assert not far.session.keepalive.is_broken
        far.session.tick(look)
    assert far.session.keepalive.is_broken


def test_silent_shard_that_speaks_on_another_connection_is_believed() -> None:
    far = Far()
    waiting(far)
    for look in (1.0, 2.0, 3.0, 4.0):
        far.session.tick(look)
    far.session.disconnected()
    assert far.session.keepalive.asked_at == 1.0  # since when it can't be reached
    far.session.connected()
    far.sent()
    far.welcome(now=5.0)
    assert [frame.op for frame in far.sent()] == [OPS["BARRIER"], OPS["PULL"]]
    assert far.session.keepalive.asked_at is None
    assert not far.session.keepalive.is_broken


def test_late_answer_to_a_request_that_gave_up_is_ignored() -> None:
    far = Far()
    far.connect()
    far.request("STATS", timeout_s=3.0)
    far.session.tick(3.0)
    far.answer("STATISTICS", m.Statistics(counters={}), request=1)
    assert far.session.state is LinkState.UP


GARBAGE = pytest.mark.parametrize("garbage", [b"\xc1", b"\x81", b"\xa3abc", b"\x80\x80"])
"""Half a map, a string, two of a kind: no body of any message."""

ASKED = [op for op in OPS if OPS[op] + 1 in REPLIES]
"""What is answered with a control message."""


@pytest.mark.parametrize(
    ("op", "reply"), [(op, OPS[op] + 1) for op in ASKED if REPLIES[OPS[op] + 1]] + [("STATS", OPS["ERROR"])]
)
@GARBAGE
def test_reply_that_does_not_decode_leaves_nobody_waiting(op: str, reply: int, garbage: bytes) -> None:
    far = Far()
    far.connect()
    promises = [far.request(op), far.request("STATS")]
    with pytest.raises(errors.BadBody) as caught:  # with which the driver gives the link up
        far.answer_with(reply, garbage, request=1)
    assert is_final(caught.value)
    far.session.give_up(caught.value)
    assert [promise.error for promise in promises] == [caught.value] * 2
    assert far.session.idle


@pytest.mark.parametrize("op", [*(op for op in ASKED if not REPLIES[OPS[op] + 1]), "PUSH", "PULL"])
@GARBAGE
def test_body_of_a_reply_that_has_none_is_not_read(op: str, garbage: bytes) -> None:
    far = Far()
    far.connect()
    promise = far.request(op)
    far.answer_with(OPS[op] + 1, garbage, request=1)
    assert promise.result is not None


def test_error_for_one_request_leaves_the_others_alone() -> None:
    far = Far()
    far.connect()
    first, second = far.request("STATS"), far.request("STATS")
    far.answer("ERROR", m.Failure(code=errors.BadArgument.code, message="no", details={"rank": 1}), request=1)
    assert isinstance(first.error, errors.BadArgument)
    assert first.error.details == {"rank": 1}
    assert not second.done()


def test_error_for_the_connection_is_raised() -> None:
    far = Far()
    far.connect()
    with pytest.raises(errors.StaleIncarnation):
        far.answer("ERROR", m.Failure(code=errors.StaleIncarnation.code, message="replaced"))


def test_reads_that_are_abandoned_fail_and_their_late_payloads_are_discarded() -> None:
    far = Far()
    far.connect()
    reads = [far.request(op, body=m.Carry()) for op in ("PULL", "NORM")]
    other = far.request("STATS")
    far.session.abandon_reads(errors.TornRound("torn"))
    assert [type(read.error) for read in reads] == [errors.TornRound] * 2
    assert not other.done()
    for request, op in ((1, "PULLED"), (2, "NORMED")):
        far.session.feed([payload_of(op, request)], 0.0)
    far.answer_with(OPS["STATISTICS"], m.encode_body(m.Statistics(counters={})), request=3)
    assert other.done(), "nothing of them is left in its way"


def test_payload_of_another_read_is_unexpected() -> None:
    far = Far()
    far.connect()
    far.request("PULL", body=m.Carry())
    with pytest.raises(errors.UnexpectedMessage):
        far.session.feed([payload_of("NORMED", 1)], 0.0)


def test_session_that_was_given_up_fails_every_request() -> None:
    far = Far()
    before = far.request("STATS")
    far.session.give_up(errors.StoreClosed("closed"))
    after = far.request("STATS")
    assert isinstance(before.error, errors.StoreClosed)
    assert isinstance(after.error, errors.StoreClosed)


def test_answer_of_another_operation_is_unexpected() -> None:
    far = Far()
    far.connect()
    far.request("STATS")
    with pytest.raises(errors.UnexpectedMessage):
        far.answer("DEFINED", request=1)


def test_version_of_the_shard_is_learnt_from_its_answers() -> None:
    far = Far()
    far.connect()
    promise = far.request("PULL", body=m.Carry())
    far.answer("PULLED", request=1, sequence=7)
    assert isinstance(promise.result, Answer)
    assert (promise.result.version, far.session.version) == (7, 7)


# ---- decisions that are carried ----


def test_facts_are_kept_until_every_shard_has_them() -> None:
    decisions = DecisionCache(2)
    signed = [decision(number) for number in range(1, 5)]
    decisions.learn(3, signed[:3])
    decisions.learn(4, signed[1:])
    decisions.heard(0, 4)
    decisions.heard(1, 2)
    assert (decisions.floor, decisions.last) == (2, 4)
    assert decisions.since(2) == tuple(signed[2:])
    assert decisions.since(0) == tuple(signed[2:])


def test_older_answer_takes_nothing_back() -> None:
    decisions = DecisionCache(1)
    signed = [decision(number) for number in range(1, 5)]
    decisions.learn(3, signed[:3])
    decisions.heard(0, 3)
    decisions.learn(2, signed[:2])
    decisions.learn(4, signed[3:])
    assert decisions.since(3) == (signed[3],)


def test_decisions_that_every_shard_has_may_be_missing_in_between() -> None:
    decisions = DecisionCache(1)
    decisions.learn(1, [decision(1)])
    later = decision(9)
    decisions.learn(9, [later])
    assert decisions.since(8) == (later,)


def test_decision_that_clips_is_unscaled_until_its_scale_is_known() -> None:
    decisions = DecisionCache(1)
    decisions.learn(1, [decision(1, max_norm=2.0)])
    assert decisions.unscaled is not None
    assert (decisions.unscaled.number, decisions.unscaled.max_norm) == (1, 2.0)
    decisions.heard(0, 1)
    decisions.set_scale(m.Scale(decision=0, factor=1.0))
    assert decisions.unscaled is not None, "of another decision"
    decisions.set_scale(m.Scale(decision=1, factor=1.0))
    assert decisions.unscaled is None


def test_scale_of_a_decision_whose_record_every_shard_has_is_nobodys_concern() -> None:
    decisions = DecisionCache(1)
    decisions.learn(5, [])
    assert decisions.unscaled is None
