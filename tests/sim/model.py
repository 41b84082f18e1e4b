"""Gradients that tell who contributed, and the values that a list of decisions must lead to.

A counter tensor has one element for each (rank, round). The contribution of that rank in that round
is 16^(life - 1) there and 0 elsewhere, and SGD with a rate of 1 subtracts it: in the value, hexadecimal
digit by digit, stands how often each life's contribution was counted. All of it is exact in float32. Clipped, the
digits blur; then the same few roundings are made here.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from psstore import _core
from psstore.partition.packing import pack
from psstore.partition.router import Router
from psstore.protocol.client import Transfer
from psstore.types import Tensor, TensorSpec, complete_hyper
from psstore.wire.messages import DecisionFact
from psstore.wire.ranges import contains

from .plan import Plan

Array = npt.NDArray[np.float32]
Manner = Literal["plain", "early", "clipped"]
Factors = Mapping[int, float | None]
"""Decision that clips -> its factor; None: it is a skip."""

F32 = _core.DTYPES["float32"]
NUM_COUNTERS = 3
DIGIT = 16
"""A weight is at most 3, so that a digit never overflows even if something is counted five times."""

SLICE_BYTES = 64
"""Of slices in simulations: tiny tensors, several slices each."""

FRAME_BYTES = 160
"""Of frames in simulations: several per shard and round."""

COUNTERS, FLOATS, MOMENTS = 0, 1, 2
"""Parameter groups."""

HYPERS: dict[int, dict[str, float]] = {
    COUNTERS: {"lr": 1.0},
    FLOATS: {"lr": 0.125, "momentum": 0.9},
    MOMENTS: {"lr": 0.01},
}


FIRST_ASTRAY = 3
"""Round from which on contributions are astray: before, there would be nothing to hold them against."""

NORMS_KEPT, FEWEST_NORMS = 5, 2
"""Norms that the median is of in simulations, at most and at least."""

NUM_SAMPLES, BATCH_SIZE = 13, 2
"""Of an epoch, and of a worker in a round; where workers come and go."""


def is_counter(spec: TensorSpec) -> bool:
    return spec.name.startswith("count")


def weight_of(rank: int) -> float:
    return float(1 + rank % 3)


def specs(plan: Plan) -> list[TensorSpec]:
    """What the workers train."""
    num_cells = plan.num_workers * plan.rounds
    counters = [
        TensorSpec(name=f"count{i}", shape=(num_cells,), rule="sgd", group=COUNTERS) for i in range(NUM_COUNTERS)
    ]
    return [
        *counters,
        TensorSpec(
            name="first", shape=(5, 7), rule="sgd", group=FLOATS, zeros=False, compensation=compensation_of(plan)
        ),
        TensorSpec(name="second", shape=(3,), rule="sgd", group=FLOATS, zeros=False),
        TensorSpec(name="third", shape=(20,), rule="adam", group=MOMENTS, zeros=False, reduction=reduction_of(plan)),
        TensorSpec(name="scalar", shape=(), rule="adam", group=MOMENTS, zeros=False),
        TensorSpec(name="empty", shape=(0, 4), rule="sgd", group=FLOATS, zeros=False),
    ]


def reduction_of(plan: Plan) -> str:
    """Of the third tensor: in some flavours the median of the workers, where they have rounds together."""
    return "median" if plan.consistency.lockstep and plan.flavour % 2 == 0 else "mean"


def compensation_of(plan: Plan) -> float:
    """Of the first tensor, where workers take steps while others compute."""
    return 0.25 if plan.compensates and not plan.consistency.lockstep else 0.0


def noise(name: str, *numbers: int, size: int) -> Array:
    """The same for the same arguments, everywhere."""
    seed = [zlib.crc32(name.encode()), *numbers]
    return np.random.default_rng(seed).standard_normal(size, dtype=np.float32)


def gradient(plan: Plan, spec: TensorSpec, value: Array, *, rank: int, life: int, round: int) -> Array:
    """That of a counter tells who and when; that of others depends on what was pulled, as in training."""
    scale = np.float32(plan.loss_scale)
    if is_counter(spec):
        counts = np.zeros(spec.num_elems, np.float32)
        counts[rank * plan.rounds + round - 1] = DIGIT ** (life - 1)
        return counts * scale
    made = (value * np.float32(0.25) + noise(spec.name, rank, round, size=spec.num_elems)) * scale
    if overflows(plan, rank=rank, round=round):
        made[-1:] = np.inf
    if is_astray(plan, rank=rank, round=round):
        made[-1:] = scale * np.float32((1e9, np.inf, np.nan)[round % 3])
    return made


def is_absent(plan: Plan, spec: TensorSpec, *, rank: int, round: int) -> bool:
    """In some flavours, workers have no gradient for some tensors in some rounds, or nobody has any at all."""
    if plan.flavour >= 3 and zlib.crc32(f"{plan.flavour}idle{round}".encode()) % 5 == 0:
        return True
    return zlib.crc32(f"{plan.flavour}{spec.name}{rank}.{round}".encode()) % 11 == 0 and plan.flavour % 2 == 1


def is_non_finite(plan: Plan, *, rank: int, round: int) -> bool:
    return zlib.crc32(f"{plan.flavour}:{rank}:{round}".encode()) % 17 == 0 and plan.flavour % 3 == 1


def manner_of(plan: Plan, *, rank: int, round: int) -> Manner:
    """How that worker commits. All of a round clip or none does; some may be early while others are not."""
    chance = zlib.crc32(f"{plan.flavour}manner{round}".encode()) % 3
    if plan.clipped and chance == 0:
        return "clipped"
    lags = zlib.crc32(f"{plan.flavour}lags{rank}.{round}".encode()) % 4 == 0
    return "early" if plan.early and chance > 0 and not lags else "plain"


def max_norm_of(round: int) -> float:
    """From what shortens every gradient to what leaves it as it is."""
    return (0.5, 8.0, 1e12)[round % 3]


def overflows(plan: Plan, *, rank: int, round: int) -> bool:
    """Not all is finite, and the worker did not look: in a clipped round, the norm tells."""
    chance = zlib.crc32(f"{plan.flavour}overflow{rank}.{round}".encode()) % 9
    return chance == 0 and manner_of(plan, rank=rank, round=round) == "clipped"


def is_astray(plan: Plan, *, rank: int, round: int) -> bool:
    """What it contributes is not like the others', and it does not know."""
    chance = zlib.crc32(f"{plan.flavour}astray{rank}.{round}".encode()) % 6
    return plan.refuse_norm is not None and chance == 0 and round >= FIRST_ASTRAY


