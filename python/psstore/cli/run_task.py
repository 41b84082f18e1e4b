"""`psstore run` for one task of a cluster: this process becomes it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NoReturn

import typer

from psstore.cli.choices import fail
from psstore.config import worker_environment
from psstore.errors import PsstoreError
from psstore.exit_codes import EXIT_MISSING
from psstore.launch.cluster import Cluster
from psstore.launch.cluster_sources import find_cluster
from psstore.launch.task import await_store, serve, task_environ
from psstore.types import Consistency


def find_task(flags: Mapping[str, str | None], *, is_local: bool) -> Cluster | None:
    """The task that flags or TF_CONFIG make of this process; None: all is to run on this host.

    `is_local`: a number of shards or workers was given. Ends the command with a sentence if it can't be both.
    """
    try:
        found = find_cluster(flags, os.environ)
    except PsstoreError as error:
        fail(error.message)
    for note in found.notes:
        typer.echo(f"psstore run: {note}", err=True)
    if found.cluster is not None and is_local:
        fail("--shards and --workers are for a run on one host; the hosts of a cluster (flags or TF_CONFIG) say it all")
    return found.cluster


def run_task(cluster: Cluster, command: Sequence[str], *, consistency: Consistency) -> NoReturn:
    """A ps task serves and ends the command; any other becomes `command`, once all ps tasks serve."""
    if cluster.job_name == "ps":
        raise typer.Exit(serve(cluster, consistency=consistency, token_file=None, environ=os.environ))
    environ = task_environ(cluster, os.environ)
    try:
        await_store(
            cluster,
            token=worker_environment().credentials.secret(),
            say=lambda text: typer.echo(f"psstore run: {text}", err=True),
        )
    except PsstoreError as error:
        fail(error.message, exit_code=EXIT_MISSING)
    os.execve(command[0], list(command), environ)
