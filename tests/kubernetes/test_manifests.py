"""Manifests of `psstore kubernetes render`: objects that belong together, and environments that make pods."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from psstore.cli.main import app
from psstore.launch.kubernetes.manifests import manifests
from psstore.launch.kubernetes.plan import KubernetesPlan
from psstore.launch.kubernetes.pods import Manifest
from psstore.server.settings import ServerSettings
from tests.support.free_ports import free_ports
from tests.support.server_process import StoreProcess

pytestmark = [pytest.mark.sockets, pytest.mark.one_loop]

PLAN = KubernetesPlan(
    image="registry.example/train:1",
    command=("python", "train.py"),
    shards=2,
    workers="3",
    checkpoint="s3://bucket/run",
    env_secrets=("s3-credentials",),
    gpus=1,
)


def of_kind(plan: KubernetesPlan, kind: str) -> Manifest:
    (found,) = [one for one in manifests(plan) if one["kind"] == kind]
    return found


def pod(plan: KubernetesPlan, kind: str) -> dict[str, Any]:
    """The pod template of the shards or the workers."""
    spec = of_kind(plan, kind)["spec"]
    if kind == "StatefulSet":
        return spec["template"]  # type: ignore[no-any-return]
    return spec["replicatedJobs"][0]["template"]["spec"]["template"]  # type: ignore[no-any-return]


def stop_pod(plan: KubernetesPlan) -> dict[str, Any]:
    """Pod template of the job that ends the store."""
    return of_kind(plan, "JobSet")["spec"]["replicatedJobs"][1]["template"]["spec"]["template"]  # type: ignore[no-any-return]


def pod_specs(plan: KubernetesPlan) -> list[dict[str, Any]]:
    return [one["spec"] for one in (pod(plan, "StatefulSet"), pod(plan, "JobSet"), stop_pod(plan))]


def containers(plan: KubernetesPlan) -> list[dict[str, Any]]:
    """Shard, waiting, worker; then, with checkpoints, save; stop."""
    return [one for spec in pod_specs(plan) for one in (*spec.get("initContainers", ()), *spec["containers"])]


def environment(container: dict[str, Any], index: int) -> dict[str, str]:
    """As the container of that number finds it, but for secrets."""
    return {one["name"]: one.get("value", str(index)) for one in container["env"]}


# ---- the command ----


def render(*arguments: str) -> tuple[int, str]:
    ran = CliRunner().invoke(app, ["kubernetes", "render", "--image", "i", *arguments])
    return ran.exit_code, ran.output


def test_what_is_printed_is_what_is_meant() -> None:
    yaml = pytest.importorskip("yaml")
    code, text = render("--shards", "3", "--workers", "4", "--", "python", "train.py", "--epochs", "3")
    assert code == 0
    plan = KubernetesPlan(image="i", command=("python", "train.py", "--epochs", "3"), shards=3, workers="4")
    assert list(yaml.safe_load_all(text)) == manifests(plan)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--standbys", "2"), "standbys"),
        (("--checkpoint", "/shared/run"), "expected a URL that every pod sees"),
        (("--workers", "many"), "workers is 'many'"),
        (("--workers", "0"), "at least 1 worker"),
        (("--workers", "2:4", "--mode", "ssp"), "come and go in mode 'sync' alone"),
        (("--checkpoint", "s3://b/r", "--checkpoint-every", "foo"), "checkpoint_every is 'foo'"),
        (("--shard-memory", "8GB"), "shard_memory is '8GB'; expected a quantity"),
        (("--worker-cpu", ""), "worker_cpu is ''"),
        (("--env-secret", "S3_KEYS"), "'S3_KEYS' is no secret's name"),
        (("--image", ""), "say which image"),
        (("--name", "My_Store"), "name is 'My_Store'; expected at most 38 lower-case letters"),
        (("--name", "s" * 39), "expected at most 38"),
        (("--tls-client-secret", "worker"), "say whose, by tls_secret"),
    ],
)
def test_what_cant_be_is_refused_in_a_sentence(arguments: tuple[str, ...], words: str) -> None:
    code, text = render(*arguments, "--", "python", "train.py")
    assert code == 2
    assert words in text


def test_what_a_worker_runs_is_asked_for_in_a_sentence() -> None:
    code, text = render("--shards", "3")
    assert code == 2
    assert "say what a worker runs: … -- python train.py" in text


def test_without_yaml_the_extra_is_named() -> None:
    program = (
        "import sys; sys.modules['yaml'] = None; sys.argv = 'psstore kubernetes render --image i -- t'.split();"
        "from psstore.cli.main import main; main()"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert run.returncode == 3
    assert "pip install 'psstore[kubernetes]'" in run.stderr


# ---- objects that belong together ----


def test_each_selector_finds_the_pods_of_its_own_template() -> None:
    labels = pod(PLAN, "StatefulSet")["metadata"]["labels"]
    assert of_kind(PLAN, "Service")["spec"]["selector"] == labels
    assert of_kind(PLAN, "StatefulSet")["spec"]["selector"]["matchLabels"] == labels
    assert of_kind(PLAN, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == labels
    assert pod(PLAN, "JobSet")["metadata"]["labels"].items() - labels.items(), "a worker is no shard"


def test_shards_find_each_other_before_they_are_ready() -> None:
    service, shards = of_kind(PLAN, "Service"), of_kind(PLAN, "StatefulSet")
    assert service["spec"]["publishNotReadyAddresses"]
    assert service["spec"]["clusterIP"] == "None"
    assert shards["spec"]["serviceName"] == service["metadata"]["name"]
    assert (shards["spec"]["replicas"], shards["spec"]["podManagementPolicy"]) == (2, "Parallel")


def test_probes_are_of_a_port_that_there_is() -> None:
    (shard,) = pod(PLAN, "StatefulSet")["spec"]["containers"]
    ports = {one["name"]: one["containerPort"] for one in shard["ports"]}
    paths = {}
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        paths[probe] = shard[probe]["httpGet"]["path"]
        assert ports[shard[probe]["httpGet"]["port"]] == int(environment(shard, 0)["PSSTORE_METRICS"])
    assert paths == {"startupProbe": "/livez", "livenessProbe": "/livez", "readinessProbe": "/readyz"}


def test_a_worker_is_a_rank_for_each_completion() -> None:
    job = of_kind(PLAN, "JobSet")["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", 3, 3)
    (worker,) = pod(PLAN, "JobSet")["spec"]["containers"]
    told = environment(worker, 2)
    assert (told["RANK"], told["WORLD_SIZE"]) == ("2", "3")
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == 1
    (rank,) = [one["valueFrom"]["fieldRef"]["fieldPath"] for one in worker["env"] if one["name"] == "RANK"]
    assert "completion-index" in rank


def test_workers_that_come_and_go_have_as_many_pods_as_there_may_be() -> None:
    plan = replace(PLAN, workers="2:5")
    assert of_kind(plan, "JobSet")["spec"]["replicatedJobs"][0]["template"]["spec"]["parallelism"] == 5
    assert environment(containers(plan)[0], 0)["PSSTORE_WORKERS"] == "2:5"


def test_a_pod_that_goes_has_a_checkpoint_written_within_its_grace() -> None:
    (shard,) = pod(PLAN, "StatefulSet")["spec"]["containers"]
    command = shard["lifecycle"]["preStop"]["exec"]["command"]
    assert command[:3] == ["psstore", "checkpoint", "save"]
    assert float(command[command.index("--wait") + 1]) < PLAN.grace_s
    assert of_kind(PLAN, "PodDisruptionBudget")["spec"]["maxUnavailable"] == 1


def test_without_checkpoints_no_shard_is_let_go() -> None:
    plan = replace(PLAN, checkpoint=None)
    assert of_kind(plan, "PodDisruptionBudget")["spec"]["maxUnavailable"] == 0
    (shard,) = pod(plan, "StatefulSet")["spec"]["containers"]
    assert "lifecycle" not in shard
    assert "PSSTORE_RESTARTS" not in environment(shard, 0)
    assert "initContainers" not in stop_pod(plan)["spec"]


def test_the_store_ends_with_its_workers_after_a_last_checkpoint() -> None:
    """Who ends it may do that, and nothing else."""
    worker, stop = of_kind(PLAN, "JobSet")["spec"]["replicatedJobs"]
    assert stop["dependsOn"] == [{"name": worker["name"], "status": "Complete"}]
    spec = stop_pod(PLAN)["spec"]
    assert spec["initContainers"][0]["command"][:3] == ["psstore", "checkpoint", "save"]
    assert spec["containers"][0]["command"] == ["psstore", "kubernetes", "stop", "store"]
    (subject,) = of_kind(PLAN, "RoleBinding")["subjects"]
    assert spec["serviceAccountName"] == subject["name"] == of_kind(PLAN, "ServiceAccount")["metadata"]["name"]
    assert of_kind(PLAN, "RoleBinding")["roleRef"]["name"] == of_kind(PLAN, "Role")["metadata"]["name"]
    (rule,) = of_kind(PLAN, "Role")["rules"]
    assert (rule["resources"], rule["resourceNames"], rule["verbs"]) == (["statefulsets/scale"], ["store"], ["patch"])
    assert [one["automountServiceAccountToken"] for one in pod_specs(PLAN)] == [False, False, True]


def test_a_store_that_stays_needs_no_rights() -> None:
    plan = replace(PLAN, stay=True)
    assert [one["kind"] for one in manifests(plan)] == ["Service", "PodDisruptionBudget", "StatefulSet", "JobSet"]
    assert len(of_kind(plan, "JobSet")["spec"]["replicatedJobs"]) == 1


def test_standbys_are_the_second_half_of_the_pods_and_let_one_go_at_a_time() -> None:
    plan = replace(PLAN, standbys=1)
    shards = of_kind(plan, "StatefulSet")["spec"]
    assert shards["replicas"] == 4
    assert shards["updateStrategy"] == {"type": "RollingUpdate"}
    (shard,) = shards["template"]["spec"]["containers"]
    told = environment(shard, 3)
    assert told["PSSTORE_SHARDS_AT"] == "store-0.store:5700,store-1.store:5700"
    assert told["PSSTORE_STANDBYS_AT"] == "store-2.store:5700,store-3.store:5700"
    assert told.keys() <= {f"PSSTORE_{name.upper()}" for name in ServerSettings.__struct_fields__}
    assert "lifecycle" not in shard, "it hands over when it is told to end"
    assert "PSSTORE_RESTARTS" not in told
    assert of_kind(plan, "PodDisruptionBudget")["spec"]["maxUnavailable"] == 1
    (worker,) = pod(plan, "JobSet")["spec"]["containers"]
    assert environment(worker, 0)["PSSTORE_URL"] == "ps://store-0.store:5700,store-2.store:5700"


def test_shards_are_spread_over_nodes() -> None:
    template = pod(PLAN, "StatefulSet")
    (spread,) = template["spec"]["topologySpreadConstraints"]
    assert spread["labelSelector"]["matchLabels"] == template["metadata"]["labels"]
    assert spread["topologyKey"] == "kubernetes.io/hostname"


# ---- rights ----


def test_no_container_has_rights_that_it_does_not_need() -> None:
    for spec in pod_specs(PLAN):
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["runAsUser"] > 0
        assert not spec["enableServiceLinks"]
        assert spec["terminationGracePeriodSeconds"] == PLAN.grace_s
    for one in containers(PLAN):
        security = one["securityContext"]
        assert security["readOnlyRootFilesystem"]
        assert not security["allowPrivilegeEscalation"]
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert one["resources"]["requests"]["memory"] == one["resources"]["limits"]["memory"]


def files_of(spec: dict[str, Any]) -> dict[str, str]:
    """Secret by the file that has its key of that name, or its token, if it is the workers' in the store's pods."""
    (volume,) = [one["projected"] for one in spec["volumes"] if one["name"] == "secrets"]
    assert volume["defaultMode"] == 0o440
    found: dict[str, str] = {}
    for source in volume["sources"]:
        assert all(one["path"] in (one["key"], f"worker-{one['key']}") for one in source["secret"]["items"])
        found |= {one["path"]: source["secret"]["name"] for one in source["secret"]["items"]}
    return found


def test_tokens_come_from_secrets_whose_mount_its_user_can_read_and_no_other() -> None:
    shards, workers, end = map(files_of, pod_specs(PLAN))
    assert shards == {"token": "psstore-token", "worker-token": "psstore-worker-token"}
    assert workers == {"token": "psstore-worker-token"}, "the store's own lets one do everything"
    assert end == {"token": "psstore-token"}, "it has a checkpoint written"
    for spec in pod_specs(PLAN):
        assert spec["securityContext"]["fsGroup"] == spec["securityContext"]["runAsGroup"]
    *others, stop = containers(PLAN)
    for one in others:
        (mount,) = [mount for mount in one["volumeMounts"] if mount["name"] == "secrets"]
        assert environment(one, 0)["PSSTORE_TOKEN_FILE"] == f"{mount['mountPath']}/token"
    assert "env" not in stop
    shard, _, worker, *_ = others
    assert environment(shard, 0)["PSSTORE_WORKER_TOKEN_FILE"] == "/run/psstore/worker-token"
    assert shard["envFrom"] == worker["envFrom"] == [{"secretRef": {"name": "s3-credentials"}}]


def test_a_certificate_is_mounted_where_it_is_needed_and_its_key_nowhere_else() -> None:
    plan = replace(PLAN, tls_secret="store-tls")
    shards, *others = pod_specs(plan)
    own = {"tls.crt": "store-tls", "tls.key": "store-tls"}
    tokens = {"token": "psstore-token", "worker-token": "psstore-worker-token"}
    assert files_of(shards) == {**tokens, "ca.crt": "store-tls", **own}
    for spec, token in zip(others, ("psstore-worker-token", "psstore-token"), strict=True):
        assert files_of(spec) == {"token": token, "ca.crt": "store-tls"}
    shard, waiting, worker, save, _ = containers(plan)
    told = environment(shard, 0)
    assert (told["PSSTORE_TLS_CERT"], told["PSSTORE_TLS_KEY"]) == ("/run/psstore/tls.crt", "/run/psstore/tls.key")
    assert "PSSTORE_TLS_CA" not in told, "clients need no certificate"
    for one in (waiting, worker, save):
        assert environment(one, 0)["PSSTORE_TLS_CA"] == "/run/psstore/ca.crt"
        assert "PSSTORE_TLS_CERT" not in environment(one, 0)
        assert environment(one, 0)["PSSTORE_URL"].startswith("pss://")
    assert shard["lifecycle"]["preStop"]["exec"]["command"][:2] == ["env", "PSSTORE_TLS_CA=/run/psstore/ca.crt"]


def test_workers_have_a_certificate_of_their_own_where_the_store_asks_for_one() -> None:
    plan = replace(PLAN, tls_secret="store-tls", tls_client_secret="worker-tls")
    shards, *others = pod_specs(plan)
    assert files_of(shards)["tls.key"] == "store-tls"
    for spec in others:
        assert files_of(spec)["tls.key"] == files_of(spec)["tls.crt"] == "worker-tls"
    shard, _, worker, *_ = containers(plan)
    assert environment(shard, 0)["PSSTORE_TLS_CA"] == "/run/psstore/ca.crt"
    assert environment(worker, 0)["PSSTORE_TLS_CERT"] == "/run/psstore/tls.crt"


# ---- what a pod is ----


@pytest.mark.parametrize(
    "plan", [PLAN, replace(PLAN, standbys=1, tls_secret="store-tls", tls_client_secret="worker-tls")]
)
def test_variables_of_a_shard_are_settings(plan: KubernetesPlan) -> None:
    settings = {f"PSSTORE_{name.upper()}" for name in ServerSettings.__struct_fields__}
    assert environment(containers(plan)[0], 0).keys() <= settings


def mounted(spec: dict[str, Any], folder: Path) -> Path:
    """The folder with the pod's secrets, each of which is a token that is its name, again and again."""
    folder.mkdir()
    for name, secret in files_of(spec).items():
        (folder / name).write_text(secret * 2)
        (folder / name).chmod(0o600)
    return folder


