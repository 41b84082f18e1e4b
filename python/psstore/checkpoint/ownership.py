"""Who writes to a place: one store, which says so in a file and renews it. Another one is refused.

    owner.json  {"owner": …, "beat": 17, "lease_s": 30, "host": …, "process": …, "since": …}

The beat goes up while the owner lives. No clocks are compared: whoever wants the place watches for a lease, by its own
clock, whether the beat still changes. It takes the place over

  - at once, if the owner was a process of this machine and is gone, if it led the same store before whoever comes, as
    one of a host that has fallen silent, or if an operator says so (`take_over`);
  - after a lease in which the beat did not change.

An owner looks into the file before each commit, and before each beat, and is told there that it has lost the place.
Between that look and the commit is a moment in which a place may change hands; file names of two stores never meet, so
that what comes of it is a checkpoint of the one or the other, whole. The file is replaced, not compared and replaced:
of two stores that take a place over at one moment the second has it, and the first is told so at its next look.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec

from psstore.checkpoint.storage import Storage, read_all, where, write_all
from psstore.checkpoint.tensor_file import NOT_DECODED
from psstore.errors import CheckpointPlaceTaken

OWNER = "owner.json"

LEASE_S = 30.0
"""How long a beat may stand still. Renewed three times as often, so that one slow request loses nothing."""

MAX_LEASE_S = 3600.0
"""What says more is no record: who waits for the place would wait for so long."""

LAST_TIME_S = 253402300799.0
"""The end of the year 9999."""

LOOKS_PER_LEASE = 15
"""How often somebody who waits for a place looks."""

MAX_OWNER_BYTES = 64 << 10


class OwnerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What the file says."""

    owner: str
    """Drawn for each life of a store."""
    beat: int = 0
    lease_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_LEASE_S)] = LEASE_S
    host: str = ""
    process: str = ""
    """The process on its machine, so that another one there can see whether it lives: see `this_process`."""
    since: Annotated[float, msgspec.Meta(ge=0, le=LAST_TIME_S)] = 0.0
    """Unix time in seconds. For people."""
    store: str = ""
    """Id of the life of a store, whichever of its processes leads there; '': it is none's."""
    led_before: Annotated[int, msgspec.Meta(ge=0)] = 0
    """How many processes have led it before this one."""


class Ownership:
    """The right to write to a place, once `take` has returned it. Not thread-safe."""

    def __init__(self, storage: Storage, record: OwnerRecord) -> None:
        self._storage = storage
        self._record = record
        self._said_at = _now()
        """When it was said last that the owner lives."""

    @property
    def owner(self) -> str:
        return self._record.owner

    @property
    def renew_every_s(self) -> float:
        """How often to call `renew`, commits or not."""
        return self._record.lease_s / 3

    def check(self) -> None:
        """Raises CheckpointPlaceTaken if another store has taken the place over. A file that is not there, and can't
        have been anybody else's within the lease, was lost: it is written again."""
        found = read_owner(self._storage)
        if found is None and _now() - self._said_at < self._record.lease_s:
            self._storage.claim(OWNER, msgspec.json.encode(self._record))
            found = read_owner(self._storage)
        if found is None or found.owner != self._record.owner:
            raise _taken(self._storage, found, "has taken this place over: this store writes no more checkpoints here")

    def renew(self) -> None:
        """Says that the owner lives. Raises as `check`, and StorageFailed."""
        now = _now()
        self._record = msgspec.structs.replace(self._record, beat=self._record.beat + 1)
        _write(self._storage, self._record, check=self.check)
        self._said_at = now

    def release(self) -> None:
        """Leaves the place to whoever comes next; if another one has it already, that is so."""
        found = read_owner(self._storage)
        if found is not None and found.owner == self._record.owner:
            self._storage.remove(OWNER)


