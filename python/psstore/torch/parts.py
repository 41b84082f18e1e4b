"""Parts of tensors, of which each process has one: what DTensor, fully_shard and tensor parallelism make.

In the store a part is a tensor of its own, whose name says which part of what it is: "0.weight[0:16,0:8/32x8]" is rows
0 to 16 of a weight of 32 × 8. A part that is the whole goes by the plain name. So whoever knows a tensor's name finds
its parts, however it is cut, and reads any range of it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from psstore.errors import ShapeMismatch, UnknownKey, UnknownTensor, UsageError

Shape = tuple[int, ...]

PART_NAME = re.compile(r"(?P<whole>.+)\[(?P<ranges>\d+:\d+(?:,\d+:\d+)*)/(?P<shape>\d+(?:x\d+)*)\]", re.DOTALL)

T = TypeVar("T")


class TensorPart(NamedTuple):
    """A part of a tensor, for processes that have no DTensor."""

    shape: Shape
    """The whole tensor's."""
    offset: Shape
    """Where the part begins, in each dimension."""
    local: torch.Tensor
    """The part."""


class Box(NamedTuple):
    """Which part of a tensor: in each dimension from `offset`, `size` elements."""

    shape: Shape
    offset: Shape
    size: Shape

    @property
    def num_elems(self) -> int:
        return math.prod(self.size)

    @property
    def is_whole(self) -> bool:
        return self.size == self.shape

    def name(self, whole: str) -> str:
        """The part's name in the store."""
        if self.is_whole:
            return whole
        ranges = ",".join(f"{begin}:{begin + size}" for begin, size in zip(self.offset, self.size, strict=True))
        return f"{whole}[{ranges}/{'x'.join(map(str, self.shape))}]"

    def common(self, other: Box) -> Box | None:
        """What both have; None: nothing."""
        offset = tuple(map(max, self.offset, other.offset))
        ends = [min(a + n, b + m) for a, n, b, m in zip(self.offset, self.size, other.offset, other.size, strict=True)]
        size = tuple(max(0, end - begin) for begin, end in zip(offset, ends, strict=True))
        common = Box(self.shape, offset, size)
        return common if common.num_elems else None

    def of(self, outer: Box) -> tuple[slice, ...]:
        """The indices of this box in an array of an outer one."""
        begins = [mine - its for mine, its in zip(self.offset, outer.offset, strict=True)]
        return tuple(slice(begin, begin + size) for begin, size in zip(begins, self.size, strict=True))


def is_dtensor(kind: type) -> bool:
    """Recognised by its class name: torch has moved the class, and imports it only for programs that use it."""
    return any(base.__name__ == "DTensor" for base in kind.__mro__)


def box_of(tensor: torch.Tensor | TensorPart) -> Box:
    """Which part this process has. Raises UsageError for a DTensor whose part is no range of each dimension, or that
    others have to be added to (Partial)."""
    if isinstance(tensor, TensorPart):
        box = Box(tuple(tensor.shape), tuple(tensor.offset), tuple(tensor.local.shape))
        ends = [begin + size for begin, size in zip(box.offset, box.size, strict=True)]
        if len(box.shape) != len(box.size) or min(box.offset, default=0) < 0 or any(map(int.__gt__, ends, box.shape)):
            raise UsageError(f"a part of shape {box.size} at {box.offset} does not lie in a tensor of {box.shape}")
        return box
    shape = tuple(tensor.shape)
    if not is_dtensor(type(tensor)):
        return Box(shape, (0,) * len(shape), shape)
    dtensor: Any = tensor
    if any(placement.is_partial() for placement in dtensor.placements):
        raise UsageError(f"a DTensor of placements {dtensor.placements} has sums to make: redistribute() it first")
    if not hasattr(dtensor, "__create_chunk_list__"):
        raise UsageError(f"the DTensors of torch {torch.__version__} do not say which part is here; a newer torch's do")
    chunks = dtensor.__create_chunk_list__()  # what torch.distributed.checkpoint asks for
    if len(chunks) != 1 or tuple(chunks[0].sizes) != tuple(local_of(tensor).shape):
        raise UsageError(f"a DTensor of placements {dtensor.placements} has parts that are no range of each dimension")
    return Box(shape, tuple(chunks[0].offsets), tuple(chunks[0].sizes))


