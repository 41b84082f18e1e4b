"""`psstore demo --crash`: the training once more, with checkpoints. In the middle of it all is killed, and the same is
started with another number of shards: it goes on from the last checkpoint, and must end with the same bytes.

    train ─► SIGKILL to the store and the workers ─► train, as before but for the shards ─► SHA-256 of what it ends with
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path

import msgspec
from rich.console import Console

from psstore.checkpoint.place import CheckpointPlace, open_place
from psstore.cli.choices import fail
from psstore.cli.demo.display import Display
from psstore.cli.demo.messages import CrashReport, Settings
from psstore.cli.demo.training import fail_for, job_of, train
from psstore.cli.demo.weights import sha256_of
from psstore.errors import CheckpointNotFound
from psstore.exit_codes import EXIT_FAILED
from psstore.launch.environment import checkpoint_environ
from psstore.launch.job import Job, run_job
from psstore.text import counted
from psstore.types import Consistency

MIN_ROUNDS = 8
"""In a training that has a middle."""

LOOK_S = 0.02
"""How often it is looked whether it is time to kill: some steps of a worker."""


PATIENCE_S = 60.0
"""For a checkpoint, while workers wait: they take a fraction of a second."""


def train_and_crash(
    console: Console, settings: Settings, *, rounds: int, num_shards: int, consistency: Consistency
) -> CrashReport:
    """Ends the command if a training fails, or does not go on where it was to.

    Args:
        settings: of the training that was not interrupted, whose weights are written. Checkpoints go beside them.
        rounds: that it had.
    """
    if rounds < MIN_ROUNDS:
        fail(f"the training has {counted(rounds, 'step')}, too few to be killed in the middle: ask for more --epochs")
    assert settings.weights_path is not None
    uninterrupted, went_on = Path(settings.weights_path), Path(settings.weights_path).with_name("went_on.npz")
    place = open_place(str(uninterrupted.with_name("checkpoints"))).place
    environ = {**os.environ, **checkpoint_environ(place.storage.url, every=str(rounds // 3))}
    command = msgspec.structs.replace(settings, weights_path=str(went_on))
    job = partial(job_of, consistency=consistency, environ=environ)
    display = partial(Display, console, num_workers=settings.num_workers)

    before = display(how=f"again, with checkpoints · {counted(num_shards, 'shard')}", dataset="to be killed")
    to_be_killed = msgspec.structs.replace(command, hold_after=3 * rounds // 4)
    num_killed = _train_and_kill(
        job(to_be_killed, num_shards=num_shards), before, place, between=(rounds // 2, 3 * rounds // 4)
    )
    latest = _latest(place)
    if latest == 0:
        fail(f"no checkpoint was written within {PATIENCE_S:g} s", exit_code=EXIT_FAILED)
    console.print(
        f"[bold red]killed[/] with SIGKILL at step {before.round} of {rounds}: {num_killed} processes, all there were",
        soft_wrap=True,
        highlight=False,
    )
    after = display(
        how=f"the same · {counted(num_shards + 1, 'shard')}", dataset=f"from the checkpoint of version {latest}"
    )
    train(job(command, num_shards=num_shards + 1), after)
    went_on_from = after.results[0].done_before
    if went_on_from != latest:
        fail(f"it went on after step {went_on_from}, and not from the checkpoint of {latest}", exit_code=EXIT_FAILED)
    return CrashReport(
        killed_at=before.round,
        num_killed=num_killed,
        went_on_from=went_on_from,
        shards_before=num_shards,
        shards_after=num_shards + 1,
        sha256_uninterrupted=sha256_of(uninterrupted),
        sha256_went_on=sha256_of(went_on),
    )


def _train_and_kill(job: Job, display: Display, place: CheckpointPlace, *, between: tuple[int, int]) -> int:
    """Kills all once there is a checkpoint, and workers are past it and past the first of the two rounds; after the
    second one they wait. Returns how many processes were killed. Ends the command if the training ends before."""
    not_before, held_after = between

    async def run() -> int:
        num_killed, held_s = 0, 0.0
        running = asyncio.create_task(run_job(job, deliver=display.deliver))
        while not running.done():
            await asyncio.wait([running], timeout=LOOK_S)
            held_s += LOOK_S if display.round >= held_after else 0.0
            is_time = display.round >= not_before and 0 < _latest(place) <= display.round
            if num_killed == 0 and (is_time or held_s > PATIENCE_S):
                num_killed = kill_all(job.environ)
        if num_killed == 0:
            fail_for(running.result())
        return num_killed

    with display:
        return asyncio.run(run())


def _latest(place: CheckpointPlace) -> int:
    """0: there is no checkpoint yet."""
    try:
        return place.latest()
    except CheckpointNotFound:
        return 0


def kill_all(environ: Mapping[str, str]) -> int:
    """SIGKILL to every process of the run that writes its checkpoints where `environ` says, at once, as by a power cut:
    the store, its shards and the workers, which are in several sessions and groups. Returns how many they were, when
    they are gone. They are stopped first, so that none lives to see another one dead, and ends in order."""
    marker = f"PSSTORE_CHECKPOINT={environ['PSSTORE_CHECKPOINT']}".encode()
    killed: set[int] = set()
    while found := _processes_with(marker):
        for number, pid in product((signal.SIGSTOP, signal.SIGKILL), found):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        killed.update(found)
        time.sleep(LOOK_S)
    return len(killed)


def _processes_with(marker: bytes) -> list[int]:
    """Whose environment has it, by /proc: none of those that are dead and not waited for, whose memory is gone."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it is another user's, or has ended meanwhile
            if marker in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found
