"""What a connection must prove, and what happens to one that says what it must not."""

from __future__ import annotations

import pytest

from psstore import _core, errors
from psstore.protocol import auth
from psstore.protocol.connection import HANDSHAKE_S
from psstore.protocol.signing import Signer
from psstore.types import Tensor
from psstore.wire import messages as m
from tests.protocol.support import NONCE, OPS, SIGNER, FakeStore, carrying, sgd, tensor_of

TOKEN = b"the token of the store"
CLIENT = "c" * 32
FORGER = Signer(b"another key")


def decision(number: int = 1) -> m.DecisionFact:
    return m.DecisionFact(number=number, members=(), divisor=1.0, hypers={})


def answer_to_challenge(token: bytes) -> m.Auth:
    return m.Auth(
        proof=auth.proof(token, "client", client=CLIENT, client_nonce=NONCE, shard_nonce=NONCE),
    )


# ---- the token ----


def test_right_token_opens_the_connection_and_is_proved_back() -> None:
    peer = FakeStore(token=TOKEN).dial(client=CLIENT)
    assert peer.ask("HELLO", m.Hello(client=CLIENT, nonce=NONCE)).op == OPS["CHALLENGE"]
    welcome = peer.control("AUTH", answer_to_challenge(TOKEN), m.Welcome)
    assert welcome.proof == auth.proof(TOKEN, "shard", client=CLIENT, client_nonce=NONCE, shard_nonce=NONCE)
    assert welcome.proof != answer_to_challenge(TOKEN).proof


def test_wrong_token_is_refused() -> None:
    peer = FakeStore(token=TOKEN).dial(client=CLIENT)
    peer.ask("HELLO", m.Hello(client=CLIENT, nonce=NONCE))
    with pytest.raises(errors.AuthFailed, match="different tokens"):
        peer.ask("AUTH", answer_to_challenge(b"a wrong token of the store"))
    assert peer.closed_because


def test_client_without_a_token_is_told_that_one_is_needed() -> None:
    peer = FakeStore(token=TOKEN).dial(client=CLIENT)
    with pytest.raises(errors.AuthFailed, match="needs a token"):
        peer.ask("HELLO", m.Hello(client=CLIENT))


def test_proof_without_a_challenge_is_unexpected() -> None:
    peer = FakeStore(token=TOKEN).dial(client=CLIENT)
    with pytest.raises(errors.UnexpectedMessage):
        peer.ask("AUTH", answer_to_challenge(TOKEN))


@pytest.mark.parametrize("op", ["JOIN", "PULL", "STATS", "HEARTBEAT", "CREATE"])
@pytest.mark.parametrize("token", [None, TOKEN])
def test_request_before_the_handshake_closes_the_connection(op: str, token: bytes | None) -> None:
    peer = FakeStore(token=token).dial()
    with pytest.raises(errors.UnexpectedMessage, match="the first frame must be HELLO"):
        peer.ask(op)
    assert peer.closed_because


def test_payload_before_the_handshake_is_refused_at_its_header() -> None:
    peer = FakeStore().dial()
    with pytest.raises(errors.FrameTooLarge, match="payload of 4 bytes: at most 0 are allowed here"):
        peer.ask("PUSH", values=[1.0])
    assert peer.closed_because


@pytest.mark.parametrize("role", ["operator", "elector", "heartbeat"])
def test_payload_of_whoever_has_no_values_ends_its_connection(role: m.Role) -> None:
    """Nobody would answer the frame, and it would come out of its connection for ever."""
    store = FakeStore()
    peer = store.connect(role=role)
    table = _core.SliceTable([(1 << _core.SLICE_INDEX_BITS, 4, _core.DTYPES["float32"])])
    with pytest.raises(errors.UnexpectedMessage, match="can't have a payload"):
        peer.ask("PUSH", carrying(), values=[1.0], table=table, round=1)
    assert peer.closed_because
    assert store.connect().ask("STATS").complete


def test_second_hello_is_no_request() -> None:
    peer = FakeStore().connect()
    with pytest.raises(errors.UnexpectedMessage, match="is not a request"):
        peer.ask("HELLO", m.Hello(client=peer.client))
    assert peer.closed_because


@pytest.mark.parametrize("client", ["", "c" * 31, "C" * 32, "c" * 32 + "\n"])
def test_client_id_that_is_none_is_a_bad_body(client: str) -> None:
    peer = FakeStore().dial()
    with pytest.raises(errors.BadBody, match="32 hex digits"):
        peer.ask("HELLO", m.Hello(client=client))


