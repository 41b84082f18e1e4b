"""The token: who has it is served, who has not learns nothing, and it is seen nowhere."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from psstore import _core, errors
from psstore.protocol.auth import matches, proof
from psstore.wire import messages as m
from tests.support.raw_client import RawClient
from tests.support.server_process import StoreProcess

pytestmark = pytest.mark.sockets

TOKEN = b"correct horse battery staple"


@pytest.fixture(scope="module")
def store(loop_name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    token_file: Path = tmp_path_factory.mktemp("auth") / "token"
    token_file.write_bytes(TOKEN + b"\n")
    token_file.chmod(0o600)
    with StoreProcess("--shards", "2", "--token-file", str(token_file)) as store:
        yield store


def test_right_token_is_served_on_every_shard(store: StoreProcess) -> None:
    for address in store.addresses:
        with RawClient(address) as client:
            client.hello(TOKEN)
            client.stats()


def test_shard_proves_that_it_has_the_token_too(store: StoreProcess) -> None:
    with RawClient(store.url) as client:
        nonce = os.urandom(32)
        client.send("HELLO", body=m.Hello(client=client.client, nonce=nonce))
        challenge = m.decode_body(m.Challenge, client.reply("CHALLENGE").body)
        prove = partial(proof, TOKEN, client=client.client, client_nonce=nonce, shard_nonce=challenge.nonce)
        client.send("AUTH", body=m.Auth(proof=prove("client")))
        welcome = m.decode_body(m.Welcome, client.reply("WELCOME").body)
        assert matches(prove("shard"), welcome.proof)


def test_wrong_token_is_refused(store: StoreProcess) -> None:
    with RawClient(store.url) as client:
        with pytest.raises(errors.AuthFailed, match="different tokens"):
            client.hello(b"correct horse battery stable")
        assert client.closed_by_server()


def test_no_token_is_refused_and_told_what_to_do(store: StoreProcess) -> None:
    with RawClient(store.url) as client:
        with pytest.raises(errors.AuthFailed, match="PSSTORE_TOKEN_FILE"):
            client.hello()
        assert client.closed_by_server()


def test_challenge_can_not_be_skipped(store: StoreProcess) -> None:
    with RawClient(store.url) as client:
        client.send("HELLO", body=m.Hello(client=client.client, nonce=os.urandom(32)))
        client.reply("CHALLENGE")
        with pytest.raises(errors.UnexpectedMessage):
            client.ask("STATS", "STATISTICS")
        assert client.closed_by_server()


def test_proof_of_another_connection_is_worthless(store: StoreProcess) -> None:
    nonce = os.urandom(32)
    with RawClient(store.url) as first, RawClient(store.url, client=first.client) as second:
        proofs = []
        for client in (first, second):
            client.send("HELLO", body=m.Hello(client=first.client, nonce=nonce))
            challenge = m.decode_body(m.Challenge, client.reply("CHALLENGE").body)
            proofs.append(proof(TOKEN, "client", client=first.client, client_nonce=nonce, shard_nonce=challenge.nonce))
        assert proofs[0] != proofs[1]
        second.send("AUTH", body=m.Auth(proof=proofs[0]))
        with pytest.raises(errors.AuthFailed):
            second.reply("WELCOME")


def test_large_frames_wait_for_the_proof(store: StoreProcess) -> None:
    with RawClient(store.url) as client:
        client.send("HELLO", body=m.Hello(client=client.client, nonce=os.urandom(32)))
        client.reply("CHALLENGE")
        client.sock.sendall(_core.encode_frame(_core.OPS["AUTH"], body=bytes(_core.PRE_AUTH_MAX_BYTES + 1)))
        with pytest.raises(errors.FrameTooLarge):
            client.reply("WELCOME")


def test_token_stands_in_no_command_line_and_no_environment(store: StoreProcess) -> None:
    for shard in store.shards():
        assert TOKEN.decode() not in " ".join(shard.cmdline())
        assert TOKEN.decode() not in " ".join(shard.environ().values())
