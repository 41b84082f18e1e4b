"""The bytes of one file of a checkpoint: safetensors, cut into pieces that are hashed one by one.

    0        8           8 + H                                                      size - T        size
    | H: u64 | header    | entries, without a gap, in the order of the header          | hashes: T bytes |
    |      piece 0       | piece 1 | piece 2 | …                     | piece n - 1     | n x 40 bytes    |

Any reader of safetensors can read it: H and JSON {"__metadata__": {text: text}, name: {"dtype", "shape",
"data_offsets"}, …}, padded with spaces so that 8 + H divides by HEADER_ALIGNMENT. The last entry is named 'hashes':

    of piece i:  | bytes: u64 | SHA-256: 32 bytes |

Pieces lie one after the other; an entry is one or more of them. So any piece can be read and verified alone, and
pieces are hashed in parallel. What says that a file is whole and unchanged is its digest: the SHA-256 of 'hashes'.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import msgspec

from psstore.errors import InternalError

HEADER_ALIGNMENT = 64
"""What the data begins at a multiple of: a cache line, and more than any element's size."""

MAX_HEADER_BYTES = 100_000_000
"""The most that the safetensors library reads."""

HASHES = "hashes"
"""Name of the last entry."""

HASH_BYTES = 32
HASHED_BYTES = 8 + HASH_BYTES
"""What 'hashes' has of each piece."""

METADATA = "__metadata__"

NOT_DECODED = (msgspec.DecodeError, RecursionError)
"""What msgspec raises of a text that it can't make out: the latter where it is nested too deep."""

ITEM_BYTES_OF: Mapping[str, int] = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8,
    "F32": 4, "I32": 4, "U32": 4,
    "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
"""Bytes per element, by safetensors' name of the dtype."""


class FileEntry(NamedTuple):
    """A named array of a file."""

    name: str
    dtype: str
    """As safetensors names it."""
    shape: tuple[int, ...]
    pieces: tuple[int, ...]
    """Bytes of each, in their order."""


class FoundEntry(NamedTuple):
    """An entry as a header names it."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    """In bytes from the beginning of the file."""
    end: int


def digest_of(*parts: bytes | bytearray | memoryview) -> bytes:
    """SHA-256. Releases the GIL for what is larger than 2 KiB."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.digest()


def encode_header(entries: Sequence[FileEntry], metadata: Mapping[str, str]) -> bytes:
    """Piece 0 of a file: its length and its header. The caller orders the entries by the size of their elements, the
    largest first, so that all are aligned."""
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    begin = 0
    for entry in [*entries, _hashes_entry(1 + sum(len(entry.pieces) for entry in entries))]:
        if entry.name in header:
            raise InternalError(f"a file of a checkpoint was to have two entries named {entry.name!r}")
        end = begin + sum(entry.pieces)
        header[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": (begin, end)}
        begin = end
    text = msgspec.json.encode(header)
    text += b" " * (-(8 + len(text)) % HEADER_ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise InternalError(
            f"a file of a checkpoint would need a header of {len(text)} bytes for {len(entries)} arrays"
        )
    return len(text).to_bytes(8, "little") + text


def _hashes_entry(num_pieces: int) -> FileEntry:
    return FileEntry(HASHES, "U8", (num_pieces, HASHED_BYTES), (num_pieces * HASHED_BYTES,))


class Header(NamedTuple):
    """What a file says of itself. Not to be believed before it has been verified."""

    num_bytes: int
    """With its length before it: where the data begins."""
    metadata: Mapping[str, str]
    entries: Mapping[str, FoundEntry]


def decode_header(text: bytes, *, file_bytes: int) -> Header:
    """`text`: without its length. Raises ValueError that says what is wrong."""
    found = msgspec.json.decode(text, type=dict[str, dict[str, Any]])
    metadata = found.pop(METADATA, {})
    data = 8 + len(text)
    entries: dict[str, FoundEntry] = {}
    last = data
    for name, one in found.items():
        entry = _decode_entry(name, one, data)
        if entry.begin != last:
            raise ValueError(f"entry {name!r} begins at byte {entry.begin}; expected {last}")
        last = entry.end
        entries[name] = entry
    if last != file_bytes:
        raise ValueError(f"its entries end at byte {last}, and the file has {file_bytes}")
    return Header(data, metadata, entries)


def _decode_entry(name: str, one: Mapping[str, Any], data: int) -> FoundEntry:
    try:
        shape = tuple(int(dim) for dim in one["shape"])
        begin, end = (data + int(offset) for offset in one["data_offsets"])
        num_bytes = ITEM_BYTES_OF[one["dtype"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"entry {name!r} is no safetensors entry: {error!r}") from None
    for dim in shape:
        num_bytes *= dim
    if end - begin != num_bytes or begin < data:
        raise ValueError(f"entry {name!r} of {one['dtype']} {shape} has {end - begin} bytes; expected {num_bytes}")
    return FoundEntry(one["dtype"], shape, begin, end)


class Hashes:
    """The entry 'hashes': how long each piece is, and its SHA-256."""

    def __init__(self, content: bytes) -> None:
        """Raises ValueError for a length that can't be."""
        if not content or len(content) % HASHED_BYTES:
            raise ValueError(f"its hashes have {len(content)} bytes; expected a multiple of {HASHED_BYTES}")
        self._content = memoryview(content)
        sizes = (int.from_bytes(content[at : at + 8], "little") for at in range(0, len(content), HASHED_BYTES))
        self._begins = array("Q", accumulate(sizes, initial=0))

    @staticmethod
    def encode(num_bytes: int, digest: bytes) -> bytes:
        """What the entry has of one piece."""
        return num_bytes.to_bytes(8, "little") + digest

    def __len__(self) -> int:
        return len(self._begins) - 1

    @property
    def end(self) -> int:
        """Where the last piece ends in the file."""
        return self._begins[-1]

    def bounds(self, index: int) -> tuple[int, int]:
        """[begin, end) of a piece in the file."""
        return self._begins[index], self._begins[index + 1]

    def digest(self, index: int) -> bytes:
        at = index * HASHED_BYTES + 8
        return bytes(self._content[at : at + HASH_BYTES])
