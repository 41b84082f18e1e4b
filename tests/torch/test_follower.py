"""Models that follow a store: their parameters are the trainer's, in the model's own dtype, version by version."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
from torch import nn

import psstore.torch
from psstore.errors import DeadlineExceeded, ShapeMismatch, UnknownTensor
from psstore.torch import DistributedOptimizer, Follower
from psstore.torch.follower import as_tensor
from tests.support.cluster import PATIENCE_S, Cluster, clusters

pytestmark = [pytest.mark.sockets, pytest.mark.one_loop]


def model_of(width: int = 64) -> nn.Module:
    return nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.Linear(width, 2))


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with clusters("tcp") as start:
        yield start(shards=2)


class Trainer:
    def __init__(self, cluster: Cluster) -> None:
        torch.manual_seed(0)
        self.model = model_of()
        self.optimizer = DistributedOptimizer(
            torch.optim.AdamW(self.model.parameters(), lr=1e-3),
            cluster.connect(rank=0),
            named_parameters=self.model.named_parameters(),
            named_buffers=self.model.named_buffers(),
        )

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(16, 8)).square().mean().backward()
        self.optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_model_follows_in_its_own_dtype(cluster: Cluster, dtype: torch.dtype) -> None:
    trainer = Trainer(cluster)
    copy = model_of().to(dtype)
    with Follower(copy, cluster.url) as follower:
        assert follower.version is None
        for number in range(4):
            version = follower.update()
            assert version.number == follower.version == number
            for (name, there), here in zip(trainer.model.named_parameters(), copy.parameters(), strict=True):
                assert torch.equal(there.to(dtype), here), name
            trainer.step()
        follower.update()
        follower.verify()
        for ours, theirs in zip(copy.buffers(), trainer.model.buffers(), strict=True):
            assert torch.equal(theirs.to(ours.dtype), ours)


def test_what_has_not_changed_is_not_touched(cluster: Cluster) -> None:
    trainer = Trainer(cluster)
    for parameter in list(trainer.model.parameters())[1:]:
        parameter.requires_grad_(False)
    copy = model_of()
    with Follower(copy, cluster.url) as follower:
        follower.update()
        before = {name: parameter._version for name, parameter in copy.named_parameters()}
        with pytest.raises(DeadlineExceeded):
            follower.update(timeout_s=0.01)
        trainer.step()
        follower.update()
        touched = {name for name, parameter in copy.named_parameters() if parameter._version != before[name]}
    assert "0.weight" in touched
    assert "0.bias" not in touched


@pytest.mark.parametrize("where", ["before the first tensor", "after it"])
def test_an_update_that_is_interrupted_is_ended_by_the_next(
    cluster: Cluster, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(cluster)
    copy = model_of()
    with Follower(copy, cluster.url) as follower:
        follower.update()
        trainer.step()
        with monkeypatch.context() as patched:
            before = [mock.DEFAULT] if where == "after it" else []
            interrupted = mock.Mock(wraps=as_tensor, side_effect=[*before, KeyboardInterrupt])
            patched.setattr("psstore.torch.follower.as_tensor", interrupted)
            with pytest.raises(KeyboardInterrupt):
                follower.update()
        with pytest.raises(DeadlineExceeded):
            follower.update(timeout_s=0.01)
        assert all(map(torch.equal, copy.parameters(), trainer.model.parameters()))


def test_another_models_shapes_are_named_all_at_once(cluster: Cluster) -> None:
    Trainer(cluster)
    with pytest.raises(ShapeMismatch) as found:
        Follower(model_of(width=32), cluster.url)
    for name in ("0.weight is (64, 8) in the store and (32, 8) in the model", "0.bias", "2.weight is (2, 64)"):
        assert name in str(found.value)
    assert "2.bias" not in str(found.value)


def test_a_tensor_that_is_there_anew_in_another_shape_is_named_and_leaves_the_model_as_it_was(cluster: Cluster) -> None:
    Trainer(cluster)
    copy = model_of()
    with Follower(copy, cluster.url) as follower, psstore.connect(cluster.url, role="client") as other:
        follower.update()
        before = [parameter.detach().clone() for parameter in copy.parameters()]
        other.create("0.bias", [1.0], exist="overwrite")
        for _ in range(2):
            with pytest.raises(ShapeMismatch, match=r"0\.bias is \(1,\) in the store and \(64,\) in the model"):
                follower.verify()
            assert all(map(torch.equal, copy.parameters(), before))
        other.create("0.bias", [1.0] * 64, exist="overwrite")
        follower.verify()
        assert torch.equal(copy.get_parameter("0.bias"), torch.ones(64))


def test_parameters_that_the_store_does_not_have_are_named(cluster: Cluster) -> None:
    Trainer(cluster).step()
    with pytest.raises(UnknownTensor, match=r"'3\.bias', '3\.weight'; is '3\.bias' '\d\.bias'\?"):
        Follower(nn.Sequential(*model_of().children(), nn.Linear(2, 2)), cluster.url)
    psstore.connect(cluster.url, role="client").close()


def test_a_follower_that_is_started_first_waits_for_the_trainer(cluster: Cluster) -> None:
    copy = model_of()
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(Follower, copy, cluster.url, wait_s=PATIENCE_S)
        trainer = Trainer(cluster)
        with waits.result(PATIENCE_S) as follower:
            follower.update()
    assert all(map(torch.equal, copy.state_dict().values(), trainer.model.state_dict().values()))


def test_names_may_have_a_prefix(cluster: Cluster) -> None:
    model = nn.Linear(3, 1)
    DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        cluster.connect(rank=0),
        named_parameters=model.named_parameters(),
        name="ranker",
    )
    copy = nn.Linear(3, 1)
    with Follower(copy, cluster.url, name="ranker") as follower:
        follower.update()
    assert torch.equal(copy.weight, model.weight)
