"""The monitor over other hosts and over the workers, which a life of a store may have, and what it is told."""

from __future__ import annotations

import selectors
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from psstore.server.site import Site
from psstore.server.store_life import RestoreFrom
from psstore.server.store_token import StoreToken

if TYPE_CHECKING:
    from psstore.server.peer_monitor import PeerMonitor


@dataclass(kw_only=True)
class KeptMonitor:
    """One at a time: `current`."""

    site: Site
    token: StoreToken
    leads: Callable[[], bool]
    """Whether a shard is led here; called on the monitor's thread."""
    selector: selectors.BaseSelector
    """Where it is registered."""
    current: PeerMonitor | None = None

    def start(self, *, store: str, former: str = "", joined: str = "", restore: RestoreFrom | None) -> PeerMonitor:
        """Starts one, with that in its Duty. `restore`: what this host's shards begin with. REQUIRES: there is none."""
        from psstore.server.peer_monitor import Duty, PeerMonitor

        settings = self.site.settings
        duty = Duty(
            index=self.site.first,
            addresses=tuple(shard[0] for shard in self.site.addresses),
            asked_at=self.site.watched(),
            consistency=settings.consistency(),
            credentials=self.token.credentials,
            restored=restore.version if restore is not None else -1,
            goes_back=settings.restarts > 0,
            is_whole=self.site.is_whole,
            store=store,
            former=former,
            joined=joined,
            has_last_word=lambda: self.site.first == 0 and self.leads(),
            until_done=settings.until_done,
            patience_s=settings.patience_s,
        )
        self.current = PeerMonitor(duty)
        self.selector.register(self.current.readable, selectors.EVENT_READ, self.current)
        return self.current

    def end(self) -> None:
        """Stops it, if there is one."""
        if self.current is not None:
            self.selector.unregister(self.current.readable)
            self.current.stop()
            self.current = None
