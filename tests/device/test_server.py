"""`psstore-server --device`: shards in the memory of a device, here one that is not there (docs/cuda.md)."""

from __future__ import annotations

import asyncio
import socket
from unittest.mock import Mock

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import psstore
from psstore.client.store import Store
from psstore.errors import DeviceFailed, OutOfMemory
from psstore.net.limits import ServerLimits
from psstore.net.server import Server
from psstore.types import TensorSpec
from tests.support.server_process import StoreProcess, failed_start
from tests.support.server_thread import make_service

pytestmark = [pytest.mark.sockets, pytest.mark.one_loop]


def train(store: Store) -> np.ndarray:
    """Three steps of a tensor of several slices."""
    random = np.random.default_rng(0)
    store.create("w", random.standard_normal(600_000, dtype=np.float32), rule="adam", exist="overwrite")
    for _ in range(3):
        store.push("w", random.standard_normal(600_000, dtype=np.float32))
        store.commit({"lr": 0.01})
        value = store.pull("w")
    return np.asarray(value)


def train_for_ever(store: Store) -> None:
    while True:
        train(store)


def test_shards_on_devices_take_the_steps_of_those_on_the_host() -> None:
    with psstore.connect("local://") as store:
        expected = train(store)
    devices = "fake:0?seed=1,fake:1?seed=2"
    with StoreProcess("--shards", "2", "--device", devices) as server, psstore.connect(server.url) as store:
        assert_array_equal(train(store), expected)


def test_a_tensor_that_one_shard_has_no_room_for_is_created_on_none() -> None:
    spec = TensorSpec(name="w", shape=(1_000_000,))
    with psstore.connect("local://?shards=2&device=fake:0,fake:1?bytes=1048576") as store:
        with pytest.raises(OutOfMemory, match="device fake:1"):
            store.create_many([spec, TensorSpec(name="b", shape=(3,))])
        assert store.keys() == []
        store.create("w", np.ones(1000, np.float32))
        with pytest.raises(OutOfMemory):
            store.create_many([TensorSpec(name="w", shape=(1000,)), TensorSpec(name="x", shape=(1_000_000,))])
        assert store.keys() == ["w"]
        assert_array_equal(store.pull("w"), np.ones(1000, np.float32))


def test_a_step_whose_momentum_does_not_fit_is_refused_and_changes_nothing() -> None:
    with (
        StoreProcess("--device", "fake:0?bytes=1048576") as server,
        psstore.connect(server.url) as store,
        psstore.connect(server.url, role="client") as reader,
    ):
        store.create("w", np.ones(120_000, np.float32), rule="sgd")
        store.push("w", np.ones(120_000, np.float32))
        store.commit({"lr": 1.0, "momentum": 0.9})
        for _ in range(2):
            with pytest.raises(OutOfMemory, match="rule state or pushes do not fit"):
                store.pull("w")
        assert_array_equal(reader.pull("w"), np.ones(120_000, np.float32))


@pytest.mark.parametrize("num_steps", [40, 55])
def test_device_that_fails_ends_its_store_and_tells_its_clients(num_steps: int) -> None:
    """Whether it is policy that asks too much of it, or a port that answers a pull by itself."""
    with StoreProcess("--device", f"fake:0?fail_after={num_steps}") as server:
        with psstore.connect(server.url, timeout_s=10.0) as store, pytest.raises(DeviceFailed, match="fake:0"):
            train_for_ever(store)
        assert server.wait() == 1
        assert "fake:0" in server.log()


@pytest.mark.parametrize("step", ["tick", "catch_up", "settle", "woken"])
def test_device_that_fails_in_what_no_client_asked_for_ends_its_store(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When time is up, a decision is applied ahead, what it left over is done, or a port has woken readers."""
    failure, due = DeviceFailed("device fake:0 failed"), Mock(return_value=0.0)

    async def ended_by() -> DeviceFailed:
        loop, service = asyncio.get_running_loop(), make_service()
        sock = socket.create_server(("127.0.0.1", 0))
        server = Server(service, loop=loop, limits=ServerLimits(linger_s=0.5))
        ended: asyncio.Future[DeviceFailed] = loop.create_future()
        server.on_device_failed = lambda error: None if ended.done() else ended.set_result(error)
        monkeypatch.setattr(service, step, Mock(side_effect=failure))
        monkeypatch.setattr(service, "next_wake", due)
        monkeypatch.setattr(service, "data", Mock(wraps=service.data, next_wake=due, is_filling=False))
        server.listen(sock)
        _, writer = await asyncio.open_connection(*sock.getsockname())
        writer.write(b"something")
        error = await asyncio.wait_for(ended, 30.0)
        writer.close()
        await server.drain(error)
        return error

    assert asyncio.run(ended_by()) is failure


@pytest.mark.skipif(psstore.cuda.device_count() > 0, reason="there is a GPU here")
def test_device_that_is_not_there_is_no_start() -> None:
    status, said = failed_start("--device", "cuda:0")
    assert status != 0
    assert "cuda:0" in said
    assert "Traceback" not in said
