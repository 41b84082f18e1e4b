"""What a type checker says of pulls: mypy reads this file, and `assert_type` is where it would complain. Run, it is a
pull of each kind that has the type at run time, too."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import psstore
from psstore.client.operations import Operations
from psstore.client.pull_types import PullOptions

if TYPE_CHECKING:
    from typing_extensions import assert_type
else:

    def assert_type(value: Any, kind: Any) -> Any:
        return value


NumpyArray = np.ndarray[Any, np.dtype[Any]]


def made(store: psstore.Store) -> psstore.Store:
    store.create("w", np.ones(3, np.float32))
    return store


def test_a_pull_is_a_numpy_array_or_what_was_given() -> None:
    with made(psstore.connect("local://")) as store:
        assert isinstance(assert_type(store.pull("w"), NumpyArray), np.ndarray)
        out = torch.zeros(3)
        assert assert_type(store.pull("w", out=out), torch.Tensor) is out
        assert isinstance(assert_type(store.pull("w", dtype="float16", wait_s=1.0), NumpyArray), np.ndarray)


def test_a_pull_of_what_is_newer_may_be_none() -> None:
    with made(psstore.connect("local://")) as store:
        held = store.version_of("w")
        assert assert_type(store.pull("w", if_newer_than=held + 9), "NumpyArray | None") is None
        assert assert_type(store.pull("w", if_newer_than=held + 9, out=torch.zeros(3)), "torch.Tensor | None") is None
        assert assert_type(store.pull_many(["w"], if_newer_than=held + 9), "list[NumpyArray | None]") == [None]


def test_pulls_of_many_are_lists() -> None:
    with made(psstore.connect("local://")) as store:
        (value,) = assert_type(store.pull_many(["w"]), "list[NumpyArray]")
        assert isinstance(value, np.ndarray)
        out = torch.zeros(3)
        (same,) = assert_type(store.pull_many(["w"], out=[out]), "list[torch.Tensor]")
        assert same is out


async def awaited(store: psstore.AsyncStore) -> None:
    """Read by the type checker; tests/client/test_asyncio.py runs such calls."""
    assert_type(await store.pull("w"), NumpyArray)
    assert_type(await store.pull("w", out=torch.zeros(3)), torch.Tensor)
    assert_type(await store.pull_many(["w"], if_newer_than=3), "list[NumpyArray | None]")


def test_the_types_name_every_argument_of_the_calls() -> None:
    for call in (Operations.pull, Operations.pull_many):
        keywords = {name for name, one in inspect.signature(call).parameters.items() if one.kind is one.KEYWORD_ONLY}
        assert keywords == {"out", "if_newer_than", *PullOptions.__annotations__}
