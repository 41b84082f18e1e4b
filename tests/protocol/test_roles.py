"""The table of who may do what, and the limit on wrong proofs, without a socket."""

from __future__ import annotations

import typing

from psstore import _core
from psstore.protocol.proof_limits import BURST, FORGET_S, LOCK_S, ProofLimits
from psstore.protocol.roles import LEAST, LEAST_OF_CLIENTS, Access, Tokens
from psstore.wire.messages import Role

HANDSHAKE = {"HELLO", "AUTH"}
BY_THE_SHARD = {"FILL", "RECORD", "SCALE"}
"""What a shard asks of its standby, which has connected to it."""

HERE, THERE = "192.0.2.1", "192.0.2.2"


def test_every_request_stands_in_the_table() -> None:
    requests = {name for name, number in _core.OPS.items() if number % 2 == 0}
    assert set(LEAST) | BY_THE_SHARD == requests - HANDSHAKE


def test_every_kind_of_client_stands_in_the_table() -> None:
    assert set(LEAST_OF_CLIENTS) == set(typing.get_args(Role))


def test_a_token_of_two_roles_gives_the_greater() -> None:
    tokens = Tokens(((Access.READ, b"both"), (Access.ADMIN, b"both"), (Access.WORKER, b"one")))
    assert tokens.proved(lambda token: token, b"both") == (Access.ADMIN, b"both")
    assert tokens.proved(lambda token: token, b"one") == (Access.WORKER, b"one")
    assert tokens.proved(lambda token: token, b"none") is None


def test_an_address_that_guesses_is_not_heard_for_a_while() -> None:
    limits = ProofLimits()
    for _ in range(BURST):
        assert limits.wait_s(HERE, "guesser", 0.0) == 0.0
        limits.failed(HERE, "guesser", 0.0)
    assert limits.wait_s(HERE, "somebody new", 1.0) == LOCK_S - 1.0
    assert limits.wait_s(THERE, "somebody new", 1.0) == 0.0
    assert limits.wait_s(HERE, "somebody new", LOCK_S) == 0.0
    limits.failed(HERE, "guesser", LOCK_S)
    assert limits.wait_s(HERE, "somebody new", LOCK_S) == LOCK_S
    assert limits.wait_s(HERE, "somebody new", LOCK_S + FORGET_S) == 0.0
    limits.failed(HERE, "guesser", 2 * LOCK_S + FORGET_S)
    assert limits.wait_s(HERE, "somebody new", 2 * LOCK_S + FORGET_S) == 0.0


def test_who_has_proved_a_token_is_heard_whatever_its_neighbour_does() -> None:
    limits = ProofLimits()
    limits.proved("worker")
    for _ in range(BURST):
        limits.failed(HERE, "guesser", 0.0)
    assert limits.wait_s(HERE, "worker", 1.0) == 0.0
    limits.failed(HERE, "worker", 1.0)  # somebody has taken its id
    assert limits.wait_s(HERE, "worker", 1.0) == LOCK_S
