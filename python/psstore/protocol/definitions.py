"""Tensors as a client creates, finds and drops them, each known to every shard before it is used there; and their
names, for errors about them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from psstore.errors import BadArgument, BadBody, OutOfMemory, UnknownTensor
from psstore.protocol.links import Links
from psstore.types import Tensor, TensorSpec
from psstore.wire import messages as m

MAX_DROPPED_NAMES = 1024
"""Tensors whose names are remembered after they were dropped: for errors of whoever had not heard of it."""


class Definitions:
    """The tensors that one client has heard of."""

    def __init__(self, links: Links) -> None:
        self.names: dict[int, str] = {}
        """By the tensors' ids, for messages."""
        self._links = links
        self._dropped: deque[int] = deque()
        """Ids of tensors that were dropped, the latest at the end: an error about one shall say its name."""

    async def create(
        self, specs: Sequence[TensorSpec], *, exist: m.Exist, offer: bool
    ) -> tuple[list[Tensor], list[int]]:
        """Creates or matches tensors, known to every shard on return. Also: ids whose value is ours to send. Raises
        OutOfMemory if a shard has no room for its part, BadArgument if it can have no such tensor; then none of them
        was created."""
        asked = m.Create(specs=tuple(specs), exist=exist, offer=offer)
        created = await self._links.ask_coordinator("CREATE", asked, m.Created)
        try:
            await self._define((*created.dropped, *created.tensors))
        except (OutOfMemory, BadArgument):
            if created.made:  # none, rather than the part of them that some shards have
                await self.drop(created.made)
            raise
        self._forget(created.dropped)
        return self._learn(created.tensors), list(created.initialise)

    async def ready(self, ids: Sequence[int]) -> None:
        """The first values of these tensors are in place."""
        await self._links.request(self._links.shards[0], "READY", body=m.Ready(ids=tuple(ids)))

    async def describe(self, names: Sequence[str] | None) -> list[Tensor]:
        """These tensors, or all; known to every shard on return. Raises UnknownTensor naming the first missing."""
        asked = m.Describe(names=None if names is None else tuple(names))
        described = await self._links.ask_coordinator("DESCRIBE", asked, m.Described)
        missing = set(names or ()) - set(described.names)
        if missing:
            name = next(name for name in names or () if name in missing)
            raise UnknownTensor(f"no tensor is named {name!r}; store.keys() lists those there are", name=name)
        await self._define(described.tensors)
        return self._learn(described.tensors)

    async def keys(self) -> list[str]:
        """Names of all tensors."""
        return list((await self._links.ask_coordinator("DESCRIBE", m.Describe(names_only=True), m.Described)).names)

    async def drop(self, names: Sequence[str]) -> None:
        """Forgets tensors, on every shard. Raises UnknownTensor and drops none."""
        dropped = await self._links.ask_coordinator("DROP", m.Drop(names=tuple(names)), m.Dropped)
        await self._define(dropped.facts)
        self._forget(dropped.facts)

    async def _define(self, facts: Sequence[m.Signed]) -> None:
        if facts:
            await self._links.ask_all("DEFINE", body=m.Define(facts=tuple(facts)))

    def _learn(self, signed: Sequence[m.Signed]) -> list[Tensor]:
        """What the coordinator sent us is believed: the connection is authenticated, the MAC is for shards."""
        tensors = []
        for fact in map(m.decode_fact, (one.blob for one in signed)):
            if not isinstance(fact, Tensor):
                raise BadBody("the coordinator sent a fact that is no tensor where tensors belong")
            self.names[fact.id] = fact.spec.name
            tensors.append(fact)
        return tensors

    def _forget(self, signed: Sequence[m.Signed]) -> None:
        for fact in map(m.decode_fact, (one.blob for one in signed)):
            if not isinstance(fact, m.DropFact):
                raise BadBody("the coordinator sent a fact that drops nothing where such facts belong")
            self._dropped.extend(fact.ids)
        while len(self._dropped) > MAX_DROPPED_NAMES:
            self.names.pop(self._dropped.popleft(), None)
