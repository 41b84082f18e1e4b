"""learner_loss, learner_time and stale_learners: that learners take a course, and what is told of it. Nothing here
looks at how long anything took."""

from __future__ import annotations

import argparse
import math
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing import Pipe

import pytest
import torch
from bench import learner_gpt, learner_loss, learner_time, learner_ways, stale_learners
from bench.learner_course import Course, Seen, learn
from bench.learner_ways import DATA_PARALLEL, DILOCO, LEARNERS, QUORUM, Way


@pytest.fixture
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of a few hundred weights, on a text of two words, with a round every other step."""
    for name, value in (("WIDTH", 8), ("BLOCKS", 1), ("LENGTH", 4), ("LOOKED_AT", 8)):
        monkeypatch.setattr(learner_gpt, name, value)
    monkeypatch.setattr(learner_gpt, "read", lambda: torch.tensor(list(b"over and " * 100)))
    monkeypatch.setattr(learner_ways, "EVERY", 2)


@pytest.mark.usefixtures("_tiny")
@pytest.mark.parametrize("way", [DATA_PARALLEL, QUORUM], ids=lambda way: way.name)
def test_learners_take_a_course_and_the_first_one_tells_of_it(way: Way) -> None:
    course = Course(num_steps=21, num_windows=4, learning_rate=3e-2, schedule="constant", looks_every=10)
    ours, theirs = Pipe(duplex=False)
    flags = [False] * (LEARNERS + 1)
    with way.serve() as where, ThreadPoolExecutor(LEARNERS) as learners:
        links = (theirs, None, None, None)
        list(learners.map(lambda rank: learn(way, where, rank, course, flags, links[rank]), range(LEARNERS)))
    seen = [ours.recv() for _ in range(3)]
    assert not ours.poll()
    assert [one.steps for one in seen] == [10, 20, 21]
    assert 0.0 < seen[0].seconds < seen[1].seconds
    assert 0 < seen[0].num_bytes < seen[1].num_bytes
    assert seen[-1].loss < seen[0].loss


def test_losses_and_bytes_are_parts_of_data_parallel_trainings() -> None:
    found = {DATA_PARALLEL.name: at_the_end(1.5, 8000), DILOCO.name: at_the_end(1.515, 40)}
    ours = learner_loss.rows(found)[1]
    assert ours == [DILOCO.name, "1.5150", "1.0100", "1", "1/200"]


def at_the_end(loss: float, num_bytes: int) -> Sequence[Seen]:
    return [Seen(steps=10, seconds=1.0, num_bytes=num_bytes, loss=loss)]


def test_peers_that_are_not_installed_are_left_out_and_a_loss_that_is_not_reached_has_no_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(learner_ways, "find_spec", lambda package: None)
    monkeypatch.setattr(
        learner_time,
        "seen",
        lambda case, way, loss: [Seen(steps=50, seconds=8.0, num_bytes=400, loss=loss if way == DILOCO else 9.0)],
    )
    report = learner_time.learner_time(argparse.Namespace(quick=True, loss=None, fragments=1))
    assert report.notes == ["torchft is not installed: left out", "hivemind is not installed: left out"]
    for table in report.tables:
        assert table.rows[0] == [DILOCO.name, 8.0, 1.0, None, "50", "2"]
        assert table.rows[1][1:3] == [None, None]
        assert len(table.rows) == 2


@pytest.mark.usefixtures("_tiny")
@pytest.mark.parametrize(("quorum", "fragments"), [(LEARNERS, 1), (LEARNERS - 1, 1), (LEARNERS - 1, 2), (1, 1)])
def test_stale_learners_take_turns_by_a_clock_that_is_played(
    quorum: int, fragments: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stale_learners, "EVERY", 2)
    way = stale_learners.Way(quorum, partial(stale_learners.delayed, every=LEARNERS), fragments)
    taken, again = (stale_learners.looks(way, (1.0, 1.0, 1.0, 4.0), seed=1, steps=24) for _ in range(2))
    assert taken == again
    assert taken[-1].steps == 24
    assert [look.units for look in taken] == sorted(look.units for look in taken)
    in_a_round = (taken[1].steps - taken[0].steps) * fragments // 2
    assert in_a_round == quorum
    assert taken[0].units > 7.0 if quorum == LEARNERS else taken[0].units < 3.0, "whom a round waits for"


@pytest.mark.usefixtures("_tiny")
def test_what_is_damped_by_its_age_is_taken_with_a_lower_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stale_learners, "EVERY", 2)
    shared: list[tuple[int, float]] = []

    class Noting(stale_learners.Learner):
        def share(self, age: int) -> threading.Thread:
            thread = super().share(age)
            shared.append((age, self.optimizer.outer.param_groups[0]["lr"]))
            return thread

    monkeypatch.setattr(stale_learners, "Learner", Noting)
    damped = stale_learners.WAYS["async, no momentum, lr / age"]
    stale_learners.looks(damped, (1.0, 1.0, 1.0, 4.0), seed=1, steps=32)
    assert max(age for age, _ in shared) > LEARNERS, "the slow one's"
    assert all(lr == stale_learners.RATE / age for age, lr in shared)


def test_a_loss_that_stale_learners_do_not_reach_has_no_time() -> None:
    looks = [stale_learners.Look(units=10.0, steps=40, loss=3.0), stale_learners.Look(units=20.0, steps=80, loss=2.0)]
    lost = [stale_learners.Look(units=10.0, steps=40, loss=math.nan)]
    first, second = stale_learners.rows({"all": [looks], "async": [lost]}, 2.5)
    assert first == ["all", "2.000", "20", 1.0]
    assert second == ["async", "diverges", "not reached", None]
