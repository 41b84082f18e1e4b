"""The words that lines between a store's processes and their supervisor begin with."""

from __future__ import annotations

READY = "ready"
"""What a shard reports, with its version, when it serves; anything else before that is why it can't."""

IN_SYNC, LOST = "in-sync", "lost"
"""What a shard reports, with the client that its standby is: from now on that one may lead; it is out of reach."""

RETIRED = "retired"
"""What a shard reports, with the client that its standby was: that one ends, or is dead by the word of an operator, and
is done without."""

OVER = "over"
"""What a shard is told, and its standby reports: the workers are done, or lost, and the store ends on all hosts; with
the reason, if that is a failure."""

CUT = "cut"
"""What a standby reports that may lead, with the seconds before others may be asked whether it does: it has lost its
shard, which may be dead."""

RESHARD = "reshard"
"""What shard 0 reports, with the number of shards that somebody wants."""

STAND_STILL, NOT_RESHARDED = "stand-still", "not-resharded"
"""What shards are told then: the client that has them stand still; why they go on as they were."""

WRITTEN, NOT_WRITTEN = "written", "not-written"
"""What is reported by who writes down a store that stands still, with the version or the reason."""

LEAD, WITHOUT = "lead", "without"
"""What a shard is told: to lead, as a standby; that the standby which is that client will never do so."""
