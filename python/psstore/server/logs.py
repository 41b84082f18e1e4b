"""The format of the server's log: every line says when, how important, which shard, and about which peer."""

from __future__ import annotations

import logging
import sys
import time
from typing import Literal

import msgspec


def configure(*, who: str, level: str, form: Literal["text", "json"]) -> None:
    """Logs of this process go to stderr. `who`: 'shard 1' or 'supervisor'."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(TextFormatter(who) if form == "text" else JsonFormatter(who))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.getLogger("asyncio").setLevel(logging.WARNING)


class TextFormatter(logging.Formatter):
    """`2026-01-31 23:59:59.123 info shard 1 [rank 0 at 10.0.0.7:4711] message`"""

    def __init__(self, who: str) -> None:
        super().__init__()
        self._who = who

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        level, peer = record.levelname.lower(), getattr(record, "peer", "-")
        line = f"{when}.{int(record.msecs):03} {level} {self._who} [{peer}] {record.getMessage()}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One object per line; `time` is in seconds since 1970."""

    def __init__(self, who: str) -> None:
        super().__init__()
        self._who = who

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            "process": self._who,
            "peer": getattr(record, "peer", None),
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()
