"""Who has a store go on with another number of shards: it writes the store down as it stands still."""

from __future__ import annotations

from collections.abc import Callable

from psstore.errors import AvailabilityError, StorageError

from .actors import Actor
from .history import History
from .machine import TIMEOUT_S, Machine
from .plan import Plan

STANDS_S = 60.0
"""How long an attempt may take."""


class Resharder(Actor):
    """One attempt. `written` and `came_to_nothing` are what the supervisor does then."""

    def __init__(
        self,
        plan: Plan,
        machine: Machine,
        history: History,
        *,
        written: Callable[[int], None],
        came_to_nothing: Callable[[], None],
    ) -> None:
        super().__init__(plan, machine, history)
        self._written = written
        self._came_to_nothing = came_to_nothing

    async def act(self) -> None:
        world = self.machine.world
        writing = self.client.checkpoints.write_at_standstill(
            None, gather_s=self.plan.gather_s, pause=world.sleep, wait_s=STANDS_S
        )
        try:
            version = await self.call("reshard", writing, STANDS_S + 4 * TIMEOUT_S)
        except (AvailabilityError, StorageError) as error:
            world.say(f"{self.machine.name}: {error}")
            world.after(world.rng.uniform(0.0, 0.2), self._came_to_nothing)
        else:
            self._written(version)
