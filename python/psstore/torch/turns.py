"""Turns: which fragment a round is about.

In each cycle of as many rounds as there are fragments, each has its turn once. Were the order always the same, a
learner that is a whole number of cycles behind would come for one fragment for ever, and what it does to the others
would be merged over. It falls into such a rhythm by itself, since its steps begin when a round is decided.

So the order changes, by a row of the plain hunt of change ringing: from row to row, neighbours change places, in turn
those at places 0 and 1, 2 and 3, …, and those at 1 and 2, 3 and 4, …. Each fragment goes up the places and down again,
by one at a time, and from one of its turns to the next it is a cycle, or a round more or less. Orders that are drawn by
lot would have it come twice in succession, with no steps to share, and stay away for nearly two cycles.

    row 0   0 1 2 3        row 2   1 3 0 2        row 4   3 2 1 0        row 6   2 0 3 1
    row 1   1 0 3 2        row 3   3 1 2 0        row 5   2 3 0 1        row 7   0 2 1 3

Rows repeat themselves, after twice as many as there are fragments. A cycle's row is its number divided by √2, rounded
down, and so no learner's rhythm repeats itself with them: over time it comes for all fragments alike.
"""

from __future__ import annotations

from math import isqrt

SCHEME = 2
"""What learners agree on by this number: the orders below. In scheme 1 it was row 0 always."""


def fragment_of(round: int, num_fragments: int) -> int:
    """The fragment of a round, which are numbered from 1: the same wherever the number of the round is known."""
    cycle, place = divmod(round - 1, num_fragments)
    row = isqrt(2 * cycle * cycle) // 2
    # A way up and down has a step for each place and direction, of which one row uses the even ones or the odd ones.
    num_steps = 2 * num_fragments
    step = place if (place - row) % 2 == 0 else num_steps - 1 - place
    begun = (step - row) % num_steps
    return min(begun, num_steps - 1 - begun)


def fragments_since(merged: int, last: int, num_fragments: int) -> list[int]:
    """The fragments of rounds after `merged`, up to `last`. A whole cycle is among 2 * num_fragments - 1 rounds,
    wherever they end, so that older ones add none."""
    first = max(merged + 1, last - 2 * num_fragments + 2)
    return sorted({fragment_of(round, num_fragments) for round in range(first, last + 1)})
