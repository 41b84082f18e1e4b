"""The only place that reads environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from psstore.errors import BadArgument


class WorkerEnvironment(msgspec.Struct, frozen=True, kw_only=True):
    """What a launcher (psstore run, torchrun, srun) tells a worker process."""

    url: str | None = None
    """PSSTORE_URL: the store."""
    rank: int | None = None
    """RANK."""
    num_workers: int | None = None
    """WORLD_SIZE."""
    token: bytes | None = None
    """Content of the file that PSSTORE_TOKEN_FILE names."""


def worker_environment(environ: Mapping[str, str] = os.environ) -> WorkerEnvironment:
    """Raises BadArgument naming the variable that is malformed."""
    path = environ.get("PSSTORE_TOKEN_FILE")
    return WorkerEnvironment(
        url=environ.get("PSSTORE_URL") or None,
        rank=_integer(environ, "RANK"),
        num_workers=_integer(environ, "WORLD_SIZE"),
        token=read_token(Path(path)) if path else None,
    )


def read_token(path: Path) -> bytes:
    """The token in a file, without surrounding whitespace. Raises BadArgument with what to do."""
    try:
        token = path.read_bytes().strip()
    except OSError as error:
        raise BadArgument(f"token file {path}: {error.strerror}") from None
    if len(token) < 16:
        raise BadArgument(
            f"token file {path} holds {len(token)} bytes; a token needs at least 16:"
            " python -c 'import secrets; print(secrets.token_hex(32))' > FILE"
        )
    return token


def _integer(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name)
    if text is None or not text.strip():
        return None
    try:
        return int(text)
    except ValueError:
        raise BadArgument(f"environment variable {name} is {text!r}; expected an integer") from None
