"""Every exception psstore raises, by the error code that the core and the wire use for it.

The list of codes lives in csrc/core/errors.h; a test holds this file against it.
"""

from __future__ import annotations

from typing import ClassVar


class PsstoreError(Exception):
    """Base of all. `code` is the wire's error number; `details` holds facts for programs."""

    code: ClassVar[int] = 90

    def __init__(self, message: str, **details: object) -> None:
        super().__init__(message)
        self.message = message
        self.details = details


class ProtocolError(PsstoreError):
    """The peer sent what the protocol forbids. That connection is closed, nothing else."""


class UsageError(PsstoreError):
    """The caller asked for what can't be done. Nothing changed."""


class AvailabilityError(PsstoreError):
    """A peer died, is too slow or can't be reached. What was acknowledged is safe."""


class StorageError(PsstoreError):
    """The storage of checkpoints, or what lies there, is not as it should be. Nothing in memory changed."""


class InternalError(PsstoreError):
    """psstore broke one of its own invariants. Please report it."""


class BadMagic(ProtocolError):
    code = 1


class BadVersion(ProtocolError):
    code = 2


class BadHeader(ProtocolError):
    code = 3


class FrameTooLarge(ProtocolError):
    code = 4


class BadBody(ProtocolError):
    code = 5


class UnexpectedMessage(ProtocolError):
    code = 6


class AuthFailed(ProtocolError):
    code = 7


class HandshakeTimeout(ProtocolError):
    code = 8


class BadChecksum(ProtocolError):
    code = 9


class BadSignature(ProtocolError):
    code = 10


class TlsFailed(ProtocolError):
    """No TLS with the peer: one of the two speaks none, or does not accept the other's certificate. The message says
    which, and what to do."""

    code = 11


class UnknownTensor(UsageError):
    code = 20


class UnknownKey(UsageError):
    code = 21


class ShapeMismatch(UsageError):
    code = 22


class DTypeMismatch(UsageError):
    code = 23


class RuleMismatch(UsageError):
    code = 24


class TensorExists(UsageError):
    code = 25


class SizeMismatch(UsageError):
    code = 26


class RankTaken(UsageError):
    code = 27


class TooManyWorkers(UsageError):
    code = 28


class StaleIncarnation(UsageError):
    code = 29


class RoundOutOfOrder(UsageError):
    code = 30


class NonFinite(UsageError):
    code = 31


class NotAWorker(UsageError):
    code = 32


class BadHyper(UsageError):
    code = 33


class NotInitialised(UsageError):
    code = 34


class BadArgument(UsageError):
    code = 35


class MissingContribution(UsageError):
    """A commit of this worker named tensors of which a shard had no gradient from it: they counted as absent, and this
    life of the rank is over. `details`: rank, round, shard."""

    code = 36


class NotAllowed(UsageError):
    """The token that this client connected with is of a role that may not do this. `details`: role, operation."""

    code = 37


class TableFull(UsageError):
    """A table has as many rows as it may have, and evicts none: what is new to it was not taken. Rows that are there
    are trained as ever. `details`: name."""

    code = 38


class WorkerLost(AvailabilityError):
    """A worker that the round needs is lost. `details`: rank, round, last_seen_s."""

    code = 50


class DeadlineExceeded(AvailabilityError):
    """A wait outlasted its deadline. `details`: peer, waited_s, and what is known of the cause."""

    code = 51


class StoreUnreachable(AvailabilityError):
    """No connection to a shard in time. `details`: address, tried_s."""

    code = 52


class ShuttingDown(AvailabilityError):
    code = 53


class StoreClosed(AvailabilityError):
    code = 54


class Overloaded(AvailabilityError):
    code = 55


class TornRound(AvailabilityError):
    """A worker was lost after its early commit, before all that it had promised was pushed: the round can be neither
    finished nor undone. `details`: rank, round."""

    code = 56


class DeviceFailed(AvailabilityError):
    """The device that a shard lives on failed: its values are lost, and the shard ends. The message names the device
    and its reason."""

    code = 57


class VersionGone(AvailabilityError):
    """The version that a snapshot reads is not kept any longer: it was held for too long, what changed meanwhile takes
    more memory than snapshots may hold, or the connection was lost. Take another snapshot."""

    code = 59


class RolledBack(AvailabilityError):
    """The store ended, and was restored from a checkpoint: what was done after that is undone. `details["version"]` is
    the decision that it is at again, `details["undone"]` how many this client knew of that are void. `Store.reconnect`
    goes on from there."""

    code = 60


class NotLeading(AvailabilityError):
    """A standby was asked what only its shard answers. Clients try the other addresses of the shard."""

    code = 61


class TooManyProofs(AvailabilityError):
    """Wrong proofs of a token came from this address: none is heard from there for `details["wait_s"]` seconds. Clients
    try again then by themselves."""

    code = 62


class OutOfMemory(AvailabilityError):
    """What was asked for does not fit into the memory that a shard may use, of its host or its device. Nothing
    changed."""

    code = 58


class CheckpointNotFound(StorageError):
    """No complete checkpoint is there, or none of that version. `details`: url, version."""

    code = 70


class CheckpointDamaged(StorageError):
    """Bytes on storage are not those that were written: changed, cut short, missing, or another checkpoint's.
    `details`: file."""

    code = 71


class CheckpointUnsupported(StorageError):
    """The checkpoint is of a format that this version of psstore can't read. `details`: file, format."""

    code = 72


class CheckpointPlaceTaken(StorageError):
    """Another store writes its checkpoints there. `details`: url, owner."""

    code = 73


class StorageFailed(StorageError):
    """Storage refused or failed: a full disk, no permission, no network. `details`: file."""

    code = 74


class DecisionGap(InternalError):
    code = 92


OK = 0
NOT_MODIFIED = 40
NOT_APPLIED = 41
NO_STATE = 42


def _collect(cls: type[PsstoreError]) -> dict[int, type[PsstoreError]]:
    found: dict[int, type[PsstoreError]] = {}
    for sub in cls.__subclasses__():
        if "code" in vars(sub):
            found[sub.code] = sub
        found.update(_collect(sub))
    return found


BY_CODE: dict[int, type[PsstoreError]] = {**_collect(PsstoreError), InternalError.code: InternalError}
"""Wire number -> exception class, for every code that is an error."""


def from_code(code: int, message: str, **details: object) -> PsstoreError:
    """The exception that a peer's error reply stands for."""
    return BY_CODE.get(code, InternalError)(message, **details)