def test_shards_and_a_worker_with_these_environments_train(tmp_path: Path) -> None:
    """On this machine: names of pods are places of it, and the checkpoint is in a folder."""
    plan = replace(PLAN, workers="1", checkpoint=f"file://{tmp_path}/run")
    in_store, in_workers = (mounted(spec, tmp_path / str(i)) for i, spec in enumerate(pod_specs(plan)[:2]))
    places = [f"localhost:{port}" for port in free_ports(2)]

    def here(container: dict[str, Any], index: int, secrets: Path) -> dict[str, str]:
        told = {**environment(container, index), "PSSTORE_METRICS": "0"}
        moved = {"/run/psstore": str(secrets), **{f"store-{i}.store:5700": place for i, place in enumerate(places)}}
        for there, place in moved.items():
            told = {name: value.replace(there, place) for name, value in told.items()}
        return told

    shard, waiting, worker, *_ = containers(plan)
    stores = [StoreProcess(port=None, environ=here(shard, index, in_store)) for index in range(2)]
    try:
        assert all(one.wait_ready() for one in stores), stores[0].log()
        script = (
            "import numpy as np, psstore\n"
            "with psstore.connect() as store:\n"
            "    store.create('w', np.zeros(100_000, np.float32), rule='sgd')\n"
            "    store.push('w', np.ones(100_000, np.float32))\n"
            "    store.commit({'lr': 1.0})\n"
            "    print(store.rank, store.num_workers, store.num_shards, store.pull('w')[0])\n"
            "    try:\n"
            "        store.checkpoint()\n"
            "    except psstore.errors.NotAllowed as error:\n"
            "        print(error.details['role'])\n"
        )
        for container, program in ((waiting, waiting["command"][2]), (worker, script)):
            ran = subprocess.run(
                [sys.executable, "-c", program],
                env=here(container, 0, in_workers),
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert ran.returncode == 0, ran.stderr
        assert ran.stdout == "0 1 2 -1.0\nworker\n"
        save = shard["lifecycle"]["preStop"]["exec"]["command"]
        command = [value.replace("store-0.store:5700", places[0]) for value in save]
        ran = subprocess.run(
            [sys.executable, "-m", "psstore.cli.main", *command[1:]],
            env=here(shard, 0, in_store),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (ran.returncode, ran.stdout) == (0, "version 1 is written\n"), ran.stderr
    finally:
        for one in stores:
            one.end()
