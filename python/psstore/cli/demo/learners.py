"""`psstore demo --learners 4`: learners of DiLoCo, which each take their own steps, in front of the user; with `--kill`
one of them is killed every two seconds, and another one joins in its place. The command's side is first, and then the
learner's, which is started by

python -m psstore.cli.demo.learners SETTINGS-AS-JSON
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from contextlib import suppress

import msgspec
import torch
from rich.console import Console
from rich.panel import Panel
from torch import nn

import psstore
from psstore.cli.choices import fail
from psstore.cli.demo.data import Digits, load
from psstore.cli.demo.display import SPARK_WIDTH, Curve, LiveLines, done
from psstore.cli.demo.messages import LearnerProgress, WorkerBegan, emit, parse
from psstore.cli.demo.reporter import REPORT_S
from psstore.cli.demo.training import fail_for
from psstore.cli.demo.worker import seeded_model
from psstore.client.store import Store
from psstore.exit_codes import EXIT_FAILED
from psstore.launch.environment import find_gpus
from psstore.launch.job import Job, Outcome, run_job
from psstore.launch.output import Line
from psstore.text import counted
from psstore.types import Consistency

ROUNDS = 160
"""Until accuracy hardly grows; long enough for several learners to be killed."""

EVERY, FRAGMENTS = 8, 4
"""A fragment has its round after two steps."""

BATCH_IMAGES = 32

GRACE_S = 0.02
"""How long a round waits for the last learner, beyond the quorum."""

KILL_EVERY_S = 2.0

RESTARTS = 10_000
"""How often a learner may be started again: more often than any training is long."""


class LearnerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One run, as each learner gets it."""

    rounds: int
    seed: int


class LearnersReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run, as it is shown and as `--json` prints it."""

    shards: int
    learners: int
    rounds: int
    seed: int
    killed: tuple[int, ...]
    """Ranks, in order."""
    joined: int
    """Learners that have begun, those that were there first among them."""
    first_loss: float
    loss: float
    accuracy: float
    """The last that was told, of images that nobody trained on, as is the loss."""
    seconds: float
    """From the start of the first process to the end of the last learner."""


def train_learners(
    console: Console, *, shards: int, learners: int, seed: int, kill: bool, rounds: int = ROUNDS
) -> LearnersReport:
    """Ends the command if the training fails, or is over before anybody was killed who was to be."""
    settings = LearnerSettings(rounds=rounds, seed=seed)
    job = Job(
        command=[sys.executable, "-u", "-m", "psstore.cli.demo.learners", msgspec.json.encode(settings).decode()],
        num_shards=shards,
        consistency=Consistency.of_mode("backup", num_workers=learners, backups=learners // 2),
        environ={**os.environ, **({"PSSTORE_GRACE_S": f"{GRACE_S:g}", "PSSTORE_LOST": "drop"} if learners > 1 else {})},
        gpus=find_gpus(os.environ),
        restarts=RESTARTS if kill else 0,
    )
    began = time.perf_counter()
    display = LearnersDisplay(console, num_shards=shards, num_learners=learners, seed=seed)

    async def run() -> Outcome:
        killing = asyncio.create_task(display.kill_now_and_then()) if kill else None
        try:
            return await run_job(job, deliver=display.deliver)
        finally:
            if killing is not None:
                killing.cancel()

    with display:
        outcome = asyncio.run(run())
    if outcome.exit_code != 0:
        fail_for(outcome)
    if kill and not display.killed:
        fail(f"the training was over in less than {KILL_EVERY_S:g} s, before anybody was killed", exit_code=EXIT_FAILED)
    first, last = display.first, display.last
    assert first is not None, "learners that have ended have told where they are"
    assert last is not None
    return LearnersReport(
        shards=shards,
        learners=learners,
        rounds=settings.rounds,
        seed=seed,
        killed=tuple(display.killed),
        joined=display.joined,
        first_loss=round(first.loss, 4),
        loss=round(last.loss, 4),
        accuracy=round(last.accuracy, 4),
        seconds=round(time.perf_counter() - began, 2),
    )


class LearnersDisplay(LiveLines):
    """Shows the training: a line for each learner in a terminal, and one for each that dies or joins."""

    def __init__(self, console: Console, *, num_shards: int, num_learners: int, seed: int) -> None:
        super().__init__(
            console,
            title=(
                f"[bold]psstore demo --learners[/] · {counted(num_shards, 'shard')} ·"
                f" {counted(num_learners, 'learner')} · each fragment shared every {EVERY} steps"
            ),
            of="learner",
            num_processes=num_learners,
        )
        self.first: LearnerProgress | None = None
        self.last: LearnerProgress | None = None
        """What any learner told first, and last."""
        self.joined = 0
        self.killed: list[int] = []
        self._there: dict[int, int] = {}
        """Process ids of those that train, by rank."""
        self._random = random.Random(seed)
        self._tenths = 0
        """How many of all rounds were told, outside a terminal."""
        self._curves = [Curve() for _ in range(num_learners)]

    def deliver(self, line: Line) -> None:
        event = None if line.is_error else parse(line.text)
        match event:
            case WorkerBegan():
                self._there[event.rank] = event.process
                self.joined += 1
                self._print(f"learner {event.rank} joined")
            case LearnerProgress():
                self._show(event)
            case None:
                self._pass_on(line)

    async def kill_now_and_then(self) -> None:
        """Kills one learner every two seconds, if all others are there, or all but one of many."""
        num_learners = len(self._tasks)
        while True:
            await asyncio.sleep(KILL_EVERY_S)
            if len(self._there) < min(num_learners, max(2, num_learners - 1)):
                continue
            rank = self._random.choice(sorted(self._there))
            with suppress(ProcessLookupError):
                os.kill(self._there.pop(rank), signal.SIGKILL)
                self.killed.append(rank)
                self._progress.update(self._tasks[rank], status="[bold red]killed")
                self._print(f"[bold red]killed[/] learner {rank} with SIGKILL")

    def _show(self, event: LearnerProgress) -> None:
        self.first = self.first or event
        self.last = event
        if event.round >= event.rounds:
            self._there.pop(event.rank, None)  # it is done
        curve = self._curves[event.rank]
        curve.add(event.round / event.rounds, event.loss)
        self._progress.update(
            self._tasks[event.rank],
            total=event.rounds,
            completed=event.round,
            status=(
                f"round {event.round:>4}/{event.rounds}  loss {event.loss:.3f} [green]{curve!s:<{SPARK_WIDTH}}[/]"
                f" {event.accuracy:.1%} right"
            ),
        )

        if not self._console.is_terminal and 10 * event.round // event.rounds > self._tenths:
            self._tenths = 10 * event.round // event.rounds
            self._print(f"round {event.round}/{event.rounds}  loss {event.loss:.3f}  {event.accuracy:.1%} right")


def learners_summary(report: LearnersReport) -> Panel:
    return done(
        [
            ("loss", f"{report.first_loss:.3f} → [bold green]{report.loss:.3f}[/] on images not trained on"),
            ("accuracy", f"{report.accuracy:.2%} of them"),
            ("learners", f"{report.joined} joined, {len(report.killed)} were killed"),
            ("rounds", f"{report.rounds}, of a quarter of the weights each"),
            ("time", f"{report.seconds:.1f} s"),
        ]
    )


# ---- the learner ----


def train(store: Store, settings: LearnerSettings) -> None:
    rank = store.rank
    assert rank is not None, "a store is joined as a worker unless it is told otherwise"
    digits = load(None)
    model = seeded_model(digits, settings.seed)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = psstore.torch.DiLoCo(model, inner, store, every=EVERY, fragments=FRAGMENTS)
    emit(WorkerBegan(rank=rank, process=os.getpid(), store=None))
    drawn = torch.Generator().manual_seed(os.getpid())
    reported = -REPORT_S
    while True:
        is_over = store.version >= settings.rounds
        if is_over or time.perf_counter() - reported >= REPORT_S:
            reported = time.perf_counter()
            _tell(model, digits, settings, rank=rank, version=store.version)
        if is_over:
            return
        chosen = torch.randint(len(digits.train_labels), (BATCH_IMAGES,), generator=drawn)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(digits.train_images[chosen]), digits.train_labels[chosen])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


@torch.no_grad()
def _tell(model: nn.Module, digits: Digits, settings: LearnerSettings, *, rank: int, version: int) -> None:
    scores = model(digits.test_images)
    emit(
        LearnerProgress(
            rank=rank,
            round=version,
            rounds=settings.rounds,
            loss=nn.functional.cross_entropy(scores, digits.test_labels).item(),
            accuracy=(scores.argmax(1) == digits.test_labels).float().mean().item(),
        )
    )


def main() -> None:
    torch.set_num_threads(1)
    with psstore.connect() as store:
        train(store, msgspec.json.decode(sys.argv[1], type=LearnerSettings))


if __name__ == "__main__":
    main()
