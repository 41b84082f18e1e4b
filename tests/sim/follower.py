"""Who goes from version to version by what has changed."""

from __future__ import annotations

import random

from psstore.client import changes
from psstore.client.changes import Copies
from psstore.client.operations import Operations
from psstore.errors import AvailabilityError, NotInitialised, RolledBack, UnknownTensor, VersionGone

from . import model
from .actors import READ_S, Actor
from .history import History, Version
from .machine import TIMEOUT_S, Machine
from .plan import Plan

NAMES = tuple(f"count{number}" for number in range(model.NUM_COUNTERS))
DTYPES = (None, "float16")
"""Counters are whole numbers that float16 has, too."""

LONG_S = changes.ATTEMPTS * (READ_S + TIMEOUT_S)
"""What takes several attempts, each of which takes what a read does."""


class Follower(Actor):
    """Takes the newest version, again and again, and misses those between."""

    def __init__(self, plan: Plan, machine: Machine, history: History, *, copies: Copies | None = None) -> None:
        """`copies`: what it had of the store that has gone back."""
        super().__init__(plan, machine, history)
        self._rng = random.Random(f"follower {plan.seed} {machine.name}")
        self.copies = copies or Copies(NAMES, self._rng.choice(DTYPES))
        self.stopped = False

    async def act(self) -> None:
        operations = Operations(self.client, wait_s=1.0)
        while not self.stopped:
            await self.machine.world.sleep(self._rng.expovariate(3.0))
            before = self.copies.number, self.copies.sha256()
            try:
                await self.take_version(operations)
                continue
            except RolledBack:
                self.copies.forget()
                raise
            except (NotInitialised, UnknownTensor, AvailabilityError) as error:
                if isinstance(error, VersionGone):
                    self.history.gone.append(f"{self.machine.name}: {error}")
                self.machine.world.say(f"{self.machine.name}: {error}")
            assert before == (self.copies.number, self.copies.sha256()), "nothing came, and yet something was taken"

    async def take_version(self, operations: Operations) -> None:
        acknowledged = self.history.acknowledged
        if self._rng.random() < 0.1:
            version = await self.call("verify", self.copies.verify(operations, wait_s=1.0), LONG_S)
        else:
            version = await self.call("follow", self.copies.advance(operations, wait_s=1.0), LONG_S)
        values = {name: value.tobytes() for name, value in version.values.items()}
        dtypes = {str(value.dtype) for value in version.values.values()}
        assert len(dtypes) == 1, dtypes
        self.history.versions.append(Version(self.machine.name, version.number, acknowledged, values, *dtypes))
        if version.changed and not version.num_whole:
            self.history.num_by_changes += 1
