"""What the training script is told: warnings at its own line, however deep in here they arise, and what errors mean
there."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import torch

from psstore.errors import PsstoreError

INNER = tuple(f"{root}{os.sep}" for root in (Path(__file__).parents[1], Path(str(torch.__file__)).parent))
"""Where psstore and torch lie."""


def warn(message: str) -> None:
    """A UserWarning, placed at the nearest caller outside psstore and torch."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(INNER):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def explained(error: PsstoreError, more: str) -> PsstoreError:
    """The same error with a word more, of what it means in training."""
    return type(error)(f"{error.message}; {more}", **error.details)
