"""The timer between an event loop and a machine that says when it wants to be called."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import uvloop

from psstore.net.deadline_timer import DeadlineTimer


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_alarm_whose_time_has_come_may_be_updated_again_before_it_rings(
    loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    running = loop()
    wakes: list[float | None] = [0.0]
    rung = running.create_future()

    def tick(now: float) -> None:
        wakes[0] = None
        rung.set_result(now)

    timer = DeadlineTimer(running, next_wake=lambda: wakes[0], tick=tick)
    timer.update()
    timer.update()
    assert running.run_until_complete(asyncio.wait_for(rung, 10.0)) > 0.0
    running.close()
