"""Who may do what: the roles of tokens, each of which may do what those before it may."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from psstore import _core
from psstore.errors import NotAllowed
from psstore.protocol.auth import matches
from psstore.wire.messages import Role


class Access(enum.IntEnum):
    """What a token gives."""

    READ = 1
    """Look: pull values, snapshots, what there is, how the store is."""
    WORKER = 2
    """Train: also define tensors, write them, take part in rounds."""
    ADMIN = 3
    """See to the store: also have checkpoints written, stand by, and say which process leads."""

    def __str__(self) -> str:
        return self.name.lower()


LEAST: Mapping[str, Access] = {
    **dict.fromkeys(
        ("PULL", "NORM", "PULL_ROWS", "LIST_ROWS", "SHARE", "RELEASE", "HOLD", "FREE", "DEFINE", "DESCRIBE"),
        Access.READ,
    ),
    **dict.fromkeys(("DECISIONS", "STATS"), Access.READ),
    **dict.fromkeys(("PUSH", "ASSIGN", "ADD", "INIT", "RESTORE"), Access.WORKER),
    **dict.fromkeys(("CREATE", "READY", "DROP", "JOIN", "ATTACH", "ATTEST", "HEARTBEAT"), Access.WORKER),
    **dict.fromkeys(("COMMIT", "FINISH", "BARRIER", "STOP", "LEAVE", "HAND_IN", "HAND_BACK"), Access.WORKER),
    **dict.fromkeys(("BEGIN", "SAVE", "KEEP", "RESHARD", "FREEZE"), Access.ADMIN),
    **dict.fromkeys(("FOLLOW", "COMPLETE", "RETIRE", "PROMOTE", "ASK_WORD"), Access.ADMIN),
}
"""Operation -> the least access that it needs. Every request that there is stands here (tests/protocol/test_roles.py).
DEFINE carries what the coordinator has signed to a shard that has not heard of it, and a reader may be the first."""

LEAST_OF_CLIENTS: Mapping[Role, Access] = {
    "client": Access.READ,
    "operator": Access.READ,
    "worker": Access.WORKER,
    "heartbeat": Access.WORKER,
    "standby": Access.ADMIN,
    "elector": Access.ADMIN,
    "resharder": Access.ADMIN,
}
"""What a client says that it is -> the least access that it needs to connect: the sooner it hears of it, the better."""

ALLOWED_OPS: Mapping[Access, list[int]] = {
    access: [_core.OPS[name] for name, least in LEAST.items() if least <= access] for access in Access
}
"""Access -> numbers of its operations, for the core, which answers requests for data by itself."""

_LEAST_BY_OP = {_core.OPS[name]: least for name, least in LEAST.items()}
_NAMES = {op: name for name, op in _core.OPS.items()}


@dataclass(frozen=True)
class Tokens:
    """The tokens of a store that count now, with what each gives. None: everybody may do everything."""

    grants: tuple[tuple[Access, bytes], ...] = ()

    @classmethod
    def single(cls, token: bytes | None) -> Tokens:
        """One token, which gives everything; None: none is needed."""
        return cls() if token is None else cls(((Access.ADMIN, token),))

    def proved(self, proof_of: Callable[[bytes], bytes], came: bytes) -> tuple[Access, bytes] | None:
        """The most that `came` proves, and the token that it proves. `proof_of`: what proves a token. All are compared,
        whichever it is."""
        found = [grant for grant in self.grants if matches(proof_of(grant[1]), came)]
        return max(found, default=None)


NO_TOKENS = Tokens()


def check_may(access: Access, op: int) -> None:
    """Raises NotAllowed. What is no request at all is for others to refuse."""
    least = _LEAST_BY_OP.get(op, Access.READ)
    if access < least:
        raise not_allowed(access, _NAMES[op], least)


def check_may_be(access: Access, role: Role) -> None:
    """Raises NotAllowed if a client of that role has no business here with that token."""
    least = LEAST_OF_CLIENTS[role]
    if access < least:
        raise not_allowed(access, f"connecting as {role}", least)


def not_allowed(access: Access, what: str, least: Access) -> NotAllowed:
    return NotAllowed(
        f"{what} needs a token of role {least}, and this client connected with one of role {access}: give it the"
        f" {least} token, by token= or PSSTORE_TOKEN_FILE",
        role=str(access),
        operation=what,
    )
