"""The machine that pods are on: a network in which each has an address of its own, names for them, and an image.

    psk<pid>    the node: a bridge, 10.77.255.254, which the kubelet and all that belongs to the cluster are at
      ├── veth ── eth0 10.77.0.1  in psk<pid>-0: a pod
      └── veth ── eth0 10.77.0.2  in psk<pid>-1: the next one; no address is given twice

What a pod sees is an image, which is read-only: all of this machine's files, or those of an image that was built, with
what `LAYER` says in place of what is there. Nothing of it is outside namespaces, but for a folder in /dev/shm.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from bench import virtual_hosts
from bench.virtual_hosts import VirtualHosts

NODE = "10.77.255.254"

DOMAIN = "default.svc.cluster.local"

TRAINING = "/training.py"
"""What workers run, as an image has it."""

LAYER = {
    "etc/resolv.conf": f"nameserver {NODE}\nsearch {DOMAIN} svc.cluster.local cluster.local\noptions ndots:5\n",
    "etc/hosts": "127.0.0.1 localhost\n",
    TRAINING.lstrip("/"): Path(__file__).with_name("training.py").read_text(),
}

MOUNT_POINTS = ("run/psstore", "run/secrets/kubernetes.io/serviceaccount")
"""Folders that volumes are mounted at; the image has them, as that of a container engine would."""


def why_not() -> str | None:
    """Why there can be no pods here, or None."""
    if missing := [name for name in ("unshare", "nsenter", "setpriv") if shutil.which(name) is None]:
        return f"pods need {', '.join(missing)} (util-linux)"
    if hidden := [path for path in (sys.prefix, Path(__file__)) if Path(path).is_relative_to("/tmp")]:
        return f"pods have a /tmp of their own, and {hidden[0]} is below this machine's"
    return virtual_hosts.why_not()


class Node(VirtualHosts):
    """`with Node() as node:` this thread, and what it starts, is on it."""

    prefix_bits = 16

    def __init__(self, logs: Path, image: Path) -> None:
        """`logs`: a folder for what pods write, a file for each name. `image`: a folder with the files of one."""
        super().__init__(0)
        self.image = image
        self.logs = logs
        self._switch = f"psk{os.getpid()}"
        self._given = 0

    def __enter__(self) -> Node:
        super().__enter__()
        try:
            # A bridge without a hardware address of its own takes its ports', another one whenever pods come and go.
            virtual_hosts.ip("-n", self._switch, "link", "set", "bridge", "address", "02:00:00:00:00:01")
            virtual_hosts.ip("-n", self._switch, "address", "add", f"{NODE}/16", "dev", "bridge")
            # This process belongs to the node from here on, and there is no way back.
            virtual_hosts.enter(self._switch)
            self.folder = Path(tempfile.mkdtemp(prefix=self._switch, dir="/dev/shm"))
            self.folder.chmod(0o755)
            self._ends.callback(shutil.rmtree, self.folder)
            self._make_layer()
        except BaseException:
            self._ends.close()
            raise
        return self

    def address(self, index: int) -> str:
        high, low = divmod(index, 250)
        return f"10.77.{high}.{low + 1}"

    def plug_in(self) -> tuple[str, str]:
        """(network namespace, address) of another pod."""
        index, self._given = self._given, self._given + 1
        space = f"{self._switch}-{index}"
        virtual_hosts.ip("netns", "add", space)
        virtual_hosts.ip("-n", space, "link", "set", "lo", "up")
        self._plug_in(index, space)
        return space, self.address(index)

    def unplug(self, space: str) -> None:
        """For good: whoever still talks to that address talks to nobody."""
        virtual_hosts.ip("netns", "del", space)

    def _make_layer(self) -> None:
        layer = self.folder / "layer"
        for name, text in LAYER.items():
            (layer / name).parent.mkdir(parents=True, exist_ok=True)
            (layer / name).write_text(text)
        for name in (*MOUNT_POINTS, "root"):  # root's home is passed through on the way to its Python
            (layer / name).mkdir(parents=True)
        for path in (layer, *layer.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
