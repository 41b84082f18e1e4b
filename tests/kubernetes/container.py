"""A container: a program with namespaces, files, rights and variables of its own, as its manifest says."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.kubernetes.looking import until
from tests.kubernetes.node import Node

SPACES = ("--mount", "--pid", "--uts", "--ipc")


@dataclass(frozen=True)
class Mount:
    source: Path
    at: str
    read_only: bool = False


@dataclass
class Container:
    """One run of it: of its next one there is another."""

    manifest: Mapping[str, Any]
    security: Mapping[str, Any]
    """The pod's securityContext."""
    environ: Mapping[str, str]
    mounts: Sequence[Mount]
    node: Node
    space: str
    """Network namespace."""
    host: str
    log: Path
    started_at: float = field(default_factory=lambda: asyncio.get_running_loop().time())

    async def start(self) -> None:
        with self.log.open("ab") as log:
            self._outer = await asyncio.create_subprocess_exec(
                *("nsenter", f"--net=/run/netns/{self.space}", "--"),
                *("unshare", *SPACES, "--fork", "--kill-child", "--propagation", "private"),
                *("sh", "-ec", self._script(), "sh", *self.manifest["command"]),
                env=dict(self.environ),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._exit = asyncio.ensure_future(self._outer.wait())
        await until(lambda: self.has_ended() or self._first_process() is not None, every_s=0.002)

    async def wait(self) -> int:
        """Its exit code; 128 and a signal's number if that ended it."""
        code = await asyncio.shield(self._exit)
        return 128 - code if code < 0 else code

    def has_ended(self) -> bool:
        return self._exit.done()

    def signal(self, number: signal.Signals) -> None:
        """To its first process, which ignores what it has no handler for, but for SIGKILL; with it go all others."""
        first = self._first_process()
        if first is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(first, number)

    async def run(self, command: Sequence[str], *, timeout_s: float) -> int | None:
        """Its exit code, of a command inside; None: it took too long, or the container has ended."""
        first = self._first_process()
        if first is None:
            return None
        with self.log.open("ab") as log:
            inner = await asyncio.create_subprocess_exec(
                *("nsenter", f"--target={first}", "--mount", "--pid", "--net", "--uts", "--ipc", "--root", "--wd"),
                *("--", *self._rights(), *command),
                env=dict(self.environ),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            return await asyncio.wait_for(inner.wait(), timeout_s)
        except asyncio.TimeoutError:
            inner.kill()
            await inner.wait()
            return None

    def _first_process(self) -> int | None:
        """As this machine numbers it; None: there is none."""
        pid = self._outer.pid
        try:
            return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
        except (IndexError, OSError):
            return None

    def _rights(self) -> list[str]:
        own = self.manifest["securityContext"]
        assert own["capabilities"] == {"drop": ["ALL"]}
        assert not own["allowPrivilegeEscalation"]
        user, group, more = (self.security[name] for name in ("runAsUser", "runAsGroup", "fsGroup"))
        return [
            *("setpriv", f"--reuid={user}", f"--regid={group}", f"--groups={more}"),
            *("--no-new-privs", "--bounding-set=-all", "--inh-caps=-all", "--"),
        ]

    def _script(self) -> str:
        """What is to be done with root's rights before the program has those that it may have."""
        assert self.manifest["securityContext"]["readOnlyRootFilesystem"], (
            "an image without a layer on top is read-only"
        )
        root = self.node.folder / "root"
        lines = [
            f"mkdir -p {root}",
            f"hostname {self.host}",
            f"mount -t overlay overlay -o lowerdir={self.node.folder}/layer:{self.node.image} {root}",
            f"mount --rbind /dev {root}/dev",
            f"mount -t tmpfs shm {root}/dev/shm",
            f"mount -t proc proc {root}/proc",
        ]
        for mount in self.mounts:
            at = shlex.quote(f"{root}{mount.at}")
            lines.append(f"mount --bind {shlex.quote(str(mount.source))} {at}")
            if mount.read_only:
                lines.append(f"mount -o remount,bind,ro {at}")
        lines.append(f'exec chroot {root} {shlex.join(self._rights())} "$@"')
        return "\n".join(lines)


def image_environment() -> dict[str, str]:
    """What the image sets: where its Python is. And what says whose processes these are."""
    kept = {name: text for name, text in os.environ.items() if name in ("PSSTORE_TEST_SESSION", "PSSTORE_LOOP")}
    return {
        "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
        "OMP_NUM_THREADS": "1",
        **kept,
    }
