"""Settings from outside: the only place that reads environment variables, and the order in which sources count."""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Generic, Literal, TypeVar, get_args, get_origin

import msgspec

from psstore.errors import BadArgument

Transport = Literal["auto", "tcp", "unix", "shm"]
"""What a client may use: 'auto' the best there is; 'shm' shared memory, or it is an error; 'unix' and 'tcp' a socket
of that kind and no shared memory."""

MAX_BUSY_POLL_US = 10_000.0
"""Longer than any round trip that is worth a core. A shard's timers wait as long."""

WAIT_S = 300.0
"""How long a client waits for other workers, unless it is told."""

MAX_CONNECTIONS = 64
"""Connections of one client to one shard, side by side: ten times what fills the links that cap each."""


class Credentials(msgspec.Struct, frozen=True, kw_only=True):
    """What a client proves itself with, and whom it believes. Files are read again for each connection, so that they
    can be replaced while it runs."""

    token: bytes | None = None
    """The store's secret."""
    token_file: str | None = None
    """The file that holds it, where it was not given itself: the first of its lines."""
    tls_ca: str | None = None
    """File with the certificates of CAs that a store's has to be of, at `pss://`; None: the system's."""
    tls_cert: str | None = None
    """File with this client's own certificate, for a store that asks for one."""
    tls_key: str | None = None
    """File with the private key of `tls_cert`; None: it is in the same file."""

    def secret(self) -> bytes | None:
        """The token. Raises BadArgument if its file has none."""
        if self.token is not None or self.token_file is None:
            return self.token
        return read_token(Path(self.token_file))


NO_CREDENTIALS = Credentials()


class WorkerEnvironment(msgspec.Struct, frozen=True, kw_only=True):
    """What a launcher (psstore run, torchrun, srun) tells a worker process."""

    url: str | None = None
    """PSSTORE_URL: the store."""
    rank: int | None = None
    """RANK, else srun's SLURM_PROCID."""
    num_workers: int | None = None
    """WORLD_SIZE, else srun's SLURM_NTASKS."""
    credentials: Credentials = NO_CREDENTIALS
    """PSSTORE_TOKEN_FILE, PSSTORE_TLS_CA, PSSTORE_TLS_CERT and PSSTORE_TLS_KEY."""
    transport: Transport = "auto"
    """PSSTORE_TRANSPORT."""
    busy_poll_us: float = 0.0
    """PSSTORE_BUSY_POLL_US."""
    wait_s: float = WAIT_S
    """PSSTORE_WAIT_S."""
    connections: int = 1
    """PSSTORE_CONNECTIONS."""
    congestion_control: str | None = None
    """PSSTORE_CONGESTION_CONTROL."""
    trace: Path | None = None
    """PSSTORE_TRACE: the folder where a worker notes what it does, while somebody asks for it there."""
    otel: bool = False
    """PSSTORE_OTEL: a worker's calls are spans of OpenTelemetry, of the program's own tracer provider."""


def worker_environment(environ: Mapping[str, str] = os.environ) -> WorkerEnvironment:
    """Raises BadArgument naming the variable that is malformed."""
    rank, num_workers = _place(environ)
    return WorkerEnvironment(
        url=store_url(environ),
        rank=rank,
        num_workers=num_workers,
        credentials=_credentials(environ),
        transport=check_transport("environment variable PSSTORE_TRANSPORT", environ.get("PSSTORE_TRANSPORT") or "auto"),
        busy_poll_us=check_busy_poll(
            "environment variable PSSTORE_BUSY_POLL_US", environ.get("PSSTORE_BUSY_POLL_US") or 0.0
        ),
        wait_s=check_seconds("environment variable PSSTORE_WAIT_S", environ.get("PSSTORE_WAIT_S") or WAIT_S),
        connections=check_connections(
            "environment variable PSSTORE_CONNECTIONS", environ.get("PSSTORE_CONNECTIONS") or 1
        ),
        congestion_control=environ.get("PSSTORE_CONGESTION_CONTROL") or None,
        trace=Path(environ["PSSTORE_TRACE"]) if environ.get("PSSTORE_TRACE") else None,
        otel=environ.get("PSSTORE_OTEL", "0") not in ("", "0"),
    )


def store_url(environ: Mapping[str, str] = os.environ) -> str | None:
    """PSSTORE_URL."""
    return environ.get("PSSTORE_URL") or None


