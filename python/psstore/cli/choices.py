"""Options and errors that several commands share."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, NoReturn

import typer

from psstore.errors import PsstoreError
from psstore.exit_codes import EXIT_USAGE
from psstore.types import Consistency


class Mode(str, Enum):
    """How consistent training is (docs/consistency.md)."""

    sync = "sync"
    backup = "backup"
    ssp = "ssp"
    async_ = "async"


def consistency_of(mode: Mode, *, workers: int, backups: int, staleness: int, fewest: int | None = None) -> Consistency:
    """Ends the command with a sentence for numbers that don't go together."""
    try:
        return Consistency.of_mode(mode.value, num_workers=workers, fewest=fewest, backups=backups, staleness=staleness)
    except PsstoreError as error:
        fail(error.message)


def checked_url(url: str | None) -> str | None:
    """A store's URL as it was given. Ends the command if that, or PSSTORE_URL in its place, is none: it was asked for
    wrongly."""
    from psstore.config import store_url
    from psstore.net.address import parse_addresses

    try:
        told = url or store_url()
        if told and not told.startswith("local:"):
            parse_addresses(told)
    except PsstoreError as error:
        fail(error.message)
    return url


StoreUrl = Annotated[
    str,
    typer.Argument(
        metavar="[URL]", help="Of the store (default: PSSTORE_URL).", show_default=False, callback=checked_url
    ),
]


def fail(message: str, *, exit_code: int = EXIT_USAGE) -> NoReturn:
    typer.echo(f"psstore: {message}", err=True)
    raise typer.Exit(exit_code)
