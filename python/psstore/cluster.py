"""A training script that is told by flags which task it is: `--ps_hosts --worker_hosts --job_name --task_index`.

>>> from psstore import cluster
>>> with cluster.from_flags() as store:  # on a ps host it serves, and ends the program
...     train(store)

The same script runs under `psstore run`, with the flags or without, and where TF_CONFIG says it all. docs/clusters.md
has the whole picture.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from psstore.client.connect import connect
from psstore.client.store import Store
from psstore.config import read_token, worker_environment
from psstore.errors import BadArgument
from psstore.launch import task
from psstore.launch.cluster import Cluster
from psstore.launch.cluster_sources import find_cluster, parse_flags
from psstore.types import Consistency

__all__ = ["Cluster", "from_flags", "parse_known_args"]

_log = logging.getLogger("psstore.cluster")


def from_flags(
    argv: Sequence[str] | None = None,
    *,
    mode: str = "sync",
    staleness: int = 2,
    backups: int = 1,
    timeout_s: float = 30.0,
    wait_s: float | None = None,
    connect_timeout_s: float = task.CONNECT_S,
) -> Store:
    """This task's store, or on a ps task the end of the program: it serves until the workers are done, then exits.

    Reads `--ps_hosts`, `--worker_hosts`, `--job_name`, `--task_index` and `--token_file` (underscores or dashes) from
    `argv` (default: the command line) and leaves all else, and the list itself, alone; what no flag says is taken
    from TF_CONFIG. Without either it is psstore.connect(), so that the script runs under `psstore run`, too.

    * ps: never returns. Raises SystemExit: 0 when all workers have joined and left, 1 if the store is lost or
      workers are and don't come back, 3 if it can't start; a sentence about it is logged. Needs the main thread.
    * worker: joined, with its index as rank. CUDA_VISIBLE_DEVICES is set, if it is not and there are GPUs: workers on
      one host take turns. Close the store in the end: the ps tasks wait for that.
    * evaluator: a client's store, which reads.

    `mode`, `staleness`, `backups`: how consistent training is, as for `psstore run`; only ps tasks read them.
    `timeout_s`, `wait_s`: as for psstore.connect. `connect_timeout_s`: how long to wait for the ps tasks to start.
    Blocks. Raises BadArgument, StoreUnreachable, AuthFailed, RankTaken.
    """
    flags, _ = parse_flags(sys.argv[1:] if argv is None else argv)
    cluster = _find(flags)
    if cluster is None:
        return _without_cluster(timeout_s=timeout_s, wait_s=wait_s)
    token_file = flags["token_file"]
    if cluster.job_name == "ps":
        consistency = Consistency.of_mode(mode, num_workers=cluster.num_workers, staleness=staleness, backups=backups)
        raise SystemExit(task.serve(cluster, consistency=consistency, token_file=token_file, environ=os.environ))
    gpu = task.task_environ(cluster, os.environ).get("CUDA_VISIBLE_DEVICES")
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    return task.join(
        cluster,
        say=_log.warning,
        token=None if token_file is None else read_token(Path(token_file)),
        timeout_s=timeout_s,
        wait_s=wait_s,
        connect_timeout_s=connect_timeout_s,
    )


def parse_known_args(argv: Sequence[str] | None = None) -> tuple[Cluster | None, list[str]]:
    """(the task that this process is, the arguments that are the script's own), as argparse's method of that name.

    None: neither flags nor TF_CONFIG speak of a cluster. Raises BadArgument.
    """
    flags, rest = parse_flags(sys.argv[1:] if argv is None else argv)
    return _find(flags), rest


def _find(flags: dict[str, str | None]) -> Cluster | None:
    found = find_cluster(flags, os.environ)
    for note in found.notes:
        _log.warning("%s", note)
    return found.cluster


def _without_cluster(*, timeout_s: float, wait_s: float | None) -> Store:
    if worker_environment().url is None:
        raise BadArgument(
            "no cluster: give --ps_hosts, --worker_hosts, --job_name and --task_index, or set TF_CONFIG; on one host,"
            " `psstore run --shards 2 --workers 2 SCRIPT` needs neither"
        )
    return connect(timeout_s=timeout_s, wait_s=wait_s)
