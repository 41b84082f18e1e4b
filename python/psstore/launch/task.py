"""What one task of a cluster does: a ps task serves its shard, a worker finds the store and its own place in it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import TextIO

from psstore.client.connect import connect
from psstore.client.store import Store
from psstore.config import config_path, resolve
from psstore.errors import PsstoreError, StoreUnreachable
from psstore.exit_codes import EXIT_MISSING
from psstore.launch.cluster import Cluster
from psstore.launch.environment import find_gpus, worker_environ
from psstore.server import logs
from psstore.server.settings import ServerSettings
from psstore.server.site import tcp_address
from psstore.server.supervisor import Supervisor
from psstore.types import UNBOUNDED, Consistency

CONNECT_S = 300.0
"""How long a worker waits for the ps tasks: schedulers start the hosts of a job minutes apart."""

ATTEMPT_S = 5.0
"""One of the attempts in that time."""

Say = Callable[[str], None]
"""Gets a sentence for the user."""


def serve(
    cluster: Cluster,
    *,
    consistency: Consistency,
    token_file: str | None,
    environ: Mapping[str, str],
    out: TextIO = sys.stdout,
) -> int:
    """Runs this ps task until the workers are done. Returns the exit status of psstore-server, whose settings it
    takes from the environment and the config file, too. Needs the main thread: it takes signals."""
    try:
        flags = {**_server_flags(cluster, consistency), "token_file": token_file}
        resolved = resolve(ServerSettings, flags=flags, file=config_path(None, environ), environ=environ)
        settings = resolved.settings
        logs.configure(who=f"ps task {cluster.task_index}", level=settings.log_level, form=settings.log_format)
        return Supervisor(settings, tcp=tcp_address(resolved)).run(out=out, ready_fd=None)
    except (PsstoreError, OSError) as error:
        print(f"psstore: ps task {cluster.task_index} can't start: {error}", file=sys.stderr)
        return EXIT_MISSING


def _server_flags(cluster: Cluster, consistency: Consistency) -> dict[str, object]:
    return {
        "shards_at": ",".join(cluster.ps_hosts),
        "shard_index": cluster.task_index,
        "until_done": True,
        "workers": consistency.num_workers,
        "quorum": consistency.quorum,
        "staleness": "unbounded" if consistency.staleness == UNBOUNDED else consistency.staleness,
    }


def join(
    cluster: Cluster,
    *,
    say: Say,
    token: bytes | None = None,
    timeout_s: float = 30.0,
    wait_s: float | None = None,
    connect_timeout_s: float = CONNECT_S,
) -> Store:
    """This worker's store, once all ps tasks serve; an evaluator's is a client's. Blocks.

    The times are psstore.connect's, but that `connect_timeout_s` is for all ps tasks together.
    Raises StoreUnreachable, AuthFailed, RankTaken, BadArgument.
    """
    is_worker = cluster.job_name == "worker"

    def attempt(patience_s: float) -> Store:
        return connect(
            cluster.url,
            role="worker" if is_worker else "client",
            rank=cluster.task_index if is_worker else None,
            num_workers=cluster.num_workers if is_worker else None,
            token=token,
            timeout_s=timeout_s,
            wait_s=wait_s,
            connect_timeout_s=patience_s,
        )

    return _patiently(attempt, connect_timeout_s, say)


def await_store(cluster: Cluster, *, say: Say, token: bytes | None, timeout_s: float = CONNECT_S) -> None:
    """Blocks until every ps task serves. Raises StoreUnreachable, AuthFailed."""

    def attempt(patience_s: float) -> Store:
        return connect(cluster.url, role="client", token=token, connect_timeout_s=patience_s)

    _patiently(attempt, timeout_s, say).close()


def _patiently(attempt: Callable[[float], Store], patience_s: float, say: Say) -> Store:
    """Tries until it works; says once what is waited for."""
    begun, has_said = time.monotonic(), False
    while True:
        try:
            return attempt(min(ATTEMPT_S, patience_s))
        except StoreUnreachable as error:
            where = error.details.get("address")
            if not has_said:
                say(f"waiting for the ps task at {where}, for up to {patience_s:g} s")
                has_said = True
            if time.monotonic() - begun >= patience_s:
                raise StoreUnreachable(
                    f"the ps task at {where} did not serve within {patience_s:g} s: {error.message}", **error.details
                ) from None


def task_environ(cluster: Cluster, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of this task's script: as psstore run's workers have it, and TF_CONFIG with the cluster."""
    told = {**environ, "PSSTORE_URL": cluster.url, "TF_CONFIG": cluster.tf_config()}
    if cluster.job_name != "worker":
        return told
    return worker_environ(
        told,
        url=cluster.url,
        rank=cluster.task_index,
        num_workers=cluster.num_workers,
        local_place=cluster.local_place(),
        gpus=[] if "CUDA_VISIBLE_DEVICES" in environ else find_gpus(environ),
    )
