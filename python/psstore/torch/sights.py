"""Gradients as they were seen or sent, to tell those that were changed since: by what they are, and torch's count of
their changes.

There may be thousands in a step. What is kept of many is in a few containers, therefore, and not in one for each: these
would have the garbage collector look through all that the program has, in the middle of a training.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import NamedTuple

import torch

from psstore.torch.edits import Checksum

Named = Mapping[str, torch.Tensor]
"""Gradients, by the names of their tensors in the store."""


def version_of(gradient: torch.Tensor) -> int:
    """How often it was changed. One that was made under inference_mode is not counted for, and does not change
    outside."""
    return -1 if gradient.is_inference() else gradient._version


def versions_of(gradients: Iterable[torch.Tensor]) -> list[int]:
    """`version_of` each."""
    seen = list(gradients)
    try:
        return [gradient._version for gradient in seen]
    except RuntimeError:  # one of them was made under inference_mode
        return [version_of(gradient) for gradient in seen]


class Sight(NamedTuple):
    """One gradient in some round, as a hook has seen it."""

    round: int
    gradient: torch.Tensor
    version: int

    @staticmethod
    def now(round: int, gradient: torch.Tensor) -> Sight:
        return Sight(round, gradient, version_of(gradient))

    def is_still(self, gradient: torch.Tensor) -> bool:
        return self.gradient is gradient and self.version == version_of(gradient)


class Sights:
    """Many, at one moment."""

    def __init__(self, gradients: Named) -> None:
        self.gradients = gradients
        self._versions = dict(zip(gradients, versions_of(gradients.values()), strict=True))

    def holds(self, name: str, gradient: torch.Tensor) -> bool:
        """Whether this one is still as it was."""
        return self.gradients.get(name) is gradient and self._versions[name] == version_of(gradient)

    def hold(self, gradients: Named) -> bool:
        """Whether these are all that there were, and still as they were."""
        return gradients.keys() == self.gradients.keys() and all(
            self.holds(name, gradient) for name, gradient in gradients.items()
        )


class Sent:
    """Those that were sent together in a round."""

    def __init__(
        self, sights: Sights, *, round: int, done: Future[None] | None, checksums: Mapping[str, Checksum]
    ) -> None:
        self.sights = sights
        self.round = round
        self.checksums = checksums
        """Of their bytes, in rounds in which these are looked at too."""
        self._done = done
        """None: it has ended well."""

    @property
    def has_failed(self) -> bool:
        """It has ended without the store's having them."""
        done = self._done
        return done is not None and done.done() and (done.cancelled() or done.exception() is not None)
