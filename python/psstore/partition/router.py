"""Spreads a client's slices over its connections, so that a link that carries only so much of each is used wholly."""

from __future__ import annotations

from collections.abc import Sequence

from psstore.types import ITEM_BYTES, Tensor


class Router:
    """Which of a client's sessions a slice goes over: always the same, so that what is said of it keeps its order.

    A client has `num_channels` sessions with each of `num_shards` shards, numbered channel by channel: the first
    `num_shards` are every shard's first.
    """

    def __init__(self, num_shards: int, *, num_channels: int = 1) -> None:
        self.num_shards = num_shards
        self.num_channels = num_channels
        self._known: dict[int, tuple[int, ...]] = {}
        """By tensor's id."""
        self._loads_bytes = [[0] * num_channels for _ in range(num_shards)]

    def __len__(self) -> int:
        return self.num_shards * self.num_channels

    def of(self, tensor: Tensor) -> Sequence[int]:
        """The session of each slice of the tensor. A new tensor's slices go where the fewest bytes go so far."""
        if self.num_channels == 1:
            return tensor.shards
        if tensor.id not in self._known:
            self._known[tensor.id] = tuple(map(self._choose, tensor.shards, self._sizes(tensor)))
        return self._known[tensor.id]

    def _choose(self, shard: int, num_bytes: int) -> int:
        loads = self._loads_bytes[shard]
        channel = loads.index(min(loads))
        loads[channel] += num_bytes
        return channel * self.num_shards + shard

    @staticmethod
    def _sizes(tensor: Tensor) -> list[int]:
        bounds = map(tensor.bounds, range(len(tensor.shards)))
        return [(end - begin) * ITEM_BYTES[tensor.spec.dtype] for begin, end in bounds]
