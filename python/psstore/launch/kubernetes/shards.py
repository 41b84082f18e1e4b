"""The store: a StatefulSet of shards, the Service that names its pods, and how many of them may be taken at a time."""

from __future__ import annotations

from psstore.launch.kubernetes import pods
from psstore.launch.kubernetes.plan import KubernetesPlan
from psstore.launch.kubernetes.pods import Manifest, field, value
from psstore.net.address import DEFAULT_PORT

METRICS_PORT = 9100

RESTARTS = 1000
"""How often the store goes back to a checkpoint: as often as nodes come and go."""

REJOIN_S = 600.0
"""How long the others wait for a lost worker's next pod: a node that is added takes minutes."""

START_S = 300
"""How long psstore-server may take to answer at all. /livez is well while shards read a checkpoint, however long."""

PART = "shard"


def store_of(plan: KubernetesPlan) -> list[Manifest]:
    return [_service(plan), _disruptions(plan), _stateful_set(plan)]


def _service(plan: KubernetesPlan) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": plan.name, "labels": pods.labels(plan, PART)},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # shards are looked up before they are ready
            "selector": pods.labels(plan, PART),
            "ports": [{"name": "psstore", "port": DEFAULT_PORT}, {"name": "metrics", "port": METRICS_PORT}],
        },
    }


def _disruptions(plan: KubernetesPlan) -> Manifest:
    """One pod at a time where another one leads, or the store comes back from a checkpoint; else none, since all would
    be lost with it."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": plan.name, "labels": pods.labels(plan, PART)},
        "spec": {
            "maxUnavailable": 1 if plan.standbys or plan.goes_back else 0,
            "selector": {"matchLabels": pods.labels(plan, PART)},
        },
    }


def _stateful_set(plan: KubernetesPlan) -> Manifest:
    container: Manifest = {
        **pods.container_of(plan, "shard", ["psstore-server"]),
        **pods.env_from(plan),
        "env": _environment(plan),
        "ports": [
            {"name": "psstore", "containerPort": DEFAULT_PORT},
            {"name": "metrics", "containerPort": METRICS_PORT},
        ],
        "startupProbe": {**_probe("/livez"), "periodSeconds": 1, "failureThreshold": START_S},
        "livenessProbe": {**_probe("/livez"), "periodSeconds": 10, "failureThreshold": 3},
        "readinessProbe": {**_probe("/readyz"), "periodSeconds": 2, "failureThreshold": 3},
        "resources": pods.resources(plan.shard_memory, plan.shard_cpu),
    }
    if plan.goes_back:
        # Shard 0 writes a last one when it ends, and the others don't: each has one written before it goes.
        believing = ["env", f"PSSTORE_TLS_CA={pods.SECRETS}/{pods.CA}"] if plan.tls_secret is not None else []
        container["lifecycle"] = {"preStop": {"exec": {"command": [*believing, *pods.save_command(plan)]}}}
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": plan.name, "labels": pods.labels(plan, PART)},
        "spec": {
            "serviceName": plan.name,
            "replicas": plan.num_shard_pods,
            "podManagementPolicy": "Parallel",  # a shard waits for all others
            # One by one: a standby is ready when it may lead. Without, the store would go back once for each.
            "updateStrategy": {"type": "RollingUpdate" if plan.standbys else "OnDelete"},
            "selector": {"matchLabels": pods.labels(plan, PART)},
            "template": {
                "metadata": {
                    "labels": pods.labels(plan, PART),
                    "annotations": {"prometheus.io/scrape": "true", "prometheus.io/port": str(METRICS_PORT)},
                },
                "spec": {
                    **pods.pod_spec(plan),
                    "topologySpreadConstraints": [_spread(plan)],
                    "containers": [container],
                    "volumes": pods.store_volumes(plan),
                },
            },
        },
    }


def _environment(plan: KubernetesPlan) -> list[Manifest]:
    places = [pods.place(plan, pod) for pod in range(plan.num_shard_pods)]
    found = [
        value("PSSTORE_SHARDS_AT", ",".join(places[: plan.shards])),
        field("PSSTORE_SHARD_INDEX", "metadata.labels['apps.kubernetes.io/pod-index']"),
        value("PSSTORE_WORKERS", plan.workers),
        value("PSSTORE_MODE", plan.mode),
        value("PSSTORE_REJOIN_S", f"{REJOIN_S:g}"),
        value("PSSTORE_METRICS", str(METRICS_PORT)),
        value("PSSTORE_LOG_FORMAT", "json"),
        value("PSSTORE_TOKEN_FILE", f"{pods.SECRETS}/{pods.TOKEN}"),
        value("PSSTORE_WORKER_TOKEN_FILE", f"{pods.SECRETS}/{pods.WORKER_TOKEN}"),
    ]
    if plan.tls_secret is not None:
        found += pods.certificate(plan)
    if plan.tls_client_secret is not None:
        found.append(value("PSSTORE_TLS_CA", f"{pods.SECRETS}/{pods.CA}"))
    if plan.standbys:
        found.append(value("PSSTORE_STANDBYS_AT", ",".join(places[plan.shards :])))
    if plan.checkpoint is not None:
        found += [
            value("PSSTORE_CHECKPOINT", plan.checkpoint),
            value("PSSTORE_CHECKPOINT_EVERY", plan.checkpoint_every),
            value("PSSTORE_RESTORE", "auto"),
        ]
    if plan.goes_back:
        found.append(value("PSSTORE_RESTARTS", str(RESTARTS)))
    return found


def _spread(plan: KubernetesPlan) -> Manifest:
    """Over nodes, as far as there are enough: what one takes with it is little then, and no shard with its standby."""
    return {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": pods.labels(plan, PART)},
    }


def _probe(path: str) -> Manifest:
    return {"httpGet": {"path": path, "port": "metrics"}, "timeoutSeconds": 5}
