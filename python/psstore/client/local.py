"""A store inside this process: the same shards, coordinator and protocol, without sockets.

For tests, single-machine training with threads as workers, and trying things out. Frames go from one state machine
to the other as bytes, so that what works here works over a network.
"""

from __future__ import annotations

from typing import TypedDict, TypeVar
from urllib.parse import parse_qsl

from psstore.client.local_cluster import LocalCluster, LocalDriver
from psstore.client.loop_thread import LoopThread
from psstore.client.options import Options
from psstore.client.store import AsyncStore, Store
from psstore.errors import BadArgument, StoreClosed
from psstore.memory import limit_bytes
from psstore.types import Consistency, place_shards
from psstore.wire.messages import Role

S = TypeVar("S", Store, AsyncStore)


class LocalOptions(TypedDict, total=False):
    """What a local:// URL can say."""

    shards: int
    workers: int
    mode: str
    staleness: int
    device: str
    max_memory: str


def parse_local(url: str) -> LocalOptions:
    """What `local://?shards=2&workers=4&mode=ssp&staleness=2` says. Raises BadArgument naming what it can't read."""
    scheme, _, query = url.partition("?")
    if scheme not in ("local:", "local://"):
        raise BadArgument(f"URL {url!r}: expected local:// or local://?shards=2&workers=1&mode=sync")
    options = LocalOptions()
    for name, text in parse_qsl(query, keep_blank_values=True):
        if name in ("mode", "device", "max_memory"):
            options[name] = text  # type: ignore[literal-required]
        elif name in ("shards", "workers", "staleness"):
            try:
                options[name] = int(text)  # type: ignore[literal-required]
            except ValueError:
                raise BadArgument(f"URL {url!r}: {name} is {text!r}; expected an integer") from None
        else:
            there_are = "shards, workers, mode, staleness, device and max_memory"
            raise BadArgument(f"URL {url!r}: no option {name!r}; there are {there_are}")
    return options


class LocalStore:
    """A store inside this process, for the threads of it.

    >>> server = psstore.LocalStore(shards=2, workers=4)
    >>> store = server.connect(rank=0)      # in each worker's thread, with its rank
    """

    def __init__(
        self,
        shards: int = 1,
        *,
        workers: int = 1,
        mode: str = "sync",
        backups: int = 1,
        staleness: int = 2,
        refuse_non_finite: bool = False,
        device: str = "cpu",
        max_memory: str | None = None,
    ) -> None:
        """`mode`: 'sync', 'backup' (a round does without `backups` late workers), 'ssp' (a worker may be `staleness`
        rounds ahead) or 'async'. `refuse_non_finite`: refuse pushes that hold NaN or infinity. `device`: where
        parameters live and steps are taken: 'cpu', 'cuda:0', or several, separated by commas, which the shards take
        in turn. `max_memory`: main memory that the shards may take together, as '8GiB' (default: four fifths of what
        the machine or its control group has); what goes beyond it is refused with OutOfMemory."""
        if shards < 1:
            raise BadArgument(f"shards is {shards}; a store needs at least 1")
        consistency = Consistency.of_mode(mode, num_workers=workers, backups=backups, staleness=staleness)
        self.thread = LoopThread()
        self._cluster = LocalCluster(
            self.thread.loop,
            shards,
            consistency,
            refuse_non_finite=refuse_non_finite,
            devices=place_shards(device, shards),
            max_memory_bytes=limit_bytes(max_memory),
        )
        self._closed = False
        self._what = f"local://?shards={shards}&workers={workers}&mode={consistency.mode}"

    def connect(
        self,
        *,
        role: Role = "worker",
        rank: int | None = None,
        timeout_s: float = 30.0,
        wait_s: float = 300.0,
    ) -> Store:
        """A worker of this store, or a client: the same as one of psstore.connect."""
        return self.open(Store, Options(role=role, rank=rank, timeout_s=timeout_s, wait_s=wait_s))

    def connect_async(
        self,
        *,
        role: Role = "worker",
        rank: int | None = None,
        timeout_s: float = 30.0,
        wait_s: float = 300.0,
    ) -> AsyncStore:
        """Opens a store whose calls are awaited. Connecting itself takes no time here."""
        return self.open(AsyncStore, Options(role=role, rank=rank, timeout_s=timeout_s, wait_s=wait_s))

    def open(self, face: type[S], options: Options, *, private: bool = False) -> S:
        """`private`: the store ends when this connection does."""
        if self._closed:
            raise StoreClosed("this store is closed; make another LocalStore")
        line = LocalDriver(self._cluster, self.thread, on_released=self.close if private else None)
        opening = self.thread.submit(line.open(options))
        try:
            operations = opening.result()
        except BaseException:
            opening.cancel()
            self.thread.submit(line.close()).result()
            line.release()
            raise
        return face(operations, line, self._what)

    def close(self) -> None:
        """Ends the store and what it holds. Calls under way fail with StoreClosed."""
        if not self._closed:
            self._closed = True
            self.thread.run(self._cluster.close())
            self.thread.stop()

    def __enter__(self) -> LocalStore:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<LocalStore {self._what}{': closed' if self._closed else ''}>"