def test_silent_stranger_is_told_why_it_is_closed() -> None:
    store = FakeStore()
    stranger = store.dial()
    store.pass_time(HANDSHAKE_S + 1)
    with pytest.raises(errors.HandshakeTimeout):
        stranger.answer(0)
    assert stranger.closed_because


def test_other_protocol_version_is_refused_by_the_decoder() -> None:
    frame = bytearray(_core.encode_frame(OPS["HELLO"]))
    frame[4] += 1
    decoder = _core.FrameDecoder()
    decoder.feed(bytes(frame))
    with pytest.raises(errors.BadVersion):
        decoder.next_frame()


# ---- what clients carry and can't forge ----


def test_forged_decision_is_refused_and_changes_nothing() -> None:
    store = FakeStore()
    peer = store.connect()
    with pytest.raises(errors.BadSignature):
        peer.ask("PULL", carrying(decisions=(FORGER.sign(decision()),)))
    assert store.shards[0].version == 0
    assert peer.closed_because


def test_fact_of_another_kind_is_no_decision() -> None:
    peer = FakeStore().connect()
    with pytest.raises(errors.BadSignature, match="no decision"):
        peer.ask("PULL", carrying(decisions=(SIGNER.sign(m.DropFact(ids=(1,))),)))


def test_forged_definition_is_refused() -> None:
    store = FakeStore()
    peer = store.connect()
    tensor = Tensor(id=1, spec=sgd("w"), slice_elems=4, shards=(0,))
    with pytest.raises(errors.BadSignature):
        peer.ask("DEFINE", m.Define(facts=(FORGER.sign(tensor),)))
    assert store.shards[0].stats()["slots"] == 0


def test_decision_is_no_definition() -> None:
    peer = FakeStore().connect()
    with pytest.raises(errors.BadSignature, match="no definition"):
        peer.ask("DEFINE", m.Define(facts=(SIGNER.sign(decision()),)))


def test_forged_ticket_is_refused() -> None:
    peer = FakeStore().connect(client=CLIENT)
    ticket = m.TicketFact(client=CLIENT, rank=0, incarnation=1)
    with pytest.raises(errors.BadSignature):
        peer.ask("ATTACH", m.Attach(ticket=FORGER.sign(ticket)))


def test_ticket_of_another_client_is_refused() -> None:
    store = FakeStore()
    ticket = store.worker(0).ticket
    assert ticket is not None
    with pytest.raises(errors.BadSignature, match="no ticket of this client"):
        store.connect().ask("ATTACH", m.Attach(ticket=ticket))


def test_push_needs_the_ticket_of_the_worker_that_it_names() -> None:
    store = FakeStore()
    worker = store.worker(0)
    tensor = tensor_of(worker.create(sgd("w")).tensors[0])
    with pytest.raises(errors.NotAWorker, match="rank 1 needs ATTACH"):
        worker.push(tensor, [1.0] * 4, rank=1, round=1)
    assert worker.push(tensor, [1.0] * 4, round=1).first_failure() is None  # the connection is unharmed


def test_decision_out_of_turn_is_refused_and_its_carrier_may_go_on() -> None:
    store = FakeStore()
    peer = store.connect()
    with pytest.raises(errors.DecisionGap):
        peer.ask("PULL", carrying(decisions=(SIGNER.sign(decision(2)),)))
    peer.ask("PULL", carrying(decisions=(SIGNER.sign(decision(1)), SIGNER.sign(decision(2)))))
    assert store.shards[0].version == 2


# ---- who is asked ----


def test_other_shards_are_no_coordinators() -> None:
    peer = FakeStore(num_shards=2).connect(shard=1)
    with pytest.raises(errors.UnexpectedMessage, match="ask shard 0, this is 1"):
        peer.ask("JOIN", m.Join())


def test_draining_store_refuses_requests_and_keeps_the_connection() -> None:
    store = FakeStore()
    peer = store.connect()
    store.services[0].drain()
    with pytest.raises(errors.ShuttingDown):
        peer.ask("STATS")
    assert peer.closed_because is None


def test_malformed_body_names_the_field() -> None:
    peer = FakeStore().connect()
    with pytest.raises(errors.BadBody, match="rank"):
        peer.ask("JOIN", b"\x81\xa4rank\xa3one")
