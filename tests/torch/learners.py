"""DiLoCo in one process, written from the papers: what learners on a store are held against, bit for bit.

Douillard et al., arXiv:2311.08105, algorithm 1, with the fragments of arXiv:2501.18512, in the package's turns. All
learners take the same number of steps; the outer optimizer is torch's own, one for each fragment, with the mean that
the store makes: weighted contributions in the order of ranks, divided by the sum of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn
from torch.optim import SGD

from psstore.torch.turns import fragment_of
from tests.torch.support import backward, batches

Outer = Callable[..., torch.optim.Optimizer]
Fragments = Sequence[Sequence[str]]

NESTEROV: Outer = partial(SGD, lr=0.7, momentum=0.9, nesterov=True)


@dataclass
class Reference:
    """Learners that take turns in one process."""

    models: Sequence[nn.Module]
    inner: Callable[..., torch.optim.Optimizer]
    fragments: Fragments
    every: int
    outer: Outer = NESTEROV
    merge: float = 1.0
    delay: int = 0
    weigh: Callable[[int, int], float] = lambda rank, round: 1.0
    rounds: int = 0
    under_way: list[tuple[int, int]] = field(default_factory=list)
    """(the step in which it is merged, the fragment) of rounds."""

    def __post_init__(self) -> None:
        first = dict(self.models[0].named_parameters())
        for model in self.models:
            model.load_state_dict(self.models[0].state_dict())
        self.values = {name: one.detach().clone().requires_grad_() for name, one in first.items()}
        self.bases = [{name: one.detach().clone() for name, one in first.items()} for _ in self.models]
        self.outers = [self.outer([self.values[name] for name in names]) for names in self.fragments]
        self.optimizers = [self.inner(model.parameters()) for model in self.models]

    def train(self, steps: int, *, seed: int = 100, after: Callable[[int], None] = lambda step: None) -> None:
        """Each learner on the batches of its own seed. `after`: called with each step that is over."""
        streams = [list(batches(steps, seed=seed + rank)) for rank in range(len(self.models))]
        for step in range(1, steps + 1):
            for model, optimizer, stream in zip(self.models, self.optimizers, streams, strict=True):
                optimizer.zero_grad()
                backward(model, stream[step - 1])
                optimizer.step()
            self._merge(step)
            if step * len(self.fragments) // self.every > (step - 1) * len(self.fragments) // self.every:
                self.under_way.append((step + self.delay, self.share()))
                self._merge(step)
            after(step)

    @torch.no_grad()
    def share(self) -> int:
        """A round of the next fragment, which is returned."""
        self.rounds += 1
        number = fragment_of(self.rounds, len(self.fragments))
        weights = [self.weigh(rank, self.rounds) for rank in range(len(self.models))]
        for name in self.fragments[number]:
            total = torch.zeros_like(self.values[name])
            for model, base, weight in zip(self.models, self.bases, weights, strict=True):
                total += weight * (base[name] - dict(model.named_parameters())[name])
            self.values[name].grad = total / sum(weights)
        self.outers[number].step()
        return number

    @torch.no_grad()
    def _merge(self, step: int) -> None:
        for due, number in [one for one in self.under_way if one[0] <= step]:
            self.under_way.remove((due, number))
            for name in self.fragments[number]:
                for model, base in zip(self.models, self.bases, strict=True):
                    one = dict(model.named_parameters())[name]
                    base[name] = self.values[name].detach().clone()
                    one.copy_(
                        base[name].mul(self.merge).add_(one, alpha=1.0 - self.merge) if self.merge < 1 else base[name]
                    )
