"""`psstore doctor`: what is wrong with a store, and what mends it."""

from __future__ import annotations

import typer

from psstore.cli.choices import StoreUrl, fail
from psstore.cli.credentials import with_credentials
from psstore.exit_codes import EXIT_FAILED


@with_credentials
def doctor(
    url: StoreUrl = "",
) -> None:
    """Find what is wrong with a store, or between here and there, and say what mends it."""
    import psstore
    from psstore.config import worker_environment
    from psstore.errors import PsstoreError
    from psstore.launch.examining import examine

    try:
        told = worker_environment()
        where = url or told.url
        if where is None:
            fail("no store to look at: give a URL, as ps://127.0.0.1:5700, or set PSSTORE_URL")
        found = examine(where, credentials=told.credentials, version=psstore.__version__)
    except PsstoreError as error:
        fail(error.message)
    for one in found:
        typer.echo(f"{one.kind}: {one.what}\n    {one.mend}")
    if found:
        raise typer.Exit(EXIT_FAILED)
    typer.echo("nothing is wrong, as far as can be seen from here")
