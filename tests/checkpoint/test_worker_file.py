"""What a worker hands in comes back as it was, and never by pickle."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from psstore.checkpoint.handed import pack_handed
from psstore.checkpoint.hash_pool import HashPool
from psstore.checkpoint.local_storage import LocalStorage
from psstore.checkpoint.nested import MAX_DEPTH, PlainArray, as_plain_array
from psstore.checkpoint.reader import Checkpoint, verify
from psstore.checkpoint.worker_file import PIECE_BYTES, WorkerPart, write_worker_file
from psstore.checkpoint.writer import commit
from psstore.errors import BadArgument
from tests.checkpoint.support import make_model, write_model


def through_a_file(folder: Path, part: WorkerPart) -> WorkerPart:
    storage, model = LocalStorage(folder), make_model([])
    shards = write_model(storage, model, 1)
    with HashPool(2) as pool:
        record = write_worker_file(storage, part, version=1234, attempt="a", pool=pool)
    commit(storage, attempt="a", store=model.state, files=[*shards.files, record])
    verify(storage, 1234)
    with Checkpoint(storage, 1234) as checkpoint:
        assert checkpoint.ranks == (part.rank,)
        return checkpoint.worker(part.rank)


def handed_back(folder: Path, value: Any) -> Any:
    return through_a_file(folder, WorkerPart(rank=3, incarnation=2, version=5, handed=value)).handed


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -7,
        1 << 53,
        -(1 << 200),
        0.1,
        -0.0,
        math.inf,
        "text \u2028 \x00",
        b"",
        b"\x00\xff" * 9,
        [],
        (1, [2, (3.0, None)]),
        {"a": {0: "int key", "0": "text key", (1, "x"): [b"b"], None: 1.5, True: 2}},
        {"list": [1], "map": 2},
    ],
)
def test_plain_data_comes_back_as_it_was(tmp_path: Path, value: Any) -> None:
    back = handed_back(tmp_path, value)
    assert back == value
    assert repr(back) == repr(value)


class Named(str):
    """As numpy's texts and enumerations of texts are."""

    def __str__(self) -> str:
        return "another text"


class Numbered(int):
    def __str__(self) -> str:
        return "no number"


def test_numbers_and_texts_of_other_classes_come_back_as_plain_ones(tmp_path: Path) -> None:
    """Milestones of a scheduler that were computed by numpy are keys of its state."""
    value = {np.int64(30): 1, (np.uint8(2), np.float32(0.5)): Named("x"), Named("y"): Numbered(1 << 60)}
    back = handed_back(tmp_path, value)
    assert back == {30: 1, (2, 0.5): "x", "y": 1 << 60}
    assert repr(back) == "{30: 1, (2, 0.5): 'x', 'y': 1152921504606846976}"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"a": ["\udcff"]}, r"text that UTF-8 can't say at \['a'\]\[0\]"),
        ({"\udcff": 1}, "text that UTF-8 can't say at key 0"),
        ([1 << 20_000], r"an integer of 20001 bits at \[0\]"),
        ({np.bool_(True): 1}, "has a bool(_)? at key 0; keys are"),
        ({(1, np.datetime64("2020")): 1}, r"has a datetime64 at key 0\[1\]; keys are"),
        ([np.array(["2020"], "M8[D]")], r"can't be held at \[0\]: cannot include dtype 'M'"),
    ],
)
def test_what_would_not_come_back_is_refused(value: Any, said: str) -> None:
    with pytest.raises(BadArgument, match=said):
        pack_handed(value)


def test_nan_comes_back(tmp_path: Path) -> None:
    assert math.isnan(handed_back(tmp_path, [math.nan])[0])


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "int64", "int32", "uint8", "bool", "int16"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (5,), (2, 3, 4)])
def test_arrays_come_back_as_they_were(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    array = np.arange(math.prod(shape)).reshape(shape).astype(dtype)
    back = handed_back(tmp_path, {"x": array, "between": np.ones(3, np.int8)})["x"]
    assert (back.dtype, back.shape) == (dtype, shape)
    assert bytes(back.data) == array.tobytes()


def test_large_arrays_come_back(tmp_path: Path) -> None:
    large = np.random.default_rng(0).random(3 * PIECE_BYTES // 8 + 5)
    half = PlainArray("bfloat16", (3,), memoryview(b"abcdef"))
    part = WorkerPart(
        rank=1,
        incarnation=4,
        version=5,
        handed=[large[:7], "x", {"layer/w": as_plain_array(large), "b": half}],
    )
    back = through_a_file(tmp_path, part)
    assert (back.rank, back.incarnation, back.handed[1]) == (1, 4, "x")
    assert bytes(back.handed[2]["layer/w"].data) == large.tobytes()
    assert back.handed[2]["b"].dtype == "bfloat16"
    assert bytes(back.handed[2]["b"].data) == b"abcdef"
    assert np.array_equal(np.frombuffer(back.handed[0].data), large[:7])


def test_what_is_not_plain_is_refused_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(BadArgument, match=r"a object at \['a'\]\[1\]"):
        handed_back(tmp_path, {"a": [1, object()]})
    with pytest.raises(BadArgument, match=r"not contiguous"):
        handed_back(tmp_path, np.ones((4, 4))[:, 1])
    with pytest.raises(BadArgument, match=r"format"):
        handed_back(tmp_path, np.array(["text"]))
    with pytest.raises(BadArgument, match=r"6 bytes; expected 8"):
        handed_back(tmp_path, PlainArray("float32", (2,), memoryview(b"abcdef")))
    deep: list[Any] = []
    for _ in range(MAX_DEPTH + 1):
        deep = [deep]
    with pytest.raises(BadArgument, match=f"more than {MAX_DEPTH} deep"):
        handed_back(tmp_path, deep)
