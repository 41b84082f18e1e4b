"""What a command proves itself to a store with, as options: they say what variables say that every client reads."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer


def _file(of_what: str, variable: str) -> Any:
    option = typer.Option(exists=True, dir_okay=False, help=f"{of_what} (default: {variable}).", show_default=False)
    return Annotated[Path | None, option]


VARIABLES = {
    "token_file": ("PSSTORE_TOKEN_FILE", "The store's secret"),
    "tls_ca": ("PSSTORE_TLS_CA", "Certificates of the CAs that a pss:// store's has to be of"),
    "tls_cert": ("PSSTORE_TLS_CERT", "Own certificate, for a store that asks for one"),
    "tls_key": ("PSSTORE_TLS_KEY", "Private key of that certificate"),
}
"""Option -> the variable that says the same, and what is in the file."""

PARAMETERS = [
    inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_file(what, variable))
    for name, (variable, what) in VARIABLES.items()
]


def with_credentials(command: Callable[..., None]) -> Callable[..., None]:
    """Adds these options to a command that is a store's client. Wherever it reads the environment, they are there."""
    own = inspect.signature(command, eval_str=True)

    @functools.wraps(command)
    def told(**given: Any) -> None:
        with _in_environment({variable: given.pop(name) for name, (variable, _) in VARIABLES.items()}):
            command(**given)

    told.__signature__ = own.replace(parameters=[*own.parameters.values(), *PARAMETERS])  # type: ignore[attr-defined]
    told.__annotations__ = {one.name: one.annotation for one in told.__signature__.parameters.values()}  # type: ignore[attr-defined]
    return told


@contextmanager
def _in_environment(files: Mapping[str, Path | None]) -> Iterator[None]:
    before = {variable: os.environ.get(variable) for variable in files}
    os.environ.update({variable: str(file) for variable, file in files.items() if file is not None})
    try:
        yield
    finally:
        for variable, value in before.items():
            if value is None:
                os.environ.pop(variable, None)
            else:
                os.environ[variable] = value