def take(
    storage: Storage,
    *,
    take_over: bool = False,
    store: str = "",
    led_before: int = 0,
    lease_s: float = LEASE_S,
    sleep: Callable[[float], None] = time.sleep,
) -> Ownership:
    """Makes the caller the owner of a place. Returns at once where nobody owns it, one that led the same store before
    does, or `take_over` is given; else waits until it is seen that the owner lives, at most its lease. `store`,
    `led_before`: see OwnerRecord. Raises CheckpointPlaceTaken, StorageFailed."""
    mine = OwnerRecord(
        owner=secrets.token_hex(8),
        lease_s=lease_s,
        host=os.uname().nodename,
        process=this_process(),
        since=time.time(),
        store=store,
        led_before=led_before,
    )
    if storage.claim(OWNER, msgspec.json.encode(mine)):
        return _confirmed(storage, mine)
    there = read_owner(storage)
    is_mine = there is not None and there.owner == mine.owner  # storage was asked twice, as its answer was lost
    if there is not None and not (take_over or is_mine or _is_followed(there, mine) or _is_gone(there)):
        _watch(storage, there, sleep)
    _write(storage, mine)
    return _confirmed(storage, mine)


def read_owner(storage: Storage) -> OwnerRecord | None:
    """Who owns the place; None if nobody does. A file that can't be made out is of an owner who must be watched."""
    try:
        content = read_all(storage, OWNER, at_most=MAX_OWNER_BYTES)
    except FileNotFoundError:
        return None
    try:
        return msgspec.json.decode(content, type=OwnerRecord)
    except NOT_DECODED:
        return OwnerRecord(owner=f"an owner whose record has {len(content)} bytes that can't be made out")


def this_process() -> str:
    """The machine since it was started, the process' namespace of numbers, its number and when it began: what tells it
    from all other processes that there ever were. '' where the system does not say."""
    return _process(os.getpid())


def _process(pid: int) -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
        began = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
    return f"{boot} {namespace} {pid} {began}"


def _is_followed(there: OwnerRecord, mine: OwnerRecord) -> bool:
    """Whether that one led the store which this one leads now: it may live, and nobody hears it."""
    return bool(mine.store) and there.store == mine.store and there.led_before < mine.led_before


def _is_gone(there: OwnerRecord) -> bool:
    """Whether it was a process that this one would see, and does not."""
    mine, its = this_process().split(" "), there.process.split(" ")
    return len(its) == 4 and mine[:2] == its[:2] and its[2].isdigit() and _process(int(its[2])) != there.process


def _watch(storage: Storage, there: OwnerRecord, sleep: Callable[[float], None]) -> None:
    """Returns when the owner has not said for its lease that it lives. Raises CheckpointPlaceTaken."""
    for _ in range(LOOKS_PER_LEASE):
        sleep(there.lease_s / LOOKS_PER_LEASE)
        now = read_owner(storage)
        if now is None:
            return
        if now != there:
            raise _taken(storage, now, "writes its checkpoints there and lives")


def _confirmed(storage: Storage, mine: OwnerRecord) -> Ownership:
    ownership = Ownership(storage, mine)
    ownership.check()
    return ownership


def _write(storage: Storage, record: OwnerRecord, *, check: Callable[[], object] = lambda: None) -> None:
    write_all(storage, OWNER, msgspec.json.encode(record), check=check)


def _now() -> float:
    """A clock that goes on while the machine is suspended, as that of another one does."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _taken(storage: Storage, owner: OwnerRecord | None, what: str) -> CheckpointPlaceTaken:
    if owner is None:
        who = "somebody who has left again"
    else:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(owner.since))
        who = f"store {owner.owner} on {owner.host or 'an unknown host'}, since {since} UTC,"
    return CheckpointPlaceTaken(
        f"{where(storage, OWNER)}: {who} {what}; give each store a place of its own, or, if you know that the other one"
        " is dead, take it over",
        url=storage.url,
        owner=owner.owner if owner else None,
    )
