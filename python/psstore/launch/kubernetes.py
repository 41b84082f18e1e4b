"""A store and its workers as Kubernetes has them: the objects of `psstore kubernetes render`.

A shard is a pod of a StatefulSet, whose number is the shard's; with standbys there are twice as many, of which the
second half stand by for the first. A worker is a pod of an Indexed Job in a JobSet, whose index is its rank, so that
the pod that comes in place of another takes that one's rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from psstore.errors import BadArgument
from psstore.net.address import DEFAULT_PORT
from psstore.types import parse_workers

Manifest = dict[str, Any]

METRICS_PORT = 9100

USER = 65532
"""Whom all containers run as: nobody whom an image knows (that of distroless' nonroot)."""

TOKEN_FOLDER, TOKEN_MODE = "/run/psstore", 0o440
"""Where the token is, for the pod's group: it is root's file, which psstore leaves to root to protect."""

RESTARTS = 1000
"""How often the store goes back to a checkpoint, and a worker's pods may fail: as often as nodes come and go."""

REJOIN_S = 600.0
"""How long the others wait for a lost worker's next pod: a node that is added takes minutes."""

START_S = 300
"""How long psstore-server may take to answer at all. /livez is well while shards read a checkpoint, however long."""

CHECKPOINT_S = 0.8
"""Share of a pod's grace for the checkpoint before it ends."""

WAIT_FOR_STORE = "import psstore; psstore.connect(role='client', connect_timeout_s=3600).close()"


@dataclass(frozen=True, kw_only=True)
class KubernetesPlan:
    """What is to be rendered."""

    image: str
    """With psstore[metrics], and the training script."""
    command: Sequence[str]
    """What a worker runs."""
    shards: int = 1
    standbys: int = 0
    """How many each shard has: none, or one, in a pod of its own."""
    workers: str = "1"
    """Number of workers, or FEWEST:MOST."""
    mode: str = "sync"
    name: str = "store"
    """Name of the store's objects; the workers' have it with -workers."""
    checkpoint: str | None = None
    """URL that all pods see."""
    checkpoint_every: str = "300s"
    token_secret: str = "psstore-token"
    """Name of the secret whose key `token` is the store's token."""
    env_secrets: Sequence[str] = ()
    """Names of secrets that all containers get as environment variables, as those of the checkpoints' storage."""
    shard_memory: str = "8Gi"
    shard_cpu: str = "2"
    worker_memory: str = "8Gi"
    worker_cpu: str = "4"
    gpus: int = 0
    """Devices of each worker."""
    grace_s: int = 120
    """How long a pod that is to end may take: to write a checkpoint, or to end a step."""

    def check(self) -> None:
        """Raises BadArgument for what can't be rendered."""
        if self.shards < 1 or self.grace_s < 1 or self.gpus < 0:
            raise BadArgument("shards and grace are at least 1, gpus at least 0")
        if self.standbys not in (0, 1):
            raise BadArgument(f"standbys is {self.standbys}; expected 0, or 1 for each shard")
        if not self.command:
            raise BadArgument("say what a worker runs: … -- python train.py")
        if self.checkpoint is not None and "://" not in self.checkpoint:
            raise BadArgument(
                f"checkpoint is {self.checkpoint!r}; expected a URL that every pod sees, as s3://bucket/run"
            )
        parse_workers("workers", self.workers)

    @property
    def num_pods(self) -> int:
        """Pods of workers."""
        return parse_workers("workers", self.workers)[1]


def manifests(plan: KubernetesPlan) -> list[Manifest]:
    """The objects, in the order in which they are to be applied. Raises BadArgument."""
    plan.check()
    return [_service(plan), _disruptions(plan), _stateful_set(plan), _job_set(plan)]


# ---- the store ----


def _labels(plan: KubernetesPlan, part: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": "psstore", "app.kubernetes.io/instance": plan.name, "psstore/part": part}


def _service(plan: KubernetesPlan) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": plan.name, "labels": _labels(plan, "shard")},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # shards are looked up before they are ready
            "selector": _labels(plan, "shard"),
            "ports": [{"name": "psstore", "port": DEFAULT_PORT}, {"name": "metrics", "port": METRICS_PORT}],
        },
    }


