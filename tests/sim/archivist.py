"""Who has checkpoints of a run written."""

from __future__ import annotations

from psstore.errors import AvailabilityError, RolledBack, StorageError, VersionGone

from .actors import Actor
from .history import Checkpoint, History
from .machine import TIMEOUT_S, Machine
from .plan import Plan

WRITE_S = 60.0


class Archivist(Actor):
    """Leads one checkpoint after the other."""

    def __init__(self, plan: Plan, machine: Machine, history: History) -> None:
        super().__init__(plan, machine, history)
        self.stopped = False

    async def act(self) -> None:
        world = self.machine.world
        while not self.stopped:
            await world.sleep(world.rng.expovariate(1.0 if self.plan.full_every == 1 else 4.0))
            acknowledged = self.history.acknowledged
            wait_s = self.plan.gather_s + WRITE_S
            writing = self.client.checkpoints.write(None, gather_s=self.plan.gather_s, pause=world.sleep, wait_s=wait_s)
            try:
                version = await self.call("checkpoint", writing, wait_s + 4 * TIMEOUT_S)
            except VersionGone as error:
                self.history.gone.append(f"{self.machine.name}: {error}")
            except RolledBack:
                raise
            except (AvailabilityError, StorageError) as error:
                world.say(f"{self.machine.name}: {error}")
            else:
                self.history.checkpoints.append(Checkpoint(self.machine.name, version, acknowledged))
