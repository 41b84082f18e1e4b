"""Whether tensors have their first values, which whoever created them may still have on their way.

A push waits for them, as a pull does: a shard takes no gradient for what has no value, since a decision that counts on
it could not be carried out. It is asked once per tensor, before the first push of it goes; so no call of those that go
as one went before (lane.py, paced.py) meets a tensor without a value.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from psstore import _core
from psstore.client.layout import Layout
from psstore.protocol.client import Client, Transfer
from psstore.types import Tensor

NEVER = 2**64 - 1
"""A version that none is newer than: whoever asks for it gets no bytes."""

RECHECK_S = 1.0
"""A slice whose decision waits for the very push that waits here is said to have a value when it is asked again: the
wait is cut into pieces of this length. A value that comes ends it at once."""


class FirstValues:
    """Knows which tensors of one store have values. Used on the store's loop only."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._there: set[int] = set()
        """Ids of tensors that have one."""

    def note(self, ids: Iterable[int]) -> None:
        """These have come, or were sent."""
        self._there.update(ids)

    async def arrive(self, tensors: Sequence[Tensor], *, wait_s: float) -> None:
        """Returns when all of them have their first values, or `wait_s` is over: then shards refuse what is pushed."""
        unsure = [tensor for tensor in tensors if not tensor.spec.zeros and tensor.id not in self._there]
        missing = self._questions(unsure)
        asked_s = 0.0
        while missing := await self._client.without_value(missing, wait_s=asked_s):
            if not wait_s:
                return
            asked_s = min(wait_s, RECHECK_S)
            wait_s -= asked_s
        self.note(tensor.id for tensor in unsure)

    def _questions(self, tensors: Sequence[Tensor]) -> list[Transfer]:
        """Reads that bring nothing."""
        if not tensors:
            return []
        layout = Layout(tensors, [tensor.spec.dtype for tensor in tensors], ways=self._client.ways, pull=True)
        nowhere = _core.Segments([], writable=True)
        return [
            Transfer(frame.way, frame.table.with_versions([NEVER] * len(frame.table)), nowhere)
            for frame in layout.frames
        ]
