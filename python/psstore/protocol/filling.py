"""Replies that wait for a device to fill in their bytes. Part of the shard's service.

The device copies values to the host while the loop goes on; a reply is sent when the copy is done, in the order in
which the reads came: the device makes its copies in that order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from psstore import _core
from psstore.errors import PsstoreError
from psstore.protocol.frames import Output, failure


class _Unsent(NamedTuple):
    conn: int
    request: int
    ready: _core.Fence
    finish: Callable[[], Sequence[Output]]


class Filling:
    """A reply is here from `add` until `take_ready` or `forget` gives it up."""

    def __init__(self) -> None:
        self._unsent: deque[_Unsent] = deque()

    def add(self, conn: int, request: int, ready: _core.Fence, finish: Callable[[], Sequence[Output]]) -> None:
        """`finish`: makes the reply, once `ready` is done; or finds that it has to be another one, and adds that."""
        self._unsent.append(_Unsent(conn, request, ready, finish))

    def forget(self, conn: int) -> None:
        """The connection is gone. What the device still writes to stays the shard's until it is done."""
        self._unsent = deque(unsent for unsent in self._unsent if unsent.conn != conn)

    def take_ready(self) -> list[Output]:
        outputs: list[Output] = []
        while self._unsent:
            unsent = self._unsent.popleft()
            try:
                if not unsent.ready.done():
                    self._unsent.appendleft(unsent)
                    break
                outputs += unsent.finish()
            except PsstoreError as error:
                outputs.append(failure(unsent.conn, unsent.request, error))
        return outputs

    def __bool__(self) -> bool:
        """Whether there is one."""
        return bool(self._unsent)
