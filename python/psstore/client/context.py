"""What the parts of a store's operations have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from psstore import _core
from psstore.client.arguments import number
from psstore.client.compression.coded import Coded
from psstore.client.device.transfers import Transfers
from psstore.client.flow_control import Pace
from psstore.client.layout import Layout, Layouts, Reply
from psstore.client.schema import FirstValues, Schema
from psstore.errors import UnknownKey
from psstore.protocol.client import Client
from psstore.protocol.requests import Answer, Future
from psstore.types import Tensor


class Context:
    """What the calls of one store share: schema, layouts, transfers, pacing. Used on the store's loop only."""

    def __init__(self, client: Client, *, wait_s: float, pace: Pace | None, over_sockets: bool) -> None:
        self.client = client
        self.layouts = Layouts(client.ways)
        self.first_values = FirstValues(client)
        self.transfers = Transfers(client)
        self.coded = Coded(self.layouts, self.transfers)
        self.schema = Schema(client, on_changed=self.layouts.forget_plans, on_overwritten=self.forget)
        self.on_gone: list[Callable[[Sequence[Tensor]], None]] = [
            self.layouts.forget,
            self.first_values.forget,
            self.coded.forget,
        ]
        """Drop what they keep of tensors that are gone, or were made anew."""
        self.pace = pace
        """Paces pushes over links that workers share; None: nothing to pace."""
        self._wait_s = wait_s
        self._over_sockets = over_sockets

    def forget(self, tensors: Sequence[Tensor]) -> None:
        """Drops what is kept here of tensors that are gone, or were made anew."""
        for drop in self.on_gone:
            drop(tensors)

    def forget_dropped(self, tensors: Sequence[Tensor]) -> None:
        """Drops what is kept here of tensors that the store has no more."""
        for tensor in tensors:
            if self.schema.knows(tensor):
                self.schema.forget(tensor.spec.name)
        self.forget(tensors)

    def patience(self, wait_s: float | None) -> float:
        return self._wait_s if wait_s is None else number("wait_s", wait_s)

    async def layout(
        self, tensors: Sequence[Tensor], dtypes: Sequence[str], *, pull: bool, place: _core.Device | None
    ) -> Layout:
        """The layout for arrays on that device; None: in main memory."""
        near = frozenset[int]() if place is None else await self.transfers.near(place)
        return self.layouts.of(tensors, dtypes, pull=pull, near=near, early=self.layouts.early)

    @property
    def sends_all(self) -> bool:
        """True if all shards are reached over sockets, so that values are sent and not copied."""
        return self._over_sockets and not any(session.shares_memory for session in self.client.sessions)

    @property
    def turns(self) -> Pace | None:
        """The pace, while pushes and pulls wait for their turns; None: they go at once."""
        return self.pace if self.pace is not None and self.pace.is_on else None

    async def answers(self, layout: Layout, requests: Sequence[Future]) -> list[Answer]:
        """Returns the answers to requests of a layout's slices. Raises the first failure, of a request or a slice,
        after all have ended."""
        with self.forgetting_unknown(layout.tensors):
            return await self.client.answers(requests)

    def checked(self, layout: Layout, answers: Sequence[Reply], error: BaseException | None) -> Sequence[Reply]:
        """Returns the answers to a call without the loop. Raises what a request of it has failed with, if that is not
        None, or else the first failure of a slice."""
        with self.forgetting_unknown(layout.tensors):
            self.client.check(answers, error)
        return answers

    @contextmanager
    def forgetting_unknown(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Forgets tensors if a shard does not know a slice of them, as after `drop`: they are looked up next time."""
        try:
            yield
        except UnknownKey:
            for tensor in tensors:
                self.schema.forget(tensor.spec.name)
            self.forget(tensors)
            raise
