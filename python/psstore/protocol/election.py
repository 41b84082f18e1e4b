"""Whether a standby leads, or its shard goes on without it: what the words of the other shards come to.

    all say that it leads       it leads, and its shard can't go on without it any more
    one says that it is gone    its shard goes on without it, and it never leads
    neither                     they are asked again

Each shard keeps to what it has said first (words.py), so it is one of the first two for both who ask, or the third.
Where there is no other shard nobody can say: two processes that have lost each other are all there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from psstore.wire.messages import Word


class Succession(Enum):
    """On a standby, by those who have answered."""

    LEADS = "leads"
    GONE = "gone"
    OPEN = "open"


def succession(words: Sequence[Word | None]) -> Succession:
    """`words`: of each other shard; None: it has not answered."""
    said = [None if word is None else word.leads for word in words]
    if False in said:
        return Succession.GONE
    return Succession.LEADS if said and all(said) else Succession.OPEN
