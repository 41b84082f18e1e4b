"""The table of a shard's slots: which slices it holds, at which version, after how many steps, and what of them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from typing import NamedTuple

SLOT_WORDS = 4
"""u64 numbers of a slot in the table: key, version, steps, parts."""

SLOT_BYTES = 8 * SLOT_WORDS

ZEROS = 1 << 8
"""In `parts`: the value is zero and takes no memory. Nobody has used it yet."""


ROWS_SHIFT = 16


class SlotRecord(NamedTuple):
    """A slot without its arrays."""

    key: int
    """Tensor's id and index of the slice."""
    version: int
    steps: int
    """Updates that the rule has taken of it."""
    parts: int
    """Bit 0: the file has its value; bit i: state buffer i. Or ZEROS. 0: it has no value yet. Of a partition of a
    table: how many rows it has, from bit ROWS_SHIFT on, bit 0 if it has any, and bit 1: what admission has counted."""

    @property
    def num_rows(self) -> int:
        return self.parts >> ROWS_SHIFT

    def has(self, part: int) -> bool:
        return bool(self.parts >> part & 1)


class SlotTable:
    """Slots by ascending key. Its memory layout is that of the file: little-endian u64, SLOT_WORDS of each slot."""

    def __init__(self, content: memoryview | bytes) -> None:
        """Raises ValueError for what is no such table. The content is not copied; it must not change."""
        if len(content) % SLOT_BYTES:
            raise ValueError(f"its table of slots has {len(content)} bytes; expected a multiple of {SLOT_BYTES}")
        self.content = memoryview(content).cast("B")
        self._words = self.content.cast("Q")
        last = -1
        for key in self._words[::SLOT_WORDS].tolist():
            if key <= last:
                raise ValueError(f"its table of slots has key {key} after key {last}; expected ascending keys")
            last = key

    @staticmethod
    def of(slots: Iterable[SlotRecord]) -> SlotTable:
        """The table of these slots, in any order. Raises ValueError for a key that comes twice."""
        words = array("Q", [word for slot in sorted(slots) for word in slot])
        return SlotTable(memoryview(words).cast("B"))

    def __len__(self) -> int:
        return len(self._words) // SLOT_WORDS

    def __getitem__(self, index: int) -> SlotRecord:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return SlotRecord(*self._words[index * SLOT_WORDS : (index + 1) * SLOT_WORDS].tolist())

    def __iter__(self) -> Iterator[SlotRecord]:
        words = iter(self._words)
        return map(SlotRecord._make, zip(words, words, words, words, strict=True))
