"""Gradients as they come over the wire: how each dtype is made, how many bytes it has, and how torch adds it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
import numpy.typing as npt
import torch

from psstore import _core

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

Add = Callable[[torch.Tensor | None], torch.Tensor]
"""Adds a gradient to a sum in place; makes the sum where there is none yet."""

BLOCK = 256
"""Elements that share a scale."""

ELEMS_PER_KEPT = 128
"""Of top-k: one in so many is sent, the largest."""


@dataclass(frozen=True)
class Read:
    """What the plain loop reads in a gradient's place. Scales are left out: 1.5 % of int8, 11 % of 1-bit gradients."""

    c_type: str
    elems: int = 1
    """Elements of the gradient that one of them stands for."""


READS = {
    "float32": Read("float"),
    "bfloat16": Read("uint16_t"),
    "float16": Read("uint16_t"),
    "int8": Read("int8_t"),
    "sign": Read("uint8_t", elems=8),
    "topk": Read("float", elems=ELEMS_PER_KEPT // 2),  # an index and a value
}


def is_encoding(inputs: str) -> bool:
    return inputs in ("int8", "sign", "topk")


def payload_bytes(inputs: str, num_elems: int) -> int:
    if is_encoding(inputs):
        return _core.encoded_bytes(_core.DTYPES[inputs], num_elems, num_elems // ELEMS_PER_KEPT)
    return num_elems * (4 if inputs == "float32" else 2)


def encode(inputs: str, gradient: Floats, payload: Bytes, residual: Floats | None = None) -> None:
    if is_encoding(inputs):
        kept = gradient.size // ELEMS_PER_KEPT if inputs == "topk" else 0
        _core.encode_slice(_core.DTYPES[inputs], gradient.data, residual, payload.data, kept)
    else:
        _core.convert(gradient.data, _core.DTYPES["float32"], payload.data, _core.DTYPES[inputs])


def encoded(inputs: str, gradient: Floats) -> Bytes:
    payload = np.empty(payload_bytes(inputs, gradient.size), np.uint8)
    encode(inputs, gradient, payload)
    return payload


@lru_cache(maxsize=1)
def gradients(num_workers: int, inputs: str, num_slots: int, num_elems: int) -> list[list[Bytes]]:
    """(worker, slot)."""
    random = np.random.default_rng(0).standard_normal(num_elems, dtype=np.float32)
    return [
        [encoded(inputs, random + np.float32(slot + worker)) for slot in range(num_slots)]
        for worker in range(num_workers)
    ]


# ---- as torch adds them ----


def adding(inputs: str, payload: Bytes, num_elems: int) -> Add:
    flat = torch.from_numpy(payload)
    if inputs == "topk":
        indices, values = flat.view(2, -1).view(torch.int32)
        return partial(_add_some, indices, values.view(torch.float32), num_elems)
    if not is_encoding(inputs):
        return partial(_add_dense, flat.view(getattr(torch, inputs)))
    num_scales = -(-num_elems // BLOCK)
    scales = flat[: 4 * num_scales].view(torch.float32).view(-1, 1)
    decode = _int8 if inputs == "int8" else _signs
    return lambda total: _add_dense(decode(flat[4 * num_scales :], scales), total, is_ours=True)


def _add_dense(gradient: torch.Tensor, total: torch.Tensor | None, *, is_ours: bool = False) -> torch.Tensor:
    """Halves as they are: torch widens them while it adds."""
    if total is None:
        return gradient if is_ours else gradient.to(torch.float32, copy=True)
    return total.add_(gradient)


def _add_some(indices: torch.Tensor, values: torch.Tensor, num_elems: int, total: torch.Tensor | None) -> torch.Tensor:
    return (torch.zeros(num_elems) if total is None else total).index_add_(0, indices, values)


def _int8(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return torch.mul(codes.view(torch.int8).view(-1, BLOCK), scales).view(-1)


_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_SIGNS = torch.from_numpy(1 - 2 * _BITS.astype(np.float32))
"""(256, 8): what the bits of a byte say."""


def _signs(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return _SIGNS.index_select(0, codes.int()).view(-1, BLOCK).mul_(scales).view(-1)
