"""A process that works for a store's supervisor: it is told what to do, and ends when the supervisor does."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from io import FileIO
from typing import TypeVar

import msgspec

from psstore.exit_codes import EXIT_FAILED

Duty = TypeVar("Duty", bound=msgspec.Struct)


def take_duty(kind: type[Duty], *, last_word: bytes = b"", on_last_word: Callable[[], None] = lambda: None) -> Duty:
    """What stdin brings first, as a line of JSON. From then on the end of stdin is the supervisor's death, and this
    process's, in the middle of anything: whatever is asked of a store that is gone would wait for it to come back.

    `last_word`: a line after which the supervisor has no more to say, and `on_last_word` is called in another thread.
    """
    orders = FileIO(0, closefd=False)  # no buffer: another thread reads on
    duty = msgspec.json.decode(orders.readline(), type=kind)
    heeding = threading.Thread(target=_heed, args=(orders, last_word, on_last_word), name="psstore-orders", daemon=True)
    heeding.start()
    return duty


def _heed(orders: FileIO, last_word: bytes, on_last_word: Callable[[], None]) -> None:
    word = orders.readline()
    if not word or word != last_word:
        os._exit(EXIT_FAILED)
    on_last_word()