def local_of(tensor: torch.Tensor | TensorPart) -> torch.Tensor:
    """The memory of the part that is here, without a history."""
    if isinstance(tensor, TensorPart):
        return tensor.local.detach()
    if not is_dtensor(type(tensor)):
        return tensor.detach()
    dtensor: Any = tensor
    with torch.no_grad():
        local: torch.Tensor = dtensor.to_local()
    return local.detach()


def is_first_of_copies(tensor: torch.Tensor | TensorPart) -> bool:
    """Whether this process is the one whose copy counts, of those that have the same part of a DTensor."""
    if isinstance(tensor, TensorPart) or not is_dtensor(type(tensor)):
        return True
    dtensor: Any = tensor
    place = dtensor.device_mesh.get_coordinate()
    return place is not None and not any(
        index for index, placement in zip(place, dtensor.placements, strict=True) if placement.is_replicate()
    )


def local_gradient(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """This process's part of a DTensor's gradient. Collective where the gradient is cut otherwise than its parameter,
    or has sums to make."""
    if not is_dtensor(type(gradient)):
        return gradient
    found: Any = gradient
    placements = parameter.placements  # type: ignore[attr-defined]
    if found.placements != placements:
        found = found.redistribute(placements=placements)
    return local_of(found)


def like(dtensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A DTensor that is cut as another one, of this process's part."""
    of: Any = dtensor
    made: torch.Tensor = type(of.detach()).from_local(
        local, of.device_mesh, of.placements, run_check=False, shape=of.shape, stride=of.stride()
    )
    return made


# ---- in the store ----


def stored_parts(keys: Iterable[str], wholes: Iterable[str]) -> dict[str, dict[str, Box | None]]:
    """The parts of these tensors among the store's keys, by tensor and name. None: it is there as a whole."""
    found: dict[str, dict[str, Box | None]] = {whole: {} for whole in wholes}
    for key in keys:
        if key in found:
            found[key][key] = None
        if (part := PART_NAME.fullmatch(key)) is not None and part["whole"] in found:
            ranges = [tuple(map(int, one.split(":"))) for one in part["ranges"].split(",")]
            shape = tuple(map(int, part["shape"].split("x")))
            box = Box(shape, tuple(begin for begin, _ in ranges), tuple(end - begin for begin, end in ranges))
            found[part["whole"]][key] = box
    return found


def overlapping(there: Mapping[str, Box | None], box: Box) -> dict[str, Box]:
    """Parts in the store that have something of this box, by name, with what they are of."""
    whole = Box(box.shape, (0,) * len(box.shape), box.shape)
    boxes = {name: whole if one is None else one for name, one in there.items()}
    for name, one in boxes.items():
        if one.shape != box.shape:
            raise ShapeMismatch(f"{name!r} in the store is of a tensor of shape {one.shape}; here it is {box.shape}")
    return {name: one for name, one in boxes.items() if one.common(box) is not None}


def assemble(whole: str, box: Box, parts: Sequence[tuple[Box, torch.Tensor]], out: torch.Tensor) -> None:
    """Fills `out`, of the size of the box, from parts. Raises UnknownTensor if they leave something out."""
    missing = box.num_elems
    for part, values in parts:
        if tuple(values.shape) != part.size:
            raise ShapeMismatch(f"{whole!r} has shape {tuple(values.shape)} in the store, not {part.size}")
        common = part.common(box)
        if common is not None:
            out[common.of(box)].copy_(values[common.of(part)])
            missing -= common.num_elems
    if missing != 0:
        what = "lacks" if missing > 0 else "has twice"
        raise UnknownTensor(
            f"the store {what} {abs(missing)} elements of {box.name(whole)!r}: every process that has a part must have"
            " published it, all cut in one way"
        )


def by_range(
    wanted: Mapping[str, Box], keys: Iterable[str], pull: Callable[[list[str]], Sequence[T]]
) -> dict[str, list[tuple[Box, T]]]:
    """What `pull` gives of all parts that have something of each wanted box. `wanted`: by the whole tensor's name."""
    there = stored_parts(keys, wanted)
    chosen = {whole: overlapping(there[whole], box) for whole, box in wanted.items()}
    names = list(dict.fromkeys(name for parts in chosen.values() for name in parts))
    pulled: dict[str, T] = {}
    if names:
        try:
            pulled = dict(zip(names, pull(names), strict=True))
        except UnknownKey:  # of a part that was dropped and then cut so again: the client has forgotten the former
            pulled = dict(zip(names, pull(names), strict=True))
    return {whole: [(box, pulled[name]) for name, box in parts.items()] for whole, parts in chosen.items()}
