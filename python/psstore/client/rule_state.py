"""What update rules keep for their tensors, read from and written to the store part by part.

A part is one buffer of every slice: part i is the buffer that `_core.STATES` of the rule names at i - 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from psstore import _core
from psstore.client.arrays import Array, Source
from psstore.client.layout import Layout
from psstore.client.schema import as_source
from psstore.errors import BadArgument, RuleMismatch
from psstore.partition.router import Router
from psstore.protocol.client import Transfer
from psstore.types import Tensor, applies_by_decision


@dataclass(frozen=True)
class RuleState:
    """What an update rule keeps for a tensor, under torch's names."""

    steps: int = 0
    """Updates taken."""
    buffers: Mapping[str, Array] = field(default_factory=dict)
    """'momentum_buffer', 'exp_avg', ...: arrays of the tensor's shape and dtype. Only those that the rule has made."""


@dataclass(frozen=True)
class Restored:
    """What `restore` sets of a tensor; None leaves it as it is."""

    value: Array | None = None
    state: RuleState | None = None
    """Buffers that it does not hold are as if they had never been made."""

    def check(self, tensor: Tensor) -> None:
        """Raises RuleMismatch, BadArgument."""
        spec = tensor.spec
        if not applies_by_decision(spec.rule):
            raise RuleMismatch(f"restore {spec.name!r}: its rule is {spec.rule!r}; it is not trained, so push sets it")
        if self.state is None:
            return
        if self.state.steps < 0:
            raise BadArgument(f"restore {spec.name!r}: steps is {self.state.steps}; expected 0 or more")
        unknown = sorted(set(self.state.buffers) - set(_core.STATES[spec.rule]))
        if unknown:
            known = ", ".join(name for name in _core.STATES[spec.rule] if name) or "none"
            raise BadArgument(f"restore {spec.name!r}: rule {spec.rule!r} has no state {unknown[0]!r}; it has {known}")


def parts(tensors: Sequence[Tensor]) -> Iterator[tuple[int, list[int]]]:
    """(part, positions of the tensors whose rule has it)."""
    most = max((len(_core.STATES[tensor.spec.rule]) for tensor in tensors), default=0)
    for part in range(1, most + 1):
        yield part, [i for i, tensor in enumerate(tensors) if part <= len(_core.STATES[tensor.spec.rule])]


def state_name(tensor: Tensor, part: int) -> str:
    name = _core.STATES[tensor.spec.rule][part - 1]
    assert name is not None, "states are numbered without gaps"
    return name


def restoring(tensors: Sequence[Tensor], wanted: Sequence[Restored], ways: Router) -> Iterator[Transfer]:
    """The writes that make these tensors what is wanted. Raises before the first if one does not fit."""
    for tensor, one in zip(tensors, wanted, strict=True):
        if not isinstance(one, Restored):
            raise BadArgument(
                f"restore {tensor.spec.name!r}: expected psstore.client.rule_state.Restored(value=…, state=…), got"
                f" {type(one).__name__}"
            )
        one.check(tensor)
    values = [i for i, one in enumerate(wanted) if one.value is not None]
    writes = [_write(tensors, values, [wanted[i].value for i in values], 0, [0] * len(values), ways)]
    for part, positions in parts(tensors):
        states = [(i, wanted[i].state) for i in positions]
        held = [(i, s) for i, s in states if s is not None and state_name(tensors[i], part) in s.buffers]
        lost = [(i, s) for i, s in states if s is not None and state_name(tensors[i], part) not in s.buffers]
        buffers = [s.buffers[state_name(tensors[i], part)] for i, s in held]
        writes.append(_write(tensors, [i for i, _ in held], buffers, part, [s.steps for _, s in held], ways))
        writes.append(_clear(tensors, [i for i, _ in lost], part, [s.steps for _, s in lost], ways))
    for transfers in writes:
        yield from transfers


def _write(
    tensors: Sequence[Tensor],
    positions: Sequence[int],
    arrays: Sequence[Array],
    part: int,
    steps: Sequence[int],
    ways: Router,
) -> list[Transfer]:
    chosen = [tensors[i] for i in positions]
    sources: list[Source] = [
        as_source("restore", tensor.spec, array) for tensor, array in zip(chosen, arrays, strict=True)
    ]
    layout = Layout(chosen, [one.dtype for one in sources], ways=ways, pull=False, part=part)
    return [
        transfer._replace(table=frame.table.with_versions([steps[piece.position] for piece in frame.ranges]))
        for frame, transfer in zip(layout.frames, layout.transfers([one.data for one in sources]), strict=True)
    ]


def _clear(
    tensors: Sequence[Tensor], positions: Sequence[int], part: int, steps: Sequence[int], ways: Router
) -> list[Transfer]:
    """Returns writes without bytes: the buffers will be as if they had never been made."""
    chosen = [tensors[i] for i in positions]
    layout = Layout(chosen, [t.spec.dtype for t in chosen], ways=ways, pull=True, part=part)
    return [
        Transfer(frame.way, frame.table.with_versions([steps[piece.position] for piece in frame.ranges]), None)
        for frame in layout.frames
    ]
