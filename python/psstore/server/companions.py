"""What runs beside a store's shards on this host: what writes checkpoints, where shard 0 is led, and what answers
/metrics."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Sequence

from psstore.server.kept_companion import KeptCompanion
from psstore.server.listening import LOOPBACKS, bind_tcp
from psstore.server.processes import CheckpointDuty, CheckpointProcess, MetricsDuty, MetricsProcess
from psstore.server.site import Site
from psstore.server.store_token import StoreToken


class Companions:
    """What writes checkpoints, and what answers /metrics: both are kept running for as long as they are to."""

    def __init__(
        self,
        site: Site,
        *,
        token: StoreToken,
        metrics_socket: socket.socket | None,
        selector: selectors.BaseSelector,
    ) -> None:
        """`metrics_socket`: where /metrics is answered. `selector`: where reports are registered."""
        self._site = site
        self._token = token
        self._metrics_socket = metrics_socket
        self._began_at = 0
        """The version with which the store began this life."""
        self._leads = False
        """A shard was led here when checkpoints were seen to last."""
        self.checkpoints = KeptCompanion(
            self._start_checkpoints, selector, name="writes checkpoints", when_let_be="none are written any more"
        )
        self.metrics = KeptCompanion(
            self._start_metrics, selector, name="answers /metrics", when_let_be="nothing is answered any more"
        )

    def next_wake(self) -> float:
        """When one that could not be started may be."""
        return min(self.checkpoints.next_wake(), self.metrics.next_wake())

    def heard(self, events: Sequence[object]) -> None:
        """Does what is due. `events`: whose reports have ended."""
        if any(isinstance(event, CheckpointProcess) for event in events):
            self.checkpoints.begin_again()
        self.checkpoints.tick()
        self.metrics.tick()

    def end(self) -> None:
        """Ends both at once."""
        self.metrics.end()
        self.checkpoints.end()

    # ---- checkpoints ----

    def life_begins(self, *, began_at: int) -> None:
        """All shards are ready, with that version."""
        self._began_at, self._leads = began_at, False

    def see_to_checkpoints(self, *, leads: bool) -> None:
        """Has them written from here as long as shard 0 is led here, which may change. `leads`: a shard is."""
        if leads == self._leads:
            return
        self._leads = leads
        if leads:
            self.begin_checkpoints()
        else:
            self.checkpoints.end()

    def begin_checkpoints(self) -> None:
        """If they are wanted, and from here. REQUIRES: none are written."""
        if self._site.settings.checkpoint is not None and self._site.first == 0:
            self.checkpoints.begin()

    def _start_checkpoints(self) -> CheckpointProcess:
        settings = self._site.settings
        assert settings.checkpoint is not None, "begin_checkpoints"
        return CheckpointProcess(
            CheckpointDuty(
                url=self._site.url,
                credentials=self._token.credentials,
                place=settings.checkpoint,
                interval=settings.checkpoint_interval(),
                began_at=self._began_at,
                log_level=settings.log_level,
                log_format=settings.log_format,
            )
        )

    # ---- metrics ----

    def begin_metrics(self) -> None:
        """Before any shard runs: that one takes its time to restore is no reason to be out of reach."""
        if self._metrics_socket is not None:
            self.metrics.begin()

    def begin_metrics_anew(self) -> None:
        """Has a new process answer: the one before would say of a shard that was there, and reads, that it hangs."""
        self.metrics.end()
        self.begin_metrics()

    def metrics_url(self) -> str | None:
        """Where it is answered; None: nowhere."""
        if self._metrics_socket is None:
            return None
        host, port = self._metrics_socket.getsockname()[:2]
        host = LOOPBACKS.get(host, host)
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def _start_metrics(self) -> MetricsProcess:
        assert self._metrics_socket is not None, "begin_metrics"
        return MetricsProcess(
            MetricsDuty(
                first=self._site.first,
                addresses=tuple(str(endpoint.local) for endpoint in self._site.endpoints),
                credentials=self._token.credentials,
                socket=self._metrics_socket.fileno(),
                log_level=self._site.settings.log_level,
                log_format=self._site.settings.log_format,
            )
        )


def bind_metrics(site: Site) -> socket.socket | None:
    """Where /metrics is to be answered; None: nowhere. Raises BadArgument."""
    if site.settings.metrics is None:
        return None
    return bind_tcp(site.tcp.host if site.tcp is not None else "127.0.0.1", site.settings.metrics, flag="--metrics")
