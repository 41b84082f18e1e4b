"""Who assigns rows, while workers train them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from psstore.errors import AvailabilityError, RolledBack
from psstore.types import Tensor

from . import rows
from .actors import Actor
from .history import Assigned, History
from .machine import TIMEOUT_S, Machine
from .plan import Plan

NUM_ASSIGNMENTS = 6
IDS = (0, 1, 2, 5, 11)
"""That workers train, too."""


class Assigner(Actor):
    """Assigns some rows of tables that have room for all, again and again, each time another value. It creates none:
    norms are added in the order in which workers create what has gradients."""

    def __init__(self, plan: Plan, machine: Machine, history: History, *, num_decided: Callable[[], int]) -> None:
        super().__init__(plan, machine, history)
        self._num_decided = num_decided
        self.stopped = False

    async def act(self) -> None:
        for number in range(NUM_ASSIGNMENTS):
            await self.machine.world.sleep(self.machine.world.rng.expovariate(1.0))
            for table in await self.call("describe", self.client.tensors.describe(None), 2 * TIMEOUT_S):
                if rows.is_open(table):
                    await self.assign(table, number)

    async def assign(self, table: Tensor, number: int) -> None:
        """Until it is acknowledged: what is refused, since a decision is not carried out, may be there in part. In a
        torn store none is, and training is over."""
        assert table.spec.rows is not None, "it is a table"
        ids = np.array(IDS, np.uint64)
        while not self.stopped:
            count, since = len(self.history.assigned), self.history.acknowledged
            noted = Assigned(table.spec.name, count, float(100 * number), since)
            self.history.assigned.append(noted)
            values = np.full((len(ids), table.spec.rows.dim), noted.value, np.float32)
            write = self.client.write("ASSIGN", rows.assigned(table, ids, values, self.ways), trained=True)
            try:
                await self.call("assign", write, 4 * TIMEOUT_S)
            except RolledBack:
                raise
            except AvailabilityError as error:
                self.machine.world.say(f"{self.machine.name}: {error}")
                await self.machine.world.sleep(0.1)
            else:
                noted.is_acknowledged = True
                return
            finally:
                noted.until = self._num_decided()
