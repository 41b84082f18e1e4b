"""Stores on a real Ray, with several nodes on this machine. Starting them takes half a minute."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

pytest.importorskip("ray", reason="needs Ray: pip install 'psstore[ray]'")

import psstore.ray
from psstore.errors import StoreUnreachable
from psstore.ray import RayStore
from tests.docs.test_snippets import side_of
from tests.ray.nodes import Nodes, member_addresses
from tests.ray.training import Workers, eventually_whole, undisturbed
from tests.server.test_standbys import leader
from tests.support.free_ports import free_ports
from tests.support.server_process import eventually

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

NUM_WORKERS = 2
SHARDS = 3


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """One more than a store takes here: room for what another one had, when that is killed."""
    with Nodes(SHARDS + 1) as nodes:
        yield nodes


def start(**options: Any) -> RayStore:
    options = {"strategy": "STRICT_SPREAD", "port": free_ports(1)[0], "workers": NUM_WORKERS, **options}
    store = psstore.ray.start(SHARDS, **options)
    store.use()
    return store


def kill_one(nodes: Nodes, store: RayStore) -> None:
    """The node of shard 0, wherever it is."""
    (address,) = [address for name, address in member_addresses(store).items() if name.startswith("shard-0.")]
    nodes.kill(address)


def test_plain_actors_train_to_the_bytes_of_a_store_by_psstore_server(nodes: Nodes) -> None:
    with start() as store:
        assert len(set(member_addresses(store).values())) == SHARDS
        workers = Workers(store, NUM_WORKERS)
        workers.await_steps(20)
        num_steps, digest = workers.end()
    assert digest == undisturbed(NUM_WORKERS, num_steps, shards=SHARDS)


def test_a_node_is_killed_and_the_training_goes_on_with_the_standbys(nodes: Nodes) -> None:
    with start(standbys=1) as store:
        assert eventually_whole(store)
        workers = Workers(store, NUM_WORKERS)
        workers.await_steps(20)
        kill_one(nodes, store)
        workers.await_steps(workers.steps() + 20)
        assert eventually_whole(store)  # what the node had is on another one
        num_steps, digest = workers.end()
    nodes.add()
    assert digest == undisturbed(NUM_WORKERS, num_steps, shards=SHARDS)


def test_a_node_is_killed_and_the_training_goes_on_from_a_checkpoint(nodes: Nodes, tmp_path: Path) -> None:
    with start(checkpoint=str(tmp_path), checkpoint_every="10") as store:
        workers = Workers(store, NUM_WORKERS)
        workers.await_steps(30)
        kill_one(nodes, store)
        workers.await_steps(workers.steps() + 20)
        num_steps, digest = workers.end()
    nodes.add()
    assert digest == undisturbed(NUM_WORKERS, num_steps, shards=SHARDS)


def test_an_actor_that_dies_is_started_again(nodes: Nodes) -> None:
    with start(standbys=1) as store:
        assert eventually_whole(store)
        workers = Workers(store, NUM_WORKERS)
        workers.await_steps(20)
        with psstore.connect(role="client") as reader:
            of_actor = psutil.Process(leader(reader, 1)).parents()[1]
        assert of_actor.name().startswith("ray::")
        of_actor.kill()
        workers.await_steps(workers.steps() + 20)
        assert eventually_whole(store)
        num_steps, digest = workers.end()
    assert digest == undisturbed(NUM_WORKERS, num_steps, shards=SHARDS)


def test_a_store_that_ends_leaves_nothing(nodes: Nodes) -> None:
    store = start(standbys=1)
    url, environ = store.url, dict(os.environ)
    store.stop()
    assert "PSSTORE_URL" not in os.environ
    for name in ("PSSTORE_TOKEN_FILE", "PSSTORE_HOSTS_FILE"):
        assert eventually(lambda: not Path(environ[name]).exists())  # noqa: B023 (at once)
    with pytest.raises(StoreUnreachable):
        psstore.connect(url, connect_timeout_s=0.2)
    with pytest.raises(StoreUnreachable, match="has ended"):
        store.use()
    store.stop()
    again = start(port=free_ports(1)[0])
    again.stop()


def test_a_cluster_without_room_is_told_from_one_that_is_slow(nodes: Nodes) -> None:
    with pytest.raises(StoreUnreachable, match="`ray status` says whether the cluster has room"):
        psstore.ray.start(1, resources={"CPU": 64}, start_timeout_s=2)


def test_a_process_that_does_not_start_ends_the_start(nodes: Nodes) -> None:
    with pytest.raises(StoreUnreachable, match="psstore-server ended with 3 before it was ready"):
        psstore.ray.start(1, port=free_ports(1)[0], device="cuda:99")


# ---- Ray Train ----


def test_ray_train_with_the_lines_of_the_docs_comes_to_the_weights_of_its_ddp(nodes: Nodes, tmp_path: Path) -> None:
    before, after = (trained(nodes, tmp_path, sign) for sign in "-+")
    assert before.keys() == after.keys()
    for name, weight in before.items():
        torch.testing.assert_close(after[name], weight, rtol=0.0, atol=1e-6)


def trained(nodes: Nodes, folder: Path, sign: str) -> dict[str, torch.Tensor]:
    """The weights that one side of the page's script comes to."""
    out = folder / f"model{sign}.pt"
    program = folder / f"train{sign}.py"
    program.write_text(side_of("docs/ray.md", sign).replace("/shared/model.pt", str(out)))
    environ = {**os.environ, "RAY_ADDRESS": nodes.address}
    run = subprocess.run(
        [sys.executable, program], cwd=folder, env=environ, capture_output=True, text=True, timeout=200
    )
    assert run.returncode == 0, run.stdout + run.stderr
    weights: dict[str, torch.Tensor] = torch.load(out, weights_only=True)
    return weights
