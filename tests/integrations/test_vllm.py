"""An engine of vLLM's weight transfer that follows a store, driven as vLLM's workers do: with the interface alone, and
with vLLM's base class, factory and layerwise loading, where these can be imported. The model is one of torch alone.

Beside torch without CUDA, this is enough for them, with PYTHONPATH=DIR (vllm's wheel of 0.33.0 has 336 MB):

    pip install --no-deps --target DIR vllm pyzmq cbor2 openai_harmony openai sniffio pybase64 cachetools py-cpuinfo \
        xgrammar apache-tvm-ffi fastapi starlette partial_json_parser llguidance einops
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import psstore
from psstore.client.first_tensors import RELAYED
from psstore.errors import DeadlineExceeded, RolledBack, UsageError
from psstore.integrations import vllm_plugin
from tests.support.cluster import PATIENCE_S, Cluster, clusters
from tests.support.server_process import StoreProcess

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from . import vllm_interface
from .vllm_serving import LAYERWISE, OLD, FusedModel, Serving, trained_model

pytestmark = [pytest.mark.sockets, pytest.mark.one_loop]

Named = dict[str, torch.Tensor]


@pytest.fixture(params=["interface", "installed"])
def vllm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Serving:
    if request.param == "interface":
        vllm_interface.install(monkeypatch)
    else:
        try:
            import_module("vllm.distributed.weight_transfer.factory")
            import_module(LAYERWISE)
        except ImportError as error:
            pytest.skip(f"needs vLLM: {error}")
        monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    vllm_plugin.register()
    serving = Serving()
    serving.watch(monkeypatch)
    return serving


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with clusters("tcp") as start:
        yield start(shards=2)


def detached(model: torch.nn.Module) -> Named:
    return {name: p.detach() for name, p in model.named_parameters()}


def serves(served: FusedModel, values: Named) -> bool:
    return all(torch.equal(tensor, values[name].bfloat16()) for name, tensor in served.as_checkpoint().items())


def update(engine: Any, version: int) -> None:
    engine.start_weight_update()
    engine.update_weights({"version": version, "timeout_s": PATIENCE_S})
    engine.finish_weight_update()


def test_a_worker_has_the_version_that_was_asked_for_and_loads_blocks_that_changed(
    vllm: Serving, cluster: Cluster
) -> None:
    served = FusedModel()
    store = cluster.connect(rank=0)
    values = detached(trained_model())
    named = {f"policy/{name}": value for name, value in values.items()}
    engine = vllm.engine(served)
    engine.init_transfer_engine(engine.init_info_cls(url=cluster.url, name="policy"))
    update(engine, store.publish({**named, "critic/embed.weight": torch.ones(3), "note": torch.ones(1)}))
    assert set(served.loaded) == values.keys()
    values["layers.1.up.weight"] = values["layers.1.up.weight"] + 1
    update(engine, store.publish({"policy/layers.1.up.weight": values["layers.1.up.weight"]}))
    assert {name.rpartition(".")[0] for name in served.loaded} == {"layers.1.gate", "layers.1.up"}
    assert serves(served, values)
    assert vllm.phases == ["start", "finish"] * 2
    engine.shutdown()


def test_behind_a_relay_versions_are_the_trainers(vllm: Serving, cluster: Cluster) -> None:
    relay = cluster.connect(rank=0)
    relay.publish({**detached(trained_model()), RELAYED: torch.tensor([40.0], dtype=torch.float64)})
    engine = vllm.engine(FusedModel())
    engine.init_transfer_engine(engine.init_info_cls(url=cluster.url))
    update(engine, 40)
    engine.start_weight_update()
    with pytest.raises(DeadlineExceeded):
        engine.update_weights({"version": 41, "timeout_s": 0.01})
    engine.shutdown()


def test_a_version_that_does_not_come_leaves_the_model_as_it_was(vllm: Serving, cluster: Cluster) -> None:
    served = FusedModel()
    store = cluster.connect(rank=0)
    values = detached(trained_model())
    engine = vllm.engine(served)
    engine.init_transfer_engine(engine.init_info_cls(url=cluster.url))
    update(engine, version := store.publish(values))
    engine.start_weight_update()
    with pytest.raises(DeadlineExceeded):
        engine.update_weights({"version": version + 1, "timeout_s": 0.01})
    assert serves(served, values)
    assert vllm.phases == ["start", "finish"]
    values["embed.weight"] = values["embed.weight"] + 1
    update(engine, store.publish({"embed.weight": values["embed.weight"]}))
    assert serves(served, values)
    assert served.loaded == ["embed.weight"]
    engine.shutdown()


def test_what_cannot_be_loaded_leaves_nothing_undefined_and_comes_again(vllm: Serving, cluster: Cluster) -> None:
    served = FusedModel()
    values = detached(trained_model())
    version = cluster.connect(rank=0).publish(values)
    engine = vllm.engine(served)
    engine.init_transfer_engine(engine.init_info_cls(url=cluster.url))
    served.fails_at = "layers.1.up.weight"
    engine.start_weight_update()
    with pytest.raises(RuntimeError, match="no room"):
        engine.update_weights({"version": version, "timeout_s": PATIENCE_S})
    assert vllm.phases == ["start", "finish"]
    for name, tensor in served.as_checkpoint().items():
        assert torch.all(tensor == OLD) or torch.equal(tensor, values[name].bfloat16()), name
    served.fails_at = None
    update(engine, version)
    assert serves(served, values)
    engine.shutdown()


def test_what_came_to_a_call_that_was_interrupted_is_loaded_by_the_next(
    vllm: Serving, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = FusedModel()
    store = cluster.connect(rank=0)
    values = detached(trained_model())
    engine = vllm.engine(served)
    engine.init_transfer_engine(engine.init_info_cls(url=cluster.url))
    version = store.publish(values)
    follows = engine._reader.next

    def interrupted(**options: Any) -> None:
        follows(**options)
        raise KeyboardInterrupt

    engine.start_weight_update()
    with monkeypatch.context() as patched:
        patched.setattr(engine._reader, "next", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.update_weights({"version": version, "timeout_s": PATIENCE_S})
    update(engine, version)
    assert serves(served, values)
    values["embed.weight"] = values["embed.weight"] + 1
    update(engine, store.publish({"embed.weight": values["embed.weight"]}))
    assert served.loaded == ["embed.weight"]
    engine.shutdown()


def test_a_version_of_before_the_store_went_back_to_a_checkpoint_is_not_taken_for_the_one_after(
    vllm: Serving, tmp_path: Path
) -> None:
    served = FusedModel()
    before = detached(trained_model())
    after = {name: value + 1 for name, value in before.items()}
    flags = ("--checkpoint", str(tmp_path), "--checkpoint-every", "1000000", "--restarts", "1")
    with StoreProcess(*flags) as server, psstore.connect(server.url, rank=0) as store:
        engine = vllm.engine(served)
        engine.init_transfer_engine(engine.init_info_cls(url=server.url))
        store.publish(before)
        store.checkpoint()
        update(engine, version := store.publish(before))
        os.kill(server.shard_pids()[0], signal.SIGKILL)
        with pytest.raises(RolledBack):
            store.pull("embed.weight")
        store.reconnect()
        assert store.publish(after) == version
        update(engine, version)
        assert serves(served, after)
        engine.shutdown()


@pytest.mark.parametrize("shared_by", ["world_size", "data_parallel_size"])  # the latter: of a mixture of experts
def test_workers_that_share_a_model_have_one_version_or_say_so(vllm: Serving, cluster: Cluster, shared_by: str) -> None:
    setattr(vllm, shared_by, 2)
    served = FusedModel()
    store = cluster.connect(rank=0)
    values = detached(trained_model())
    asked = store.publish(values)
    newest = store.publish(values)
    engine = vllm.engine(served)
    engine.init_transfer_engine(engine.init_info_cls(url=cluster.url))
    engine.start_weight_update()
    with pytest.raises(UsageError, match="take no step"):
        engine.update_weights({"version": asked})
    assert all(torch.all(tensor == OLD) for tensor in served.as_checkpoint().values())
    update(engine, newest)
    assert serves(served, values)
    engine.shutdown()


def test_what_is_asked_for_in_the_wrong_order_is_said(vllm: Serving) -> None:
    engine = vllm.engine(FusedModel())
    with pytest.raises(UsageError, match="init_weight_transfer_engine"):
        engine.update_weights({"version": 1})
    with pytest.raises(UsageError, match="nothing to send"):
        engine.trainer_send_weights(iter(()), {})
    engine.shutdown()


def test_vllm_finds_the_backend_by_its_plugins_and_may_ask_twice(vllm: Serving, repository: Path) -> None:
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    module, _, function = project["entry-points"]["vllm.general_plugins"]["psstore"].partition(":")
    getattr(import_module(module), function)()
    engine: Any = vllm.engine(FusedModel())
    assert (type(engine).__module__, type(engine).__name__) == ("psstore.integrations.vllm", "StoreEngine")


def test_a_vllm_without_weight_transfer_is_left_alone(vllm: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys.modules["vllm.distributed.weight_transfer"], "WeightTransferEngineFactory")
    vllm_plugin.register()
