"""The actor that runs one process of a store: a shard's, or its standby's."""

from __future__ import annotations

import logging
import os
import threading

from psstore.errors import StoreUnreachable
from psstore.launch.ray.host_names import AsksDirectory, HostNames
from psstore.launch.ray.plan import StorePlan
from psstore.launch.server_process import ServerProcess

PAUSE_S = 1.0
"""Before psstore-server is started again: what ran at its port before may need a moment to end."""

_log = logging.getLogger("psstore.ray")


class MemberActor:
    """Starts psstore-server again when it ends. Ray starts the actor again when it dies, there or on another node."""

    def __init__(self, plan: StorePlan, member: int, directory: AsksDirectory) -> None:
        """Blocks until it is known where all others are: a process that can't ask them might begin anew what they
        have."""
        address = directory.here()
        self._names = names = HostNames(directory, own={plan.host(member): address}, token=plan.token)
        names.await_all(plan.num_members)
        self._name = plan.host(member)
        self._environ = {**os.environ, **plan.environ(member, address), **names.environ}
        self._server = ServerProcess(self._environ)
        self._is_ready = threading.Event()
        self._is_to_end = threading.Event()
        self._failure: str | None = None
        """Why it was not ready when it was first started."""
        self._keeping = threading.Thread(target=self._keep, daemon=True)
        self._keeping.start()

    def ready(self) -> None:
        """Blocks until psstore-server serves, or stands by. Raises StoreUnreachable if it has ended before."""
        self._is_ready.wait()
        if self._failure is not None:
            raise StoreUnreachable(self._failure)

    def stop(self) -> None:
        """Ends it in order, and returns when it is gone, with its files: Ray kills the actor then."""
        self._is_to_end.set()
        self._server.tell_to_end()
        self._keeping.join()
        self._names.remove()

    def _keep(self) -> None:
        while True:
            was_ready = self._server.await_ready()
            if was_ready:
                self._is_ready.set()
            code = self._server.wait()
            if self._is_to_end.is_set():
                return
            if not self._is_ready.is_set():
                self._failure = (
                    f"{self._name}: psstore-server ended with {code} before it was ready; its output says why"
                )
                self._is_ready.set()
            _log.warning("psstore-server of %s ended with %d, and is started again", self._name, code)
            if self._is_to_end.wait(PAUSE_S):
                return
            self._server = ServerProcess(self._environ)
            if self._is_to_end.is_set():
                self._server.tell_to_end()  # `stop` has told the one before
