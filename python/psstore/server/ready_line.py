"""What is said once, when a store serves for the first time: where it is found, and how it is."""

from __future__ import annotations

import os
from typing import TextIO

import msgspec

from psstore.server.site import Site
from psstore.text import counted
from psstore.types import workers_text


class ReadyLine(msgspec.Struct, frozen=True, kw_only=True):
    """What `--ready-fd` is told, as one line of JSON."""

    url: str
    """The address that a client needs: of shard 0."""
    shards: tuple[tuple[str, ...], ...]
    """All addresses of each shard."""
    store: str
    mode: str
    workers: int | str
    pid: int
    index: int | None = None
    """Index of the one shard that runs here, if the others have other hosts."""
    place: str | None = None
    """Where that one is found."""
    standby: bool = False
    """What runs here is a standby of that shard."""
    metrics: str | None = None
    """Where /metrics, /livez and /readyz are answered; None: nowhere."""

    def __str__(self) -> str:
        workers = "1 worker" if self.workers == 1 else f"{str(self.workers).replace(':', ' to ')} workers"
        metrics = "" if self.metrics is None else f"; metrics at {self.metrics}/metrics"
        if self.index is not None:
            what = "standby of shard" if self.standby else "shard"
            which = f"{what} {self.index} of {len(self.shards)} at {self.place}"
            return f"psstore-server ready: {which} ({self.mode}, {workers}{metrics})"
        places = " ".join(_short(addresses) for addresses in self.shards)
        shards = counted(len(self.shards), "shard")
        return f"psstore-server ready: {self.url} ({shards}: {places}; {self.mode}, {workers}{metrics})"


def ready_line(site: Site, *, store: str, is_standby: bool, metrics: str | None) -> ReadyLine:
    """`store`: this host's id of its life."""
    terms = site.settings.consistency()
    return ReadyLine(
        url=site.url,
        shards=site.addresses,
        store=store,
        mode=terms.mode,
        workers=workers_text(terms) if terms.elastic else terms.num_workers,
        pid=os.getpid(),
        index=None if site.is_whole else site.first,
        place=None if site.is_whole else str(site.endpoints[0].addresses[0]),
        standby=is_standby,
        metrics=metrics,
    )


def announce(ready: ReadyLine, *, out: TextIO, ready_fd: int | None) -> None:
    """Prints it, and writes it to the descriptor, which is closed then."""
    print(ready, file=out, flush=True)
    if ready_fd is not None:
        with os.fdopen(ready_fd, "wb") as pipe:
            pipe.write(msgspec.json.encode(ready) + b"\n")


def _short(addresses: tuple[str, ...]) -> str:
    """'5700', '/run/store' or '/run/store+5700'."""
    return "+".join(a.removeprefix("unix://") if a.startswith("unix") else a.rpartition(":")[2] for a in addresses)
