"""A store on its way to another number of shards: what was there before, while it may still come to nothing.

wanted ─► ports bound ─► the store stands still, and is written down ─► all shards end ─► as many begin with that
  ▲                                │ something fails
  └────────────────────────────────┘  it goes on, and nothing has happened
"""

from __future__ import annotations

import logging
import math
import secrets
import selectors
import time
from collections.abc import Callable, Sequence

import msgspec

from psstore.errors import BadArgument
from psstore.server.pipe_words import NOT_RESHARDED, STAND_STILL, WRITTEN
from psstore.server.processes import ReshardDuty, ReshardProcess, ShardProcess
from psstore.server.settings import ServerSettings
from psstore.server.shard_group import ShardGroups
from psstore.server.site import Site, addresses_of
from psstore.server.store_token import StoreToken
from psstore.server.temporary_place import TemporaryPlace
from psstore.text import counted

_log = logging.getLogger("psstore.supervisor")

STANDS_S = 660.0
"""How long a store stands still at most. What writes it down gives up before."""


class Resharding:
    """One attempt. To be ended by `come_to_nothing`, by `done`, or by `end`."""

    def __init__(
        self,
        num_shards: int,
        *,
        site: Site,
        token: StoreToken,
        leaders: Sequence[ShardProcess],
    ) -> None:
        """`site`: of the store as it is. `leaders`: its shards. Raises BadArgument, OSError, with nothing begun."""
        settings = site.settings
        self.settings = _with_shards(settings, num_shards)
        self.leaders = list(leaders)
        self.until = time.monotonic() + STANDS_S
        self._is_changed = False
        self._more = site.more(self.settings)
        self.temporary: TemporaryPlace | None = None
        """Where it is written down, unless it has a place for checkpoints."""
        client = secrets.token_hex(16)
        try:
            token.also_for(addresses_of(self._more))
            if settings.checkpoint is None:
                self.temporary = TemporaryPlace(sum(child.resident_bytes() for child in leaders))
            self.place = str(self.temporary.path) if self.temporary is not None else str(settings.checkpoint)
            self.process = ReshardProcess(
                ReshardDuty(
                    client=client,
                    url=str(site.endpoints[0].local),
                    credentials=token.credentials,
                    place=self.place,
                    log_level=settings.log_level,
                    log_format=settings.log_format,
                )
            )
        except OSError:
            self._clear_away()
            raise
        for leader in leaders:
            leader.tell(f"{STAND_STILL} {client}")

    def come_to_nothing(self, why: str, leaders: Sequence[ShardProcess]) -> None:
        """The store goes on with the shards that it has. `leaders`: what leads them by now. One that has taken over
        meanwhile never stood still, and whoever has asked there wishes for another attempt."""
        self.process.kill()
        for leader in leaders:
            if leader in self.leaders:
                leader.tell(f"{NOT_RESHARDED} {why}")
        self._clear_away()

    def change(self, site: Site) -> None:
        """From now on the site is that of the new shards. REQUIRES: the old ones have ended."""
        self._is_changed = True
        self.process.kill()
        site.reshard(self.settings, self._more)

    def end(self) -> None:
        """The supervisor ends, for whatever reason."""
        if not self._is_changed:
            self.come_to_nothing("the store ends", [])
        elif self.temporary is not None:
            _log.error("the store as it was is at %s: start with --restore %s", self.place, self.place)

    def done(self) -> None:
        """What was written down is not needed any more."""
        if self.temporary is not None:
            self.temporary.remove()

    def _clear_away(self) -> None:
        """Nothing is left of it."""
        for endpoint in self._more:
            endpoint.close()
            endpoint.remove_files()
        self.done()


class Reshardings:
    """Attempts, one at a time: begun when somebody wishes for one, seen to, and given up."""

    def __init__(
        self,
        site: Site,
        *,
        token: StoreToken,
        selector: selectors.BaseSelector,
        checkpoints_end: Callable[[], None],
        checkpoints_begin: Callable[[], None],
    ) -> None:
        """`selector`: where its process's report is registered. `checkpoints_end`, `checkpoints_begin`: no other
        checkpoint is written meanwhile."""
        self.current: Resharding | None = None
        self._left: list[TemporaryPlace] = []
        """Where attempts came to nothing: a shard that was at work there may have made the folder anew."""
        self._site = site
        self._token = token
        self._selector = selector
        self._checkpoints_end = checkpoints_end
        self._checkpoints_begin = checkpoints_begin

    def next_wake(self) -> float:
        return math.inf if self.current is None else self.current.until

    def see_to(self, groups: ShardGroups, events: Sequence[object]) -> int | None:
        """The version at which the store stands still and is written down; None: it is not. `events`: whose reports
        are readable."""
        written = None if self.current is None else self._look_at(self.current, groups, events)
        if written is None and (wish := groups.take_wish()) is not None:
            self._begin_one(wish, groups)
        return written

    def give_up(self, why: str, groups: ShardGroups) -> None:
        """REQUIRES: one has begun."""
        attempt, self.current = self.current, None
        assert attempt is not None
        _log.warning("the store goes on with %s: %s", counted(len(groups.leaders), "shard"), why)
        self._selector.unregister(attempt.process.report)
        attempt.come_to_nothing(why, groups.leaders)
        if attempt.temporary is not None:
            self._left.append(attempt.temporary)
        self._checkpoints_begin()

    def change(self) -> str:
        """From now on the site is that of the new shards. Where the store is written down. REQUIRES: one has begun, and
        the old shards have ended."""
        assert self.current is not None
        self._selector.unregister(self.current.process.report)
        self.current.change(self._site)
        return self.current.place

    def done(self) -> None:
        """The new shards serve."""
        if self.current is not None:
            self.current.done()
            self.current = None

    def end(self) -> None:
        """The supervisor ends, for whatever reason."""
        for place in self._left:
            place.clear()
        if self.current is not None:
            self.current.end()

    def _look_at(self, attempt: Resharding, groups: ShardGroups, events: Sequence[object]) -> int | None:
        if groups.leaders != attempt.leaders:
            self.give_up("a standby has taken over meanwhile: ask again", groups)
        elif attempt.process in events:
            told = attempt.process.told()
            if told is not None and told[0] == WRITTEN:
                return int(told[1])
            if told is not None:
                self.give_up(told[1], groups)
        elif time.monotonic() > attempt.until:
            self.give_up("it was not written down in time", groups)
        return None

    def _begin_one(self, num_shards: int, groups: ShardGroups) -> None:
        if self.current is not None:
            return  # who asks is told what becomes of that
        try:
            self.current = Resharding(num_shards, site=self._site, token=self._token, leaders=groups.leaders)
        except (BadArgument, OSError) as error:
            groups.leaders[0].tell(f"{NOT_RESHARDED} {' '.join(str(error).split())}")
            return
        _log.info("going on with %s: the store is written down to %s", counted(num_shards, "shard"), self.current.place)
        self._checkpoints_end()  # one at a time
        self._selector.register(self.current.process.report, selectors.EVENT_READ, self.current.process)


def _with_shards(settings: ServerSettings, num_shards: int) -> ServerSettings:
    if num_shards == settings.shards:
        raise BadArgument(f"the store has {counted(num_shards, 'shard')} already")
    try:
        changed = msgspec.convert({**msgspec.structs.asdict(settings), "shards": num_shards}, ServerSettings)
    except msgspec.ValidationError as error:
        raise BadArgument(f"{counted(num_shards, 'shard')}: {error}") from None
    changed.check()
    return changed
