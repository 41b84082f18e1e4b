"""Cutting, placing and packing: by a tensor's own shape, evenly, in few frames."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psstore import _core
from psstore.cli import model_shapes
from psstore.client.device import pinned_transfer
from psstore.errors import BadArgument
from psstore.partition import packing
from psstore.partition.packing import pack
from psstore.partition.placement import place
from psstore.partition.router import Router
from psstore.partition.slicing import SLICE_BYTES, num_slices, slice_elems
from psstore.types import Tensor, TensorSpec

Shapes = Mapping[str, tuple[int, ...]]

MODELS: list[tuple[Callable[[], Shapes], int, int]] = [
    (model_shapes.resnet50, 161, 25_557_032),
    (model_shapes.vgg16, 32, 138_357_544),
    (model_shapes.gpt2, 148, 124_439_808),
]
"""Shapes, and the number of tensors and of parameters as published."""


def slice_sizes(shapes: Shapes) -> list[int]:
    sizes: list[int] = []
    for name, shape in shapes.items():
        spec = TensorSpec(name=name, shape=shape)
        elems = slice_elems(spec)
        whole, rest = divmod(spec.num_elems, elems)
        sizes += [4 * elems] * whole + ([4 * rest] if rest else [])
    return sizes


def tensors_of(shapes: Shapes, *, num_shards: int) -> list[Tensor]:
    owners = iter(place(slice_sizes(shapes), [0] * num_shards))
    tensors = []
    for tensor_id, (name, shape) in enumerate(shapes.items(), start=1):
        spec = TensorSpec(name=name, shape=shape)
        elems = slice_elems(spec)
        shards = tuple(next(owners) for _ in range(num_slices(spec.num_elems, elems)))
        tensors.append(Tensor(id=tensor_id, spec=spec, slice_elems=elems, shards=shards))
    return tensors


@pytest.mark.parametrize(("shapes", "num_tensors", "num_params"), MODELS, ids=lambda m: getattr(m, "__name__", None))
def test_shapes_are_those_of_the_models(shapes: Callable[[], Shapes], num_tensors: int, num_params: int) -> None:
    assert len(shapes()) == num_tensors
    assert sum(math.prod(shape) for shape in shapes().values()) == num_params


@pytest.mark.parametrize("num_shards", range(1, 9))
@pytest.mark.parametrize("shapes", [model for model, _, _ in MODELS], ids=lambda model: model.__name__)
def test_largest_shard_is_at_most_one_percent_above_the_mean(shapes: Callable[[], Shapes], num_shards: int) -> None:
    sizes = slice_sizes(shapes())
    loads = [0] * num_shards
    for size, owner in zip(sizes, place(sizes, loads), strict=True):
        loads[owner] += size
    assert max(loads) <= 1.01 * sum(loads) / num_shards


@given(st.lists(st.integers(1, SLICE_BYTES)), st.lists(st.integers(0, 1 << 40), min_size=1, max_size=8))
def test_placement_ends_within_one_slice_of_even(sizes: list[int], loads: list[int]) -> None:
    """Graham's bound for lists: whoever is fullest got its last slice when it was emptiest."""
    owners = place(sizes, loads)
    after = list(loads)
    for size, owner in zip(sizes, owners, strict=True):
        after[owner] += size
    for shard, load in enumerate(after):
        got = [size for size, owner in zip(sizes, owners, strict=True) if owner == shard]
        assert not got or load - max(got) <= min(after)
    assert place(sizes, loads) == owners


@pytest.mark.parametrize("num_shards", [2, 3])
def test_neighbours_are_spread_over_all_shards(num_shards: int) -> None:
    """Any layers of a transformer that follow one another, as in a bucket of gradients."""
    spread = [768, 768 * 3, 768, 768 * 3, 768, 768 * 4] * 4
    sizes = slice_sizes({f"layer{index}": (192, width) for index, width in enumerate(spread)})
    owners = place(sizes, [0] * num_shards)
    for begin in range(len(sizes)):
        loads = [0] * num_shards
        for size, owner in zip(sizes[begin:], owners[begin:], strict=True):
            loads[owner] += size
            assert max(loads) - min(loads) <= 2 * SLICE_BYTES


def test_new_tensors_go_where_there_is_room() -> None:
    assert place([10, 10], [100, 0, 95]) == [1, 1]


# ---- slices ----


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_slice_has_as_many_bytes_whatever_the_dtype(dtype: str) -> None:
    spec = TensorSpec(name="w", shape=(1 << 20,), dtype=dtype)
    assert slice_elems(spec) * {"float32": 4, "float64": 8}[dtype] == SLICE_BYTES


