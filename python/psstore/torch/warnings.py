"""Warnings and error messages in the terms of the training script. A warning points at the script's own line, however
deep inside psstore it arises."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from psstore.client.rounds import CommitResult
from psstore.errors import PsstoreError

INNER = tuple(f"{root}{os.sep}" for root in (Path(__file__).parents[1], Path(str(torch.__file__)).parent))
"""Where psstore and torch lie."""


def warn(message: str) -> None:
    """A UserWarning, placed at the nearest caller outside psstore and torch."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(INNER):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def tell_of_refusal(commit: CommitResult) -> None:
    """Warns a worker whose round was decided without its contribution, because that is not like the others'."""
    if commit.refused is not None:
        warn(f"{commit.refused.describe()}; round {commit.round} went on without it")


def with_hint(error: PsstoreError, hint: str) -> PsstoreError:
    """A copy of the error whose message ends with what it means in training."""
    return type(error)(f"{error.message}; {hint}", **error.details)


def dtype_name(dtype: torch.dtype) -> str:
    """'float32', not 'torch.float32'."""
    return str(dtype).removeprefix("torch.")


def quoted(names: Sequence[str], *, most: int = 3) -> str:
    """The first `most` names, quoted, and how many more there are."""
    shown = ", ".join(map(repr, names[:most]))
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown
