"""What callers give, as the wire has it: a number may be numpy's or a tensor of one element. Raises BadArgument that
names what is none: the store would take a message of other types for a broken client's, and end the connection."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from psstore.errors import BadArgument


def number(what: str, value: Any) -> float:
    if type(value) is float:
        return value
    try:
        if not isinstance(value, (str, bytes)):
            return float(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise BadArgument(f"{what} is {value!r}; expected a number")


def whole(what: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise BadArgument(f"{what} is {value!r}; expected an integer") from None


def one_of(what: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise BadArgument(f"{what} is {value!r}; expected {', '.join(map(repr, choices))}")
