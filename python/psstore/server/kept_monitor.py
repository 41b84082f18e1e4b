"""The monitor over other hosts and over the workers, which a life of a store may have, and what it is told."""

from __future__ import annotations

import selectors
from collections.abc import Callable
from typing import TYPE_CHECKING

from psstore.server.settings import ServerSettings
from psstore.server.site import Site
from psstore.server.store_life import RestoreFrom
from psstore.server.store_token import StoreToken

if TYPE_CHECKING:
    from psstore.server.peer_monitor import PeerMonitor


class KeptMonitor:
    """One at a time: `current`."""

    def __init__(
        self,
        settings: ServerSettings,
        site: Site,
        *,
        token: StoreToken,
        leads: Callable[[], bool],
        selector: selectors.BaseSelector,
    ) -> None:
        """`leads`: whether a shard is led here; called on the monitor's thread. `selector`: where it is registered."""
        self.current: PeerMonitor | None = None
        self._settings = settings
        self._site = site
        self._token = token
        self._leads = leads
        self._selector = selector

    def start(self, *, store: str, former: str = "", restore: RestoreFrom | None, is_new: bool = True) -> PeerMonitor:
        """As in Duty. `restore`: what this host's shards begin with. REQUIRES: there is none."""
        from psstore.server.peer_monitor import Duty, PeerMonitor

        duty = Duty(
            index=self._site.first,
            addresses=tuple(shard[0] for shard in self._site.addresses),
            asked_at=self._site.watched(),
            consistency=self._settings.consistency(),
            credentials=self._token.credentials,
            restored=restore.version if restore is not None else -1,
            goes_back=self._settings.restarts > 0,
            is_whole=self._site.is_whole,
            is_new=is_new,
            store=store,
            former=former,
            has_last_word=lambda: self._site.first == 0 and self._leads(),
            until_done=self._settings.until_done,
            patience_s=self._settings.patience_s,
        )
        self.current = PeerMonitor(duty)
        self._selector.register(self.current.readable, selectors.EVENT_READ, self.current)
        return self.current

    def end(self) -> None:
        """If there is one."""
        if self.current is not None:
            self._selector.unregister(self.current.readable)
            self.current.stop()
            self.current = None
