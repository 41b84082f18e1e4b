"""`psstore status`: how a store is, in some lines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from psstore.cli.choices import fail

if TYPE_CHECKING:
    from psstore.client.store import Store

EXIT_NO_STORE = 3
"""As for a store that can't start."""

MIB = float(1 << 20)


class ShardStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One shard."""

    shard: int
    version: int
    """Decisions that it has applied."""
    value_bytes: int
    state_bytes: int
    memory_bytes: int
    """All that it takes, of the host's memory or its device's."""
    connections: int
    process: int
    """Its id on its host: of the process that leads."""
    led_before: int
    """How many processes led it before, and died."""
    standbys: int
    """How many may lead at once."""
    standby_lag: int
    """Changes that a standby has been sent and has not answered."""


class StoreStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What `status --json` prints."""

    mode: str
    num_workers: int
    version: int
    """The last decision."""
    tensors: int
    live: tuple[int, ...]
    """Ranks of the workers that train."""
    lost: tuple[int, ...]
    left: tuple[int, ...]
    restored: int | None
    """The version that this life of the store began with; None: it began empty."""
    checkpoint: int | None
    """The last one that this life has written."""
    shards: tuple[ShardStatus, ...]


def status(
    url: Annotated[
        str, typer.Argument(metavar="[URL]", help="Of the store (default: PSSTORE_URL).", show_default=False)
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say how a store is: its version, who trains, its last checkpoint, and what each shard holds."""
    from psstore.client.connect import connect
    from psstore.errors import PsstoreError

    try:
        with connect(url or None, role="client") as store:
            found = look_at(store)
    except PsstoreError as error:
        fail(error.message, exit_code=EXIT_NO_STORE)
    typer.echo(msgspec.json.encode(found).decode() if as_json else "\n".join(lines_of(found)))


def look_at(store: Store) -> StoreStatus:
    """Asks all shards. Raises as `Store.stats`."""
    shards = store.stats()
    first = shards[0]
    checkpoint = int(first.get("checkpoint", -1))
    return StoreStatus(
        mode=store.consistency.mode,
        num_workers=store.num_workers,
        version=int(first["version"]),
        tensors=int(first["tensors"]),
        live=_ranks(first["ranks_live"]),
        lost=_ranks(first["ranks_lost"]),
        left=_ranks(first["ranks_left"]),
        restored=store.restored,
        checkpoint=checkpoint if checkpoint >= 0 else None,
        shards=tuple(
            ShardStatus(
                shard=int(one["shard"]),
                **{name: int(one[name]) for name in ShardStatus.__struct_fields__ if name != "shard"},
            )
            for one in shards
        ),
    )


def lines_of(found: StoreStatus) -> list[str]:
    """For people."""
    workers = [
        f"{_named(ranks)} {what}"
        for ranks, what in ((found.live, "train"), (found.lost, "lost"), (found.left, "left"))
        if ranks
    ]
    began = "began empty" if found.restored is None else f"began with the checkpoint of version {found.restored}"
    last = "none in this life" if found.checkpoint is None else f"version {found.checkpoint}"
    lines = [
        f"store       version {found.version}, {found.tensors} tensors, {found.mode}; {began}",
        f"workers     {', '.join(workers) or 'none has joined'} (of {found.num_workers})",
        f"checkpoint  {last}",
    ]
    for shard in found.shards:
        behind = found.version - shard.version
        where = f"version {shard.version}" + (f", {behind} behind" if behind > 0 else "")
        led = f" after {shard.led_before} that died" if shard.led_before else ""
        stands_by = f", a standby may lead ({shard.standby_lag} changes behind)" if shard.standbys else ""
        lines.append(
            f"shard {shard.shard:<5} {where}: values {shard.value_bytes / MIB:.1f} MiB, state"
            f" {shard.state_bytes / MIB:.1f} MiB, memory {shard.memory_bytes / MIB:.1f} MiB,"
            f" {shard.connections} connections; process {shard.process} leads{led}{stands_by}"
        )
    return lines


def _ranks(told: int | float | str) -> tuple[int, ...]:
    return tuple(int(rank) for rank in str(told).split(",") if rank)


def _named(ranks: tuple[int, ...]) -> str:
    """'rank 3', or 'ranks 0, 1'."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
