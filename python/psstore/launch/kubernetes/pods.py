"""What the pods of shards and workers have in common: where the store is, who may do what, and the store's secrets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from psstore.launch.kubernetes.plan import KubernetesPlan
from psstore.net.address import DEFAULT_PORT

Manifest = dict[str, Any]

USER = 65532
"""Whom all containers run as: nobody whom an image knows (that of distroless' nonroot)."""

SECRETS, SECRET_MODE = "/run/psstore", 0o440
"""Where the token and certificates are, for the pod's group: they are root's files, which psstore leaves to root to
protect."""

TOKEN, CERT, KEY, CA = "token", "tls.crt", "tls.key", "ca.crt"
"""Keys of secrets, as kubernetes.io/tls and cert-manager have them, and the names of their files."""

WORKER_TOKEN = "worker-token"
"""Name of the file in the store's pods that has the workers' token."""

CHECKPOINT_S = 0.8
"""Share of a pod's grace for the checkpoint before it ends."""


def labels(plan: KubernetesPlan, part: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": "psstore", "app.kubernetes.io/instance": plan.name, "psstore/part": part}


def place(plan: KubernetesPlan, pod: int) -> str:
    """Where that pod of the store is."""
    return f"{plan.name}-{pod}.{plan.name}:{DEFAULT_PORT}"


def url(plan: KubernetesPlan) -> str:
    """Where shard 0 is, or its standby."""
    scheme = "ps" if plan.tls_secret is None else "pss"
    return f"{scheme}://" + ",".join(place(plan, pod) for pod in (0, plan.shards)[: 1 + plan.standbys])


def save_command(plan: KubernetesPlan) -> list[str]:
    """Has the store write a checkpoint, within a pod's grace."""
    return ["psstore", "checkpoint", "save", url(plan), "--wait", f"{CHECKPOINT_S * plan.grace_s:g}"]


# ---- the pod ----


def pod_spec(plan: KubernetesPlan) -> Manifest:
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


def container_of(plan: KubernetesPlan, name: str, command: Sequence[str]) -> Manifest:
    """Nothing in it can be written but /tmp."""
    return {
        "name": name,
        "image": plan.image,
        "command": list(command),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "secrets", "mountPath": SECRETS, "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }


def resources(memory: str, cpu: str, *, gpus: int = 0) -> Manifest:
    """Memory is bounded by what is asked for, since who takes more is killed with what it holds; processors are not."""
    devices = {"nvidia.com/gpu": gpus} if gpus else {}
    return {"requests": {"memory": memory, "cpu": cpu, **devices}, "limits": {"memory": memory, **devices}}


def value(name: str, text: str) -> Manifest:
    """An environment variable."""
    return {"name": name, "value": text}


def field(name: str, path: str) -> Manifest:
    """An environment variable that Kubernetes knows."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


# ---- secrets ----


def client_environment(plan: KubernetesPlan) -> list[Manifest]:
    """How a pod connects to the store, which is no part of it."""
    found = [value("PSSTORE_URL", url(plan)), value("PSSTORE_TOKEN_FILE", f"{SECRETS}/{TOKEN}")]
    if plan.tls_secret is not None:
        found.append(value("PSSTORE_TLS_CA", f"{SECRETS}/{CA}"))
    if plan.tls_client_secret is not None:
        found += certificate(plan)
    return found


def certificate(plan: KubernetesPlan) -> list[Manifest]:
    """The pod's own, by which it is known."""
    return [value("PSSTORE_TLS_CERT", f"{SECRETS}/{CERT}"), value("PSSTORE_TLS_KEY", f"{SECRETS}/{KEY}")]


def store_volumes(plan: KubernetesPlan) -> list[Manifest]:
    """The store's key is in its own pods alone."""
    tokens = [_source(plan.token_secret, TOKEN), _source(plan.worker_token_secret, token=WORKER_TOKEN)]
    return _volumes(plan, tokens, certificate_secret=plan.tls_secret)


def client_volumes(plan: KubernetesPlan, token_secret: str) -> list[Manifest]:
    return _volumes(plan, [_source(token_secret, TOKEN)], certificate_secret=plan.tls_client_secret)


def _volumes(plan: KubernetesPlan, tokens: Sequence[Manifest], *, certificate_secret: str | None) -> list[Manifest]:
    sources = list(tokens)
    if plan.tls_secret is not None:
        sources.append(_source(plan.tls_secret, CA))
    if certificate_secret is not None:
        sources.append(_source(certificate_secret, CERT, KEY))
    secrets = {"name": "secrets", "projected": {"defaultMode": SECRET_MODE, "sources": sources}}
    return [secrets, {"name": "tmp", "emptyDir": {}}]


def _source(secret: str, *keys: str, **files: str) -> Manifest:
    """`keys`: in files of their own names; `files`: the file of each key."""
    named = {**{key: key for key in keys}, **files}
    return {"secret": {"name": secret, "items": [{"key": key, "path": path} for key, path in named.items()]}}


def env_from(plan: KubernetesPlan) -> Manifest:
    """What the image's own libraries read, as storage's do."""
    return {"envFrom": [{"secretRef": {"name": name}} for name in plan.env_secrets]} if plan.env_secrets else {}
