"""`psstore run`: a store and its workers, started and torn down together."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Annotated

import typer

from psstore.cli.choices import Mode, consistency_of, fail


def run(
    command: Annotated[list[str], typer.Argument(metavar="SCRIPT [ARGS]", help="Training script and its arguments.")],
    shards: Annotated[int, typer.Option(min=1, help="Shard processes of the store.")] = 2,
    workers: Annotated[int, typer.Option(min=1, help="Worker processes.")] = 2,
    mode: Annotated[Mode, typer.Option(help="Consistency.")] = Mode.sync,
    staleness: Annotated[int, typer.Option(min=0, help="ssp: rounds a worker may be ahead of the slowest.")] = 2,
    backups: Annotated[int, typer.Option(min=0, help="backup: late workers that a round does without.")] = 1,
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is a module, as in python -m.")] = False,
) -> None:
    """Start a store and the workers that train on it; end all when they are done, or when one fails.

    Each worker runs SCRIPT with this Python and finds RANK, WORLD_SIZE, LOCAL_RANK and PSSTORE_URL in its
    environment, so that psstore.connect() needs no arguments; where there are GPUs, CUDA_VISIBLE_DEVICES gives each
    worker one. Its output is shown line by line, with its rank in front.
    """
    from psstore.launch.environment import find_gpus
    from psstore.launch.job import Job, run_job
    from psstore.launch.lines import Prefixer

    if not module and not os.path.isfile(command[0]):
        fail(f"there is no script {command[0]!r} here; for a module, use: psstore run -m {command[0]}")
    if workers > 1 and "OMP_NUM_THREADS" not in os.environ:
        typer.echo("psstore run: OMP_NUM_THREADS is 1 in each worker; set it to choose otherwise", err=True)
    job = Job(
        command=[sys.executable, "-u", *(["-m"] if module else []), *command],
        num_shards=shards,
        consistency=consistency_of(mode, workers=workers, backups=backups, staleness=staleness),
        environ=os.environ,
        gpus=find_gpus(os.environ),
    )
    deliver = Prefixer(out=sys.stdout.buffer, err=sys.stderr.buffer, colour=sys.stdout.isatty())
    outcome = asyncio.run(run_job(job, deliver=deliver))
    if outcome.reason is not None:
        fail(f"{outcome.reason}; everything was stopped", exit_code=outcome.exit_code)
    raise typer.Exit(outcome.exit_code)
