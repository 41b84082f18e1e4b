"""All objects of a plan."""

from __future__ import annotations

from psstore.launch.kubernetes.plan import KubernetesPlan
from psstore.launch.kubernetes.pods import Manifest
from psstore.launch.kubernetes.shards import store_of
from psstore.launch.kubernetes.workers import workers_of


def manifests(plan: KubernetesPlan) -> list[Manifest]:
    """In the order in which they are to be applied. Raises BadArgument."""
    plan.check()
    return [*store_of(plan), *workers_of(plan)]
