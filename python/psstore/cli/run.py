"""`psstore run`: a store and its workers, started and torn down together, or one task of a cluster of hosts."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from psstore.cli.choices import Mode, consistency_of, fail
from psstore.cli.standard_output import drop_output
from psstore.errors import PsstoreError
from psstore.types import Consistency, parse_workers

CLUSTER = "A cluster of hosts: the same command on each, but for its role"


def run(
    command: Annotated[list[str], typer.Argument(metavar="SCRIPT [ARGS]", help="Training script and its arguments.")],
    shards: Annotated[int | None, typer.Option(min=1, help="Shard processes of the store (default: 2).")] = None,
    workers: Annotated[
        str | None,
        typer.Option(
            help="Worker processes (default: 2). FEWEST:MOST starts the most, and goes on while the fewest are left."
        ),
    ] = None,
    mode: Annotated[Mode, typer.Option(help="Consistency.")] = Mode.sync,
    staleness: Annotated[int, typer.Option(min=0, help="ssp: rounds a worker may be ahead of the slowest.")] = 2,
    backups: Annotated[int, typer.Option(min=0, help="backup: late workers that a round does without.")] = 1,
    max_memory: Annotated[
        str | None,
        typer.Option(help="Memory that the store may take on a host, as 8GiB (default: four fifths of all)."),
    ] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(help="Folder or URL of the run's checkpoints: it begins with the latest, if there is one."),
    ] = None,
    checkpoint_every: Annotated[
        str | None, typer.Option("--checkpoint-every", help="So many decisions, as 500, or seconds (default: 300s).")
    ] = None,
    restarts: Annotated[
        int,
        typer.Option(
            min=0,
            help="How often each worker that fails is started again, while the others wait; with"
            " --checkpoint also the store, all from the latest one.",
        ),
    ] = 0,
    standbys: Annotated[
        int | None,
        typer.Option(min=0, max=1, help="Processes beside each shard: one that dies is led by its standby, at once."),
    ] = None,
    grace_s: Annotated[
        float,
        typer.Option("--grace-s", min=0, help="How long workers that are told to end may take: SIGTERM, then SIGKILL."),
    ] = 5.0,
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is a module, as in python -m.")] = False,
    ps_hosts: Annotated[
        str | None,
        typer.Option("--ps_hosts", "--ps-hosts", help="host:port of each ps task.", rich_help_panel=CLUSTER),
    ] = None,
    worker_hosts: Annotated[
        str | None,
        typer.Option("--worker_hosts", "--worker-hosts", help="Host of each worker.", rich_help_panel=CLUSTER),
    ] = None,
    job_name: Annotated[
        str | None,
        typer.Option("--job_name", "--job-name", help="ps, worker or evaluator.", rich_help_panel=CLUSTER),
    ] = None,
    task_index: Annotated[
        str | None,
        typer.Option("--task_index", "--task-index", help="Which of them, from 0 on.", rich_help_panel=CLUSTER),
    ] = None,
    token_file: Annotated[
        str | None,
        typer.Option("--token_file", "--token-file", help="File with the store's secret (or PSSTORE_TOKEN_FILE)."),
    ] = None,
) -> None:
    """Start a store and the workers that train on it; end all when they are done, or when one fails for good.

    Each worker runs SCRIPT with this Python and finds RANK, WORLD_SIZE, LOCAL_RANK and PSSTORE_URL in its
    environment, so that psstore.connect() needs no arguments, and MASTER_ADDR and MASTER_PORT, for a process group of
    torch's beside the store; where there are GPUs, CUDA_VISIBLE_DEVICES gives each worker one. Its output is shown
    line by line, with its rank in front.

    With --ps_hosts, --worker_hosts, --job_name and --task_index (or TF_CONFIG) it runs that one task of a cluster: a
    ps task serves a shard until the workers are done, a worker waits for the ps tasks and runs SCRIPT.
    """
    from psstore.cli.run_task import find_task, run_task
    from psstore.launch.environment import checkpoint_environ, restart_environ

    flags = {"ps_hosts": ps_hosts, "worker_hosts": worker_hosts, "job_name": job_name, "task_index": task_index}
    cluster = find_task(flags, is_local=shards is not None or workers is not None)
    if (cluster is None or cluster.job_name != "ps") and not module and not os.path.isfile(command[0]):
        fail(f"there is no script {command[0]!r} here; for a module, use: psstore run -m {command[0]}")
    if cluster is not None and restarts:
        fail(
            "--restarts is for a run on one host. In a cluster whoever started a task starts it again; let the other"
            " workers wait for that: PSSTORE_REJOIN_S=60 at the ps tasks"
        )
    if token_file is not None:
        os.environ["PSSTORE_TOKEN_FILE"] = token_file
    if max_memory is not None:
        os.environ["PSSTORE_MAX_MEMORY"] = max_memory  # as the server is told what has no flag here
    if standbys is not None:
        os.environ["PSSTORE_STANDBYS"] = str(standbys)
    os.environ.update(checkpoint_environ(checkpoint, every=checkpoint_every))
    os.environ.update(restart_environ(os.environ, restarts=restarts))
    interpreted = [sys.executable, "-u", *(["-m"] if module else []), *command]
    fewest, num_workers = _workers(workers) if cluster is None else (None, cluster.num_workers)
    consistency = consistency_of(mode, workers=num_workers, fewest=fewest, backups=backups, staleness=staleness)
    if cluster is None:
        _run_here(interpreted, num_shards=shards or 2, consistency=consistency, restarts=restarts, grace_s=grace_s)
    else:
        run_task(cluster, interpreted, consistency=consistency)


def _workers(text: str | None) -> tuple[int | None, int]:
    try:
        return parse_workers("--workers", text or "2")
    except PsstoreError as error:
        fail(error.message)


def _run_here(
    command: Sequence[str], *, num_shards: int, consistency: Consistency, restarts: int, grace_s: float
) -> NoReturn:
    """All of it on this host. Ends the program."""
    from psstore.launch.environment import find_gpus, meeting_environ
    from psstore.launch.job import Job, run_job
    from psstore.launch.output import Outlet, Prefixer

    if consistency.num_workers > 1 and "OMP_NUM_THREADS" not in os.environ:
        typer.echo("psstore run: OMP_NUM_THREADS is 1 in each worker; set it to choose otherwise", err=True)
    job = Job(
        command=command,
        num_shards=num_shards,
        consistency=consistency,
        environ={**os.environ, **meeting_environ(os.environ, free_port=_free_port)},
        gpus=find_gpus(os.environ),
        restarts=restarts,
        grace_s=grace_s,
    )
    out, err = (Outlet(stream.fileno()) for stream in (sys.stdout, sys.stderr))
    deliver = Prefixer(out=out, err=err, colour=sys.stdout.isatty())
    outcome = asyncio.run(run_job(job, deliver=deliver))
    try:
        sys.stdout.flush()
    except OSError:  # which is the reason
        drop_output()
    if outcome.reason is not None:
        fail(f"{outcome.reason}; everything was stopped", exit_code=outcome.exit_code)
    raise typer.Exit(outcome.exit_code)


def _free_port() -> int:
    """One of this host that nobody listens at now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
    return port
