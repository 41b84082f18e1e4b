"""The encodings of csrc/kernels/codec.h in numpy: payloads to the byte, and what they say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from psstore import _core

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

ENCODINGS = ("int8", "sign", "topk")

BLOCK = 256
LANES = 32
"""Partial sums of a mean."""


def num_kept(num_elems: int, encoding: str) -> int:
    """How many elements the tests keep of so many: some, but not all."""
    return (num_elems + 6) // 7 if encoding == "topk" else 0


def encoded(encoding: str, x: Floats) -> Bytes:
    """The payload of x."""
    with np.errstate(all="ignore"):
        parts = CODECS[encoding](x)
    return np.concatenate([part.view(np.uint8) for part in parts])


def decoded(encoding: str, payload: Bytes, num_elems: int) -> Floats:
    """What the payload says."""
    if encoding == "topk":
        indices, values = np.split(payload.view(np.uint32), 2)
        found = np.zeros(num_elems, np.float32)
        found[indices] = values.view(np.float32)
        return found
    scales_bytes = 4 * (-(-num_elems // BLOCK))
    scale = np.repeat(payload[:scales_bytes].view(np.float32), BLOCK)[:num_elems]
    codes = payload[scales_bytes:]
    if encoding == "int8":
        return scale * codes.view(np.int8).astype(np.float32)
    negative = np.unpackbits(codes, bitorder="little")[:num_elems].astype(bool)
    return np.where(negative, -scale, scale)


def _blocks(x: Floats) -> Floats:
    padded = np.zeros(-(-x.size // BLOCK) * BLOCK, np.float32)
    padded[: x.size] = x
    return padded.reshape(-1, BLOCK)


def _finite(scale: Floats) -> Floats:
    return np.where(np.isfinite(scale), scale, np.float32(np.nan))


def _int8(x: Floats) -> tuple[Floats, npt.NDArray[np.int8]]:
    blocks = _blocks(x)
    scale = np.abs(blocks).max(axis=1) / np.float32(127)
    scale = np.where(np.isfinite(scale * np.float32(127)), scale, np.float32(np.nan))
    codes = np.clip(np.rint(blocks / scale[:, None]), -127, 127)
    codes[~(scale > 0)] = 0
    return scale, codes.reshape(-1)[: x.size].astype(np.int8)


def _sign(x: Floats) -> tuple[Floats, Bytes]:
    lanes = np.zeros((-(-x.size // BLOCK), LANES), np.float32)
    for part in np.split(np.abs(_blocks(x)), BLOCK // LANES, axis=1):
        lanes = lanes + part
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    counts = np.full(lanes.shape[0], BLOCK, np.float32)
    if x.size % BLOCK:
        counts[-1] = x.size % BLOCK
    return _finite(lanes[:, 0] / counts), np.packbits(np.signbit(x), bitorder="little")


def _topk(x: Floats) -> tuple[npt.NDArray[np.uint32], Floats]:
    magnitudes = x.view(np.uint32) & np.uint32(0x7FFFFFFF)  # in the order of the numbers, NaN last
    largest = np.argsort(-magnitudes.astype(np.int64), kind="stable")[: num_kept(x.size, "topk")]
    indices = np.sort(largest).astype(np.uint32)
    return indices, x[indices]


CODECS: Mapping[str, Callable[[Floats], tuple[npt.NDArray[Any], npt.NDArray[Any]]]] = {
    "int8": _int8,
    "sign": _sign,
    "topk": _topk,
}
"""The two halves of a payload."""


def encode(encoding: str, source: Floats, residual: Floats | None = None, **options: Any) -> Bytes:
    """The payload as the core makes it."""
    number, kept = _core.DTYPES[encoding], num_kept(source.size, encoding)
    out = np.zeros(_core.encoded_bytes(number, source.size, kept), np.uint8)
    assert _core.encode_slice(number, source, residual, out, kept, **options) == out.size
    return out
