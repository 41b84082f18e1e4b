"""One rank of test_parts.py, under `psstore run`: trains parts of a model on the store and beside it, on some meshes.

Prints how far apart the two are, for each mesh that training goes on upon.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import psstore
from psstore.torch import DistributedOptimizer, TensorPart, load, publish

FEATURES, HIDDEN, RESULTS = 7, 20, 3
"""Hidden ones are a multiple of the ranks, as tensor parallelism needs it; parts of the results differ."""

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=1e-2),
}

MAX_NORM = 0.1
"""Less than any norm that comes."""

Shard = Callable[[nn.Module], None]


def model_of(shard: Shard, weights: dict[str, torch.Tensor] | None = None) -> nn.Module:
    """Before it is cut it has these weights, or those that are everybody's first ones."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, RESULTS))
    if weights is not None:
        model.load_state_dict(weights)
    shard(model)
    return model


def fully(model: nn.Module, mesh: DeviceMesh) -> None:
    for layer in (model[0], model[2]):  # type: ignore[index]
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def full(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole on every rank."""
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


def batches(count: int, seed: int, *, own: bool) -> Iterator[torch.Tensor]:
    """`own`: another one on each rank."""
    generator = torch.Generator().manual_seed(100 * seed + (dist.get_rank() if own else 0))
    for _ in range(count):
        yield torch.randn(5, FEATURES, generator=generator)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Iterator[torch.Tensor], clip: str) -> None:
    for batch in inputs:
        optimizer.zero_grad()
        (3 * model(batch).square().mean()).backward()
        if clip == "torch":
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max((one[name] - other[name]).abs().max().item() for name in one)


def main(rendezvous: str, left: str, kind: str, clip: str) -> None:
    """`left`: a file for what a run with other ranks has come to, on a store that was restored."""
    store = psstore.connect()
    at = f"file://{rendezvous}"
    dist.init_process_group("gloo", init_method=at, rank=store.rank or 0, world_size=store.num_workers)
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    line = init_device_mesh("cpu", (num_ranks,))
    square = init_device_mesh("cpu", (2, num_ranks // 2), mesh_dim_names=("copies", "parts"))
    meshes: dict[str, tuple[Shard, bool]] = {
        "fully": (partial(fully, mesh=line), True),
        "hybrid": (partial(fully, mesh=square), True),
        "tensor parallel": (partial(tensor_parallel, mesh=line), False),
    }
    make = OPTIMIZERS[kind]
    before = Path(left)
    expected, state = torch.load(before) if before.exists() else (None, None)
    for seed, (name, (shard, own)) in enumerate(meshes.items()):
        beside = model_of(shard, expected)
        local = make(beside.parameters())
        if state is not None:
            local.load_state_dict(cut(state, beside))
        train(beside, local, batches(4, seed, own=own), "torch" if clip != "none" else clip)
        expected, state = full(beside), whole_state(local)

        model = model_of(shard)  # with weights that the store has newer ones of, from the second mesh on
        stored = DistributedOptimizer(
            make(model.parameters()), store, model.named_parameters(), max_norm=MAX_NORM if clip == "store" else None
        )
        train(model, stored, batches(4, seed, own=own), clip)
        held = whole_state(stored)["state"]
        for number, one in state["state"].items():
            assert apart(one, held[number]) <= 1e-6, (name, number)
        stored.load_state_dict(stored.state_dict())  # with which the next mesh goes on
        print(f"{name}: {apart(expected, full(model)):.1e}")
        if rank == 0:  # and every reader has it whole
            plain = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, RESULTS))
            with psstore.connect(role="client") as reader:
                load(reader, plain.named_parameters())
            assert apart(dict(plain.state_dict()), expected) <= 1e-6
        dist.barrier()
    assert expected is not None
    if rank == 0:
        torch.save((expected, state), before)
    publishing(store, model_of(meshes["fully"][0], expected), expected, meshes, rank)
    store.barrier()
    store.close()
    dist.destroy_process_group()


def whole_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    found = optimizer.state_dict()
    return {
        **found,
        "state": {
            number: {
                name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in one.items()
            }
            for number, one in found["state"].items()
        },
    }


def cut(state: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """A whole state dict, for an optimizer of this model."""
    from torch.distributed.tensor import distribute_tensor

    parameters: list[Any] = list(model.parameters())
    found = {
        number: {
            name: value
            if name == "step"
            else distribute_tensor(value, parameters[number].device_mesh, parameters[number].placements)
            for name, value in one.items()
        }
        for number, one in state["state"].items()
    }
    return {**state, "state": found}


def publishing(
    store: psstore.Store,
    model: nn.Module,
    weights: dict[str, torch.Tensor],
    meshes: dict[str, tuple[Shard, bool]],
    rank: int,
) -> None:
    publish(store, model.named_parameters(), name="published")
    store.barrier()
    for shard, _ in meshes.values():
        other = model_of(shard)
        load(store, other.named_parameters(), name="published")
        assert apart(full(other), weights) == 0
    store.barrier()
    publish(store, other.named_parameters(), name="published")  # cut otherwise
    store.barrier()
    again = model_of(meshes["fully"][0])
    load(store, again.named_parameters(), name="published")
    assert apart(full(again), weights) == 0

    whole = weights["0.weight"]
    rows = torch.arange(HIDDEN).tensor_split(dist.get_world_size())[rank]
    mine = TensorPart((HIDDEN, FEATURES), (int(rows[0]), 0), whole[rows].clone())
    publish(store, [("w", mine)], name="by hand")
    store.barrier()
    half = TensorPart((HIDDEN, FEATURES), (3, 2), torch.zeros(9, 4))
    load(store, [("w", half)], name="by hand")
    assert torch.equal(half.local, whole[3:12, 2:6])
    print("published: 0.0e+00")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(*sys.argv[1:])
