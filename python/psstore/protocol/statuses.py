"""What a shard says of each slice that it was asked about, as errors for callers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from psstore import _core
from psstore.errors import NOT_APPLIED, DeadlineExceeded, from_code
from psstore.protocol.requests import Answer

MEANINGS = {
    _core.ERROR_CODES["UNKNOWN_KEY"]: "the shard does not know it; it was dropped or overwritten, describe it again",
    _core.ERROR_CODES["DTYPE_MISMATCH"]: "the values sent have a dtype that it does not take",
    _core.ERROR_CODES["SIZE_MISMATCH"]: "the bytes sent do not match its shape",
    _core.ERROR_CODES["RULE_MISMATCH"]: "its update rule does not take this operation"
    " (push and commit are for training rules, assign and add for tensors of those rules)",
    _core.ERROR_CODES["STALE_INCARNATION"]: "a newer life of this worker has joined; this one was replaced",
    _core.ERROR_CODES["NON_FINITE"]: "the values contain NaN or infinity, which this store refuses",
    _core.ERROR_CODES["ROUND_OUT_OF_ORDER"]: "it still waits for what an earlier round lacks",
    _core.ERROR_CODES["VERSION_GONE"]: "its shard does not keep the snapshot's version any longer; take another one",
    _core.ERROR_CODES["TABLE_FULL"]: "a partition of it has as many rows as it may have, and evicts none",
    NOT_APPLIED: "its last decision is not applied: contributions or the scale are missing and did not come in time",
    _core.ERROR_CODES["NOT_INITIALISED"]: "it has no value yet: the client that created it did not send one in time",
}
"""What each status that is a failure means, for messages."""


def check(answers: Iterable[Answer | _core.Frame], names: Mapping[int, str]) -> None:
    """Raises the first slice's failure, naming its tensor. `names`: by the tensors' ids."""
    for answer in answers:
        failure = answer.table.first_failure()
        if failure is not None:
            position, status = failure
            key = answer.table.keys()[position]
            name = names.get(key >> _core.SLICE_INDEX_BITS, f"of key {key}")
            message = f"tensor {name!r}: {MEANINGS.get(status, 'the shard refused it')}"
            raise DeadlineExceeded(message) if status == NOT_APPLIED else from_code(status, message, name=name)
