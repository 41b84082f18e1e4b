"""Arguments of callers: the options of `connect`, and checks of single values.

A number may be numpy's or a tensor of one element. Each check raises BadArgument that names what does not fit: the
store would take a message of other types for a broken client's, and end the connection.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from psstore.config import NO_CREDENTIALS, WAIT_S, Credentials, Transport
from psstore.errors import BadArgument
from psstore.types import is_text
from psstore.wire.messages import Role

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of psstore.connect, with defaults filled in. Times are in seconds."""

    role: Role = "worker"
    client: str | None = None
    """Id of the client, 32 hex digits; None: a random one."""
    rank: int | None = None
    num_workers: int | None = None
    goes_on: bool = False
    """A worker takes the place of a life that failed."""
    credentials: Credentials = NO_CREDENTIALS
    timeout_s: float = 30.0
    wait_s: float = WAIT_S
    connect_timeout_s: float = 10.0
    transport: Transport = "auto"
    busy_poll_us: float = 0.0
    connections: int = 1
    congestion_control: str | None = None
    trace: Path | None = None
    """Where a worker notes its calls, while somebody asks for it there; None: nowhere."""
    otel: bool = False
    """A worker's calls are spans of OpenTelemetry."""


def number(what: str, value: Any) -> float:
    if type(value) is float:
        return value
    try:
        if not isinstance(value, (str, bytes, bool)):
            return float(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise BadArgument(f"{what} is {value!r}; expected a number")


def whole(what: str, value: Any) -> int:
    try:
        found = operator.index(value)
    except TypeError:
        found = None
    if found is None or isinstance(value, bool):
        raise BadArgument(f"{what} is {value!r}; expected an integer")
    if not -(1 << 63) <= found < 1 << 63:
        raise BadArgument(f"{what} is {found}; expected an integer of 64 bits")
    return found


def version(what: str, value: Any) -> int:
    found = whole(what, value)
    if found < 0:
        raise BadArgument(f"{what} is {found}; expected a version, as version_of() tells it: 0, 1, …")
    return found


def text(what: str, value: Any) -> str:
    if not isinstance(value, str):
        raise BadArgument(f"{what} is {value!r}; expected a string")
    if not is_text(value):
        raise BadArgument(f"{what} is {value!r}; expected text that UTF-8 can say")
    return value


def several(what: str, given: Iterable[T], of: str = "names") -> tuple[T, ...]:
    """Several names, or what else is said; each is looked at where it is used."""
    if not isinstance(given, (str, bytes)) and isinstance(given, Iterable):
        return tuple(given)
    raise BadArgument(f"{what} is {given!r}; expected several {of}, as in a list")


def by_name(what: str, given: Mapping[str, T]) -> Mapping[str, T]:
    if isinstance(given, Mapping):
        return given
    raise BadArgument(f"{what}: expected a dict, by name, got {type(given).__name__}")


def scale(what: str, value: Any) -> float:
    found = number(what, value)
    if not 0.0 < found < math.inf:
        raise BadArgument(f"{what} is {found:g}; expected a finite number above 0")
    return found


def one_of(what: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise BadArgument(f"{what} is {value!r}; expected {', '.join(map(repr, choices))}")
