"""`psstore promote`: somebody who knows says that one of a shard's two processes is dead."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from psstore.cli.choices import checked_url, fail
from psstore.cli.credentials import with_credentials
from psstore.exit_codes import EXIT_MISSING

LEADS_S = 30.0
"""How long it may take to lead."""

LOOK_AGAIN_S = 0.1

_REFUSALS = {
    "gone": "shard {} has gone on without this standby: what it has is old. Better than nothing? Say so: --force",
    "open": "other shards don't answer, and shard {} may go on without this standby by their word. See to them first,"
    " or make sure that it is dead, and say so: --force",
}
"""By what the words of other shards come to."""


@with_credentials
def promote(
    url: Annotated[
        str, typer.Argument(help="Of the process that lives: ps://host:port, its own place.", callback=checked_url)
    ],
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Although the other process is still connected to it, or other shards don't say that its shard has"
            " not gone on without it.",
        ),
    ] = False,
) -> None:
    """Say that the other process of a shard is dead: a standby leads, and a leader goes on without its standby.

    Needed only where a host is gone with its supervisor, or two hosts do not reach each other: who is right cannot be
    seen from inside. Make sure first that the other process is dead, or can reach nobody.
    """
    from psstore.config import worker_environment
    from psstore.errors import PsstoreError
    from psstore.protocol.election import Succession
    from psstore.server import other_member, voting

    try:
        credentials = worker_environment().credentials
        member = other_member.look_at(url, credentials)
        told = member.welcome
        others = voting.other_shards(told.addresses, told.shard)
        if others and member.may_lead and not member.leads:  # its shard is not to go on without it from now on
            found = voting.vote_for(others, url, credentials)
            if not force and found is not Succession.LEADS:
                fail(_REFUSALS[found.value].format(told.shard), exit_code=EXIT_MISSING)
        other_member.promote(url, credentials, force=force)
        until = time.monotonic() + LEADS_S
        while not (member := other_member.look_at(url, credentials)).leads:
            if time.monotonic() > until:
                fail(f"{url} does not lead after {LEADS_S:g} s; its log says why", exit_code=EXIT_MISSING)
            time.sleep(LOOK_AGAIN_S)
    except PsstoreError as error:
        fail(error.message, exit_code=EXIT_MISSING)
    typer.echo(f"shard {member.counters['shard']} is led at {url}")
