"""The tokens of a store: files that are looked at now and then, and read when they have changed."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

import msgspec

from psstore.config import read_tokens
from psstore.errors import BadArgument
from psstore.protocol.roles import Access, Tokens

_log = logging.getLogger("psstore.tokens")


class TokenSources(msgspec.Struct, frozen=True, kw_only=True):
    """Where a store's tokens come from. None at all: it needs none."""

    own: bytes | None = None
    """Made for this life of the store, for its user's programs."""
    admin: str | None = None
    worker: str | None = None
    read: str | None = None
    """The files of each role, up to two tokens in each: the new one, and the one that it replaces."""

    def files(self) -> dict[Access, str]:
        named = {Access.ADMIN: self.admin, Access.WORKER: self.worker, Access.READ: self.read}
        return {access: path for access, path in named.items() if path is not None}


class TokenWatch:
    """What counts now. A file that is being replaced and can't be used leaves the former tokens valid."""

    def __init__(self, sources: TokenSources) -> None:
        """Raises BadArgument."""
        self._sources = sources
        self._stamp = self._look()
        self.tokens = self._read()

    def look(self) -> bool:
        """Whether `tokens` are others now."""
        stamp = self._look()
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        try:
            before, self.tokens = self.tokens, self._read()
        except BadArgument as error:
            _log.warning("token files have changed, and the former tokens stay valid: %s", error.message)
            return False
        if self.tokens != before:
            _log.info("token files have changed, and were read")
        return self.tokens != before

    def _read(self) -> Tokens:
        if self._sources.own is not None:
            return Tokens.single(self._sources.own)
        files = self._sources.files()
        return Tokens(tuple((access, token) for access, path in files.items() for token in read_tokens(Path(path))))

    def _look(self) -> list[tuple[int, int, int, int]]:
        found = []
        for path in self._sources.files().values():
            with contextlib.suppress(OSError):
                there = os.stat(path)
                found.append((there.st_mtime_ns, there.st_ino, there.st_size, there.st_mode))
        return found
