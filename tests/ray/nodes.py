"""A Ray cluster on this machine, whose nodes can be killed."""

from __future__ import annotations

import contextlib
from importlib import import_module
from pathlib import Path
from typing import Any

from psstore.net.names import read_hosts
from psstore.ray import RayStore

OBJECT_STORE_BYTES = 80 << 20
"""The least that Ray takes; nothing of a store goes there."""

REPOSITORY = Path(__file__).parents[2]


class Nodes:
    """A head, where this program and its workers are, and nodes at 127.0.0.2 and so on, for the store."""

    def __init__(self, count: int, *, cpus: int = 2) -> None:
        self._cpus = cpus
        self._count = count
        self._of: dict[str, Any] = {}
        self._next = 2
        self._ends = contextlib.ExitStack()

    def __enter__(self) -> Nodes:
        ray, utils = import_module("ray"), import_module("ray.cluster_utils")
        with contextlib.ExitStack() as ends:
            head = {"num_cpus": 0, "resources": {"worker": 8}, "include_dashboard": False}
            self._cluster = utils.Cluster(
                initialize_head=True, head_node_args={**head, "object_store_memory": OBJECT_STORE_BYTES}
            )
            ends.callback(self._cluster.shutdown)
            for _ in range(self._count):
                self.add()
            environ = {"env_vars": {"PYTHONPATH": str(REPOSITORY)}}
            ray.init(address=self._cluster.address, runtime_env=environ, logging_level="error", log_to_driver=False)
            ends.callback(ray.shutdown)
            self._ends = ends.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    @property
    def address(self) -> str:
        """What RAY_ADDRESS is for a program that is to run there."""
        return str(self._cluster.address)

    def add(self) -> None:
        address = f"127.0.0.{self._next}"
        self._next += 1
        self._of[address] = self._cluster.add_node(
            num_cpus=self._cpus, node_ip_address=address, object_store_memory=OBJECT_STORE_BYTES
        )

    def kill(self, address: str) -> None:
        """With all that runs there, at once."""
        self._cluster.remove_node(self._of.pop(address), allow_graceful=False)


def member_addresses(store: RayStore) -> dict[str, str]:
    """Where each process of the store is, by the names of hosts, as this process has heard. REQUIRES: `use()`."""
    return read_hosts(Path(store._names.environ["PSSTORE_HOSTS_FILE"]))
