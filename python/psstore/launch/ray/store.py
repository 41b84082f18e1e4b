"""Starts a store's actors in a placement group, and is how other processes of the Ray cluster reach the store."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib import import_module
from types import TracebackType
from typing import Any, Literal

from psstore.client.connect import connect
from psstore.client.store import Store
from psstore.errors import PsstoreError, StoreUnreachable
from psstore.launch.job import CHECKPOINT_GRACE_S, STORE_GRACE_S
from psstore.launch.ray.directory import Directory, Hosts
from psstore.launch.ray.host_names import HostNames
from psstore.launch.ray.member import MemberActor
from psstore.launch.ray.plan import StorePlan
from psstore.net.address import DEFAULT_PORT

ray: Any = import_module("ray")
placement: Any = import_module("ray.util.placement_group")
scheduling: Any = import_module("ray.util.scheduling_strategies")

Strategy = Literal["SPREAD", "STRICT_SPREAD", "PACK", "STRICT_PACK"]

ONE_CPU = {"CPU": 1.0}

START_S = 300.0
"""How long the start of all processes may take; nodes that are added for it take minutes."""


class RemoteDirectory:
    """The directory's actor, asked and waited for. Travels to other processes of the cluster as a name: a handle would
    have Ray keep what an actor is started again with in an object, which can be lost."""

    def __init__(self, name: str) -> None:
        self.name = name

    def here(self) -> str:
        return str(ray.util.get_node_ip_address())

    def moved(self, own: Mapping[str, str]) -> Hosts:
        hosts: Hosts = self._answer("moved", own)
        return hosts

    def news(self, known: Mapping[str, str], own: Mapping[str, str]) -> Hosts | None:
        hosts: Hosts | None = self._answer("news", known, own)
        return hosts

    def _answer(self, question: str, *told: Mapping[str, str]) -> Any:
        try:
            return ray.get(getattr(ray.get_actor(self.name), question).remote(*told))
        except (ValueError, ray.exceptions.RayError) as error:  # no actor has that name; it is dead
            raise StoreUnreachable(f"the store has ended, or Ray: {error}") from None


class RayStore:
    """A store that runs on the Ray cluster. Travels to tasks and actors as an argument; each of them calls
    `connect()`, or `use()`."""

    def __init__(self, plan: StorePlan, directory: Any, members: Sequence[Any], group: Any) -> None:
        """All but the plan are Ray's handles: of actors and of the placement group."""
        self._plan = plan
        self._directory = directory
        self._members = list(members)
        self._group = group

    @property
    def url(self) -> str:
        """What `psstore.connect` takes, in a process that has called `use()`: its names are known there."""
        return self._plan.url

    def use(self) -> None:
        """Has `psstore.connect()`, sessions and `psstore status` reach the store, in this process and those that it
        starts: sets PSSTORE_URL, PSSTORE_WAIT_S, PSSTORE_TOKEN_FILE and PSSTORE_HOSTS_FILE. Raises StoreUnreachable
        if the store has ended."""
        if not self._is_in_use:
            os.environ.update(self._environ)

    def connect(self, **options: Any) -> Store:
        """A store as `psstore.connect` gives it, whose options these are, once `use()` was called: in a training
        function of Ray Train, the worker of Ray Train's rank. Raises what both raise."""
        self.use()
        return connect(**options)

    @property
    def _is_in_use(self) -> bool:
        return os.environ.get("PSSTORE_URL") == self.url

    @property
    def _environ(self) -> dict[str, str]:
        return {"PSSTORE_URL": self.url, "PSSTORE_WAIT_S": f"{self._plan.wait_s:g}", **self._names.environ}

    @cached_property
    def _names(self) -> HostNames:
        return HostNames(RemoteDirectory(self._plan.directory), own={}, token=self._plan.token)

    def stop(self) -> None:
        """Ends the store, after a last checkpoint if it writes any, and what `use()` has set here. Twice is once."""
        if self._is_in_use:
            for name in self._environ:
                del os.environ[name]
        self.__dict__.pop("_names", None)
        grace_s = CHECKPOINT_GRACE_S if "checkpoint" in self._plan.settings else STORE_GRACE_S
        of_shard_0 = self._members[:: self._plan.shards]
        others = [member for member in self._members if member not in of_shard_0]
        for members in (*([one] for one in of_shard_0), others):  # it writes the checkpoint, with all others there
            with contextlib.suppress(ray.exceptions.RayError):
                ray.get([member.stop.remote() for member in members], timeout=grace_s)
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(self._directory.end.remote(), timeout=STORE_GRACE_S)
        for member in self._members:
            ray.kill(member)
        placement.remove_placement_group(self._group)
        ray.kill(self._directory)

    def __enter__(self) -> RayStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __getstate__(self) -> dict[str, Any]:
        """Another process has files of its own."""
        return {name: value for name, value in self.__dict__.items() if name != "_names"}


