"""What is rendered, held against what clusters take: Kubernetes' own schemas by version, and JobSet's."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from psstore.launch.kubernetes.manifests import manifests
from psstore.launch.kubernetes.plan import KubernetesPlan
from tests.kubernetes.plans import PLANS

kubernetes_validate = pytest.importorskip("kubernetes_validate")

VERSIONS = [f"1.{minor}" for minor in range(28, 38)]

EACH_PLAN = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)


def objects_of(plan: KubernetesPlan) -> list[dict[str, Any]]:
    """As kinds of Kubernetes' own: JobSet's jobs are Jobs."""
    found = []
    for manifest in manifests(plan):
        if manifest["kind"] != "JobSet":
            found.append(manifest)
            continue
        for job in manifest["spec"]["replicatedJobs"]:
            metadata = {"name": f"{manifest['metadata']['name']}-{job['name']}-0"}
            found.append({"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, **job["template"]})
    return found


def problem(manifest: dict[str, Any], version: str) -> str | None:
    """What is wrong with it in that version, unknown fields included."""
    try:
        found = kubernetes_validate.validate(manifest, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return str(error.message)
    assert found == version, "there is no schema of that version"
    return None


@EACH_PLAN
def test_each_object_fits_the_schemas_of_all_versions(plan: KubernetesPlan) -> None:
    """All versions for the plan that has everything; the first and the last one for the others."""
    for manifest in objects_of(plan):
        versions = VERSIONS if plan is PLANS["everything"] else (VERSIONS[0], VERSIONS[-1])
        found = {version: told for version in versions if (told := problem(manifest, version)) is not None}
        assert not found, f"{manifest['kind']}: {found}"


def test_the_schemas_notice_a_field_that_is_none() -> None:
    for manifest in objects_of(PLANS["everything"]):
        if manifest["kind"] in ("StatefulSet", "Job"):
            wrong = copy.deepcopy(manifest)
            wrong["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
            assert "readynessProbe" in str(problem(wrong, "1.33"))
    service = copy.deepcopy(objects_of(PLANS["least"])[0])
    service["spec"]["ports"][0]["port"] = "many"
    assert problem(service, "1.28") is not None


@pytest.fixture(scope="module")
def job_set_model() -> Any:
    """Kubeflow's types of JobSet's API, which are made from its schema."""
    return pytest.importorskip("kubeflow_trainer_api.models").JobsetV1alpha2JobSet


@EACH_PLAN
def test_the_job_set_is_one(plan: KubernetesPlan, job_set_model: Any) -> None:
    (manifest,) = [one for one in manifests(plan) if one["kind"] == "JobSet"]
    assert job_set_model.from_dict(manifest).to_dict() == manifest, "what it does not know it leaves out"


def test_the_types_of_a_job_set_notice_what_is_none(job_set_model: Any) -> None:
    (manifest,) = [one for one in manifests(PLANS["least"]) if one["kind"] == "JobSet"]
    job = manifest["spec"]["replicatedJobs"][1]
    changes: list[dict[str, Any]] = [{"dependOn": []}, {"dependsOn": [{"name": "worker"}]}, {"name": None}]
    for change in changes:
        wrong = copy.deepcopy(manifest)
        wrong["spec"]["replicatedJobs"][1] = {**job, **change}
        assert job_set_model.from_dict(wrong).to_dict() != wrong, change
    job["replicas"] = "one"
    with pytest.raises(ValueError, match="replicas"):
        job_set_model.from_dict(manifest)
