"""A loop with Accelerate is the user's own, so a session goes around it as it is: with what `prepare` has returned."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import psstore
from psstore.client.store import Store
from tests.integrations.support import BATCH, Life, Rows, assert_same_training, life, lives, loss_of, network, on

pytestmark = [pytest.mark.sockets, pytest.mark.one_loop]


@pytest.fixture
def accelerate() -> Any:
    """Imported by the first test that runs, since all of pytest's workers collect all of them. Accelerate keeps what it
    is told first, for the whole process: here that may be Hugging Face's Trainer."""
    module = pytest.importorskip("accelerate")
    module.state.AcceleratorState._reset_state(reset_partial_state=True)
    module.state.GradientState._reset_state()
    return module


def trained(accelerate: Any, store: Store, stop_at: int | None, *, seedable: bool) -> Life:
    accelerator = accelerate.Accelerator(
        cpu=True, dataloader_config=accelerate.utils.DataLoaderConfiguration(use_seedable_sampler=seedable, data_seed=7)
    )
    module = network()
    optimizer = on(store, module)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
    loader = DataLoader(Rows(augmented=False), BATCH, shuffle=True)
    prepared, wrapped, schedule, loader = accelerator.prepare(module, optimizer, schedule, loader)
    batches, seen = psstore.torch.ResumableLoader(loader), []
    endless: Iterator[Any] = itertools.chain.from_iterable(itertools.repeat(batches))
    for _ in psstore.torch.session(
        wrapped, stop_at=stop_at, state={"schedule": schedule, "batches": batches}, checkpoint="4"
    ):
        numbers, rows = next(endless)
        seen.append((store.version, numbers.tolist()))
        wrapped.zero_grad()
        accelerator.backward(loss_of(prepared, rows))
        wrapped.step()
        schedule.step()
    return life(module, optimizer, seen)


@pytest.mark.parametrize("seedable", [False, True])
def test_a_training_that_was_stopped_goes_on_bit_for_bit(accelerate: Any, seedable: bool, tmp_path: Path) -> None:
    def one(store: Store, stop_at: int | None) -> Life:
        return trained(accelerate, store, stop_at, seedable=seedable)

    (whole,) = lives(one, tmp_path / "whole", 16)
    parted = lives(one, tmp_path / "parted", 8, 16)
    assert_same_training(parted, whole)