def start(
    shards: int = 1,
    *,
    standbys: int = 0,
    strategy: Strategy = "SPREAD",
    resources: Mapping[str, float] = ONE_CPU,
    port: int = DEFAULT_PORT,
    start_timeout_s: float = START_S,
    **settings: object,
) -> RayStore:
    """A store whose processes Ray's actors start and see to; returns when all of them serve.

    Its placement group has a bundle for each shard, with the standby of another one in it. An actor that dies, with its
    node or without, is started again where Ray has room for its bundle. With `standbys=1` nothing is lost then;
    with `checkpoint="s3://…"` all shards go back to the latest one. The store ends with `stop()`, or this program.

    `strategy`: how bundles are placed on nodes; STRICT_SPREAD never puts two on one. `resources`: what Ray sets
    aside for each process. `port`: member i of the store listens at port + i, shards first, then standbys.
    `settings`: all others of `psstore-server`, as workers=8, rejoin_s=60, checkpoint="s3://bucket/run".
    Needs `ray.init()`. Blocks. Raises BadArgument; StoreUnreachable if Ray has no room, or a process does not start.
    """
    plan = StorePlan(
        name=f"psstore-{secrets.token_hex(4)}",
        shards=shards,
        standbys=standbys,
        port=port,
        token=secrets.token_hex(32),
        settings=settings,
    )
    plan.check()
    group = placement.placement_group(_bundles(plan, resources), strategy=strategy)
    directory = _start_directory(plan)
    members = [_start_member(plan, member, group, resources) for member in range(plan.num_members)]
    store = RayStore(plan, directory, members, group)
    try:
        ray.get([member.ready.remote() for member in members], timeout=start_timeout_s)
    except BaseException as error:
        store.stop()
        raise _failed_start(error, start_timeout_s) from None
    return store


def _bundles(plan: StorePlan, resources: Mapping[str, float]) -> list[dict[str, float]]:
    members = Counter(plan.bundle(member) for member in range(plan.num_members))
    return [
        {name: amount * members[bundle] for name, amount in resources.items()} for bundle in range(plan.num_bundles)
    ]


def _start_directory(plan: StorePlan) -> Any:
    """On this node, if it stays: the one where the program is whose end is the store's."""
    here = scheduling.NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    options = {
        "name": plan.directory,
        "num_cpus": 0,
        "max_restarts": -1,
        "max_task_retries": -1,
        "max_concurrency": 10_000,
    }
    return ray.remote(Directory).options(scheduling_strategy=here, **options).remote()


def _start_member(plan: StorePlan, member: int, group: Any, resources: Mapping[str, float]) -> Any:
    bundle = scheduling.PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=plan.bundle(member))
    others = {name: amount for name, amount in resources.items() if name not in ("CPU", "GPU")}
    return (
        ray.remote(MemberActor)
        .options(
            name=plan.host(member),
            num_cpus=resources.get("CPU", 0),
            num_gpus=resources.get("GPU", 0),
            resources=others,
            scheduling_strategy=bundle,
            max_restarts=-1,
        )
        .remote(plan, member, RemoteDirectory(plan.directory))
    )


def _failed_start(error: BaseException, timeout_s: float) -> BaseException:
    if isinstance(error, ray.exceptions.GetTimeoutError):
        return StoreUnreachable(
            f"the store's processes were not ready after {timeout_s:g} s; `ray status` says whether the cluster has"
            " room for them"
        )
    if isinstance(error, ray.exceptions.RayTaskError) and isinstance(error.cause, PsstoreError):
        return error.cause
    return error
