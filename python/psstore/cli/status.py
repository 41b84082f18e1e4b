"""`psstore status`: how a store is, in some lines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from psstore.cli.choices import StoreUrl, fail
from psstore.cli.credentials import with_credentials
from psstore.exit_codes import EXIT_MISSING

if TYPE_CHECKING:
    from psstore.client.store_status import StoreStatus

MIB = float(1 << 20)


@with_credentials
def status(
    url: StoreUrl = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say how a store is: its version, who trains, its last checkpoint, and what each shard holds."""
    from psstore.client.connect import connect
    from psstore.client.store_status import CONNECT_S, look_at
    from psstore.errors import PsstoreError

    try:
        with connect(url or None, role="client", connect_timeout_s=CONNECT_S) as store:
            found = look_at(store)
    except PsstoreError as error:
        fail(error.message, exit_code=EXIT_MISSING)
    typer.echo(msgspec.json.encode(found).decode() if as_json else "\n".join(lines_of(found)))


def lines_of(found: StoreStatus) -> list[str]:
    """For people."""
    has_any = found.live or found.lost or found.left
    workers = [
        f"{_named(ranks)} {many if len(ranks) > 1 else one}"
        for ranks, one, many in (
            (found.live, "trains", "train"),
            (found.lost, "is lost", "are lost"),
            (found.left, "has left", "have left"),
            (found.absent if has_any else (), "has not joined", "have not joined"),
        )
        if ranks
    ]
    number = f"{found.num_workers}"
    if found.fewest is not None:
        number = f"{found.fewest} to {found.num_workers} that come and go"
    began = "began empty" if found.restored is None else f"began with the checkpoint of version {found.restored}"
    last = "none in this life" if found.checkpoint.version is None else f"version {found.checkpoint.version}"
    lines = [
        f"store       version {found.version}, {found.tensors} tensors, {found.mode}; {began}",
        f"workers     {'; '.join(workers) or 'none has joined'} (of {number})",
        f"checkpoint  {last}",
    ]
    if found.waited_for:
        lines.append(f"waits       for {found.waited_for}")
    refused = [f"{one.refused:,} of rank {one.rank}" for one in found.workers if one.refused]
    if refused:
        lines.append(f"refused     {', '.join(refused)}: contributions of a norm far beyond the usual, or not finite")
    for shard in found.shards:
        behind = found.version - shard.version
        where = f"version {shard.version}" + (f", {behind} behind" if behind > 0 else "")
        led = f" after {shard.led_before} that died" if shard.led_before else ""
        rows = (
            f" {shard.rows:,} rows ({shard.rows_evicted:,} evicted, {shard.rows_refused:,} refused),"
            if shard.rows or shard.rows_evicted or shard.rows_refused
            else ""
        )
        stands_by = f", a standby may lead ({shard.standby_lag} changes behind)" if shard.standbys else ""
        lines.append(
            f"shard {shard.shard:<5} {where}: values {shard.value_bytes / MIB:.1f} MiB, state"
            f" {shard.state_bytes / MIB:.1f} MiB, memory {shard.memory_bytes / MIB:.1f} MiB,{rows}"
            f" {shard.connections} connections, readers' and this command's included; process {shard.process} leads"
            f"{led}{stands_by}"
        )
    lines += [
        f"table {one.name}: {one.rows:,} rows, {one.row_bytes / MIB:.1f} MiB; {one.rows_evicted:,} evicted,"
        f" {one.rows_refused:,} refused"
        for one in found.tables
    ]
    return lines


def _named(ranks: tuple[int, ...]) -> str:
    """'rank 3', or 'ranks 0, 1'."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
