"""Fixtures of several of these files."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import psstore
from tests.kernels.parity import exact_square_root


@pytest.fixture
def store() -> Iterator[psstore.Store]:
    """The only worker of a store of two shards in this process."""
    with psstore.connect("local://?shards=2") as connection:
        yield connection


@pytest.fixture
def exact() -> Iterator[None]:
    """torch's square root rounds as the store's does, so that Adam and the like have the same bits."""
    with exact_square_root():
        yield
