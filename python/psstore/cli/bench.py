"""`psstore bench`: how fast a running store takes a model and gives it back, beside what its network carries.

A plain client with plain tensors of its own under a prefix that nobody else has, which it drops in the end: training
goes on beside it, and shares links and shards with it meanwhile. It goes over sockets of the URL's kind, also where
memory could be shared with the store: plain sockets are what it is held against.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from psstore.cli.choices import checked_url, fail
from psstore.cli.credentials import with_credentials
from psstore.cli.ending import end_as_by_ctrl_c
from psstore.cli.model_shapes import MODELS, Shape
from psstore.errors import BadArgument, PsstoreError
from psstore.exit_codes import EXIT_FAILED, EXIT_MISSING

if TYPE_CHECKING:
    import psstore
    from psstore.config import Transport
    from psstore.net.address import Address
    from psstore.net.baseline import RawLinks

SMALL_BYTES = 1024
SMALL_ROUNDS = 300
WARM_UP = 2

Work = Callable[[], object]


@dataclass(frozen=True)
class Times:
    """How long one kind of work took."""

    median_s: float
    min_s: float
    p99_s: float

    @staticmethod
    def of(times: list[float]) -> Times:
        ordered = sorted(times)
        return Times(median(ordered), ordered[0], ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))])


@dataclass(frozen=True)
class Row:
    """One kind of work, done by the store and, where there is a peer, by plain sockets in turns with it."""

    what: str
    num_bytes: int
    store: Times
    raw: Times | None


@with_credentials
def bench(
    url: Annotated[
        str | None,
        typer.Argument(help="ps://host:port or unix:///path of a shard (default: PSSTORE_URL).", callback=checked_url),
    ] = None,
    model: Annotated[str, typer.Option(help=f"Whose tensors: {', '.join(MODELS)}.")] = "resnet50",
    megabytes: Annotated[int | None, typer.Option(min=1, help="One tensor of this size instead.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Times that the model is pushed and pulled.")] = 10,
    raw: Annotated[
        str | None, typer.Option(help="ps://host:port where `psstore bench --serve` runs, on the store's host.")
    ] = None,
    serve: Annotated[
        str | None, typer.Option(metavar="ps://HOST:PORT", help="Be the peer of --raw: move bytes, until Ctrl-C.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Push a model to a running store and pull it back, and say how much of the network that used.

    Pushes are plain ones, of tensors that the command creates and drops: no round, no update. A training under way is
    not touched, but shares its links and its shards' time. Plain sockets do the same beside it, in turns: to a process
    of this machine if the store is here, else to where `--serve` runs. The store is reached over sockets as well, and
    not through shared memory.
    """
    end_as_by_ctrl_c()
    try:
        if serve is not None:
            _serve(serve)
        else:
            shapes = _shapes(model, megabytes)
            where, num_shards, rows = measure(url, shapes, rounds=rounds, raw=raw)
            show = _print_json if as_json else _print_table
            show(f"{where}, shards: {num_shards}", shapes, rows)
    except PsstoreError as error:
        fail(error.message, exit_code=EXIT_MISSING)
    except MemoryError:
        fail("no memory here for three times such a model; --megabytes takes a smaller one", exit_code=EXIT_FAILED)


def _shapes(model: str, megabytes: int | None) -> Mapping[str, Shape]:
    if megabytes is not None:
        return {"w": (megabytes * 250_000,)}
    if model not in MODELS:
        fail(f"model {model!r} is not one of {', '.join(MODELS)}; --megabytes takes any size")
    return MODELS[model]()


def _serve(address: str) -> None:
    from psstore.net.address import UnixAddress, parse_address
    from psstore.net.baseline import listen, serve

    where = parse_address(address)
    with contextlib.ExitStack() as ends:
        listener = ends.enter_context(listen(where))
        if isinstance(where, UnixAddress):
            ends.callback(os.unlink, where.path)  # else nobody could listen there again
        ends.enter_context(contextlib.suppress(KeyboardInterrupt))
        typer.echo(f"moving bytes at {address}; stop with Ctrl-C")
        serve(listener)


# ---- measuring ----


