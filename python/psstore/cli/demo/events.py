"""What a demo worker tells the command: JSON lines on standard output, among whatever else is printed there.

A line of ours starts with the record separator, as in JSON text sequences (RFC 7464).
"""

from __future__ import annotations

import sys

import msgspec

RECORD_SEPARATOR = b"\x1e"


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Where a worker is."""

    rank: int
    round: int
    """The last one it ended."""
    rounds: int
    """In the whole training."""
    epoch: int
    epochs: int
    loss: float
    images_per_s: float
    staleness: int


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What a worker did."""

    rank: int
    images: int
    seconds: float
    bytes_pushed: int
    bytes_pulled: int
    max_staleness: int
    accuracy: float
    """Of the final weights, on the test images."""
    test_images: int
    dataset: str


Event = Progress | Finished

_decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


def emit(event: Event) -> None:
    sys.stdout.buffer.write(RECORD_SEPARATOR + msgspec.json.encode(event) + b"\n")
    sys.stdout.buffer.flush()


def parse(line: bytes) -> Event | None:
    """None for a line that is no event."""
    return _decoder.decode(line[1:]) if line.startswith(RECORD_SEPARATOR) else None
