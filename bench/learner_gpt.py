"""What the learners of `learner_loss` and `learner_time` learn: to write Python, letter by letter, as a small GPT does
that reads the standard library's own source. Model and text are those of examples/transformer.py.
"""

from __future__ import annotations

from functools import cache, partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

EXAMPLE = Path(__file__).parents[1] / "examples" / "transformer.py"

WIDTH, BLOCKS, HEADS, LENGTH = 48, 2, 4, 32
"""64 thousand weights, so that thousands of steps of four learners take minutes on two cores."""

HELD_OUT = 20
"""One letter in so many, the last ones, is of text that nobody trains on."""

LOOKED_AT = 256
"""Windows of that text whose loss is told, the same ones whenever it is."""

MAX_NORM = 1.0
"""To which a gradient is clipped."""


class Lesson:
    """One learner's: the model, which begins alike on all, and windows that are its own."""

    def __init__(self, rank: int, num_windows: int) -> None:
        """`num_windows`: in a step."""
        text, example = read(), _example()
        held_out = len(text) // HELD_OUT
        torch.manual_seed(0)
        self.model: nn.Module = example.Gpt(width=WIDTH, num_blocks=BLOCKS, num_heads=HEADS, length=LENGTH)
        self._looked_at = example.windows(text[-held_out:], LOOKED_AT, LENGTH)
        self._windows = partial(example.windows, text[:-held_out], num_windows, LENGTH)
        torch.manual_seed(1 + rank)

    def backward(self) -> None:
        """Leaves the gradient of the learner's next windows."""
        self.model.zero_grad()
        self._loss(*self._windows()).backward()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def held_out_loss(self) -> float:
        return self._loss(*self._looked_at).item()

    def _loss(self, letters: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.model(letters).flatten(0, 1), following.flatten())


@cache
def read() -> torch.Tensor:
    """All letters, as ASCII codes."""
    text: torch.Tensor = _example().standard_library()
    return text


@cache
def _example() -> ModuleType:
    spec = spec_from_file_location("transformer", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
