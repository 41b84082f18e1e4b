"""A pod, from its address to its end: what a kubelet does with its manifest.

Not here: limits of memory and processors, seccomp, images, and nodes of which there is more than one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.kubernetes.container import Container, Mount, image_environment
from tests.kubernetes.node import Node
from tests.kubernetes.probes import Probe

Secrets = Mapping[str, Mapping[str, str]]
"""By name, and then by key."""

BACK_OFF_S = 10.0
"""Before the second restart of a container in a row, and twice as long before each one after it."""

AFTER_PRE_STOP_S = 2.0
"""What a container has between SIGTERM and SIGKILL, though its preStop took all of the grace."""


class Pod:
    """One life of a pod: another one of the same name has another address."""

    def __init__(
        self,
        name: str,
        template: Mapping[str, Any],
        *,
        labels: Mapping[str, str],
        annotations: Mapping[str, str],
        node: Node,
        secrets: Secrets,
        environ: Mapping[str, str],
    ) -> None:
        """`labels`, `annotations`: besides those of its template. `environ`: of the API server."""
        metadata = template["metadata"]
        self.name = name
        self.labels = {**metadata.get("labels", {}), **labels}
        self.annotations = {**metadata.get("annotations", {}), **annotations}
        self.spec = template["spec"]
        self.is_ready = self.is_ending = False
        self.restarts = 0
        """Of its container, within this life."""
        self.succeeded: bool | None = None
        """Whether it came to its end by itself; None: it has not."""
        self._node = node
        self._secrets = secrets
        self._environ = environ
        self._folder = node.folder / f"pods/{name}-{id(self):x}"
        self.log = node.logs / f"{name}.log"
        """What all lives of that name have written."""
        self._ended = asyncio.Event()
        self._container: Container | None = None
        self._space, self.address = node.plug_in()
        self._life = asyncio.ensure_future(self._live())

    @property
    def is_gone(self) -> bool:
        """Nothing of it is left but its name."""
        return self._life.done()

    # ---- its life ----

    async def gone(self) -> None:
        """Waits until nothing of it is left. Raises what went wrong in the kubelet."""
        await asyncio.shield(self._life)

    def delete(self) -> None:
        """Asks it to end: preStop, SIGTERM, grace, SIGKILL."""
        self.is_ending, self.is_ready = True, False
        self._ended.set()

    def folder_of(self, volume: str) -> Path:
        """Where this machine has what is in it."""
        return self._folder / volume

    def kill(self) -> None:
        """Its container dies, as by the kernel for lack of memory."""
        if self._container is not None:
            self._container.signal(signal.SIGKILL)

    async def _live(self) -> None:
        try:
            volumes = self._make_volumes()
            for manifest in self.spec.get("initContainers", ()):
                if not await self._run(manifest, volumes):
                    return
            (manifest,) = self.spec["containers"]
            self.succeeded = await self._run(manifest, volumes) or None
        finally:
            self._container = None
            self.is_ready = False
            self._node.unplug(self._space)
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _run(self, manifest: Mapping[str, Any], volumes: Mapping[str, Path]) -> bool:
        """Again and again, as its policy is. False: the pod was deleted; True: it has succeeded."""
        pause_s = 0.0
        while not self._ended.is_set():
            code = await self._run_once(manifest, volumes)
            if code == 0 and self.spec.get("restartPolicy", "Always") == "OnFailure":
                return True  # though it was deleted meanwhile: its Job takes it for done
            if self.is_ending:
                break
            self.restarts += 1
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._ended.wait(), pause_s)
            pause_s = max(BACK_OFF_S, 2 * pause_s)
        return False

    async def _run_once(self, manifest: Mapping[str, Any], volumes: Mapping[str, Path]) -> int:
        """Its exit code."""
        mounts = [
            Mount(volumes[one["name"]], one["mountPath"], one.get("readOnly", False))
            for one in manifest["volumeMounts"]
        ]
        if self.spec["automountServiceAccountToken"]:
            mounts.append(Mount(volumes["account"], "/run/secrets/kubernetes.io/serviceaccount", True))
        container = Container(
            manifest,
            self.spec["securityContext"],
            self._variables(manifest),
            mounts,
            self._node,
            self._space,
            self.name,
            self.log,
        )
        self._container = container
        await container.start()
        code = asyncio.ensure_future(container.wait())
        health = asyncio.ensure_future(self._watch(manifest))
        ended = asyncio.ensure_future(self._ended.wait())
        try:
            await asyncio.wait([code, health, ended], return_when=asyncio.FIRST_COMPLETED)
            if not code.done():
                await self._end(container, manifest)
            return await code
        finally:
            container.signal(signal.SIGKILL)  # it has ended, unless the kubelet was interrupted
            self.is_ready = False
            for task in (health, ended):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await health

    async def _end(self, container: Container, manifest: Mapping[str, Any]) -> None:
        """Returns when nothing of the container is left."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self.spec["terminationGracePeriodSeconds"]
        hook = manifest.get("lifecycle", {}).get("preStop")
        if hook is not None:
            await container.run(hook["exec"]["command"], timeout_s=until - loop.time())
            until = max(until, loop.time() + AFTER_PRE_STOP_S)
        container.signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(container.wait(), until - loop.time())
        except asyncio.TimeoutError:
            container.signal(signal.SIGKILL)
            await container.wait()

    async def _watch(self, manifest: Mapping[str, Any]) -> None:
        """Returns when the container is to be started anew: its startup or liveness probe has failed."""
        ports = {one["name"]: one["containerPort"] for one in manifest.get("ports", ())}

        def probe(name: str) -> Probe | None:
            return Probe(manifest[name], ports, self.address) if name in manifest else None

        if (startup := probe("startupProbe")) is not None and not await startup.succeeds():
            return
        readiness = asyncio.ensure_future(self._watch_ready(probe("readinessProbe")))
        try:
            liveness = probe("livenessProbe")
            if liveness is None:
                await self._ended.wait()
                return
            await liveness.fails()
        finally:
            readiness.cancel()

    async def _watch_ready(self, probe: Probe | None) -> None:
        if probe is None:
            self.is_ready = not self.is_ending
            return
        while not self.is_ending:
            well = await probe.ask()
            if well is not None:
                self.is_ready = well and not self.is_ending
            await asyncio.sleep(probe.period_s)

    # ---- what it is given ----

    def _variables(self, manifest: Mapping[str, Any]) -> dict[str, str]:
        found = {**image_environment(), "HOSTNAME": self.name, **self._environ}
        for source in manifest.get("envFrom", ()):
            found |= self._secrets[source["secretRef"]["name"]]
        for one in manifest.get("env", ()):
            found[one["name"]] = one["value"] if "value" in one else self._field(one["valueFrom"]["fieldRef"])
        return found

    def _field(self, reference: Mapping[str, str]) -> str:
        named = re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", reference["fieldPath"])
        assert named is not None, f"{reference} is no field that is known here"
        return str((self.labels if named[1] == "labels" else self.annotations)[named[2]])

    def _make_volumes(self) -> dict[str, Path]:
        return {one["name"]: self._make_volume(one) for one in [*self.spec["volumes"], *self._account()]}

    def _account(self) -> list[dict[str, Any]]:
        """The volume that a service account's token is in."""
        if not self.spec["automountServiceAccountToken"]:
            return []
        keys = ("token", "ca.crt", "namespace")
        items = [{"key": key, "path": key} for key in keys]
        source = {"secret": {"name": f"account {self.spec['serviceAccountName']}", "items": items}}
        return [{"name": "account", "projected": {"defaultMode": 0o444, "sources": [source]}}]

    def _make_volume(self, volume: Mapping[str, Any]) -> Path:
        """A folder of its group's, which others can't read."""
        folder = self.folder_of(volume["name"])
        folder.mkdir(parents=True)
        group = int(self.spec["securityContext"]["fsGroup"])
        if "emptyDir" in volume:
            os.chown(folder, 0, group)
            folder.chmod(0o2777)
            return folder
        # As a kubelet does, so that all files of it can be replaced at once: links to links.
        data = folder / "..2026_01_01"
        data.mkdir()
        for source in volume["projected"]["sources"]:
            secret = self._secrets[source["secret"]["name"]]
            for item in source["secret"]["items"]:
                file = data / item["path"]
                file.write_text(secret[item["key"]])
                os.chown(file, 0, group)
                file.chmod(volume["projected"]["defaultMode"])
                (folder / item["path"]).symlink_to(f"..data/{item['path']}")
        (folder / "..data").symlink_to(data.name)
        return folder
