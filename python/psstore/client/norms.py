"""The global norm of a reduced gradient, from what the shards say of each slice."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from psstore import _core
from psstore.client.context import Context
from psstore.errors import BadArgument
from psstore.partition.packing import pack
from psstore.partition.router import Router
from psstore.protocol.client import Transfer
from psstore.types import Tensor
from psstore.wire.messages import Scale

NORM_EPS = 1e-6
"""Added to the norm before dividing by it. Source: torch.nn.utils.clip_grads_with_norm_."""


class Norm:
    """The gradient norm of the round that a store's worker committed last."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def ask(self, *, wait_s: float | None) -> float:
        """Returns the round's norm; the round is clipped then."""
        client = self._context.client
        decision = client.worker.unscaled
        if decision is None or decision.max_norm is None:
            raise BadArgument("there is no norm to ask for: commit with max_norm= first, and ask once")
        tensors = await self._context.schema.within(member.present for member in decision.members)
        sums = SquareSums(tensors, client.ways)
        await client.norm(sums.transfers(), wait_s=self._context.patience(wait_s))
        norm = sums.norm()
        client.worker.set_scale(Scale(decision=decision.number, factor=clip_factor(norm, decision.max_norm)))
        self._context.coded.conclude(counts=math.isfinite(norm))
        return norm

    async def settle(self, wait_s: float | None) -> None:
        """Nothing can follow a clipped round before its norm is known: a worker that joins anew may have to ask."""
        if self._context.client.worker.unscaled is not None:
            await self.ask(wait_s=wait_s)


class SquareSums:
    """Sums of squares, one float64 per slice of these tensors; a slice without a gradient has 0."""

    def __init__(self, tensors: Sequence[Tensor], ways: Router) -> None:
        self._frames = pack(tensors, ways)
        self._sums = [np.zeros(len(frame.slices)) for frame in self._frames]

    def transfers(self) -> list[Transfer]:
        """Requests whose answers bring the sums."""
        float64 = _core.DTYPES["float64"]
        return [
            Transfer(
                frame.way,
                _core.SliceTable([(piece.key, 0, float64) for piece in frame.slices]),
                _core.Segments([memoryview(sums[i : i + 1]) for i in range(len(sums))], writable=True),
            )
            for frame, sums in zip(self._frames, self._sums, strict=True)
        ]

    def norm(self) -> float:
        """Added in the order of the keys, so that everybody gets the same bits, however the slices are placed."""
        by_key = sorted(
            (piece.key, value)
            for frame, sums in zip(self._frames, self._sums, strict=True)
            for piece, value in zip(frame.slices, sums.tolist(), strict=True)
        )
        return math.sqrt(sum(value for _, value in by_key))


def clip_factor(norm: float, max_norm: float) -> float | None:
    """Returns the factor for a gradient, so that its norm is at most `max_norm`. None: the norm is not finite."""
    return min(1.0, max_norm / (norm + NORM_EPS)) if math.isfinite(norm) else None
