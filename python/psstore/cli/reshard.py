"""`psstore reshard`: a store goes on with another number of shards."""

from __future__ import annotations

import contextlib
import time
from typing import Annotated

import typer

from psstore.cli.choices import fail
from psstore.cli.credentials import with_credentials
from psstore.exit_codes import EXIT_MISSING

WRITE_S = 700.0
"""How long the store may take to be written down."""

BEGIN_S = 600.0
"""And to begin again."""

REFUSED_S = 3.0
"""And to listen: where nobody does for so long, the store has ended."""

LOOK_AGAIN_S = 0.1


@with_credentials
def reshard(
    url: Annotated[str, typer.Argument(help="Of the store: ps://host:port or unix:///path.")],
    shards: Annotated[int, typer.Option("--shards", min=1, max=1024, help="How many it is to go on with.")],
) -> None:
    """Have a store go on with another number of shards, while it is trained.

    For a store that one `psstore-server` or `psstore run` has started, on one host. All workers end their step; the
    store stands still while it is written down, to its own place or to memory, and read by as many shards. Nothing that
    anybody was told is lost. Sessions go on by themselves; other programs hear RolledBack, with 0 steps undone.
    """
    from psstore.config import worker_environment
    from psstore.errors import AvailabilityError, PsstoreError, RolledBack, StoreUnreachable
    from psstore.server import other_member
    from psstore.server.other_member import LOOK_S, look_at

    try:
        credentials = worker_environment().credentials
        first = look_at(url, credentials).welcome.addresses[0]
        address = url if url in first else first[0]
        before = look_at(address, credentials).welcome
        if len(before.addresses) == shards:
            fail(f"the store at {address} has {shards} shards already", exit_code=EXIT_MISSING)
        with contextlib.suppress(RolledBack, StoreUnreachable):  # the shard that was asked has ended
            other_member.reshard(address, credentials, shards, timeout_s=WRITE_S)
        listened = time.monotonic()
        until = listened + BEGIN_S
        while True:
            began = time.monotonic()
            try:
                now = look_at(address, credentials)
                if now.welcome.store != before.store:
                    break
            except AvailabilityError:
                if began > until or began > listened + REFUSED_S:
                    raise
            if time.monotonic() - began > LOOK_S / 2:  # it was not refused at once
                listened = time.monotonic()
            time.sleep(LOOK_AGAIN_S)
    except PsstoreError as error:
        fail(error.message, exit_code=EXIT_MISSING)
    told = now.welcome
    typer.echo(f"the store goes on with {len(told.addresses)} shards, from version {told.restored} on")
