"""`psstore demo --chaos`: the training once more, on shards with standbys. Every two seconds one of its processes is
killed, a shard's leader, a standby or a worker; it must go on by itself, and end with the same bytes.

    train ─► SIGKILL to one ─► a standby leads, or it is started again ─► … ─► SHA-256 of what it ends with
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.console import Console

from psstore.cli.choices import fail
from psstore.cli.demo.display import Display
from psstore.cli.demo.messages import ChaosReport, Settings
from psstore.cli.demo.training import fail_for, job_of
from psstore.cli.demo.weights import sha256_of
from psstore.client.connect import connect
from psstore.client.store_status import ShardStatus, look_at
from psstore.errors import PsstoreError
from psstore.exit_codes import EXIT_FAILED
from psstore.launch.job import Outcome, run_job
from psstore.launch.output import Line
from psstore.text import counted
from psstore.types import Consistency

KILL_EVERY_S = 2.0

LAST_PART = 0.95
"""How much of the training may be over when somebody is killed, who must have steps left to take."""

RESTARTS = 10_000
"""How often a worker may be started again: more often than any training is long."""

REJOIN_S = 60.0
"""How long the others wait for one that is started again."""

ASK_S = 1.0
"""How long the store is asked who leads; if it can't say, a shard is just being taken over."""


def train_through_chaos(
    console: Console, settings: Settings, *, rounds: int, num_shards: int, consistency: Consistency
) -> ChaosReport:
    """Ends the command if the training fails, or is over before anything was killed.

    Args:
        settings: of the training that was not disturbed, whose weights are written.
        rounds: that it had.
    """
    assert settings.weights_path is not None
    undisturbed = Path(settings.weights_path)
    disturbed = undisturbed.with_name("disturbed.npz")
    display = Display(
        console,
        how=f"again, with standbys · {num_shards} + {counted(num_shards, 'shard')}",
        num_workers=settings.num_workers,
        dataset=f"one process is killed every {KILL_EVERY_S:g} s",
    )
    job = job_of(
        msgspec.structs.replace(settings, weights_path=str(disturbed)),
        num_shards=num_shards,
        consistency=consistency,
        environ={**os.environ, "PSSTORE_STANDBYS": "1", "PSSTORE_REJOIN_S": f"{REJOIN_S:g}"},
        restarts=RESTARTS,
    )
    killer = _Killer(console, display, rounds=rounds, seed=settings.seed)

    async def run() -> Outcome:
        killing = asyncio.create_task(killer.run())
        try:
            return await run_job(job, deliver=killer.deliver)
        finally:
            killing.cancel()

    with display:
        outcome = asyncio.run(run())
    if outcome.exit_code != 0:
        fail_for(outcome)
    if not killer.killed:
        fail(
            f"the training was over in less than {KILL_EVERY_S:g} s, before anything was killed: ask for more --epochs",
            exit_code=EXIT_FAILED,
        )
    return ChaosReport(
        killed=tuple(killer.killed),
        longest_wait_s=round(killer.longest_wait_s, 2),
        sha256_undisturbed=sha256_of(undisturbed),
        sha256_disturbed=sha256_of(disturbed),
    )


class _Victim(NamedTuple):
    kind: str
    name: str
    process: int
    """Its id."""


class _Killer:
    """Kills one process after another, and says so."""

    def __init__(self, console: Console, display: Display, *, rounds: int, seed: int) -> None:
        self.killed: list[str] = []
        self.longest_wait_s = 0.0
        self._console = console
        self._display = display
        self._last_round = LAST_PART * rounds
        self._random = random.Random(seed)
        self._moved_at: float | None = None
        """When workers last told of a step."""

    def deliver(self, line: Line) -> None:
        before = self._display.round
        self._display.deliver(line)
        if self._display.round > before:
            now = time.monotonic()
            if self._moved_at is not None:
                self.longest_wait_s = max(self.longest_wait_s, now - self._moved_at)
            self._moved_at = now

    async def run(self) -> None:
        while self._display.round <= self._last_round:
            await asyncio.sleep(KILL_EVERY_S)
            await self._kill_one()

    async def _kill_one(self) -> None:
        """One of those that can be done without: none yet where the training does not run, no leader whose standby has
        not all that it has."""
        url = self._display.store
        if url is None or self._display.round == 0:
            return
        with suppress(PsstoreError):
            shards = await asyncio.to_thread(_ask, url)
            victims = [*_of_shards(shards), *self._workers()]
            if not victims or self._display.round > self._last_round:
                return
            # Each kind as often as the others, however many there are of it.
            kind = self._random.choice(sorted({one.kind for one in victims}))
            self._kill(self._random.choice([one for one in victims if one.kind == kind]))

    def _workers(self) -> list[_Victim]:
        return [_Victim("worker", f"worker {rank}", process) for rank, process in sorted(self._display.workers.items())]

    def _kill(self, one: _Victim) -> None:
        with suppress(ProcessLookupError):
            os.kill(one.process, signal.SIGKILL)
            self.killed.append(one.name)
            self._display.lose(one.process)
            self._console.print(
                f"[bold red]killed[/] {one.name} with SIGKILL at step {self._display.round}",
                soft_wrap=True,
                highlight=False,
            )


def _ask(url: str) -> tuple[ShardStatus, ...]:
    with connect(url, role="client", connect_timeout_s=ASK_S, timeout_s=ASK_S) as store:
        return look_at(store).shards


def _of_shards(shards: tuple[ShardStatus, ...]) -> Iterator[_Victim]:
    """Leaders that a standby may follow, and all standbys."""
    for shard in shards:
        if shard.standbys:
            yield _Victim("leader", f"leader of shard {shard.shard}", shard.process)
    leaders = {shard.process for shard in shards}
    yield from (_Victim("standby", "a standby", pid) for pid in _siblings(shards[0].process) if pid not in leaders)


def _siblings(process: int) -> list[int]:
    """All children of its parent, by /proc."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
        parent = next(line.split()[1] for line in status.splitlines() if line.startswith("PPid:"))
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text()
    except OSError:  # it has died meanwhile
        return []
    return [int(child) for child in children.split()]
