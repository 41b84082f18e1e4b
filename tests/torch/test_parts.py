"""Parts of tensors, as DTensor, fully_shard and tensor parallelism have them, on a store: as torch alone."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import psstore
from psstore.errors import ShapeMismatch, UnknownTensor, UsageError
from psstore.torch import DistributedOptimizer, TensorPart, load, publish
from psstore.torch.parts import box_of
from tests.support.cluster import at_once
from tests.support.fork_server import run

RUN_S = 110.0

LARGEST = 1e-6


def differences(ranks: int, tmp_path: Path, *arguments: str, flags: tuple[str, ...] = ()) -> dict[str, list[float]]:
    """What each rank of parts_worker.py prints, by mesh."""
    command = [sys.executable, "-m", "psstore.cli.main", "run", "--shards", "2", "--workers", str(ranks), *flags]
    places = [str(tmp_path / f"rendezvous of {ranks}"), str(tmp_path / "before")]
    command += ["-m", "tests.torch.parts_worker", *places, *arguments]
    ran = run(command, cwd=Path(__file__).parents[2], timeout_s=RUN_S)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found: dict[str, list[float]] = {}
    for mesh, far in re.findall(r"\] ([a-z ]+): ([\d.e+-]+)$", ran.stdout, re.MULTILINE):
        found.setdefault(mesh, []).append(float(far))
    return found


@pytest.mark.parametrize(
    ("ranks", "kind", "clip"),
    [
        (4, "sgd", "torch"),
        pytest.param(2, "sgd", "none", marks=pytest.mark.long),
        pytest.param(2, "adamw", "none", marks=pytest.mark.long),
        pytest.param(4, "adamw", "store", marks=pytest.mark.long),
    ],
)
def test_parts_train_as_torch_alone_and_go_on_upon_other_meshes(
    ranks: int, kind: str, clip: str, tmp_path: Path
) -> None:
    check(differences(ranks, tmp_path, kind, clip), ranks)


@pytest.mark.timeout(240)
def test_parts_go_on_with_another_number_of_workers(tmp_path: Path) -> None:
    """Of a store that was restored from a checkpoint: two ranks, then four, upon what two have left."""
    checkpoint = ("--checkpoint", str(tmp_path / "checkpoints"))
    for ranks in (2, 4):
        check(differences(ranks, tmp_path, "adamw", "store", flags=checkpoint), ranks)


def check(found: Mapping[str, Sequence[float]], ranks: int) -> None:
    """Every rank has said of every mesh how far it is from torch alone, and is near."""
    assert set(found) == {"fully", "hybrid", "tensor parallel", "published"}
    assert all(len(one) == ranks for one in found.values())
    assert max(map(max, found.values())) <= LARGEST


def part(offset: int, *rows: float) -> TensorPart:
    return TensorPart((4, 2), (offset, 0), torch.tensor(rows)[:, None].expand(-1, 2).clone())


def test_what_no_part_has_is_said(store: psstore.Store) -> None:
    publish(store, [("w", part(0, 1.0, 2.0))])
    whole = torch.zeros(4, 2)
    with pytest.raises(UnknownTensor, match=r"lacks 4 elements of 'w'"):
        load(store, [("w", whole)])
    publish(store, [("w", part(2, 3.0, 4.0))])
    load(store, [("w", whole)])
    assert whole[:, 1].tolist() == [1.0, 2.0, 3.0, 4.0]
    publish(store, [("w", whole.neg())])
    assert store.keys() == ["w"], "parts that were cut otherwise are gone"
    middle = part(1, 0.0, 0.0)
    load(store, [("w", middle)])
    assert middle.local[:, 0].tolist() == [-2.0, -3.0]


@pytest.mark.parametrize("as_version", [False, True])
def test_a_whole_state_dict_is_published_and_loaded(store: psstore.Store, as_version: bool) -> None:
    """Also what it counts by."""

    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).bfloat16()

    model, other = net(), net()
    model(torch.randn(4, 3).bfloat16())
    publish(store, model.state_dict().items(), as_version=as_version)
    load(store, other.state_dict().items())
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


def test_complex_tensors_are_not_published(store: psstore.Store) -> None:
    with pytest.raises(UsageError, match="tensor 'spectrum' is complex64"):
        publish(store, [("spectrum", torch.zeros(2, dtype=torch.complex64))])


def test_parts_of_all_workers_are_one_version() -> None:
    """Whoever loads while they are published has the halves of one."""
    with psstore.LocalStore(2, workers=2) as local, local.connect(role="client") as reader:
        workers = [local.connect(rank=rank) for rank in range(2)]

        def publish_half(rank: int, numbers: range) -> None:
            for number in numbers:
                half = torch.full((2, 50_000), float(number))
                publish(workers[rank], [("w", TensorPart((4, 50_000), (2 * rank, 0), half))], as_version=True)
                assert workers[rank].version == number

        def load_all() -> None:
            found = torch.zeros(4, 50_000)
            while found[0, 0] < 20:
                load(reader, [("w", found)])
                assert torch.equal(found, found[:1, :1].expand_as(found))

        at_once(*(partial(publish_half, rank, range(1, 2)) for rank in range(2)))
        at_once(*(partial(publish_half, rank, range(2, 21)) for rank in range(2)), load_all)
        for worker in workers:
            worker.close()


def test_parts_that_were_dropped_and_cut_so_again_are_read() -> None:
    """By a reader that knows of the former ones."""
    whole = torch.arange(8.0).reshape(4, 2)
    with (
        psstore.LocalStore(1) as local,
        local.connect(role="client") as writer,
        local.connect(role="client") as reader,
    ):
        for sign in (1, -1):
            publish(writer, [("w", TensorPart((4, 2), (0, 0), sign * whole[:2]))])
            publish(writer, [("w", TensorPart((4, 2), (2, 0), sign * whole[2:]))])
            found = torch.zeros(4, 2)
            load(reader, [("w", found)])
            assert torch.equal(found, sign * whole)
            publish(writer, [("w", whole)])


def test_tensors_of_another_shape_are_refused(store: psstore.Store) -> None:
    publish(store, [("w", part(0, 1.0, 2.0)), ("v", torch.zeros(3))])
    with pytest.raises(ShapeMismatch, match=r"of shape \(4, 2\); here it is \(4, 3\)"):
        load(store, [("w", torch.zeros(4, 3))])
    with pytest.raises(ShapeMismatch, match=r"'v' has shape \(3,\) in the store"):
        load(store, [("v", torch.zeros(4))])
    with pytest.raises(UsageError, match="does not lie in"):
        publish(store, [("w", part(3, 1.0, 2.0))])


def test_a_dtensor_that_does_not_say_which_part_is_here_is_refused() -> None:
    """As those of torch 2.4 are."""

    class DTensor(torch.Tensor):
        placements = ()

    with pytest.raises(UsageError, match="a newer torch's do"):
        box_of(torch.zeros(2).as_subclass(DTensor))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"overlap": "eager"}, "leave these out"),
        ({"exist": "overwrite"}, "leave these out"),
        ({"compression": "int8"}, "leave compression out"),
        ({"mode": "average"}, "for workers with whole models"),
    ],
)
def test_what_can_not_be_with_parts_is_refused(
    store: psstore.Store, mesh: Callable[[torch.Tensor], torch.Tensor], options: dict[str, Any], words: str
) -> None:
    model = sharded(mesh)
    with pytest.raises(UsageError, match=words):
        DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), store, model.named_parameters(), **options)


def test_parts_of_which_each_has_one_contribution_have_no_median(
    store: psstore.Store, mesh: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    model = sharded(mesh)
    optimizer = torch.optim.SGD([{"params": list(model.parameters()), "reduction": "median"}], lr=0.1)
    with pytest.raises(UsageError, match="leave reduction out"):
        DistributedOptimizer(optimizer, store, model.named_parameters())


def test_optimizers_without_a_rule_can_not_step_parts(
    store: psstore.Store, mesh: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    model = sharded(mesh)
    with pytest.raises(UsageError, match=r"no rule for NAdam.*psstore\.torch\.publish"):
        DistributedOptimizer(torch.optim.NAdam(model.parameters()), store, model.named_parameters())


def test_parts_and_whole_parameters_do_not_mix(
    store: psstore.Store, mesh: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    model = sharded(mesh)
    model.bias = nn.Parameter(torch.zeros(2))
    with pytest.raises(UsageError, match=r"some parameters are DTensors, as 'weight'"):
        DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), store, model.named_parameters())


def test_a_store_for_other_workers_than_the_processes_is_refused(
    mesh: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    model = sharded(mesh)
    for mode, words in (("sync", "1 processes, and the store waits for 2"), ("ssp", "need mode 'sync'")):
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        with (
            psstore.LocalStore(1, workers=2, mode=mode) as local,
            local.connect(rank=0) as store,
            pytest.raises(UsageError, match=words),
        ):
            DistributedOptimizer(plain, store, model.named_parameters())


def test_parts_have_one_gradient_and_no_weight_and_stay_where_they_are(
    store: psstore.Store, mesh: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    model = sharded(mesh)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), store, model.named_parameters())
    with pytest.raises(UsageError, match="no mean"):
        optimizer.weight = 2.0
    model.weight.grad = mesh(torch.ones(2, 2))
    optimizer.step()
    weight: Any = model.weight
    assert torch.equal(weight.full_tensor(), torch.full((2, 2), 0.9))
    weight._local_tensor = torch.ones(2, 2)  # as fully_shard does where a model is moved
    with pytest.raises(UsageError, match="lies elsewhere"):
        optimizer.step()


def sharded(mesh: Callable[[torch.Tensor], torch.Tensor]) -> nn.Linear:
    model = nn.Linear(2, 2)
    for name, parameter in list(model.named_parameters()):
        setattr(model, name, nn.Parameter(mesh(torch.ones_like(parameter))))
    return model
