"""What a shard has said of other shards' standbys: that they may lead, or that their shards do without them.

A standby that has lost its shard leads with the word of every other shard that it may; a shard that has lost its
standby goes on without it with the word of one that it may. Whoever asks first about a standby has the word, for good,
and a word is told when the shard's own standby has it. So it is never both: with one word that it is gone, a standby
has not all words to lead.

Words are of one life of a standby: the next one is another client.
"""

from __future__ import annotations

from collections.abc import Mapping

from psstore.errors import Overloaded

MAX_WORDS = 4096
"""Each is of a host that was lost: a store that has so many is asked by somebody who is up to something."""


class Words:
    """By standby, as clients."""

    def __init__(self) -> None:
        self.of: dict[str, bool] = {}
        """Whether it may lead."""

    def give(self, client: str, *, leads: bool) -> bool:
        """Gives that word on a standby, unless there is one. Returns whether it is new. Raises Overloaded."""
        if client in self.of:
            return False
        if len(self.of) >= MAX_WORDS:
            raise Overloaded(f"this shard has given its word on {MAX_WORDS} standbys, and gives no other")
        self.of[client] = leads
        return True

    def know(self, words: Mapping[str, bool]) -> None:
        """Takes over what the shard has said."""
        self.of.update(words)

    @property
    def gone(self) -> tuple[str, ...]:
        """Standbys that will never lead."""
        return tuple(client for client, leads in self.of.items() if not leads)
