"""What a push or a pull asks for: made once, by whichever method was called, and passed to all who carry it out."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from psstore.client.arrays import Array
from psstore.codec.codecs import Codecs


class Push(NamedTuple):
    """The arguments are explained where they come from, in operations.py."""

    names: tuple[str, ...]
    values: Sequence[Array]
    op: str | None = None
    codec: Codecs | None = None
    loss_scale: float | None = None

    @property
    def manner(self) -> Hashable:
        """Everything that can change how the push is encoded, but for the kinds of its arrays: a key of a cache. None:
        not to be cached."""
        return ("push", self.names, self.op) if self.codec is None else None


class Pull(NamedTuple):
    """A pull as it was asked for."""

    names: tuple[str, ...]
    out: Sequence[Array] | None
    if_newer_than: int | None = None
    dtype: str | None = None
    codec: Codecs | None = None
    wait_s: float | None = None

    @property
    def manner(self) -> Hashable:
        return ("pull", self.names, self.dtype, self.out is None) if self.codec is None else None
