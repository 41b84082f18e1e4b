"""Readers that are started before the trainer: they wait for its tensors, and know a mistake once a step was taken."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import numpy as np
import pytest

from psstore import FollowingReader, LocalStore
from psstore.client import first_tensors
from psstore.errors import DeadlineExceeded, UnknownTensor
from psstore.launch.relay import Relay
from tests.support.cluster import PATIENCE_S

ONES = np.ones(3, np.float32)


@pytest.fixture
def local() -> Iterator[LocalStore]:
    with LocalStore(shards=2) as store:
        yield store


def reader_of(local: LocalStore, *names: str) -> FollowingReader:
    """A reader of these tensors, or of whatever there is."""
    return FollowingReader(local.connect(role="client", wait_s=PATIENCE_S), names or None, None)


@pytest.mark.parametrize("names", [("first", "second"), ()], ids=["named", "any"])
def test_a_reader_waits_until_somebody_has_created_its_tensors(local: LocalStore, names: tuple[str, ...]) -> None:
    with reader_of(local, *names) as reader, ThreadPoolExecutor(1) as pool:
        waits = pool.submit(reader.next)
        trainer = local.connect(rank=0)
        for name in ("first", "second"):
            trainer.create(name, ONES, rule="sgd")
        version = waits.result(PATIENCE_S)
    assert version.number == 0
    assert set(names) <= set(version.values)


def test_who_waits_in_vain_is_told_for_what_and_may_wait_on(local: LocalStore) -> None:
    trainer = local.connect(rank=0)
    trainer.create("w", ONES, rule="sgd")
    with reader_of(local, *"wabcde") as reader:
        with pytest.raises(DeadlineExceeded, match=r"'a', 'b', 'c' and 2 more .* 1 tensors are"):
            reader.next(timeout_s=0.01)
        assert reader.version is None
        for name in "abcde":
            trainer.create(name, ONES, rule="sgd")
        assert reader.next().values.keys() == set("wabcde")
    with LocalStore() as empty, reader_of(empty) as reader, pytest.raises(DeadlineExceeded, match="has none"):
        reader.next(timeout_s=0.01)


def test_a_table_is_no_tensor_that_a_reader_begins_with(local: LocalStore) -> None:
    trainer = local.connect(rank=0)
    trainer.create_table("rows", dim=4, rule="sgd", group=1)
    with reader_of(local) as reader:
        with pytest.raises(DeadlineExceeded, match="which has tables alone"):
            reader.next(timeout_s=0.01)
        trainer.create("w", ONES, rule="sgd")
        assert reader.next().values.keys() == {"w"}


def test_a_reader_says_once_that_it_waits(local: LocalStore, caplog: pytest.LogCaptureFixture) -> None:
    with mock.patch.object(first_tensors, "SAY_AFTER_S", 0.01), reader_of(local, "w") as reader:
        for _ in range(3):
            with pytest.raises(DeadlineExceeded):
                reader.next(timeout_s=0.02)
    (said,) = caplog.messages
    assert "waiting for somebody to create 'w'" in said


def test_a_name_that_is_missing_after_the_first_step_is_a_mistake(local: LocalStore) -> None:
    trainer = local.connect(rank=0)
    trainer.create("layer.weight", ONES, rule="sgd")
    trainer.push("layer.weight", ONES)
    trainer.commit({"lr": 1.0})
    expected = r"'layer.wieght', 'unlike'; is 'layer.wieght' 'layer.weight'\?"
    with reader_of(local, "layer.wieght", "unlike") as reader, pytest.raises(UnknownTensor, match=expected):
        reader.next()


def test_a_store_that_was_begun_and_has_nothing_is_followed_at_once(local: LocalStore) -> None:
    local.connect(rank=0).commit()
    with reader_of(local) as reader:
        version = reader.next()
    assert (version.number, version.values) == (1, {})


def test_behind_a_relay_it_is_the_followed_store_that_has_begun(local: LocalStore) -> None:
    trainer = local.connect(rank=0)
    trainer.create("early", ONES, rule="reduce", group=7)
    with LocalStore() as near, reader_of(local) as passing, reader_of(near, "early", "late") as reader:
        relay = Relay(near.connect(rank=0))
        relay.publish(passing.next())
        with pytest.raises(DeadlineExceeded, match="'late'"):
            reader.next(timeout_s=0.1)
        trainer.publish({"late": ONES})
        relay.publish(passing.next())
        assert reader.next().values.keys() == {"early", "late"}
        with reader_of(near, "later") as mistaken, pytest.raises(UnknownTensor, match="'later'"):
            mistaken.next()