def _credentials(environ: Mapping[str, str]) -> Credentials:
    files = (environ.get(PREFIX + name) or None for name in ("TOKEN_FILE", "TLS_CA", "TLS_CERT", "TLS_KEY"))
    token_file, ca, cert, key = files
    found = Credentials(token_file=token_file, tls_ca=ca, tls_cert=cert, tls_key=key)
    found.secret()  # which is to be wrong here, not at some later reconnect
    return found


def hosts_file(environ: Mapping[str, str] = os.environ) -> Path | None:
    """PSSTORE_HOSTS_FILE: what says where names of hosts are, before the system is asked, in the form of /etc/hosts."""
    path = environ.get(PREFIX + "HOSTS_FILE")
    return Path(path) if path else None


def was_restarted(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process was started in the place of one that failed, of the same worker: PSSTORE_RESTART."""
    return environ.get("PSSTORE_RESTART", "0") != "0"


TOKEN_RECIPE = "python -c 'import secrets; print(secrets.token_hex(32))'"
"""A shell command that writes a token, for messages."""


MIN_TOKEN_BYTES = 16
MAX_TOKENS = 2
"""A role has so many at a time: the new one, and the one that it replaces."""


def read_token(path: Path) -> bytes:
    """The token that a file's owner proves: its first. Raises BadArgument with what to do."""
    return read_tokens(path)[0]


def read_tokens(path: Path) -> tuple[bytes, ...]:
    """The tokens in a file, one a line. Raises BadArgument with what to do."""
    try:
        with path.open("rb") as file:
            check_private(path, file.fileno())
            tokens = tuple(line.strip() for line in file.read().splitlines() if line.strip())
    except OSError as error:
        raise BadArgument(f"token file {path}: {error.strerror}") from None
    shortest = min(map(len, tokens), default=0)
    if shortest < MIN_TOKEN_BYTES:
        raise BadArgument(
            f"token file {path} holds {shortest} bytes; a token needs at least {MIN_TOKEN_BYTES}: {TOKEN_RECIPE} > FILE"
        )
    if len(tokens) > MAX_TOKENS:
        raise BadArgument(
            f"token file {path} has {len(tokens)} lines; there may be {MAX_TOKENS} tokens, a new one and below it the"
            " one that it replaces"
        )
    return tokens


def check_private(path: Path, descriptor: int) -> None:
    """Raises BadArgument if others can read this user's file. One that is another's is that one's affair."""
    there = os.fstat(descriptor)
    if there.st_uid == os.geteuid() and there.st_mode & 0o077:
        raise BadArgument(
            f"token file {path} can be read by others (mode {stat.S_IMODE(there.st_mode):04o}), who may have it by now:"
            f" make a new one, and chmod 600 {path}"
        )


def token_directories(environ: Mapping[str, str] = os.environ) -> list[Path]:
    """Where a store on loopback leaves its token for its user's clients, best first: /tmp is the same place for all
    sessions of a user."""
    runtime = environ.get("XDG_RUNTIME_DIR")
    return [Path(f"/tmp/psstore-{os.geteuid()}"), *([Path(runtime, "psstore")] if runtime else [])]


# ---- layers: flag > environment variable > config file > default ---------------------------------

PREFIX = "PSSTORE_"
"""How every environment variable that holds a setting begins: `log_level` is PSSTORE_LOG_LEVEL."""

S = TypeVar("S", bound=msgspec.Struct)


@dataclass(frozen=True)
class Resolved(Generic[S]):
    """All settings of a program, and where each came from."""

    settings: S
    sources: Mapping[str, str]

    def is_default(self, name: str) -> bool:
        return self.sources[name] == DEFAULT

    def __str__(self) -> str:
        """A line per setting: name, value, source."""
        rows = [(name, _shown(getattr(self.settings, name)), source) for name, source in self.sources.items()]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        return "\n".join(f"{name:{widths[0]}}  {value:{widths[1]}}  {source}" for name, value, source in rows)


DEFAULT = "default"


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def resolve(
    kind: type[S], *, flags: Mapping[str, object], file: Path | None, environ: Mapping[str, str] = os.environ
) -> Resolved[S]:
    """Fills each field of `kind` from the first source that has it; text is converted to the field's type.

    `flags`: by field name; None stands for a flag that was not given. `file`: TOML, one key per field.
    Raises BadArgument naming the setting, where it came from and what was expected.
    """
    in_file = _read_file(file, known={field.name for field in msgspec.structs.fields(kind)}) if file else {}
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for field in msgspec.structs.fields(kind):
        sources[field.name] = DEFAULT
        for source, value in _candidates(field.name, flags, environ, in_file, file):
            if value is not None:
                values[field.name] = _convert(value, field.type, f"{field.name} ({source})")
                sources[field.name] = source
                break
    return Resolved(kind(**values), sources)


def _candidates(
    name: str, flags: Mapping[str, object], environ: Mapping[str, str], in_file: Mapping[str, object], file: Path | None
) -> Iterator[tuple[str, object]]:
    """(source, value) from the strongest source to the weakest; the value is None if it has none."""
    variable = PREFIX + name.upper()
    yield flag_of(name), flags.get(name)
    yield variable, environ.get(variable) or None
    yield f"config file {file}", in_file.get(name)


def _convert(value: object, kind: type, what: str) -> object:
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        named = ", ".join(choices(kind))
        raise BadArgument(f"{what} is {value!r}: {f'expected {named}' if named else error}") from None


def choices(kind: Any) -> Sequence[str]:
    """The texts that a setting may be, where all that it may be is named; else nothing."""
    if get_origin(kind) is Annotated:
        return choices(get_args(kind)[0])
    if get_origin(kind) is Literal:
        return get_args(kind)
    members = [member for member in get_args(kind) if member is not NoneType]
    return choices(members[0]) if len(members) == 1 else ()


def _read_file(path: Path, known: set[str]) -> dict[str, object]:
    try:
        found = msgspec.toml.decode(path.read_bytes(), type=dict[str, object])
    except OSError as error:
        raise BadArgument(f"config file {path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadArgument(f"config file {path}: {error}") from None
    unknown = sorted(found.keys() - known)
    if unknown:
        raise BadArgument(
            f"config file {path}: no setting is named {unknown[0]!r}; there are {', '.join(sorted(known))}"
        )
    return found


def config_path(flag: str | None, environ: Mapping[str, str] = os.environ) -> Path | None:
    """The config file: of the flag, else of PSSTORE_CONFIG, else none."""
    path = flag or environ.get(PREFIX + "CONFIG")
    return Path(path) if path else None


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "-" if value is None else str(value)


def check_transport(what: str, value: object) -> Transport:
    """Raises BadArgument saying which there are."""
    for transport in get_args(Transport):
        if value == transport:
            return transport  # type: ignore[no-any-return]
    raise BadArgument(f"{what} is {value!r}; expected {', '.join(get_args(Transport))}")


def check_busy_poll(what: str, value: object) -> float:
    """Raises BadArgument saying what it may be."""
    try:
        us = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        us = math.nan
    if not 0.0 <= us <= MAX_BUSY_POLL_US:
        raise BadArgument(f"{what} is {value!r}; expected microseconds from 0 to {MAX_BUSY_POLL_US:g}")
    return us


def check_seconds(what: str, value: object) -> float:
    """Raises BadArgument for what is no time to wait."""
    try:
        seconds = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        seconds = math.nan
    if not seconds > 0:
        raise BadArgument(f"{what} is {value!r}; expected a positive number of seconds")
    return seconds


def check_connections(what: str, value: object) -> int:
    """Raises BadArgument saying how many there may be."""
    try:
        number = int(value)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        number = 0
    if not 1 <= number <= MAX_CONNECTIONS:
        raise BadArgument(f"{what} is {value!r}; expected 1 to {MAX_CONNECTIONS}, to each shard")
    return number  # type: ignore[no-any-return]


def _place(environ: Mapping[str, str]) -> tuple[int | None, int | None]:
    """(rank, number of workers): RANK and WORLD_SIZE if either is set, else what srun says.

    Slurm sets SLURM_PROCID=0 in a batch script, too, which is no task of a step: SLURM_STEP_ID tells them apart.
    """
    rank, num_workers = _integer(environ, "RANK"), _integer(environ, "WORLD_SIZE")
    is_batch_script = "SLURM_JOB_ID" in environ and "SLURM_STEP_ID" not in environ
    if rank is not None or num_workers is not None or is_batch_script:
        return rank, num_workers
    return _integer(environ, "SLURM_PROCID"), _integer(environ, "SLURM_NTASKS")


def _integer(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name)
    if text is None or not text.strip():
        return None
    try:
        return int(text)
    except ValueError:
        raise BadArgument(f"environment variable {name} is {text!r}; expected an integer") from None
