"""Callers' arrays become memory of frames in one call, and what is not plain memory goes the longer way."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal

import psstore
from psstore import _core
from psstore.client.arrays import has_overlaps
from psstore.client.local import LocalStore
from psstore.client.store import Store
from psstore.errors import BadArgument, DTypeMismatch, ShapeMismatch, UnknownKey

F32 = np.float32

Array = np.ndarray[Any, Any]


def one_frame(shape: tuple[int, ...], dtype: str = "float32", item: int = 4) -> _core.FrameMap:
    """All of one array."""
    return _core.FrameMap([(_core.DTYPES[dtype], shape)], [[(0, 0, item * int(np.prod(shape)))]])


def sent(segments: list[_core.Segments]) -> list[bytes]:
    return [b"".join(frame.pieces()) for frame in segments]


def is_plain(frames: _core.FrameMap, array: object, *, writable: bool = False) -> bool:
    return frames.of_arrays([array], writable=writable) is not None


# ---- FrameMap ---------------------------------------------------------------------------------------


def test_frames_take_their_ranges_of_each_array() -> None:
    f32 = _core.DTYPES["float32"]
    frames = _core.FrameMap([(f32, (2, 2)), (f32, (1,))], [[(0, 0, 8), (1, 0, 4)], [(0, 8, 16)]])
    a, b = np.arange(4, dtype=F32).reshape(2, 2), np.full(1, 9, F32)
    expected = [np.array([0, 1, 9], F32).tobytes(), np.array([2, 3], F32).tobytes()]
    found = frames.of_arrays([a, torch.from_numpy(b)], writable=False)
    assert found is not None
    assert sent(found) == expected
    assert sent(frames.of_bytes([a.reshape(-1).view(np.uint8), b.view(np.uint8)], writable=False)) == expected


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_arrays_and_tensors_of_the_form_are_plain(dtype: str) -> None:
    frames = one_frame((3, 2), dtype, np.dtype(dtype).itemsize)
    array = np.ones((3, 2), dtype)
    assert is_plain(frames, array, writable=True)
    assert is_plain(frames, torch.from_numpy(array), writable=True)
    assert is_plain(frames, torch.nn.Parameter(torch.from_numpy(array)), writable=True)


def test_bfloat16_is_plain_in_torch() -> None:
    assert is_plain(one_frame((2,), "bfloat16", 2), torch.zeros(2, dtype=torch.bfloat16))
    assert not is_plain(one_frame((2,), "bfloat16", 2), np.zeros(2, np.float16))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1, 1)])
def test_scalars_and_empty_arrays_are_plain(shape: tuple[int, ...]) -> None:
    assert is_plain(one_frame(shape), np.zeros(shape, F32))
    assert is_plain(one_frame(shape), torch.zeros(shape))


def freed(num_elems: int) -> torch.Tensor:
    """As `fully_shard` leaves a parameter that nobody needs."""
    tensor = torch.ones(num_elems)
    tensor.untyped_storage().resize_(0)
    return tensor


class Derived(torch.Tensor):
    """Who knows what its memory means."""


@pytest.mark.parametrize(
    "array",
    [
        [1.0, 2.0],
        2.0,
        None,
        b"12345678",
        np.zeros(3, F32),
        np.zeros((1, 2), F32),
        np.zeros(2, np.float64),
        np.zeros(2, np.int32),
        np.zeros(2, ">f4"),
        np.zeros((2, 2), F32)[:, 0],
        np.ma.masked_array(np.zeros(2, F32)),
        torch.zeros(3),
        torch.zeros(2, dtype=torch.int32),
        torch.zeros(2, dtype=torch.float64),
        torch.zeros(2, 2)[:, 0],
        torch.zeros(2, device="meta"),
        torch.zeros(2).to_sparse(),
        torch._neg_view(torch.ones(2)),
        torch.zeros(2).as_subclass(Derived),
    ],
    ids=repr,
)
def test_whatever_else_there_is_is_not_plain(array: object) -> None:
    assert not is_plain(one_frame((2,)), array)


def test_a_tensor_without_memory_is_not_plain() -> None:
    for tensor in (freed(2), torch._efficientzerotensor((2,))):
        assert not is_plain(one_frame((2,)), tensor)


def test_read_only_arrays_are_plain_to_send_only() -> None:
    array = np.zeros(2, F32)
    array.flags.writeable = False
    assert is_plain(one_frame((2,)), array)
    assert not is_plain(one_frame((2,)), array, writable=True)


def test_as_many_arrays_as_there_are_forms() -> None:
    assert one_frame((2,)).of_arrays([], writable=False) is None
    with pytest.raises(ValueError, match="0 arrays where 1 belong"):
        one_frame((2,)).of_bytes([], writable=False)


@pytest.mark.parametrize("array", [np.zeros(7, np.uint8), np.zeros(2, F32), np.zeros(16, np.uint8)[::2]])
def test_bytes_of_another_size_are_refused(array: Array) -> None:
    with pytest.raises(ValueError, match="bytes"):
        one_frame((2,)).of_bytes([array], writable=False)


@pytest.mark.parametrize("ranges", [[(1, 0, 4)], [(0, 4, 0)]])
def test_ranges_of_no_array_are_refused(ranges: list[tuple[int, int, int]]) -> None:
    with pytest.raises(ValueError, match="none of the arrays"):
        _core.FrameMap([(_core.DTYPES["float32"], (2,))], [ranges])


def test_memory_lives_as_long_as_its_segments() -> None:
    frames = one_frame((100_000,))
    for array in (np.full(100_000, 7, F32), torch.full((100_000,), 7.0)):
        segments = frames.of_arrays([array], writable=False)
        assert segments is not None
        del array
        (piece,) = segments[0].pieces()
        del segments
        assert_array_equal(np.frombuffer(piece, F32), np.full(100_000, 7, F32))


# ---- the second time --------------------------------------------------------------------------------
#
# A store remembers what a list of names came to, and then looks at all arrays at once.


@pytest.fixture
def store() -> Iterator[Store]:
    with psstore.connect("local://") as store:
        store.create("a", np.zeros((2, 3), F32))
        store.create("b", np.zeros(4, F32))
        store.push_many({"a": np.ones((2, 3), F32), "b": np.ones(4, F32)})
        store.pull_many(["a", "b"], out=[np.zeros((2, 3), F32), np.zeros(4, F32)])
        yield store


def test_a_known_push_takes_any_kind_of_array(store: Store) -> None:
    for a in (
        np.full((2, 3), 2, F32),
        np.full((3, 2), 3, F32).T,
        np.full((2, 3), 4, np.float16),
        [[5, 5, 5], [5, 5, 5]],
        torch.full((2, 3), 6.0),
        torch.full((2, 3), 7.0, requires_grad=True),
        torch._neg_view(torch.full((2, 3), -8.0)).resolve_neg(),
        torch.full((2, 3), 9.0, dtype=torch.bfloat16),
    ):
        store.push_many({"a": a, "b": np.zeros(4, F32)})
        expected = float(torch.as_tensor(a).detach().flatten()[0])
        assert_array_equal(store.pull("a"), np.full((2, 3), expected, F32))


def test_a_known_push_refuses_what_does_not_fit(store: Store) -> None:
    b = np.ones(4, F32)
    with pytest.raises(ShapeMismatch, match=r"push 'a': expected shape \(2, 3\), got \(3, 2\)"):
        store.push_many({"a": np.ones((3, 2), F32), "b": b})
    with pytest.raises(DTypeMismatch, match="push 'a'"):
        store.push_many({"a": np.ones((2, 3), np.float64), "b": b})
    assert_array_equal(store.pull("a"), np.ones((2, 3), F32))


def test_a_known_pull_takes_any_kind_of_array(store: Store) -> None:
    b = np.zeros(4, F32)
    for a in (
        np.zeros((2, 3), F32),
        np.zeros((3, 2), F32).T,
        np.zeros((2, 3), np.float16),
        torch.zeros(2, 3),
        torch.nn.Parameter(torch.zeros(2, 3)),
        torch.zeros(3, 2).T,
    ):
        results = store.pull_many(["a", "b"], out=[a, b])
        assert results[0] is a
        assert_array_equal(torch.as_tensor(a).detach().float().numpy(), np.ones((2, 3), F32))


@pytest.mark.parametrize("array", [np.zeros(4, np.int32), torch.zeros(4, dtype=torch.int8)], ids=["numpy", "torch"])
def test_an_array_of_another_dtype_is_told_what_it_could_be(store: Store, array: Any) -> None:
    with pytest.raises(DTypeMismatch, match="use one of float32, float64, bfloat16, float16 "):
        store.push("b", array)


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (torch.ones(4).to_sparse(), "a sparse_coo tensor can't be stored or sent: make it dense, as tensor.to_dense"),
        (torch.ones(4, device="meta"), "a tensor on the meta device has no elements"),
        (freed(4), "a tensor whose memory was freed, .*has no elements"),
        (torch._efficientzerotensor((4,)), "or of zeros without any has no elements"),
    ],
    ids=["sparse", "meta", "freed", "zeros"],
)
def test_a_tensor_without_an_element_for_each_number_is_refused(store: Store, array: Any, words: str) -> None:
    with pytest.raises(BadArgument, match=words):
        store.push("b", array)
    with pytest.raises(BadArgument, match=words):
        store.pull("b", out=array)
    assert_array_equal(store.pull("b"), np.ones(4, F32))


@pytest.mark.parametrize(
    "out",
    [
        torch.zeros(1).expand(4),
        torch.zeros(3).as_strided((2, 2), (1, 1)),
        np.lib.stride_tricks.as_strided(np.zeros(1, F32), (4,), (0,)),
        np.lib.stride_tricks.as_strided(np.zeros(4, F32), (4,), (2,)),
    ],
    ids=["torch", "torch, as_strided", "numpy", "numpy, by halves"],
)
def test_memory_that_elements_share_is_not_received_into(store: Store, out: Any) -> None:
    for _ in range(2):  # not where the pull is known either
        with pytest.raises(
            BadArgument, match=r"out= is an array of shape \(.*\) whose elements share memory, .* clone"
        ):
            store.pull("b", out=out)
        store.pull("b", out=np.zeros(4, F32))


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
    [
        ((2, 3), (1, 2), False),
        ((3, 2), (2, 3), False),
        ((4, 2), (2, 3), False),
        ((4, 2), (2, 4), True),
        ((2, 2, 2), (-1, 4, 2), False),
        ((0, 5), (0, 0), False),
        ((1, 5), (0, 1), False),
        ((2, 3), (3, 1), False),
        ((2, 3), (2, 1), True),
    ],
)
def test_elements_that_share_memory_are_told_from_those_that_only_lie_between(
    shape: tuple[int, ...], strides: tuple[int, ...], expected: bool
) -> None:
    places = [sum(map(operator.mul, index, strides)) for index in np.ndindex(*shape)]
    assert (len(set(places)) < len(places)) == expected
    assert has_overlaps(shape, strides) == expected


def test_a_view_that_negates_is_sent_and_received_as_what_it_says(store: Store) -> None:
    numbers = torch.zeros(4, dtype=torch.complex64)
    view = numbers.conj().imag
    assert view.is_neg()
    assert_array_equal(store.pull("b", out=view).numpy(force=True), np.ones(4, F32))
    assert numbers.imag.tolist() == [-1.0] * 4
    with psstore.connect("local://") as other:
        other.create("b", view)
        assert_array_equal(other.pull("b"), np.ones(4, F32))


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
def test_a_numpy_matrix_is_received_into(store: Store) -> None:
    matrix = np.asmatrix(np.zeros((2, 3), F32))
    assert store.pull("a", out=matrix) is matrix
    assert_array_equal(matrix, np.ones((2, 3), F32))


@pytest.mark.parametrize(
    "value", ["4", [[1, 2], [3]], [None] * 4, [1j] * 4, {"b": 1}, [10**400] * 4, object()], ids=lambda one: type(one)
)
def test_what_is_not_made_of_numbers_is_refused(store: Store, value: Any) -> None:
    with pytest.raises(BadArgument, match=r"is no array of numbers .*: expected a numpy array, a torch"):
        store.push("b", value)
    assert_array_equal(store.pull("b"), np.ones(4, F32))


def test_a_known_pull_refuses_what_does_not_fit(store: Store) -> None:
    read_only = np.zeros((2, 3), F32)
    read_only.flags.writeable = False
    with pytest.raises(BadArgument, match="read-only"):
        store.pull_many(["a", "b"], out=[read_only, np.zeros(4, F32)])
    with pytest.raises(BadArgument, match="2 names and 1 arrays"):
        store.pull_many(["a", "b"], out=[np.zeros((2, 3), F32)])
    with pytest.raises(DTypeMismatch, match="dtype= says 'float16'"):
        store.pull_many(["a", "b"], out=[np.zeros((2, 3), F32), np.zeros(4, F32)], dtype="float16")


def test_a_known_pull_makes_new_arrays_each_time(store: Store) -> None:
    first, second = store.pull_many(["a", "b"]), store.pull_many(["a", "b"])
    assert first[0] is not second[0]
    assert_array_equal(second[0], np.ones((2, 3), F32))
    (half, _) = store.pull_many(["a", "b"], dtype="float16")
    assert half.dtype == np.float16


def test_a_known_pull_leaves_out_what_is_not_new(store: Store) -> None:
    out = [np.zeros((2, 3), F32), np.zeros(4, F32)]
    newest = store.version_of("a")
    store.push("b", np.full(4, 3, F32))
    for _ in range(2):
        a, b = store.pull_many(["a", "b"], out=out, if_newer_than=newest)
        assert a is None
        assert_array_equal(b, np.full(4, 3, F32))
    assert_array_equal(out[0], np.zeros((2, 3), F32))


def test_what_is_known_of_an_overwritten_tensor_is_forgotten(store: Store) -> None:
    store.create("a", np.full(5, 2, F32), exist="overwrite")
    store.push_many({"a": np.full(5, 3, F32), "b": np.ones(4, F32)})
    (a, _) = store.pull_many(["a", "b"], out=[np.zeros(5, F32), np.zeros(4, F32)])
    assert_array_equal(a, np.full(5, 3, F32))


def test_what_another_client_overwrote_is_refused_once_and_learned_anew() -> None:
    with LocalStore(workers=2) as local, local.connect(rank=0) as one, local.connect(rank=1) as other:
        one.create("a", np.zeros(2, F32))
        one.push_many({"a": np.ones(2, F32)})
        other.create("a", np.zeros(3, F32), exist="overwrite")
        with pytest.raises(UnknownKey):
            one.push_many({"a": np.ones(2, F32)})
        one.push_many({"a": np.ones(3, F32)})
        assert_array_equal(other.pull("a"), np.ones(3, F32))


def test_what_was_pulled_of_a_tensor_is_no_version_of_the_next_one_by_its_name() -> None:
    with LocalStore() as local, local.connect(rank=0) as writer, local.connect(role="client") as reader:
        writer.create("a", np.zeros(2, F32))
        for number in (1, 2, 3):
            writer.push("a", np.full(2, number, F32))
        reader.pull("a")
        writer.drop("a")
        writer.create("a", np.zeros(2, F32))
        writer.push("a", np.full(2, 9, F32))
        with pytest.raises(UnknownKey):
            reader.pull("a")
        assert reader.version_of("a") == 0
        assert_array_equal(reader.pull("a", if_newer_than=reader.version_of("a")), np.full(2, 9, F32))
