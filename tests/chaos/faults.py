"""How each kind of fault is done, and undone when its time is over."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Collection
from functools import partial

import psutil

from psstore.checkpoint import reader
from psstore.checkpoint.place import COMPLETE, open_place
from psstore.errors import StorageError
from tests.chaos.absences import Absences
from tests.chaos.groups import host_of
from tests.chaos.links import Links, Manner
from tests.chaos.plan import Fault
from tests.chaos.processes import Processes
from tests.chaos.programs import Programs
from tests.chaos.stage import Stage
from tests.support.server_process import reshard_command

RESHARDING = "psstore.launch.resharding"
LOOK_S = 0.05

SIGNALS = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM}
MANNERS: dict[str, Manner] = {"half-open": "swallow", "trickle": "trickle", "delay": "delay"}


class Faults:
    """Does them, one after another."""

    def __init__(
        self, stage: Stage, processes: Processes, programs: Programs, over: threading.Event, damaged: list[str]
    ) -> None:
        """On the thread that does them. `over`: the run is. `damaged` gets what a full disk took that was there."""
        self._stage = stage
        self._groups = stage.watch()
        self._absences = Absences(stage.notes)
        self._processes = processes
        self._programs = programs
        self._over = over
        self._damaged = damaged
        self._resharding: list[subprocess.Popen[bytes]] = []

    def aim(self, fault: Fault) -> Callable[[], bool]:
        """Finds the victim. Returns what does it, and blocks until it is undone; False: it met nobody, who is dead or
        has ended."""
        kinds: dict[str, Callable[[Fault], Callable[[], bool]]] = {
            "link": self._at_link,
            "host": self._at_host,
            "leader": self._at_member,
            "standby": self._at_member,
            "disk": lambda fault: partial(self._on_disk, fault),
            "store": lambda fault: partial(self._on_store, fault),
        }
        return kinds.get(fault.victim.split()[0], self._at_process)(fault)

    def settle(self, *, is_apart: bool) -> None:
        """Waits until whoever has asked for another number of shards has heard what became of it, and on hosts of their
        own until whoever came back may lead: one that comes to a store which is over waits for another one."""
        for command in self._resharding:
            command.wait()
        if is_apart:
            self._groups.find("leader", 0)

    def _at_process(self, fault: Fault) -> Callable[[], bool]:
        return partial(self._on_process, fault, self._processes.find(fault.victim))

    def _on_process(self, fault: Fault, victim: psutil.Process | None) -> bool:
        if victim is None:
            return False
        role, _, number = fault.victim.partition(" ")
        try:
            if role == "worker":
                self._absences.begin(int(number))
            if fault.kind == "stop":
                victim.suspend()
                self._over.wait(fault.for_s)
                with contextlib.suppress(psutil.NoSuchProcess):  # it was done without
                    victim.resume()
                if role == "worker":
                    self._absences.over(int(number))
            else:
                victim.send_signal(SIGNALS[fault.kind])
        except psutil.NoSuchProcess:
            return False
        return True

    def _at_link(self, fault: Fault) -> Callable[[], bool]:
        links = self._stage.links
        assert links is not None, "the scene has them"
        _, shard, *of = fault.victim.split()
        ports = self._processes.ports_to(f"worker {of[-1]}", links.ports[int(shard)]) if of else None
        return partial(self._on_link, fault, links, int(shard), ports)

    def _on_link(self, fault: Fault, links: Links, index: int, ports: Collection[int] | None) -> bool:
        if fault.kind == "cut":
            return links.cut(index, ports) > 0
        met = links.set_manner(index, ports, MANNERS[fault.kind])
        if fault.kind != "half-open":
            self._over.wait(fault.for_s)
            links.set_manner(index, ports, "pass")
        return met > 0

    def _at_member(self, fault: Fault) -> Callable[[], bool]:
        role, shard = fault.victim.split()
        return partial(self._on_process, fault, self._groups.find(role, int(shard)))

    def _at_host(self, fault: Fault) -> Callable[[], bool]:
        words = fault.victim.split()
        if words[1] != "of":
            return partial(self._on_host, fault, int(words[1]))
        member = self._groups.find(words[2], int(words[3]))
        return partial(self._on_host, fault, None if member is None else host_of(member))

    def _on_host(self, fault: Fault, index: int | None) -> bool:
        hosts = self._stage.hosts
        assert hosts is not None, "the scene has them"
        if index is None:
            return False
        with contextlib.ExitStack() as ends:
            met = True
            if fault.kind in ("crash", "partition"):  # a host that crashes says goodbye to nobody
                ends.enter_context(hosts.unplugged(index))
            if fault.kind == "stop":
                met = ends.enter_context(self._programs.still(index))
            elif fault.kind != "partition":
                met = ends.enter_context(self._programs.down(index, alone=fault.kind == "orphan"))
            self._over.wait(fault.for_s if met else 0.0)
        return met

    def _on_store(self, fault: Fault) -> bool:
        """Until the store goes on with so many shards, or only until it is on its way, which may come to nothing."""
        places = self._processes.listening()
        if not places:
            return False
        url, number = f"ps://127.0.0.1:{places[0]}", int(fault.victim.split()[-1])
        command = subprocess.Popen(
            reshard_command(url, number),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **self._processes.environ},
        )
        self._resharding.append(command)
        until_on_its_way = "on its way" in fault.victim
        while command.poll() is None and not self._over.wait(LOOK_S):
            if until_on_its_way and self._processes.running(RESHARDING):
                break
        return True

    def _on_disk(self, fault: Fault) -> bool:
        disk = self._stage.disk
        assert disk is not None, "the scene has one"
        disk.fill()
        before = self._loadable()
        self._over.wait(fault.for_s)
        # A later one may have had room, and have taken the place of the oldest: the newest that was there stays.
        if before and max(before) not in self._loadable():
            self._damaged.append(f"version {max(before)}, which was there before the disk was full")
        disk.empty()
        return True

    def _loadable(self) -> set[int]:
        """Checkpoints of which every byte is right."""
        place, found = open_place(self._stage.place).place, set[int]()
        for one in place.list():
            if one.status == COMPLETE:
                with contextlib.suppress(StorageError):
                    reader.verify(place.storage, one.version)
                    found.add(one.version)
        return found