def pulls_after(plan: Plan, round: int) -> bool:
    """In some flavours workers go on with older values every other round."""
    return plan.flavour < 3 or round % 2 == 0


def counters_after(
    plan: Plan,
    tensors: Mapping[str, Tensor],
    decisions: Sequence[DecisionFact],
    factors: Factors,
    lied: Collection[tuple[int, int, int]],
) -> dict[str, Array]:
    """The value of each counter tensor after these decisions, by arithmetic of our own. `lied`: (rank, life, round) of
    what was never pushed."""
    values = {
        name: np.zeros(tensor.spec.num_elems, np.float32) for name, tensor in tensors.items() if is_counter(tensor.spec)
    }
    for decision in decisions:
        factor = factors.get(decision.number, 1.0) if decision.max_norm is not None else 1.0
        if decision.skip or factor is None:
            continue
        for member in decision.members:
            if (member.rank, member.incarnation, member.round) in lied:
                continue
            for name, value in values.items():
                if contains(member.present, tensors[name].id):
                    cell = member.rank * plan.rounds + member.round - 1
                    digit = member.weight * plan.loss_scale * DIGIT ** (member.incarnation - 1) / decision.divisor
                    value[cell] -= np.float32(digit) * np.float32(factor)
    return values


def compensated_after(
    plan: Plan,
    tensor: Tensor,
    decisions: Sequence[DecisionFact],
    taken: Mapping[tuple[int, int, int], tuple[Array, Array]],
    lied: Collection[tuple[int, int, int]],
) -> Array:
    """The value of the first tensor after these decisions, each of one worker, by the kernel alone. `taken`: by (rank,
    life, round) the value that a worker had been sent, and what it pushed. A slice that is still what was sent takes
    its gradient as it is, whatever has become of other slices: of infinite values there is no difference."""
    first = noise(tensor.spec.name, size=tensor.spec.num_elems)
    slices = [tensor.bounds(index) for index in range(len(tensor.shards))]
    values = [first[begin:end] for begin, end in slices]
    momenta = [np.zeros_like(value) for value in values]
    num_steps = 0
    for decision in decisions:
        for member in () if decision.skip else decision.members:
            cell = member.rank, member.incarnation, member.round
            if cell in lied or not contains(member.present, tensor.id):
                continue
            base, pushed = taken[cell]
            num_steps += 1
            for (begin, end), value, momentum in zip(slices, values, momenta, strict=True):
                sent = base[begin:end]
                _core.reduce_update(
                    _core.RULES["sgd"],
                    complete_hyper("sgd", HYPERS[FLOATS]),
                    step=num_steps,
                    value=value,
                    state={"momentum_buffer": momentum},
                    contributions=[(pushed[begin:end], F32, member.weight)],
                    divisor=decision.divisor,
                    dtype=F32,
                    first={"momentum_buffer": num_steps == 1},
                    base=None if sent.tobytes() == value.tobytes() else sent,
                    compensation=compensation_of(plan),
                )
    return first


def sum_of_squares(gradient: Array) -> float:
    """What a gradient adds to the square of its contribution's norm."""
    with np.errstate(over="ignore"):
        return float(np.square(gradient.astype(np.float64)).sum())


def norm(plan: Plan, squares: Iterable[float]) -> float:
    """The 2-norm, before the loss scale, of gradients whose sums of squares these are."""
    return math.sqrt(sum(squares)) / plan.loss_scale


def transfers(
    tensors: Sequence[Tensor], arrays: Sequence[Array], ways: Router, *, into: bool = False
) -> list[Transfer]:
    """Frames that bring `arrays` to the tensors; `into`: that ask for their values."""
    made = []
    for layout in pack(tensors, ways, frame_bytes=FRAME_BYTES):
        ranges = [arrays[s.position][s.begin : s.end] for s in layout.slices]
        table = _core.SliceTable([(s.key, 0 if into else 4 * (s.end - s.begin), F32) for s in layout.slices])
        made.append(Transfer(layout.way, table, _core.Segments(ranges, writable=into)))
    return made


def singly(tensor: Tensor, array: Array, ways: Router, *, into: bool = True) -> list[Transfer]:
    """A request for each slice, so that each has an answer of its own; `into`: that asks for its value."""
    made = []
    for index, way in enumerate(ways.of(tensor)):
        begin, end = tensor.bounds(index)
        table = _core.SliceTable([(tensor.key(index), 0 if into else 4 * (end - begin), F32)])
        made.append(Transfer(way, table, _core.Segments([array[begin:end]], writable=into)))
    return made


def about_momentum(transfer: Transfer, *, steps: int) -> Transfer:
    """The same values for the momentum of the slices, which have taken so many steps."""
    table, size = transfer.table, len(transfer.table)
    part = _core.STATES["sgd"].index("momentum_buffer") + 1
    return transfer._replace(table=table.with_parts([part] * size).with_versions([steps] * size))
