"""How a life of a store begins on this host, before any of its shards runs here.

a shard whose other process leads on its host      ─► there is a life already, which this host joins
all shards run here, or shard 0 of several hosts'  ─► at once
another shard                                      ─► once shard 0 is there, with what that one has begun with
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from psstore.errors import AvailabilityError, BadArgument
from psstore.server.kept_monitor import KeptMonitor
from psstore.server.processes import Signals
from psstore.server.reports import Reports
from psstore.server.site import Site
from psstore.server.store_life import RestoreFrom, StoreLife, of_shard_0
from psstore.server.store_token import StoreToken

if TYPE_CHECKING:
    from psstore.server.other_member import FoundMember
    from psstore.wire.messages import Welcome

LOOK_AGAIN_S = 0.2
"""Between two looks whether the shard is there whose standby runs here."""

_log = logging.getLogger("psstore.supervisor")


@dataclass(kw_only=True)
class Beginnings:
    """Begins one life after the other."""

    site: Site
    token: StoreToken
    monitor: KeptMonitor
    """Started where shard 0 is on another host, and left running."""
    reports: Reports
    _former: str = ""
    """Shard 0's id of the life before, where that is another host's."""

    def begin(self, restore: RestoreFrom | None) -> StoreLife | None:
        """Shard 0 begins a life, with `restore`; a shard on another host hears of it. None: a signal came first. Raises
        AuthFailed, BadArgument, StorageError."""
        site, own = self.site, secrets.token_hex(8)
        if site.other is not None:
            joined = self._join(site.other, own)
            if joined is None or isinstance(joined, StoreLife):
                return joined
        if site.first == 0:
            key = secrets.token_bytes(32) if site.is_whole else self._signing_key(own)
            lineage = restore.lineage if restore is not None else ""
            return StoreLife(own=own, store=own, signing_key=key, lineage=lineage, restore=restore)
        return self._follow(own, restore)

    def _follow(self, own: str, restore: RestoreFrom | None) -> StoreLife | None:
        """The life that shard 0 begins on another host. None: a signal came first."""
        if self.site.settings.restarts:
            self.site.refuse()
        monitor = self.monitor.start(store=own, former=self._former, restore=restore)
        if any(isinstance(event, Signals) for event in self.reports.wait()):
            return None
        begun = monitor.take()
        if begun.store is None:
            raise BadArgument(begun.reason or "")
        if self.site.settings.restarts:
            self.site.listen()
            restore = self._as_shard_0(begun.restored, restore)
        self._former = begun.store
        return StoreLife(
            own=own,
            store=f"{begun.store}-{own}",  # begins with the store's, and this shard has lives of its own
            signing_key=self._signing_key(begun.store),
            lineage=begun.lineage,
            restore=restore,
        )

    def _as_shard_0(self, version: int, restore: RestoreFrom | None) -> RestoreFrom | None:
        """What shard 0 has begun with; -1: nothing. Raises StorageError."""
        from psstore.server.restore_plan import find_checkpoint

        if version < 0 or (restore is not None and restore.version == version):
            return None if version < 0 else restore
        own_place = self.site.settings.checkpoint
        return find_checkpoint(f"{own_place}@{version}", own_place=own_place)

    def _join(self, other: str, own: str) -> StoreLife | Literal["begins"] | None:
        """The life of the store in which the other process of this shard leads; what stands by there leads from now on,
        since the process that was here before is dead. None: a signal came first. Raises AuthFailed, BadArgument."""
        from psstore.server.other_member import look_at, promote, why_not_begin
        from psstore.server.voting import check_never_gone, other_shards

        shard, credentials, has_said = self.site.first, self.token.credentials, False
        others = other_shards(self.site.addresses, shard)
        until = time.monotonic() + self.site.settings.patience_s
        life: StoreLife | Literal["begins"]
        while True:
            member: FoundMember | None = None
            with contextlib.suppress(AvailabilityError):
                member = look_at(other, credentials)
                if member.leads:
                    life = self._life_of(member.welcome, own)
                    break
                if member.may_lead:
                    with contextlib.suppress(BadArgument):  # it waits for those who know
                        check_never_gone(others, other, credentials)
                        promote(other, credentials, force=True)
            if not self.site.settings.begins_as_standby() and (member is None or not member.may_lead):
                why_not = None if member is not None else why_not_begin(shard, other, others, credentials)
                if why_not is None:
                    life = "begins"
                    break
                if time.monotonic() > until:
                    raise BadArgument(why_not)
            if not has_said:
                _log.warning("waiting for shard %d at %s, to stand by here", shard, other)
                has_said = True
                self.site.refuse()
            if self.reports.wait(time.monotonic() + LOOK_AGAIN_S):
                return None
        if has_said:
            self.site.listen()
        return life

    def _life_of(self, welcome: Welcome, own: str) -> StoreLife:
        """With what it has begun with, whatever this host was to begin with: there may be checkpoints since."""
        begun = RestoreFrom(url="", version=welcome.restored, lineage=welcome.lineage)
        return StoreLife(
            own=own,
            store=welcome.store,
            signing_key=self._signing_key(of_shard_0(welcome.store)),
            lineage=welcome.lineage,
            restore=begun if welcome.restored >= 0 else None,
            is_joined=True,
        )

    def _signing_key(self, store: str) -> bytes:
        """`store`: shard 0's id."""
        return self.token.signing_key([shard[0] for shard in self.site.addresses], store=store)
