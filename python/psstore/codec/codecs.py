"""The codecs by name, and how many bytes they make of a slice. The arithmetic is in csrc/kernels/codec.h.

name        on the wire, per slice of n elements in blocks of 256               bytes of float32, to 1
none        as it is                                                            1
bf16, fp16  half precision                                                      2
int8        a float32 scale per block, then a signed byte per element           3.94
sign        a float32 scale per block, then a bit per element                   28.4
topk:0.01   the ceil(0.01 n) largest: a u32 index and a float32 value of each   50
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from psstore.errors import BadArgument
from psstore.types import ITEM_BYTES

BLOCK_ELEMS = 256
"""Elements that share a scale in int8 and sign."""

SCALE_BYTES = 4

KEPT_BYTES = 8
"""Size of an element that topk keeps: its index and its value."""

ENCODINGS = {"bf16": "bfloat16", "fp16": "float16", "int8": "int8", "sign": "sign", "topk": "topk"}
"""Codec -> name of what is on the wire (`_core.DTYPES`)."""

TOPK_RATIO = 0.01
"""What 'topk' alone keeps: the published work keeps 0.1 % to 1 % (Lin et al., arXiv:1712.01887)."""


@dataclass(frozen=True)
class Codec:
    """One way to make a slice of float32 fewer bytes. All lose something; who encodes keeps back what is lost."""

    name: str
    """As `parse` takes it."""
    dtype: str
    """The payload's dtype, a name of `_core.DTYPES`."""
    ratio: float = 0.0
    """topk: the part of the elements that is kept."""

    @property
    def is_half(self) -> bool:
        """Half precision: an element stays an element."""
        return self.dtype in ITEM_BYTES

    @property
    def follows(self) -> bool:
        """A pull in it brings the difference to what the puller has."""
        return self.dtype in ("int8", "sign")

    @property
    def pulls(self) -> bool:
        """Whether values can be pulled in it."""
        return self.is_half or self.follows

    def num_kept(self, num_elems: int) -> int:
        """topk: how many elements of a slice are sent."""
        return min(num_elems, math.ceil(self.ratio * num_elems))

    def num_bytes(self, num_elems: int) -> int:
        """Size of a slice's payload."""
        scales_bytes = SCALE_BYTES * -(-num_elems // BLOCK_ELEMS)
        match self.dtype:
            case "int8":
                return scales_bytes + num_elems
            case "sign":
                return scales_bytes + -(-num_elems // 8)
            case "topk":
                return KEPT_BYTES * self.num_kept(num_elems)
            case half:
                return ITEM_BYTES[half] * num_elems


Codecs = str | Mapping[str, str]
"""A codec's name, for all tensors or for each by its name."""


def codecs_for(chosen: Codecs | None, names: Sequence[str]) -> list[Codec | None]:
    """The codec of each of these tensors; None for what has none. Raises BadArgument."""
    if chosen is None:
        return [None] * len(names)
    if isinstance(chosen, str):
        return [parse(chosen)] * len(names)
    if not isinstance(chosen, Mapping):
        raise BadArgument(f"codec is {chosen!r}; expected a codec's name, or a mapping that has it by tensor")
    return [parse(chosen.get(name, "none")) for name in names]


@cache
def parse(name: str) -> Codec | None:
    """The codec of that name: 'bf16', 'fp16', 'int8', 'sign', 'topk' or 'topk:RATIO'; None for 'none'. Raises
    BadArgument for any other."""
    kind, _, ratio = name.partition(":")
    if name == "none":
        return None
    if kind not in ENCODINGS or (ratio and kind != "topk"):
        raise BadArgument(f"codec {name!r}: expected none, {', '.join(ENCODINGS)}, or topk with its ratio, 'topk:0.01'")
    return Codec(name, ENCODINGS[kind], _ratio(name, ratio) if kind == "topk" else 0.0)


def _ratio(name: str, text: str) -> float:
    try:
        ratio = float(text) if text else TOPK_RATIO
    except ValueError:
        ratio = math.nan
    if not 0.0 < ratio <= 1.0:
        raise BadArgument(f"codec {name!r}: topk keeps a part of the elements, from above 0 to 1: 'topk:0.01'")
    return ratio


def payload_bytes(encoding: str, num_elems: int) -> int:
    """Size of the payload of a slice of so many elements. `encoding`: a dtype, or a codec's name."""
    item_bytes = ITEM_BYTES.get(encoding)
    if item_bytes is not None:
        return item_bytes * num_elems
    return _known(encoding).num_bytes(num_elems)


def dtype_of(encoding: str) -> str:
    """On the wire. `encoding`: a dtype, or a codec's name."""
    return encoding if is_dtype(encoding) else _known(encoding).dtype


def is_dtype(encoding: str) -> bool:
    """Whether that is a dtype, and no codec's name."""
    return encoding in ITEM_BYTES


def _known(name: str) -> Codec:
    codec = parse(name)
    assert codec is not None, "'none' is no encoding: its name is the dtype's"
    return codec
