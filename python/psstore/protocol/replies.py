"""What the coordinator owes to a request. Shared by its parts."""

from __future__ import annotations

from msgspec import Struct

from psstore.errors import PsstoreError
from psstore.wire.messages import Message


class Reply(Struct, frozen=True):
    """The answer to one request. `result`: a body, None for an empty one, or the error."""

    conn: int
    request: int
    result: Message | PsstoreError | None
