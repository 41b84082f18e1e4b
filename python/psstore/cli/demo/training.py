"""One training of the demo: a store and its workers, from start to end, in front of the user."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from typing import NoReturn

import msgspec

from psstore.cli.choices import fail
from psstore.cli.demo.display import LiveLines
from psstore.cli.demo.messages import Settings
from psstore.launch.environment import find_gpus
from psstore.launch.job import Job, Outcome, run_job
from psstore.types import Consistency


def job_of(
    settings: Settings,
    *,
    num_shards: int,
    consistency: Consistency,
    environ: Mapping[str, str] = os.environ,
    restarts: int = 0,
) -> Job:
    """One CPU thread per worker: they are as many as the user wants cores for."""
    described = msgspec.json.encode(settings).decode()
    return Job(
        command=[sys.executable, "-u", "-m", "psstore.cli.demo.worker", described],
        num_shards=num_shards,
        consistency=consistency,
        environ=environ,
        gpus=find_gpus(environ),
        restarts=restarts,
    )


def train(job: Job, display: LiveLines) -> None:
    """Ends the command if the training fails."""
    with display:
        outcome = asyncio.run(run_job(job, deliver=display.deliver))
    if outcome.exit_code != 0:
        fail_for(outcome)


def fail_for(outcome: Outcome) -> NoReturn:
    fail(f"{outcome.reason}; everything was stopped", exit_code=outcome.exit_code)
