"""How a reader waits for tensors that nobody has created yet, since it was started before the trainer.

A name that is missing is a mistake once the store has begun, which is when its first step was decided: by then whoever
trains has created what is trained. A relay's store has versions as soon as it has anything to pass on, so there the
store that it follows is what has begun, or not.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches

from psstore.client.operations import Operations
from psstore.errors import DeadlineExceeded, UnknownTensor

RELAYED = "relay/version"
"""Tensor of a relay's store that says which version of the followed store the others are of: one float64, exact up to
2^53. A relay that follows a relay passes it on."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
"""Between two looks at what there is, each twice as long as the one before: hundreds of readers may wait."""

SAY_AFTER_S = 3.0
"""How long a reader waits before it says so: trainer and readers that are started together take a while."""

MOST_SAID = 3
"""Names that are said where all of them would be the whole model."""

_log = logging.getLogger("psstore.client")


class FirstTensors:
    """What one reader begins with."""

    def __init__(self, names: Sequence[str] | None) -> None:
        """`names`: all of which it needs; None: any."""
        self._names = names
        self._waited_s = 0.0
        self._was_said = False

    async def arrive(self, operations: Operations, *, wait_s: float | None) -> None:
        """Returns when the store has them; if any will do, when it has one that is no table, or has begun.

        Raises UnknownTensor that names those that are missing in a store that has begun, and what they may have been
        meant to be; RuleMismatch for a table; DeadlineExceeded after `wait_s` (default: the store's).
        """
        if self._names is not None:
            with suppress(UnknownTensor):
                await operations.context.schema.find(self._names)
                return
        left_s, pause_s = operations.context.patience(wait_s), 0.0
        number, has_begun = 0, False
        while await self._are_missing(operations, there := await operations.client.tensors.keys()):
            if has_begun:
                if self._names is None:
                    return
                raise _unknown(self._names, there)
            try:
                await operations.newer(number, wait_s=pause_s)
                number += 1
                has_begun = await _has_begun(operations)
            except DeadlineExceeded:
                left_s -= pause_s
                self._note(pause_s, there)
                if left_s <= 0:
                    raise self._late(there) from None
                pause_s = min(left_s, LONGEST_PAUSE_S, 2 * pause_s or FIRST_PAUSE_S)

    async def _are_missing(self, operations: Operations, there: Sequence[str]) -> bool:
        if self._names is not None:
            return not set(self._names) <= set(there)
        try:
            found = await operations.context.schema.find_any(there)
        except UnknownTensor:  # one was dropped meanwhile
            return True
        return all(tensor.spec.rows is not None for tensor in found)

    def _late(self, there: Sequence[str]) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"waited {self._waited_s:g} s for {self._missing(there)}, and no step was taken yet: start the trainer,"
            " or wait longer, by timeout_s or wait_s"
        )

    def _note(self, pause_s: float, there: Sequence[str]) -> None:
        self._waited_s += pause_s
        if self._waited_s >= SAY_AFTER_S and not self._was_said:
            self._was_said = True
            _log.warning("waiting for %s", self._missing(there))

    def _missing(self, there: Sequence[str]) -> str:
        """What is waited for."""
        if self._names is None:
            return f"somebody to create tensors in the store, which has {'tables alone' if there else 'none'}"
        missing = sorted(set(self._names) - set(there))
        more = f" and {len(missing) - MOST_SAID} more" if len(missing) > MOST_SAID else ""
        named = ", ".join(map(repr, missing[:MOST_SAID]))
        return f"somebody to create {named}{more} in the store, where {len(there)} tensors are"


async def _has_begun(operations: Operations) -> bool:
    """Whether a step was decided, in a store that has a version: always, unless it is a relay's."""
    try:
        (passed_on,) = await operations.pull(RELAYED)
    except UnknownTensor:
        return True
    return bool(passed_on > 0)


def _unknown(names: Sequence[str], there: Sequence[str]) -> UnknownTensor:
    missing = sorted(set(names) - set(there))
    near = {name: get_close_matches(name, there, n=1) for name in missing[:MOST_SAID]}
    meant = "".join(f"; is {name!r} {found[0]!r}?" for name, found in near.items() if found)
    return UnknownTensor(
        f"the store has no tensors of these names: {', '.join(map(repr, missing))}{meant or ';'}"
        " store.keys() lists those there are",
        name=missing[0],
    )
