"""What this worker's codecs kept back, as a part of a state dict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch

KEY = "residuals"
"""In a state dict, beside torch's 'state' and 'param_groups'. torch's optimizers do not look at it."""

Residuals = Mapping[torch.Tensor, torch.Tensor]
"""By parameter, in units of its gradient without a loss scale."""


def pack(residuals: Residuals, groups: Sequence[Mapping[str, Any]], *, rank: int | None) -> dict[str, Any] | None:
    """By the parameters' numbers, as torch counts them in a state dict; None if there are none."""
    parameters = chain.from_iterable(group["params"] for group in groups)
    numbered = {number: residuals[one] for number, one in enumerate(parameters) if one in residuals}
    return {"rank": rank, "of": numbered} if numbered else None


def unpack(packed: Mapping[str, Any] | None, groups: Sequence[Mapping[str, Any]], *, rank: int | None) -> Residuals:
    """None of another rank's: they are of gradients that this worker has not seen."""
    if packed is None or packed["rank"] != rank:
        return {}
    parameters = chain.from_iterable(group["params"] for group in groups)
    return {one: packed["of"][number] for number, one in enumerate(parameters) if number in packed["of"]}
