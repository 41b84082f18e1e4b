"""When a job counts as done, as lost, or as still coming: from what shard 0 counts."""

from __future__ import annotations

from psstore.server.job_state import REMIND_S, JobState, Verdict


def counters(live: str = "", lost: str = "", left: str = "") -> dict[str, int | float | str]:
    return {"ranks_live": live, "ranks_lost": lost, "ranks_left": left, "shard": 0}


def job_state(num_workers: int = 3) -> JobState:
    return JobState(num_workers=num_workers, patience_s=10.0)


def test_a_job_is_done_when_every_announced_worker_has_left() -> None:
    state = job_state()
    for now, seen in enumerate(
        (counters(), counters(live="0"), counters(live="1", left="0"), counters(left="0,1"), counters("2", left="0,1"))
    ):
        assert state.update(seen, now) is None
    assert state.update(counters(left="0,1,2"), 9.0) == Verdict(None)


def test_workers_that_have_not_joined_are_waited_for_without_an_end() -> None:
    state = job_state()
    assert state.update(counters(), 0.0) is None
    assert state.update(counters(left="0,1"), 1e6) is None


def test_lost_workers_are_waited_for_while_others_work() -> None:
    state = job_state()
    assert state.update(counters(live="0", lost="1"), 0.0) is None
    assert state.update(counters(live="0", lost="1"), 1e6) is None


def test_lost_workers_may_come_back_for_as_long_as_patience_lasts() -> None:
    state = job_state()
    assert state.update(counters(lost="1", left="0"), 0.0) is None
    assert state.update(counters(live="1", left="0"), 9.0) is None
    assert state.update(counters(lost="1", left="0"), 11.0) is None
    assert state.update(counters(lost="1", left="0"), 20.9) is None
    verdict = state.update(counters(lost="1", left="0"), 21.0)
    assert verdict is not None
    assert verdict.reason is not None
    assert verdict.reason.startswith("rank 1 went without leaving, and nobody came back within 10 s")


def test_a_loss_is_said_at_once_and_the_rest_now_and_then() -> None:
    state = job_state()
    assert state.reminder(counters(live="0"), 0.0) is None
    assert state.reminder(counters(live="0"), REMIND_S) == "waiting for ranks 1, 2 (not joined yet)"
    assert state.reminder(counters(live="0"), REMIND_S + 1) is None
    lost = counters(live="0", lost="1")
    assert state.reminder(lost, REMIND_S + 2) == "waiting for rank 1 (lost) and rank 2 (not joined yet)"
    assert state.reminder(lost, REMIND_S + 3) is None
    assert state.reminder(lost, 2 * REMIND_S + 2) == "waiting for rank 1 (lost) and rank 2 (not joined yet)"
    assert state.reminder(counters(live="0,1,2"), 9 * REMIND_S) is None


def test_workers_that_come_and_go_are_done_when_all_who_came_have_left() -> None:
    state = JobState(num_workers=8, patience_s=10.0, elastic=True)
    for now, seen in enumerate((counters(), counters(live="0,1"), counters(live="1", left="0"))):
        assert state.update(seen, now) is None
    assert state.reminder(counters(live="1", left="0"), 1e6) is None, "nobody has to come"
    assert state.update(counters(left="0,1"), 9.0) == Verdict(None)
