"""A cluster as `kubectl apply` finds it: takes objects, and has controllers that make pods of them.

Known are the kinds, and of them the fields, that `psstore kubernetes render` prints; another kind is an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

from tests.kubernetes.api_server import TOLD, ApiServer
from tests.kubernetes.looking import LOOK_S, until
from tests.kubernetes.names import NameServer
from tests.kubernetes.node import DOMAIN, NODE, Node
from tests.kubernetes.pod import Pod, Secrets

Manifest = dict[str, Any]


class Cluster:
    """`async with cluster_on(node, secrets)`."""

    def __init__(self, node: Node, secrets: Secrets, *, start_s: float) -> None:
        """`start_s`: from a pod's end to the start of the next one's first process: a scheduler's, and an image's."""
        self.pods: dict[str, Pod] = {}
        self.objects: dict[tuple[str, str], Manifest] = {}
        self.finished: dict[str, bool] = {}
        """Jobs that came to an end: whether all their pods succeeded."""
        self._node = node
        self._secrets = dict(secrets)
        self._start_s = start_s
        self._controllers: list[asyncio.Task[None]] = []
        self._lives: set[asyncio.Task[None]] = set()
        self._api = ApiServer(self._patch_scale)

    # ---- what a user does ----

    def apply(self, manifests: Iterable[Manifest]) -> None:
        for manifest in manifests:
            kind, name = manifest["kind"], manifest["metadata"]["name"]
            is_new = (kind, name) not in self.objects
            self.objects[kind, name] = copy.deepcopy(manifest)
            if kind == "ServiceAccount":
                self._secrets[f"account {name}"] = self._api.account(name)
            elif kind == "StatefulSet" and is_new:
                self._control(self._keep_set(name))
            elif kind == "JobSet" and is_new:
                self._control(self._run_job_set(manifest))
            else:
                assert kind in ("Service", "PodDisruptionBudget", "Role", "RoleBinding", "StatefulSet"), kind

    def evict(self, name: str) -> bool:
        """False: a PodDisruptionBudget does not allow it now."""
        pod = self.pods[name]
        for budget in self._of_kind("PodDisruptionBudget"):
            chosen = budget["spec"]["selector"]["matchLabels"]
            if not matches(pod.labels, chosen):
                continue
            expected = sum(
                one["spec"]["replicas"]
                for one in self._of_kind("StatefulSet")
                if matches(one["spec"]["template"]["metadata"]["labels"], chosen)
            )
            healthy = sum(one.is_ready for one in self.pods.values() if matches(one.labels, chosen))
            if healthy - (1 if pod.is_ready else 0) < expected - budget["spec"]["maxUnavailable"]:
                return False
        pod.delete()
        return True

    async def settled(self) -> None:
        """Waits until all pods of StatefulSets are there and ready, as their newest template has them."""
        await until(lambda: self.is_alive() and self.is_settled())

    def is_settled(self) -> bool:
        return all(map(self._is_settled, self._of_kind("StatefulSet")))

    async def end_of(self, name: str) -> bool:
        """Waits for the end of a JobSet: whether it succeeded."""
        await until(lambda: self.is_alive() and name in self.finished)
        return self.finished[name]

    # ---- controllers ----

    async def _keep_set(self, name: str) -> None:
        while True:
            spec = self.objects["StatefulSet", name]["spec"]
            wanted = [f"{name}-{index}" for index in range(spec["replicas"])]
            for pod in self._of_set(name):
                if pod.name not in wanted and not pod.is_ending:
                    pod.delete()
            for index, pod_name in enumerate(wanted):
                if pod_name not in self.pods:
                    labels = {"apps.kubernetes.io/pod-index": str(index), "statefulset": name, "rev": revision(spec)}
                    self._start(pod_name, spec["template"], labels=labels)
            if spec["updateStrategy"]["type"] == "RollingUpdate":
                self._roll(spec, wanted)
            await asyncio.sleep(LOOK_S)

    def _roll(self, spec: Manifest, wanted: list[str]) -> None:
        """The last old one ends, when all that come after it are new and ready."""
        for pod_name in reversed(wanted):
            pod = self.pods[pod_name]
            if pod.labels["rev"] != revision(spec):
                pod.delete()
                return
            if not pod.is_ready:
                return

    async def _run_job_set(self, job_set: Manifest) -> None:
        waiting = list(job_set["spec"]["replicatedJobs"])
        running: dict[str, asyncio.Task[bool]] = {}
        name = job_set["metadata"]["name"]
        try:
            while waiting or not all(task.done() for task in running.values()):
                if any(task.done() and not task.result() for task in running.values()):
                    self.finished[name] = False
                    return
                for job in list(waiting):
                    conditions = job.get("dependsOn", ())
                    assert all(one["status"] == "Complete" for one in conditions)
                    if all(one["name"] in running and running[one["name"]].done() for one in conditions):
                        waiting.remove(job)
                        assert job["replicas"] == 1
                        job_name = f"{name}-{job['name']}-0"
                        running[job["name"]] = asyncio.ensure_future(self._run_job(job_name, job["template"]["spec"]))
                await asyncio.sleep(LOOK_S)
            self.finished[name] = all(task.result() for task in running.values())
        finally:
            for task in running.values():
                task.cancel()

    async def _run_job(self, name: str, spec: Manifest) -> bool:
        """Each index has a pod until one has succeeded."""
        indexes = range(spec.get("completions", 1))
        return all(await asyncio.gather(*(self._run_index(name, index, spec) for index in indexes)))

    async def _run_index(self, name: str, index: int, spec: Manifest) -> bool:
        for _ in range(spec.get("backoffLimit", 6) + 1):
            pod_name = f"{name}-{index}"
            told = {"batch.kubernetes.io/job-completion-index": str(index)}
            pod = self._start(pod_name, spec["template"], annotations=told)
            await pod.gone()  # podReplacementPolicy: Failed
            if pod.succeeded:
                return True
            await until(lambda: f"{name}-{index}" not in self.pods)
        return False

    # ---- pods ----

    def _start(
        self,
        name: str,
        template: Manifest,
        *,
        labels: Mapping[str, str] | None = None,
        annotations: Mapping[str, str] | None = None,
    ) -> Pod:
        pod = Pod(
            name,
            template,
            labels=labels or {},
            annotations=annotations or {},
            node=self._node,
            secrets=self._secrets,
            environ=TOLD,
        )
        self.pods[name] = pod
        life = asyncio.ensure_future(self._forget(pod))
        self._lives.add(life)
        return pod

    async def _forget(self, pod: Pod) -> None:
        await pod.gone()
        await asyncio.sleep(self._start_s)
        del self.pods[pod.name]

    def _of_set(self, name: str) -> list[Pod]:
        return [pod for pod in self.pods.values() if pod.labels.get("statefulset") == name]

    def _is_settled(self, stateful_set: Manifest) -> bool:
        name, spec = stateful_set["metadata"]["name"], stateful_set["spec"]
        found = self._of_set(name)
        return len(found) == spec["replicas"] and all(
            pod.is_ready and pod.labels["rev"] == revision(spec) for pod in found
        )

    def _of_kind(self, kind: str) -> list[Manifest]:
        return [manifest for (of, _), manifest in self.objects.items() if of == kind]

    # ---- what belongs to a cluster ----

    def addresses(self, name: str) -> list[str] | None:
        """Of a service or of one of its pods, by its full name."""
        if not name.endswith(f".{DOMAIN}"):
            return None
        *host, service_name = name.removesuffix(f".{DOMAIN}").split(".")
        service = self.objects.get(("Service", service_name))
        if service is None or len(host) > 1:
            return None
        found = [
            pod.address
            for pod in self.pods.values()
            if matches(pod.labels, service["spec"]["selector"])
            and (pod.is_ready or service["spec"]["publishNotReadyAddresses"])
            and not pod.is_gone
            and (not host or pod.name == host[0])
        ]
        return found or None

    def _patch_scale(self, account: str, name: str, replicas: int) -> int:
        """HTTP's status."""
        bound = [one for one in self._of_kind("RoleBinding") if any(who["name"] == account for who in one["subjects"])]
        rules = [rule for one in bound for rule in self.objects["Role", one["roleRef"]["name"]]["rules"]]
        if not any(
            "patch" in rule["verbs"] and "statefulsets/scale" in rule["resources"] and name in rule["resourceNames"]
            for rule in rules
        ):
            return 403
        if ("StatefulSet", name) not in self.objects:
            return 404
        self.objects["StatefulSet", name]["spec"]["replicas"] = replicas
        return 200

    def _control(self, work: Any) -> None:
        self._controllers.append(asyncio.ensure_future(work))

    def is_alive(self) -> bool:
        """True. Raises what went wrong in a controller or a kubelet."""
        for task in (*self._controllers, *self._lives):
            if task.done():
                task.result()
        return True

    async def _end(self) -> None:
        for task in self._controllers:
            task.cancel()
        await asyncio.gather(*self._controllers, return_exceptions=True)
        for pod in self.pods.values():
            pod.delete()
            pod.kill()
        await asyncio.gather(*(pod.gone() for pod in self.pods.values()), return_exceptions=True)
        for life in self._lives:
            life.cancel()


@contextlib.asynccontextmanager
async def cluster_on(
    node: Node, secrets: Secrets, *, start_s: float = 1.0, dns_cache_s: float = 0.0
) -> AsyncIterator[Cluster]:
    """All its pods are gone afterwards."""
    cluster = Cluster(node, secrets, start_s=start_s)
    loop = asyncio.get_running_loop()
    names, _ = await loop.create_datagram_endpoint(
        lambda: NameServer(cluster.addresses, cache_s=dns_cache_s), local_addr=(NODE, 53)
    )
    async with cluster._api.serve(NODE):
        try:
            yield cluster
        finally:
            await cluster._end()
            names.close()


def matches(labels: Mapping[str, str], chosen: Mapping[str, str]) -> bool:
    return chosen.items() <= labels.items()


def revision(spec: Manifest) -> str:
    """Another one for another template."""
    return json.dumps(spec["template"], sort_keys=True)
