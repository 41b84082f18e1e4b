"""How a training is put on: which commands run it, with what around them."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.virtual_hosts import VirtualHosts

from tests.chaos.disk import SmallDisk
from tests.chaos.groups import Groups
from tests.chaos.links import Links
from tests.chaos.plan import ON_HOSTS, ChaosPlan
from tests.chaos.processes import SUPERVISOR, WORK, Processes

RESTARTS = 20
IMPATIENT = {"PSSTORE_HEARTBEAT_S": "0.2", "PSSTORE_SILENCE_S": "1.5", "PSSTORE_REJOIN_S": "0"}
"""What has a store take a worker for lost, and not wait for another one in its place, before torch is loaded."""

PORT = 5700
TOKEN = "0123456789abcdef" * 4
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Command:
    """One of them."""

    who: str
    """How its lines begin, as those of `psstore run` do; '': as they are."""
    arguments: Sequence[str]
    environ: Mapping[str, str]


class Stage:
    """What one run needs, for as long as it takes: `with Stage(plan, folder, processes) as stage:`."""

    def __init__(self, plan: ChaosPlan, folder: Path, processes: Processes) -> None:
        self._plan = plan
        self.notes, self.checkpoints, self.temporary = folder / "notes", folder / "checkpoints", folder / "temporary"
        for one in (self.notes, self.checkpoints, self.temporary):
            one.mkdir()
        self._processes = processes
        self._ends = contextlib.ExitStack()
        self.links: Links | None = None
        self.hosts: VirtualHosts | None = None
        self.disk: SmallDisk | None = None

    def __enter__(self) -> Stage:
        with contextlib.ExitStack() as ends:
            plan = self._plan
            if plan.scene == "links":
                self.links = ends.enter_context(Links(plan.num_shards, self._processes.listening, seed=plan.seed))
            if plan.scene in ON_HOSTS:
                self.hosts = ends.enter_context(VirtualHosts(self._num_places + plan.num_workers + 1))
            if plan.scene == "disk":
                self.disk = ends.enter_context(SmallDisk(self.checkpoints))
            self._ends = ends.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    @property
    def place(self) -> str:
        """Where checkpoints go."""
        return str(self.checkpoints / "run")

    def watch(self) -> Groups:
        """For this thread to ask, which is from now on, if there are hosts, on one that no fault is of."""
        if self.hosts is not None:
            self.hosts.move_to(len(self.hosts.names) - 1)
        return Groups(self._processes, self._find_url, None if self.hosts is None else TOKEN)

    def _find_url(self) -> str:
        hosts = self.hosts
        if hosts is None:
            return next((f"ps://127.0.0.1:{port}" for port in self._processes.listening()), "")
        if not self._processes.running(SUPERVISOR):
            return ""
        return self._url_of(hosts)

    def _url_of(self, hosts: VirtualHosts) -> str:
        """All places where shard 0 may be led."""
        places = range(0, self._num_places, self._plan.num_shards)
        return "ps://" + ",".join(f"{hosts.address(index)}:{PORT}" for index in places)

    @property
    def _num_places(self) -> int:
        """Hosts of shards, before those of workers."""
        return self._plan.num_shards * (2 if self._plan.scene == "apart" else 1)

    def commands(self) -> list[Command]:
        """In the order of their hosts, if there are any."""
        plan = self._plan
        work = [WORK, plan.loop, str(plan.steps), str(plan.pace_s), str(self.notes)]
        environ = {
            **os.environ,
            **self._processes.environ,
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(self.temporary),
            "OMP_NUM_THREADS": "1",
        }
        return self._on_one_machine(work, environ) if self.hosts is None else self._on_hosts(self.hosts, work, environ)

    def _on_one_machine(self, work: list[str], environ: Mapping[str, str]) -> list[Command]:
        plan = self._plan
        if self.links is not None:
            places = ",".join(f"127.0.0.1:{port}" for port in self.links.ports)
            environ = {**environ, "PSSTORE_ADVERTISE": places, "PSSTORE_TRANSPORT": "tcp"}
        if plan.loop == "sent":
            environ = {**environ, "PSSTORE_TRANSPORT": "tcp"}
        if plan.drops:
            environ = {**environ, **IMPATIENT}
        flags = ["--shards", str(plan.num_shards), "--workers", plan.workers, "--restarts", str(RESTARTS)]
        flags += ["--standbys", "1"] if plan.scene == "standbys" else []
        saves = ["--checkpoint", self.place, "--checkpoint-every", plan.checkpoint_every]
        command = [sys.executable, "-m", "psstore.cli.main", "run", *flags, *saves, *work]
        return [Command("", command, environ)]

    def _on_hosts(self, hosts: VirtualHosts, work: list[str], environ: Mapping[str, str]) -> list[Command]:
        plan = self._plan
        token = self.notes / "token"
        token.write_text(TOKEN)
        token.chmod(0o600)
        environ = {**environ, "PSSTORE_TOKEN_FILE": str(token)}
        places = [f"{hosts.address(index)}:{PORT}" for index in range(self._num_places)]
        leaders, standbys = places[: plan.num_shards], places[plan.num_shards :]
        flags = ["--shards-at", ",".join(leaders), "--workers", plan.workers]
        flags += ["--checkpoint", self.place, "--checkpoint-every", plan.checkpoint_every]
        if standbys:  # what has lost both processes of a shard is lost, and noticed
            flags += ["--standbys-at", ",".join(standbys)]
        else:
            flags += ["--restarts", str(RESTARTS), "--restore", "auto"]
        flags += ["--rejoin-s", "60", "--until-done", "--log-level", "warning"]
        found = []
        for index in range(self._num_places):
            server = [sys.executable, "-m", "psstore.cli.server", *flags, "--shard-index", str(index)]
            found.append(Command(f"host {index}", hosts.on(index, server), environ))
        told = {**environ, "PSSTORE_URL": self._url_of(hosts), "WORLD_SIZE": str(plan.num_workers)}
        for rank in range(plan.num_workers):
            run = hosts.on(self._num_places + rank, [sys.executable, "-u", *work])
            found.append(Command(f"rank {rank}", run, {**told, "RANK": str(rank)}))
        return found