def measure(
    url: str | None, shapes: Mapping[str, Shape], *, rounds: int, raw: str | None = None
) -> tuple[str, int, list[Row]]:
    """The store's URL, its number of shards, and what was measured. Raises PsstoreError."""
    import psstore
    from psstore.config import worker_environment
    from psstore.net.address import TcpAddress, parse_addresses

    chosen = url or worker_environment().url
    if chosen is None:
        raise BadArgument("no store to measure: name its URL, or set PSSTORE_URL")
    address, *_ = parse_addresses(chosen)
    with contextlib.ExitStack() as ends:
        transport: Transport = "tcp" if isinstance(address, TcpAddress) else "unix"
        store = ends.enter_context(psstore.connect(chosen, role="client", transport=transport))
        links = _raw_links(address, raw, store.num_shards, ends)
        model = ends.enter_context(_model_work(store, shapes))
        small = ends.enter_context(_model_work(store, {"w": (SMALL_BYTES // 4,)}))
        num_bytes = 4 * sum(math.prod(shape) for shape in shapes.values())
        rows = [
            *_rows("model", model, links, num_bytes=num_bytes, rounds=rounds),
            *_rows("1 KiB", small, links, num_bytes=SMALL_BYTES, rounds=SMALL_ROUNDS),
        ]
        return chosen, store.num_shards, rows


def _raw_links(store: Address, raw: str | None, count: int, ends: contextlib.ExitStack) -> RawLinks | None:
    """None: the store is elsewhere, and nobody said where a peer is."""
    from psstore.net.address import parse_address
    from psstore.net.baseline import RawLinks, peer_here

    if raw is not None:
        peer = parse_address(raw)
    elif _is_here(store):
        peer = ends.enter_context(peer_here(store))
    else:
        return None
    links = RawLinks(peer, count)
    ends.callback(links.close)
    return links


def _is_here(address: Address) -> bool:
    from psstore.net.address import TcpAddress, is_loopback

    return not isinstance(address, TcpAddress) or is_loopback(address.host)


@contextlib.contextmanager
def _model_work(store: psstore.Store, shapes: Mapping[str, Shape]) -> Iterator[dict[str, Work]]:
    """What pushes tensors of these shapes, and what pulls them. They are dropped with the block."""
    import numpy as np

    from psstore.types import TensorSpec

    prefix = f"psstore-bench-{secrets.token_hex(8)}/"
    specs = [TensorSpec(name=prefix + name, shape=shape, rule="assign") for name, shape in shapes.items()]
    names = [spec.name for spec in specs]
    store.create_many(specs)  # first: what the store has no room for takes none here
    try:
        values = {spec.name: np.ones(spec.shape, np.float32) for spec in specs}
        into = [np.zeros(spec.shape, np.float32) for spec in specs]
        yield {"push": lambda: store.push_many(values), "pull": lambda: store.pull_many(names, out=into)}
    finally:
        for name in names:
            store.drop(name)


def _rows(what: str, work: Mapping[str, Work], links: RawLinks | None, *, num_bytes: int, rounds: int) -> list[Row]:
    contestants = {f"{name} {what}": one for name, one in work.items()}
    if links is not None:
        memory = memoryview(bytearray(num_bytes))
        contestants |= {"up": lambda: links.up(memory), "down": lambda: links.down(memory)}
    times = _alternate(contestants, rounds)
    return [
        Row(name, num_bytes, times[name], times.get(raw))
        for name, raw in ((f"push {what}", "up"), (f"pull {what}", "down"))
    ]


def _alternate(contestants: Mapping[str, Work], rounds: int) -> dict[str, Times]:
    """In turns, so that what else the machines do slows all alike."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(WARM_UP + rounds):
        for name, work in contestants.items():
            begin = time.perf_counter()
            work()
            if number >= WARM_UP:
                times[name].append(time.perf_counter() - begin)
    return {name: Times.of(found) for name, found in times.items()}


# ---- showing ----


def _print_json(where: str, shapes: Mapping[str, Shape], rows: list[Row]) -> None:
    typer.echo(json.dumps({"store": where, "tensors": len(shapes), "rows": [asdict(row) for row in rows]}))


def _print_table(where: str, shapes: Mapping[str, Shape], rows: list[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    title = f"{where}; model: {rows[0].num_bytes / 1e6:,.1f} MB, tensors: {len(shapes)}"
    table = Table(title=title, title_justify="left", caption=_verdict(rows), caption_justify="left")
    for heading in ("", "psstore", "MB/s", "99 %", "plain sockets", "MB/s", "ratio"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*_cells(row))
    Console().print(table)


def _cells(row: Row) -> list[str]:
    store, raw = row.store, row.raw
    plain = ["–"] * 3 if raw is None else [*_speed(row, raw), f"{store.median_s / raw.median_s:.2f}"]
    return [row.what, *_speed(row, store), _duration(store.p99_s), *plain]


def _speed(row: Row, times: Times) -> list[str]:
    """The median, and for what is long enough to be about bytes, the rate."""
    return [_duration(times.median_s), _rate(row, times) if row.num_bytes > SMALL_BYTES else ""]


def _verdict(rows: list[Row]) -> str:
    """A sentence about the model's two rows."""
    push, pull = rows[:2]
    if push.raw is None or pull.raw is None:
        return (
            "What does the network carry? Run `psstore bench --serve ps://0.0.0.0:5800` on the store's host, and this"
            " again with --raw ps://HOST:5800."
        )
    up, down = (f"{100 * raw.median_s / row.store.median_s:.0f} %" for row, raw in ((push, push.raw), (pull, pull.raw)))
    return (
        f"The network carries {_rate(push, push.raw)} MB/s up and {_rate(pull, pull.raw)} MB/s down; psstore used"
        f" {up} and {down} of it."
    )


def _rate(row: Row, times: Times) -> str:
    return f"{row.num_bytes / times.median_s / 1e6:,.0f}"


def _duration(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:,.0f} µs"
