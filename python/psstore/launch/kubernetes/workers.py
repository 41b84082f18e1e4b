"""The workers: a JobSet, whose last job ends the store when they are done."""

from __future__ import annotations

from psstore.launch.environment import TOLD_S
from psstore.launch.kubernetes import pods
from psstore.launch.kubernetes.plan import KubernetesPlan
from psstore.launch.kubernetes.pods import Manifest, field, value
from psstore.launch.kubernetes.shards import REJOIN_S

WAIT_FOR_STORE = "import psstore; psstore.connect(role='client', connect_timeout_s=3600).close()"

FAILURES = 1000
"""How many pods of workers may fail: as many as nodes that come and go take with them."""

WAIT_S = REJOIN_S + TOLD_S
"""How long a worker waits for others."""

PART, STOP = "worker", "stop"


def workers_of(plan: KubernetesPlan) -> list[Manifest]:
    jobs = [_job(PART, _worker_job(plan))]
    if not plan.stay:
        jobs.append({**_job(STOP, _stop_job(plan)), "dependsOn": [{"name": PART, "status": "Complete"}]})
    job_set = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": f"{plan.name}-workers", "labels": pods.labels(plan, PART)},
        "spec": {"replicatedJobs": jobs},
    }
    return [job_set] if plan.stay else [*_rights(plan), job_set]


def _job(name: str, spec: Manifest) -> Manifest:
    return {"name": name, "replicas": 1, "template": {"spec": spec}}


def _worker_job(plan: KubernetesPlan) -> Manifest:
    waiting = {
        **pods.container_of(plan, "store", ["python", "-c", WAIT_FOR_STORE]),
        "env": pods.client_environment(plan),
        "resources": pods.resources("256Mi", "100m"),
    }
    worker = {
        **pods.container_of(plan, PART, ["psstore", "kubernetes", "worker", "--", *plan.command]),
        **pods.env_from(plan),
        "env": [
            *pods.client_environment(plan),
            field("RANK", "metadata.annotations['batch.kubernetes.io/job-completion-index']"),
            value("WORLD_SIZE", str(plan.num_workers)),
            value("PSSTORE_WAIT_S", f"{WAIT_S:g}"),
            value("HOME", "/tmp"),
        ],
        "resources": pods.resources(plan.worker_memory, plan.worker_cpu, gpus=plan.gpus),
    }
    worker["volumeMounts"] = [*worker["volumeMounts"], {"name": "shm", "mountPath": "/dev/shm"}]
    shm = {"name": "shm", "emptyDir": {"medium": "Memory"}}  # torch's data loaders' share of the worker's memory
    return {
        "completionMode": "Indexed",
        "completions": plan.num_workers,
        "parallelism": plan.num_workers,
        "backoffLimit": FAILURES,
        "podReplacementPolicy": "Failed",  # a rank's next pod comes when the one before has ended its step
        "template": {
            "metadata": {"labels": pods.labels(plan, PART)},
            "spec": {
                **pods.pod_spec(plan),
                "restartPolicy": "OnFailure",
                "initContainers": [waiting],
                "containers": [worker],
                "volumes": [*pods.client_volumes(plan, plan.worker_token_secret), shm],
            },
        },
    }


# ---- the end ----


def _rights(plan: KubernetesPlan) -> list[Manifest]:
    """Who may end the store: that, and nothing else."""
    name = f"{plan.name}-{STOP}"
    metadata = {"name": name, "labels": pods.labels(plan, STOP)}
    group = "rbac.authorization.k8s.io"
    rule = {
        "apiGroups": ["apps"],
        "resources": ["statefulsets/scale"],
        "resourceNames": [plan.name],
        "verbs": ["patch"],
    }
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata},
        {"apiVersion": f"{group}/v1", "kind": "Role", "metadata": metadata, "rules": [rule]},
        {
            "apiVersion": f"{group}/v1",
            "kind": "RoleBinding",
            "metadata": metadata,
            "roleRef": {"apiGroup": group, "kind": "Role", "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": name}],
        },
    ]


def _stop_job(plan: KubernetesPlan) -> Manifest:
    """With a last checkpoint first, which needs the admin's token: all pods go at once then, and none hands over."""
    save = {
        **pods.container_of(plan, "save", pods.save_command(plan)),
        "env": pods.client_environment(plan),
        "resources": pods.resources("256Mi", "100m"),
    }
    stop = {
        **pods.container_of(plan, STOP, ["psstore", "kubernetes", "stop", plan.name]),
        "resources": pods.resources("256Mi", "100m"),
    }
    spec = {
        **pods.pod_spec(plan),
        "serviceAccountName": f"{plan.name}-{STOP}",
        "automountServiceAccountToken": True,
        "restartPolicy": "OnFailure",
        "containers": [stop],
        "volumes": pods.client_volumes(plan, plan.token_secret),
    }
    if plan.checkpoint is not None:
        spec["initContainers"] = [save]
    return {"template": {"metadata": {"labels": pods.labels(plan, STOP)}, "spec": spec}}
