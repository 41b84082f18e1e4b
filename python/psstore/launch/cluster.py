"""A cluster as the classic flags say it: who serves, who trains, and which of them this process is.

A value and its checks; where it comes from is in cluster_sources.py, what a task does in task.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import msgspec

from psstore.errors import BadArgument
from psstore.net.address import TcpAddress
from psstore.server.hosts import parse_hosts

JOBS = ("ps", "worker", "evaluator")
"""ps: one shard of the store. worker: trains. evaluator: reads, and nobody waits for it."""

PARTS = ("ps_hosts", "worker_hosts", "job_name", "task_index")
"""The flags, in the order in which they are usually written."""

NO_STORE = (
    "without ps tasks there is no store: give at least one host that role, which may be one that also trains; or train"
    " by all-reduce, which needs workers alone: torch's DistributedDataParallel under torchrun"
)
"""To whoever names workers and no ps hosts."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """All tasks, and this one. `check` has been called on one that comes from flags or TF_CONFIG."""

    ps_hosts: tuple[str, ...]
    """host or host:port of each ps task: where shard i of the store listens."""
    worker_hosts: tuple[str, ...]
    """host of each worker, in rank order; a port is allowed, as in old scripts, and nothing listens there."""
    job_name: str
    """One of JOBS."""
    task_index: int
    """Which of its job's tasks this is: shard or rank."""

    @cached_property
    def shards(self) -> tuple[TcpAddress, ...]:
        """Where each shard listens. Raises BadArgument."""
        return parse_hosts("ps_hosts", self.ps_hosts)

    @property
    def url(self) -> str:
        """What a client connects to."""
        return str(self.shards[0])

    @property
    def num_workers(self) -> int:
        return len(self.worker_hosts)

    def local_place(self) -> tuple[int, int]:
        """(this worker's number among those on its host, their number), by the hosts' names."""
        names = [_name(host) for host in self.worker_hosts]
        own = names[self.task_index]
        return names[: self.task_index].count(own), names.count(own)

    def tf_config(self) -> str:
        """The cluster and this task as a value for TF_CONFIG."""
        cluster = {"ps": self.ps_hosts, "worker": self.worker_hosts}
        task = {"type": self.job_name, "index": self.task_index}
        return msgspec.json.encode({"cluster": cluster, "task": task}).decode()

    def check(self) -> None:
        """Raises BadArgument with a sentence about the first part that is wrong."""
        if not self.ps_hosts:
            raise BadArgument(f"ps_hosts is empty; {NO_STORE}")
        _ = self.shards
        if not self.worker_hosts:
            raise BadArgument("worker_hosts is empty; expected the host of every worker: it says how many there are")
        _check_workers(self.worker_hosts)
        if self.job_name not in JOBS:
            hint = "; a chief is worker 0" if self.job_name in ("chief", "master") else ""
            raise BadArgument(f"job_name is {self.job_name!r}; expected one of {', '.join(JOBS)}{hint}")
        hosts = {"ps": self.ps_hosts, "worker": self.worker_hosts}.get(self.job_name)
        if self.task_index < 0 or (hosts is not None and self.task_index >= len(hosts)):
            last = f"; {self.job_name}_hosts names {len(hosts)}, and 0 is the first" if hosts is not None else ""
            raise BadArgument(f"task_index is {self.task_index}, which no {self.job_name} task has{last}")


def make_cluster(parts: Mapping[str, object]) -> Cluster:
    """A checked cluster. `parts`: by the names of PARTS. Raises BadArgument naming the first that is missing."""
    if parts.get("ps_hosts") is None and parts.get("worker_hosts") is not None:
        raise BadArgument(f"--ps_hosts is missing, and {NO_STORE}")
    for name in PARTS:
        if parts.get(name) is None:
            raise BadArgument(
                f"--{name} is missing; a task of a cluster needs {', '.join('--' + part for part in PARTS)}"
            )
    cluster = msgspec.convert({name: parts[name] for name in PARTS}, Cluster)
    cluster.check()
    return cluster


def _name(host: str) -> str:
    """Without its port."""
    return parse_hosts("worker_hosts", [host])[0].host


def _check_workers(hosts: tuple[str, ...]) -> None:
    """Several workers may share a host, but not a port of it."""
    for index, host in enumerate(hosts):
        _name(host)
        if host in hosts[:index] and host != _name(host):
            raise BadArgument(f"worker_hosts names {host!r} twice; write the host alone for two workers on it")
