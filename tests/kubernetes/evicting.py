"""A training on the stand-in of a cluster whose pods are evicted, one after the other, and what it came to."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import random
import re
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.request import Request, urlopen

from psstore.client.local import LocalStore
from psstore.launch.kubernetes.manifests import manifests
from psstore.launch.kubernetes.plan import KubernetesPlan
from tests.kubernetes.cluster import Cluster, cluster_on
from tests.kubernetes.looking import LOOK_S, until
from tests.kubernetes.node import NODE, TRAINING, Node
from tests.kubernetes.training import LAST, train
from tests.support.certificates import TestCA

BUCKET, STORAGE_PORT = "checkpoints", 5000

STORAGE = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_ENDPOINT_URL": f"http://{NODE}:{STORAGE_PORT}",
}
"""What s3fs reads of its environment."""

UPDATE = "rolling update"

TAIL_BYTES = 4096
"""Of a log, what has its last step in it."""

END_STEPS = 100
"""How far ahead the last step is of the one that is taken when it is chosen."""

STEPPED = re.compile(r"^step (\d+) ([\d.]+)$", re.MULTILINE)
ENDED = re.compile(r"^version (\d+) sha256 (\w+)$", re.MULTILINE)


@dataclass
class Scene:
    """What is done to the pods of a plan."""

    plan: KubernetesPlan
    evictions: int = 10
    steps_each: int = 40
    """Between one eviction and the next, at least."""
    crash_share: float = 0.0
    """Of evictions, those that are none: the container is killed, in a pod that stays."""
    worker_share: float = 0.0
    """Of evictions, those of workers' pods: the others wait for the next one."""
    rolling_updates: int = 0
    """Of the store, at the end."""
    seed: int = 1
    start_s: float = 1.0
    dns_cache_s: float = 0.0
    image: Path = Path("/")
    """A folder with its files."""


@dataclass
class Outcome:
    """What the pods wrote."""

    succeeded: bool = False
    """The JobSet, and the store has ended with it."""
    done: Counter[str] = field(default_factory=Counter)
    """What was done to whom."""
    put_off: int = 0
    """Evictions that had to wait for a PodDisruptionBudget."""
    waits: dict[str, list[float]] = field(default_factory=dict)
    """By what was done: seconds from a worker's step to its next, the longest of each time."""
    digests: list[str] = field(default_factory=list)
    num_steps: int = 0
    versions: list[int] = field(default_factory=list)


def plan_of(*, shards: int, workers: int, checkpoints: bool = False) -> KubernetesPlan:
    """With certificates for both ends; and with standbys, or else with checkpoints on S3."""
    return KubernetesPlan(
        image="here",
        command=("python", TRAINING),
        shards=shards,
        standbys=0 if checkpoints else 1,
        workers=str(workers),
        checkpoint=f"s3://{BUCKET}/run" if checkpoints else None,
        env_secrets=("storage",) if checkpoints else (),
        checkpoint_every="10s",
        tls_secret="store-tls",
        tls_client_secret="worker-tls",
        grace_s=30,
    )


def secrets_of(plan: KubernetesPlan) -> dict[str, dict[str, str]]:
    names = [f"{plan.name}-{pod}.{plan.name}" for pod in range(plan.num_shard_pods)]
    with tempfile.TemporaryDirectory() as folder:
        ca = TestCA(Path(folder))
        store, worker = ca.issue(*names, "localhost", file="store"), ca.issue("worker", file="worker")
        trusted = ca.pem.read_text()
        return {
            plan.token_secret: {"token": "0123456789abcdef" * 4},
            plan.worker_token_secret: {"token": "fedcba9876543210" * 4},
            str(plan.tls_secret): {
                "tls.crt": store.cert.read_text(),
                "tls.key": store.key.read_text(),
                "ca.crt": trusted,
            },
            "storage": STORAGE,
            str(plan.tls_client_secret): {"tls.crt": worker.cert.read_text(), "tls.key": worker.key.read_text()},
        }


