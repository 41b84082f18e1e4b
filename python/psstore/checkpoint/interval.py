"""How often checkpoints are written: after so many decisions, or so much time."""

from __future__ import annotations

import math

from msgspec import Struct

from psstore.errors import BadArgument


class CheckpointInterval(Struct, frozen=True, kw_only=True):
    """One of the two."""

    decisions: int | None = None
    seconds: float | None = None

    def is_over(self, *, decisions: int, seconds: float) -> bool:
        """Whether so many decisions or so much time since the last checkpoint make another one due."""
        if self.seconds is not None:
            return decisions > 0 and seconds >= self.seconds
        assert self.decisions is not None, "one of the two is there"
        return decisions >= self.decisions


def parse_interval(what: str, text: str) -> CheckpointInterval:
    """The interval of '500' or '60s'. Raises BadArgument that names `what`."""
    given = text if isinstance(text, str) else ""
    number, is_time = (given[:-1], True) if given.endswith("s") else (given, False)
    try:
        value = float(number) if is_time else int(number)
    except ValueError:
        value = 0
    if not 0 < value < math.inf:
        raise BadArgument(f"{what} is {text!r}; expected decisions, as 500, or seconds, as 60s")
    return CheckpointInterval(seconds=value) if is_time else CheckpointInterval(decisions=int(value))