@pytest.mark.parametrize(("num_elems", "expected"), [(0, 0), (1, 1), (8, 1), (9, 2), (16, 2), (17, 3)])
def test_slices_cover_a_tensor_once(num_elems: int, expected: int) -> None:
    assert num_slices(num_elems, 8) == expected
    shards = (0,) * expected
    tensor = Tensor(id=1, spec=TensorSpec(name="w", shape=(num_elems,)), slice_elems=8, shards=shards)
    covered = [elem for index in range(expected) for elem in range(*tensor.bounds(index))]
    assert covered == list(range(num_elems))


def test_tensor_that_a_key_can_not_number_is_refused() -> None:
    too_many = SLICE_BYTES // 4 << _core.SLICE_INDEX_BITS
    with pytest.raises(BadArgument, match="'w'"):
        slice_elems(TensorSpec(name="w", shape=(too_many,)))


# ---- frames ----


@pytest.mark.parametrize("num_shards", [1, 2, 5])
@pytest.mark.parametrize("shapes", [model for model, _, _ in MODELS], ids=lambda model: model.__name__)
def test_frames_hold_every_slice_once_at_its_shard(shapes: Callable[[], Shapes], num_shards: int) -> None:
    tensors = tensors_of(shapes(), num_shards=num_shards)
    frames = pack(tensors, Router(num_shards))
    packed = sorted((ref.key, frame.way) for frame in frames for ref in frame.slices)
    placed = sorted((t.key(index), shard) for t in tensors for index, shard in enumerate(t.shards))
    assert packed == placed


def test_frames_are_full_and_no_fuller() -> None:
    tensors = tensors_of(model_shapes.resnet50(), num_shards=2)
    frames = pack(tensors, Router(2))
    sizes = [sum(4 * (ref.end - ref.begin) for ref in frame.slices) for frame in frames]
    assert max(sizes) <= packing.FRAME_BYTES
    assert len(frames) <= sum(sizes) / (packing.FRAME_BYTES - SLICE_BYTES) + 2


def test_frames_of_an_early_round_have_one_large_slice_and_small_ones_beside_it() -> None:
    tensors = tensors_of(model_shapes.resnet50(), num_shards=2)
    frames = pack(tensors, Router(2), frame_bytes=packing.EARLY_FRAME_BYTES)
    sizes = [[4 * (ref.end - ref.begin) for ref in frame.slices] for frame in frames]
    assert max(map(sum, sizes)) <= packing.EARLY_FRAME_BYTES
    assert max(one.count(SLICE_BYTES) for one in sizes) == 1
    assert len(frames) < sum(map(len, sizes))


def test_frames_take_turns_over_the_shards() -> None:
    frames = pack(tensors_of(model_shapes.vgg16(), num_shards=3), Router(3))
    assert [frame.way for frame in frames[:6]] == [0, 1, 2, 0, 1, 2]


def test_slices_keep_their_connection_and_each_has_as_many_bytes() -> None:
    tensors = tensors_of(model_shapes.gpt2(), num_shards=2)
    ways = Router(2, num_channels=3)
    frames = pack(tensors, ways)
    ways_of = {ref.key: frame.way for frame in frames for ref in frame.slices}
    assert all(way % 2 == t.shards[i] for t in tensors for i, way in enumerate(ways.of(t)))
    assert {
        ref.key: frame.way for frame in pack(tensors[::-7], ways) for ref in frame.slices
    }.items() <= ways_of.items()
    loads = [
        sum(4 * (ref.end - ref.begin) for frame in frames[way:] if frame.way == way for ref in frame.slices)
        for way in range(6)
    ]
    assert max(loads) <= 1.02 * sum(loads) / 6


def test_frame_has_no_more_slices_than_a_header_may_announce() -> None:
    shapes = {f"t{i}": (1,) for i in range(_core.MAX_SLICES + 1)}
    frames = pack(tensors_of(shapes, num_shards=1), Router(1))
    assert [len(frame.slices) for frame in frames] == [_core.MAX_SLICES, 1]


def test_empty_tensors_need_no_frame() -> None:
    assert pack(tensors_of({"empty": (0, 3)}, num_shards=2), Router(2)) == []


def test_frames_of_a_shard_that_shares_a_device_are_long_and_may_travel_all_the_same() -> None:
    assert pinned_transfer.MOST_PINNED_BYTES >= packing.NEAR_FRAME_BYTES <= _core.MAX_PAYLOAD_BYTES
    tensors = tensors_of(model_shapes.vgg16(), num_shards=2)
    frames = pack(tensors, Router(2), near={1})
    sizes = [
        [4 * sum(one.end - one.begin for one in frame.slices) for frame in frames if frame.way == s] for s in (0, 1)
    ]
    assert max(sizes[0]) <= packing.FRAME_BYTES
    assert len(sizes[1]) <= sum(sizes[1]) / (packing.NEAR_FRAME_BYTES - SLICE_BYTES) + 1
    assert max(sizes[1]) <= packing.NEAR_FRAME_BYTES
