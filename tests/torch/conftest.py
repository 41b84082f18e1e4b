"""Fixtures of several of these files."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed

import psstore
from tests.kernels.parity import exact_square_root


@pytest.fixture
def store() -> Iterator[psstore.Store]:
    """The only worker of a store of two shards in this process."""
    with psstore.connect("local://?shards=2") as connection:
        yield connection


@pytest.fixture
def exact() -> Iterator[None]:
    """torch's square root rounds as the store's does, so that Adam and the like have the same bits."""
    with exact_square_root():
        yield


@pytest.fixture
def mesh() -> Iterator[Any]:
    """Cuts a tensor over the only process of a group: a DTensor."""
    distributed_tensor = pytest.importorskip("torch.distributed.tensor")
    processes: Any = torch.distributed
    processes.init_process_group("gloo", store=processes.HashStore(), rank=0, world_size=1)
    yield partial(distributed_tensor.distribute_tensor, device_mesh=processes.init_device_mesh("cpu", (1,)))
    processes.destroy_process_group()