def undisturbed(num_workers: int, num_steps: int) -> str:
    """The hash that training has to come to, by a store in this process."""
    found: dict[int, str] = {}
    with LocalStore(2, workers=num_workers) as local:

        def work(rank: int) -> None:
            with local.connect(rank=rank) as store:
                found[rank] = train(store, lambda: num_steps, lambda _: None)

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(num_workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    (digest,) = set(found.values())
    return digest


def run(scene: Scene, logs: Path, say: Callable[[str], None]) -> Outcome:
    """This process is on the stand-in's node from then on. `logs`: an empty folder, for what pods write."""
    with Node(logs, scene.image) as node, storage() if scene.plan.checkpoint is not None else contextlib.nullcontext():
        return asyncio.run(_run(scene, node, say))


@contextlib.contextmanager
def storage() -> Iterator[None]:
    """S3 by moto, on the node."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # each request otherwise
    server = ThreadedMotoServer(ip_address=NODE, port=STORAGE_PORT)
    server.start()
    try:
        with urlopen(Request(f"{STORAGE['AWS_ENDPOINT_URL']}/{BUCKET}", method="PUT")):
            pass
        yield
    finally:
        server.stop()


async def _run(scene: Scene, node: Node, say: Callable[[str], None]) -> Outcome:
    async with cluster_on(
        node, secrets_of(scene.plan), start_s=scene.start_s, dns_cache_s=scene.dns_cache_s
    ) as cluster:
        staged = Staged(scene, node, cluster, say)
        await staged.run()
    staged.read_logs()
    return staged.outcome


class Staged:
    """A scene as it is played."""

    def __init__(self, scene: Scene, node: Node, cluster: Cluster, say: Callable[[str], None]) -> None:
        plan = scene.plan
        self.outcome = Outcome()
        self._scene, self._node, self._cluster, self._say = scene, node, cluster, say
        self._rng = random.Random(scene.seed)
        self._shards = [f"{plan.name}-{pod}" for pod in range(plan.num_shard_pods)]
        self._workers = [f"{plan.name}-workers-worker-0-{rank}" for rank in range(plan.num_workers)]
        self._moments: list[tuple[str, float]] = []
        """What was done when."""

    async def run(self) -> None:
        plan = self._scene.plan
        self._cluster.apply(manifests(plan))
        for number in range(1, self._scene.evictions + 1):
            await self._steps_on(self._scene.steps_each)
            self._say(f"{number}: {await self._strike()}")
        for number in range(1, self._scene.rolling_updates + 1):
            await self._cluster.settled()
            self._cluster.apply(_changed(plan, number))
            await self._cluster.settled()
            self.outcome.done[UPDATE] += 1
            self._say(f"{UPDATE} {number}")
        await self._steps_on(1)  # whoever was evicted last is there again
        self._say_which_is_last()
        self.outcome.succeeded = await self._cluster.end_of(f"{plan.name}-workers")
        await until(lambda: self._cluster.is_alive() and not self._cluster.pods)

    async def _steps_on(self, num_steps: int) -> None:
        """Waits until all workers are so many steps ahead of whoever is ahead now."""
        to = num_steps + max(map(self._step_of, self._workers))
        await until(lambda: self._cluster.is_alive() and min(map(self._step_of, self._workers)) >= to)

    async def _strike(self) -> str:
        """As soon as that can be; what was done to whom."""
        of_worker = self._rng.random() < self._scene.worker_share
        victim = self._rng.choice(self._workers if of_worker else self._shards)
        is_crash = self._rng.random() < self._scene.crash_share
        what = f"{'crash' if is_crash else 'eviction'} of a {'worker' if of_worker else 'shard'}"
        tried = 0
        while not self._do(victim, is_crash=is_crash):
            self._cluster.is_alive()
            tried += 1
            await asyncio.sleep(LOOK_S)
        self.outcome.put_off += tried > 0
        self.outcome.done[what] += 1
        self._moments.append((what, asyncio.get_running_loop().time()))
        return f"{what}, {victim}"

    def _do(self, victim: str, *, is_crash: bool) -> bool:
        """False: not now."""
        pod = self._cluster.pods.get(victim)
        if pod is None or not pod.is_ready:
            return False
        if not is_crash:
            return self._cluster.evict(victim)
        if not self._cluster.is_settled():  # one at a time, as evictions are
            return False
        pod.kill()
        return True

    def _say_which_is_last(self) -> None:
        self.outcome.num_steps = END_STEPS + max(map(self._step_of, self._workers))
        for name in self._workers:
            folder = self._cluster.pods[name].folder_of("tmp")
            (folder / "next").write_text(str(self.outcome.num_steps))
            (folder / "next").rename(folder / LAST.name)  # it is there as a whole, or not yet

    def _step_of(self, worker: str) -> int:
        path = self._log_of(worker)
        if not path.exists():
            return 0
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            found = STEPPED.findall(file.read().decode())
        return int(found[-1][0]) if found else 0

    def _log_of(self, worker: str) -> Path:
        return self._node.logs / f"{worker}.log"

    def read_logs(self) -> None:
        """What the workers say of it. asyncio's clock is theirs: CLOCK_MONOTONIC."""
        outcome = self.outcome
        logs = [self._log_of(name).read_text() for name in self._workers]
        for log in logs:
            ended = ENDED.findall(log)
            outcome.digests += [digest for _, digest in ended]
            outcome.versions += [int(version) for version, _ in ended]
        ends = [*(at for _, at in self._moments[1:]), math.inf]
        for (what, begin), end in zip(self._moments, ends, strict=True):
            longest = max(_longest(log, begin, end) for log in logs)
            outcome.waits.setdefault(what, []).append(longest)


def _longest(log: str, begin: float, end: float) -> float:
    """Seconds from a step to the next, which is not before that time and whose former is not after it."""
    pairs = itertools.pairwise(float(at) for _, at in STEPPED.findall(log))
    return max((later - earlier for earlier, later in pairs if begin <= later and earlier < end), default=0.0)


def _changed(plan: KubernetesPlan, number: int) -> list[dict[str, object]]:
    made = manifests(plan)
    for manifest in made:
        if manifest["kind"] == "StatefulSet":
            manifest["spec"]["template"]["metadata"]["annotations"]["update"] = str(number)
    return [manifest for manifest in made if manifest["kind"] == "StatefulSet"]
