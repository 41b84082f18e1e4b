"""An engine of vLLM's weight transfer that follows a store, driven as vLLM's workers do, with its interface alone:
vLLM itself is not run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from psstore.client.first_tensors import RELAYED
from psstore.errors import DeadlineExceeded, UsageError
from psstore.integrations import vllm_plugin
from tests.support.cluster import PATIENCE_S, Cluster, clusters

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from .vllm_interface import FusedModel, Installed, install

pytestmark = [pytest.mark.sockets, pytest.mark.one_loop]

Named = dict[str, torch.Tensor]


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Installed:
    installed = install(monkeypatch)
    vllm_plugin.register()
    return installed


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with clusters("tcp") as start:
        yield start(shards=2)


def model_of() -> nn.Module:
    blocks = [nn.ModuleDict({"gate": nn.Linear(4, 4), "up": nn.Linear(4, 4)}) for _ in range(2)]
    return nn.ModuleDict({"embed": nn.Embedding(5, 4), "layers": nn.ModuleList(blocks)})


def update(engine: Any, version: int) -> None:
    engine.start_weight_update()
    engine.update_weights({"version": version, "timeout_s": PATIENCE_S})
    engine.finish_weight_update()


def test_a_worker_has_the_version_that_was_asked_for_and_loads_blocks_that_changed(
    vllm: Installed, cluster: Cluster
) -> None:
    trained = model_of()
    served = FusedModel(trained)
    store = cluster.connect(rank=0)
    named = {f"policy/{name}": p.detach() for name, p in trained.named_parameters()}
    engine = vllm.engine(served)
    engine.init_transfer_engine(engine.init_info_cls(url=cluster.url, name="policy"))
    update(engine, store.publish({**named, "critic/embed.weight": torch.ones(3), "note": torch.ones(1)}))
    assert set(served.loaded) == {name for name, _ in trained.named_parameters()}
    with torch.no_grad():
        trained.get_parameter("layers.1.up.weight").add_(1)
    update(engine, store.publish({"policy/layers.1.up.weight": trained.get_parameter("layers.1.up.weight").detach()}))
    assert {name.rpartition(".")[0] for name in served.loaded} == {"layers.1.gate", "layers.1.up"}
    assert all(torch.equal(served.own[name], p.bfloat16()) for name, p in trained.named_parameters())
    assert served.phases == ["start", "load", "finish"] * 2
    engine.shutdown()


def test_behind_a_relay_versions_are_the_trainers(vllm: Installed, cluster: Cluster) -> None:
    trained = model_of()
    relay = cluster.connect(rank=0)
    relay.publish(
        {
            **{name: p.detach() for name, p in trained.named_parameters()},
            RELAYED: torch.tensor([40.0], dtype=torch.float64),
        }
    )
    engine = vllm.engine(FusedModel(trained))
    engine.init_transfer_engine(engine.init_info_cls(url=cluster.url))
    update(engine, 40)
    with pytest.raises(DeadlineExceeded):
        engine.update_weights({"version": 41, "timeout_s": 0.01})
    engine.shutdown()


def test_workers_that_share_a_model_have_one_version_or_say_so(vllm: Installed, cluster: Cluster) -> None:
    vllm.world_size = 2
    served = FusedModel(trained := model_of())
    store = cluster.connect(rank=0)
    named = {name: p.detach() for name, p in trained.named_parameters()}
    asked = store.publish(named)
    newest = store.publish(named)
    engine = vllm.engine(served)
    engine.init_transfer_engine(engine.init_info_cls(url=cluster.url))
    with pytest.raises(UsageError, match="take no step"):
        engine.update_weights({"version": asked})
    assert not served.loaded
    update(engine, newest)
    assert set(served.loaded) == named.keys()
    engine.shutdown()


def test_what_is_asked_for_in_the_wrong_order_is_said(vllm: Installed) -> None:
    engine = vllm.engine(FusedModel(model_of()))
    with pytest.raises(UsageError, match="init_weight_transfer_engine"):
        engine.update_weights({"version": 1})
    with pytest.raises(UsageError, match="nothing to send"):
        engine.trainer_send_weights(iter(()), {})
    engine.shutdown()


def test_vllm_finds_the_backend_by_its_plugins_and_may_ask_twice(vllm: Installed, repository: Path) -> None:
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    module, _, function = project["entry-points"]["vllm.general_plugins"]["psstore"].partition(":")
    getattr(import_module(module), function)()
    assert vllm.factory.registered == {"psstore": ("psstore.integrations.vllm", "StoreEngine")}


def test_a_vllm_without_weight_transfer_is_left_alone(vllm: Installed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys.modules["vllm.distributed.weight_transfer"], "WeightTransferEngineFactory")
    vllm_plugin.register()