def _disruptions(plan: KubernetesPlan) -> Manifest:
    """One pod at a time where another one leads, or the store comes back from a checkpoint; else none, since all would
    be lost with it."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": plan.name, "labels": _labels(plan, "shard")},
        "spec": {
            "maxUnavailable": 1 if plan.standbys or plan.checkpoint is not None else 0,
            "selector": {"matchLabels": _labels(plan, "shard")},
        },
    }


def _stateful_set(plan: KubernetesPlan) -> Manifest:
    container: Manifest = {
        "name": "shard",
        "image": plan.image,
        "command": ["psstore-server"],
        "env": [*_store_environment(plan), *_token_environment()],
        **_secrets(plan),
        "ports": [
            {"name": "psstore", "containerPort": DEFAULT_PORT},
            {"name": "metrics", "containerPort": METRICS_PORT},
        ],
        "startupProbe": {**_probe("/livez"), "periodSeconds": 5, "failureThreshold": START_S // 5},
        "livenessProbe": {**_probe("/livez"), "periodSeconds": 10, "failureThreshold": 3},
        "readinessProbe": {**_probe("/readyz"), "periodSeconds": 5, "failureThreshold": 2},
        "resources": _resources(plan.shard_memory, plan.shard_cpu),
        "securityContext": _container_security(),
        "volumeMounts": [_token_mount(), {"name": "tmp", "mountPath": "/tmp"}],
    }
    if plan.checkpoint is not None and not plan.standbys:
        # Shard 0 writes a last one when it ends, and the others don't: each has one written before it goes.
        save = ["psstore", "checkpoint", "save", _url(plan), "--wait", f"{CHECKPOINT_S * plan.grace_s:g}"]
        container["lifecycle"] = {"preStop": {"exec": {"command": save}}}
    annotations = {"prometheus.io/scrape": "true", "prometheus.io/port": str(METRICS_PORT)}
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": plan.name, "labels": _labels(plan, "shard")},
        "spec": {
            "serviceName": plan.name,
            "replicas": plan.shards * (1 + plan.standbys),
            "podManagementPolicy": "Parallel",  # a shard waits for all others
            # One by one: a standby is ready when it may lead. Without, the store would go back once for each.
            "updateStrategy": {"type": "RollingUpdate" if plan.standbys else "OnDelete"},
            "selector": {"matchLabels": _labels(plan, "shard")},
            "template": {
                "metadata": {"labels": _labels(plan, "shard"), "annotations": annotations},
                "spec": {
                    **_pod(plan),
                    "topologySpreadConstraints": [_spread(plan)],
                    "containers": [container],
                    "volumes": [_token_volume(plan), {"name": "tmp", "emptyDir": {}}],
                },
            },
        },
    }


def _store_environment(plan: KubernetesPlan) -> list[Manifest]:
    places = [_place(plan, pod) for pod in range(plan.shards * (1 + plan.standbys))]
    pod_index = {"fieldRef": {"fieldPath": "metadata.labels['apps.kubernetes.io/pod-index']"}}
    found: list[Manifest] = [
        {"name": "PSSTORE_SHARDS_AT", "value": ",".join(places[: plan.shards])},
        {"name": "PSSTORE_SHARD_INDEX", "valueFrom": pod_index},
        {"name": "PSSTORE_WORKERS", "value": plan.workers},
        {"name": "PSSTORE_MODE", "value": plan.mode},
        {"name": "PSSTORE_REJOIN_S", "value": f"{REJOIN_S:g}"},
        {"name": "PSSTORE_METRICS", "value": str(METRICS_PORT)},
        {"name": "PSSTORE_LOG_FORMAT", "value": "json"},
    ]
    if plan.standbys:
        found.append({"name": "PSSTORE_STANDBYS_AT", "value": ",".join(places[plan.shards :])})
    if plan.checkpoint is not None:
        found += [
            {"name": "PSSTORE_CHECKPOINT", "value": plan.checkpoint},
            {"name": "PSSTORE_CHECKPOINT_EVERY", "value": plan.checkpoint_every},
            {"name": "PSSTORE_RESTORE", "value": "auto"},
        ]
    if plan.checkpoint is not None and not plan.standbys:
        found.append({"name": "PSSTORE_RESTARTS", "value": str(RESTARTS)})
    return found


def _spread(plan: KubernetesPlan) -> Manifest:
    """Over nodes, as far as there are enough: what one takes with it is little then, and no shard with its standby."""
    return {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": _labels(plan, "shard")},
    }


def _probe(path: str) -> Manifest:
    return {"httpGet": {"path": path, "port": "metrics"}, "timeoutSeconds": 5}


# ---- the workers ----


def _job_set(plan: KubernetesPlan) -> Manifest:
    rank = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    environment = [
        {"name": "PSSTORE_URL", "value": _url(plan)},
        {"name": "RANK", "valueFrom": rank},
        {"name": "WORLD_SIZE", "value": str(plan.num_pods)},
        {"name": "HOME", "value": "/tmp"},
        *_token_environment(),
    ]
    shared: Manifest = {"image": plan.image, "securityContext": _container_security()}
    mounts = [_token_mount(), {"name": "tmp", "mountPath": "/tmp"}]
    waiting = {
        "name": "store",
        **shared,
        "command": ["python", "-c", WAIT_FOR_STORE],
        "env": [environment[0], *_token_environment()],
        "resources": _resources("256Mi", "100m"),
        "volumeMounts": mounts,
    }
    worker = {
        "name": "worker",
        **shared,
        "command": list(plan.command),
        "env": environment,
        **_secrets(plan),
        "resources": _resources(plan.worker_memory, plan.worker_cpu, gpus=plan.gpus),
        "volumeMounts": [*mounts, {"name": "shm", "mountPath": "/dev/shm"}],
    }
    pod = {
        "metadata": {"labels": _labels(plan, "worker")},
        "spec": {
            **_pod(plan),
            "restartPolicy": "OnFailure",
            "initContainers": [waiting],
            "containers": [worker],
            "volumes": [
                _token_volume(plan),
                {"name": "tmp", "emptyDir": {}},
                {"name": "shm", "emptyDir": {"medium": "Memory"}},  # torch's data loaders' share of the worker's memory
            ],
        },
    }
    job = {
        "completionMode": "Indexed",
        "completions": plan.num_pods,
        "parallelism": plan.num_pods,
        "backoffLimit": RESTARTS,
        "template": pod,
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": f"{plan.name}-workers", "labels": _labels(plan, "worker")},
        "spec": {"replicatedJobs": [{"name": "worker", "replicas": 1, "template": {"spec": job}}]},
    }


# ---- what both have ----


def _url(plan: KubernetesPlan) -> str:
    """Where shard 0 is, or its standby."""
    return "ps://" + ",".join(_place(plan, pod) for pod in (0, plan.shards)[: 1 + plan.standbys])


def _place(plan: KubernetesPlan, pod: int) -> str:
    return f"{plan.name}-{pod}.{plan.name}:{DEFAULT_PORT}"


def _pod(plan: KubernetesPlan) -> Manifest:
    return {
        "terminationGracePeriodSeconds": plan.grace_s,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,  # a service named psstore would set PSSTORE_PORT
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }


def _container_security() -> Manifest:
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def _resources(memory: str, cpu: str, *, gpus: int = 0) -> Manifest:
    """Memory is bounded by what is asked for, since who takes more is killed with what it holds; processors are not."""
    devices = {"nvidia.com/gpu": gpus} if gpus else {}
    return {"requests": {"memory": memory, "cpu": cpu, **devices}, "limits": {"memory": memory, **devices}}


def _token_environment() -> list[Manifest]:
    return [{"name": "PSSTORE_TOKEN_FILE", "value": f"{TOKEN_FOLDER}/token"}]


def _token_mount() -> Manifest:
    return {"name": "token", "mountPath": TOKEN_FOLDER, "readOnly": True}


def _token_volume(plan: KubernetesPlan) -> Manifest:
    return {"name": "token", "secret": {"secretName": plan.token_secret, "defaultMode": TOKEN_MODE}}


def _secrets(plan: KubernetesPlan) -> Manifest:
    return {"envFrom": [{"secretRef": {"name": name}} for name in plan.env_secrets]} if plan.env_secrets else {}
