"""Fragments: the parameters of a model in parts of about equal bytes, of which one is shared in each round.

Streaming DiLoCo (Douillard et al., arXiv:2501.18512, section 2.1) shares fragments in turn, so that no round sends the
whole model at once. Tensors stay whole. Values of the store are kept in main memory, wherever the parameters are:
rounds are seldom, and memory for a second copy of the model would be missed on a device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from psstore.errors import UsageError
from psstore.torch.learner_processes import SharedTensor
from psstore.torch.parameters import Trained, mark_written


class Fragment:
    """Parameters that are shared in the same rounds."""

    def __init__(self, trained: Sequence[Trained], whole: Sequence[SharedTensor]) -> None:
        self.trained = trained
        self.whole = whole
        """What the parameters are to the store: of a learner of several processes each may have a part."""
        self.names = [one.name for one in whole]
        self.values = [
            torch.empty(one.parameter.shape, dtype=w.dtype, device="cpu") for one, w in zip(trained, whole, strict=True)
        ]
        """What the store had when these parameters were merged with it last."""
        self.weighed_at = 0.0
        """What this worker had counted when its last contribution to this fragment began."""

    @property
    def num_bytes(self) -> int:
        return sum(one.num_bytes for one in self.whole)

    def empty(self) -> list[torch.Tensor]:
        """Memory for the store's values, whole, in its precision."""
        return [torch.empty(one.shape, dtype=one.dtype, device="cpu") for one in self.whole]

    def pseudo_gradient(self) -> list[torch.Tensor]:
        """What this worker's steps have taken from the values, one for each parameter: the store's optimizer moves by
        its negative. Rounding to half precision, which both sides have gone through, is no step. Raises UsageError
        that names a parameter which is not finite."""
        found = []
        for one, difference in zip(self.trained, self._differences(), strict=True):
            if not bool(difference.isfinite().all()):
                raise UsageError(
                    f"parameter {one.name!r} holds NaN or infinity on this worker, which would be everybody's after the"
                    " round: this worker has sent nothing; connect it anew, and it begins with the store's values"
                )
            found.append(difference)
        return found

    def merge(self, values: list[torch.Tensor], *, share: float) -> None:
        """Makes each parameter `share` of the new value and the rest of what it is."""
        for one, value in zip(self.trained, values, strict=True):
            theirs = value.to(one.parameter.device)
            if share != 1.0:
                mine = one.parameter.detach().to(theirs.dtype)
                theirs = theirs.mul(share).add_(mine, alpha=1.0 - share)
            one.parameter.detach().copy_(theirs)
        mark_written(one.owner for one in self.trained)
        self.values = values

    def carry_over(self, values: list[torch.Tensor]) -> None:
        """Makes the parameters differ from the new values as they did from the old ones: what this worker's steps have
        taken from these and not shared yet stays to be shared."""
        differences = self._differences()
        self.merge([value - own for value, own in zip(values, differences, strict=True)], share=1.0)
        self.values = values

    def _differences(self) -> Iterator[torch.Tensor]:
        """Values less parameters, one after the other, as far as the parameters' precision goes."""
        for one, value in zip(self.trained, self.values, strict=True):
            here = one.parameter.detach().to("cpu", copy=True).to(value.dtype)
            yield torch.sub(value.to(one.parameter.dtype).to(value.dtype), here)


def cut(trained: Sequence[Trained], whole: Sequence[SharedTensor], number: int) -> list[Fragment]:
    """The fragments, each with its parameters in the order of `trained`: the largest tensor first, each goes to where
    the fewest bytes are. Alike on all workers whatever the order of their parameters. Raises UsageError."""
    if not 1 <= number <= len(trained):
        raise UsageError(
            f"fragments is {number}; a fragment is at least one whole tensor, and this model trains {len(trained)}:"
            " expected 1 to that many"
        )
    taken: list[set[str]] = [set() for _ in range(number)]
    loads = [0] * number
    for one in sorted(whole, key=lambda one: (-one.num_bytes, one.name)):
        lightest = min(range(number), key=lambda index: (loads[index], len(taken[index]), index))
        taken[lightest].add(one.name)
        loads[lightest] += one.num_bytes
    pairs = list(zip(trained, whole, strict=True))
    return [Fragment(*zip(*[pair for pair in pairs if pair[1].name in names], strict=True)) for names in taken]
