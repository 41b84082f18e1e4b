"""What a host makes of the loss of another one's shard: whether the store is lost, or over."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest

from psstore.config import Credentials
from psstore.errors import StoreUnreachable
from psstore.net.address import TcpAddress, parse_address
from psstore.server import peer_monitor
from psstore.server.job_state import JobState, Verdict
from psstore.server.peer_monitor import Duty
from psstore.types import Consistency
from tests.client.proxy import Proxy
from tests.support.cluster import PATIENCE_S
from tests.support.server_process import StoreProcess

AT_WORK = {"has_ended": "", "ranks_live": "0,1", "ranks_lost": "", "ranks_left": ""}
LOST = {"has_ended": "", "ranks_live": "", "ranks_lost": "0,1", "ranks_left": ""}
DONE = {"has_ended": "", "ranks_live": "", "ranks_lost": "", "ranks_left": "0,1"}


class Shard0:
    """Answers what it counts, and the last of it again and again."""

    is_up = has_served = True

    def __init__(self, *answers: Mapping[str, str | int]) -> None:
        self.answers = list(answers)
        self.asked = asyncio.Event()

    async def reach(self) -> mock.Mock:
        return mock.Mock(restored=-1)

    async def counters(self) -> Mapping[str, str | int]:
        self.asked.set()
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


class LostShard:
    """Gone once shard 0 has said that everybody is at work."""

    is_refused = has_served = True

    def __init__(self, coordinator: Shard0) -> None:
        self._coordinator = coordinator

    async def reach(self) -> None:
        await self._coordinator.asked.wait()
        raise StoreUnreachable("its host refuses connections")


DUTY = Duty(
    index=0,
    addresses=("ps://h0:1", "ps://h1:1"),
    asked_at={},
    consistency=Consistency(num_workers=2),
    credentials=Credentials(),
    restored=-1,
    goes_back=True,
    store="",
    former="",
    joined="",
    is_whole=False,
    has_last_word=lambda: True,
    until_done=True,
    patience_s=60.0,
)


async def verdict_on_a_loss(*answers: Mapping[str, str], until_done: bool = True) -> Verdict:
    duty = replace(DUTY, until_done=until_done)
    coordinator = Shard0(*answers)
    peers: list[Any] = [coordinator, LostShard(coordinator)]
    return await peer_monitor._follow(duty, peers)


@pytest.fixture(autouse=True)
def asked_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other host asks shard 0 in between, as it may anyway."""
    monkeypatch.setattr(peer_monitor, "POLL_S", 60.0)


def test_a_shard_whose_host_heard_first_that_the_workers_are_done_is_no_loss() -> None:
    assert asyncio.run(verdict_on_a_loss(AT_WORK, DONE)) == Verdict(None)


def test_a_shard_that_goes_while_workers_are_there_is_lost() -> None:
    with pytest.raises(StoreUnreachable, match="refuses connections"):
        asyncio.run(verdict_on_a_loss(AT_WORK))


def test_a_shard_that_goes_from_a_store_that_stays_is_lost() -> None:
    with pytest.raises(StoreUnreachable, match="refuses connections"):
        asyncio.run(verdict_on_a_loss(AT_WORK, DONE, until_done=False))


def test_a_host_goes_when_shard_0_says_that_all_may() -> None:
    async def verdict(*answers: Mapping[str, str]) -> Verdict:
        job_state = JobState(num_workers=2, patience_s=60.0)
        return await peer_monitor._attend([cast(peer_monitor._Peer, Shard0(*answers))], job_state, lambda: False)

    async def main() -> None:
        waits = asyncio.create_task(verdict(AT_WORK, DONE))
        await asyncio.sleep(0.1)
        assert not waits.done()
        waits.cancel()
        assert await verdict(AT_WORK, DONE, {**DONE, "has_ended": "1"}) == Verdict(None)

    with mock.patch.object(peer_monitor, "POLL_S", 0.001):
        asyncio.run(main())


def test_workers_are_waited_for_until_all_shards_were_there_be_it_seen_or_not() -> None:
    """A network may be cut when workers are at work already, and this host has not seen all shards yet."""

    async def verdict(within_s: float, **done: int) -> Verdict:
        peers: list[Any] = [Shard0({**LOST, **done}), mock.Mock(has_served=False)]
        job_state = JobState(num_workers=2, patience_s=0.01)
        return await asyncio.wait_for(peer_monitor._attend(peers, job_state, lambda: True), within_s)

    with mock.patch.object(peer_monitor, "POLL_S", 0.001):
        found = asyncio.run(verdict(PATIENCE_S, decisions=4, tensors=1, worker_changes=2))
        assert found.reason is not None
        assert found.reason.startswith("ranks 0, 1 went without leaving")
        with pytest.raises(asyncio.TimeoutError):
            asyncio.run(verdict(0.2, decisions=0, tensors=0, worker_changes=0))


@pytest.mark.sockets
@pytest.mark.one_loop
@pytest.mark.parametrize("places", [1, 2])
def test_a_host_without_a_word_is_looked_for_anew_and_lost_in_the_end(places: int, tmp_path: Path) -> None:
    """No connection is closed, as where a cable is pulled, or a firewall forgets what it has let through. What is to be
    waited for without an end, as it may be led elsewhere, is found there all the same."""
    token = tmp_path / "token"
    token.write_text("0123456789abcdef" * 4)
    token.chmod(0o600)
    with StoreProcess("--workers", "2", "--token-file", str(token)) as store:
        address = parse_address(store.url)
        assert isinstance(address, TcpAddress)
        proxy = Proxy((address.host, address.port), iter(()))
        duty = replace(
            DUTY,
            addresses=(store.url,),
            consistency=Consistency(num_workers=2, quorum=2),
            credentials=Credentials(token_file=str(token)),
            goes_back=False,
            patience_s=8.0,
        )

        async def main() -> None:
            peer = peer_monitor._Peer(0, [str(TcpAddress(*proxy.address))] * places, duty)
            await peer.reach()
            await peer.counters()
            proxy.swallow()
            await asyncio.wait_for(peer.counters(), 7.9)
            if places == 1:
                proxy.refusing = True
                proxy.swallow()
                with pytest.raises(StoreUnreachable, match=r"shard 0 at .* is lost, and the store with it"):
                    await asyncio.wait_for(peer.counters(), 20.0)
            await peer.close()

        try:
            asyncio.run(main())
        finally:
            proxy.close()
