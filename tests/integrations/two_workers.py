"""A worker of two, in the loop of a framework: `psstore run … two_workers.py FRAMEWORK HOW PLACE`. HOW is "group" for a
process group of the framework's, "alone" for a framework that knows of one worker. Run again on a copy of what was on
storage in the middle, it says the same at its end."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch.utils.data import DataLoader

import psstore
from psstore.client.store import Store
from tests.integrations.support import BATCH, Rows, Witness, life, seed


def lightning(store: Store, witness: Witness) -> tuple[torch.nn.Module, Any, list[Any]]:
    from lightning.pytorch import Trainer

    from psstore.integrations.lightning import SessionCallback, StoreStrategy
    from tests.integrations.lightning_training import QUIETLY, Module

    module = Module(store, witness, interval="step")
    callback = SessionCallback()
    group: dict[str, Any] = {"devices": 2, "strategy": StoreStrategy()} if "RANK" in os.environ else {}
    Trainer(**{**QUIETLY, **group}, max_epochs=3, callbacks=[callback]).fit(
        module, DataLoader(Rows(augmented=True), BATCH, shuffle=True)
    )
    return module.inner, callback.session.optimizer, module.seen


def huggingface(store: Store, witness: Witness) -> tuple[torch.nn.Module, Any, list[Any]]:
    from psstore.integrations.huggingface import train
    from psstore.torch.loop import unwrapped
    from tests.integrations.huggingface_training import Model, trainer_of

    model = Model(store, witness)
    trainer = trainer_of(model, store, Path(f"output-{store.rank}"))
    train(trainer)
    assert trainer.optimizer is not None
    return model.inner, unwrapped(trainer.optimizer), model.seen


def main() -> None:
    framework, how, place = sys.argv[1:]
    with psstore.connect() as store:
        if how == "alone":
            for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
                os.environ.pop(variable, None)
        assert store.rank is not None
        seed(5 + store.rank)
        witness = Witness(Path(place))
        if store.rank or store.version:
            witness.version = 0  # rank 0 of the first life looks, for all
        module, optimizer, seen = {"lightning": lightning, "huggingface": huggingface}[framework](store, witness)
        weights, rates, _, version, random = life(module, optimizer, seen)
        print("began", seen[0][0])
        print("ended", store.rank, hashlib.sha256(weights).hexdigest(), rates, version, random, seen[-1])
        if how == "group":
            torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
