"""`psstore reshard`: a store goes on with another number of shards."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Annotated

import typer

from psstore.cli.choices import checked_url, fail
from psstore.cli.credentials import with_credentials
from psstore.exit_codes import EXIT_MISSING
from psstore.text import counted

if TYPE_CHECKING:
    from psstore.config import Credentials
    from psstore.wire.messages import Welcome

WRITE_S = 700.0
"""How long the store may take to be written down."""

BEGIN_S = 600.0
"""And to begin again."""

REFUSED_S = 3.0
"""And to listen: where nobody does for so long, the store has ended."""

LOOK_AGAIN_S = 0.1


@with_credentials
def reshard(
    url: Annotated[str, typer.Argument(help="Of the store: ps://host:port or unix:///path.", callback=checked_url)],
    shards: Annotated[int, typer.Option("--shards", min=1, max=1024, help="How many it is to go on with.")],
) -> None:
    """Have a store go on with another number of shards, while it is trained.

    For a store that one `psstore-server` or `psstore run` has started, on one host. All workers end their step; the
    store stands still while it is written down, to its own place or to memory, and read by as many shards. Nothing that
    anybody was told is lost. Sessions go on by themselves; other programs hear RolledBack, with 0 steps undone.
    """
    from psstore.config import worker_environment
    from psstore.errors import PsstoreError
    from psstore.server.other_member import look_at

    try:
        credentials = worker_environment().credentials
        first = look_at(url, credentials).welcome.addresses[0]
        address = url if url in first else first[0]
        told = look_at(address, credentials).welcome
        if len(told.addresses) == shards:
            fail(f"the store at {address} has {counted(shards, 'shard')} already", exit_code=EXIT_MISSING)
        until = time.monotonic() + WRITE_S + BEGIN_S
        while len(told.addresses) != shards:  # again where who was asked has died: its standby has heard nothing of it
            if time.monotonic() > until:
                waited = f"{WRITE_S + BEGIN_S:g} s"
                why = f"the store at {address} has {len(told.addresses)} shards still, after {waited}"
                fail(why, exit_code=EXIT_MISSING)
            told = _ask(address, credentials, shards, until)
    except PsstoreError as error:
        fail(error.message, exit_code=EXIT_MISSING)
    typer.echo(f"the store goes on with {counted(len(told.addresses), 'shard')}, from version {told.restored} on")


def _ask(address: str, credentials: Credentials, num_shards: int, until: float) -> Welcome:
    """What the store says of itself once the shard that was asked has ended. Raises PsstoreError if the store goes on
    as it is, or has ended, or if nobody has answered until then."""
    from psstore.errors import AvailabilityError, RolledBack, StoreUnreachable
    from psstore.server import other_member
    from psstore.server.other_member import LOOK_S, look_at

    with contextlib.suppress(RolledBack, StoreUnreachable):
        other_member.reshard(address, credentials, num_shards, timeout_s=min(WRITE_S, until - time.monotonic()))
    listened = time.monotonic()
    while True:
        began = time.monotonic()
        try:
            return look_at(address, credentials).welcome
        except AvailabilityError:
            if began > until or began > listened + REFUSED_S:
                raise
        if time.monotonic() - began > LOOK_S / 2:  # it was not refused at once
            listened = time.monotonic()
        time.sleep(LOOK_AGAIN_S)
