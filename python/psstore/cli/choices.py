"""Options and errors that several commands share."""

from __future__ import annotations

import os
import sys
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from psstore.errors import PsstoreError
from psstore.exit_codes import EXIT_USAGE
from psstore.types import Consistency

if TYPE_CHECKING:  # and where it is needed: not every command has to do with tokens
    from psstore.config import Credentials


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


TokenFile = Annotated[
    Path | None, typer.Option(exists=True, dir_okay=False, help="The store's secret (default: PSSTORE_TOKEN_FILE).")
]
"""An option of commands for whoever sees to a store."""


def credentials_of(token_file: Path | None) -> Credentials:
    """The environment's, with the token of that file if there is one. Raises BadArgument."""
    from msgspec.structs import replace

    from psstore.config import read_token, worker_environment

    credentials = worker_environment().credentials
    return credentials if token_file is None else replace(credentials, token=read_token(token_file))


def fail(message: str, *, exit_code: int = EXIT_USAGE) -> NoReturn:
    typer.echo(f"psstore: {message}", err=True)
    raise typer.Exit(exit_code)


def drop_output() -> None:
    """Lets go of what standard output holds and the system refuses: Python would try again at its end, say so in its
    own words, and make the exit code 120."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
