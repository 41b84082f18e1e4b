"""Which codec a parameter's gradient is pushed in, and its new value pulled in: as its parameter group says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from psstore.codec.compression import Compression
from psstore.errors import UsageError
from psstore.torch.parameters import Trained, short

KEY = "compression"
"""Of a parameter group's own choice."""


NONE = Compression()


def compression_for(one: Trained, groups: Sequence[Mapping[str, Any]], default: Compression) -> Compression:
    """Of one parameter: its group's, or else the optimizer's; none if it is small. Raises UsageError for one whose
    dtype the codecs are not for."""
    chosen = Compression.of(groups[one.group].get(KEY, default))
    if chosen == NONE or one.parameter.numel() < chosen.min_elems:
        return NONE
    if one.parameter.dtype is torch.float64:
        raise UsageError(
            f"parameter {one.name!r} is {short(one.parameter.dtype)}, and compression is for float32 and below: put it"
            " into a parameter group with compression=None"
        )
    return chosen


def is_wanted(groups: Sequence[Mapping[str, Any]], default: Compression) -> bool:
    """Whether any parameter may be compressed."""
    return any(Compression.of(group.get(KEY, default)) != NONE for group in groups)
