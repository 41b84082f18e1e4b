"""A small DLRM, and the log of clicks that it learns, which a seeded generator makes: they are nobody's clicks.

The model is that of Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems"
(2019): a row for each category, a vector of the dense features, their dot products by pairs, and a network on top.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

TABLES: Mapping[str, tuple[int, int]] = {
    "user": (20_000, 1),
    "item": (10_000, 1),
    "liked": (10_000, 6),
    "shop": (500, 1),
    "city": (200, 1),
    "hour": (24, 1),
}
"""Name of each category -> how many ids it has, and how many of them a sample."""

NUM_DENSE = 4

DIM = 16

TASTE_ELEMS = 4
"""Elements of the hidden vectors by which the generator decides who clicks what."""

POPULARITY = 3.0
"""The exponent of a uniform number that chooses an id: half of all lookups are of an eighth of the ids."""

TEST_STEP = 2**32 - 1
"""Number of a batch that no training comes to."""


class Clicks(NamedTuple):
    """A batch of the log."""

    dense: torch.Tensor
    """(samples, NUM_DENSE) float32."""
    ids: list[torch.Tensor]
    """(samples, ids of a sample) int64, of each table."""
    clicked: torch.Tensor
    """(samples,) float32, 0 or 1."""

    @property
    def num_rows(self) -> int:
        """That a model looks up."""
        return sum(one.numel() for one in self.ids)


class ClickLog:
    """Batches by step and rank, each a function of these and the seed."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._seed = seed
        self._tastes = [torch.randn(num_ids, TASTE_ELEMS, generator=generator) for num_ids, _ in TABLES.values()]
        self._weights = torch.randn(NUM_DENSE, generator=generator)

    def batch(self, step: int, *, samples: int, rank: int = 0) -> Clicks:
        (seed,) = np.random.SeedSequence([self._seed, step, rank]).generate_state(1).tolist()
        generator = torch.Generator().manual_seed(seed)
        dense = torch.randn(samples, NUM_DENSE, generator=generator)
        ids = [
            (torch.rand(samples, num_each, generator=generator) ** POPULARITY * num_ids).long()
            for num_ids, num_each in TABLES.values()
        ]
        tastes = [taste[one].mean(dim=1) for taste, one in zip(self._tastes, ids, strict=True)]
        likings = sum((one * other).sum(dim=1) for one, other in combinations(tastes, 2))
        chances = torch.sigmoid(dense @ self._weights + likings - 1.0)
        return Clicks(dense, ids, torch.bernoulli(chances, generator=generator))

    def test(self, samples: int = 4096) -> Clicks:
        return self.batch(TEST_STEP, samples=samples)


class Dlrm(nn.Module):
    """Scores of samples: the larger, the likelier is a click.

    Args:
        tables: a module for each of TABLES, which reduces bags to rows of DIM.
    """

    def __init__(self, tables: Sequence[nn.Module], *, seed: int = 0) -> None:
        super().__init__()
        self.tables = nn.ModuleList(tables)
        self.bottom = nn.Sequential(nn.Linear(NUM_DENSE, 32), nn.ReLU(), nn.Linear(32, DIM))
        pairs = list(combinations(range(len(tables) + 1), 2))
        self._left, self._right = ([pair[side] for pair in pairs] for side in range(2))
        self.top = nn.Sequential(nn.Linear(DIM + len(pairs), 32), nn.ReLU(), nn.Linear(32, 1))
        self._draw(torch.Generator().manual_seed(seed))

    @torch.no_grad()
    def _draw(self, generator: torch.Generator) -> None:
        """Draws first weights, spread as torch's own. Torch draws its own from what all threads of a process share."""
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                bound = layer.in_features**-0.5
                layer.weight.uniform_(-bound, bound, generator=generator)
                layer.bias.uniform_(-bound, bound, generator=generator)

    def forward(self, batch: Clicks) -> torch.Tensor:
        """Returns float32 of (samples,)."""
        dense = self.bottom(batch.dense)
        vectors = torch.stack([dense, *(table(ids) for table, ids in zip(self.tables, batch.ids, strict=True))], dim=1)
        products = (vectors[:, self._left] * vectors[:, self._right]).sum(dim=2)
        scores: torch.Tensor = self.top(torch.cat([dense, products], dim=1))
        return scores.squeeze(1)

    def loss(self, batch: Clicks) -> torch.Tensor:
        return nn.functional.binary_cross_entropy_with_logits(self(batch), batch.clicked)


@torch.no_grad()
def auc(model: Dlrm, batch: Clicks) -> float:
    """Area under the ROC curve: how often a sample that was clicked has a larger score than one that was not, where a
    tie counts half."""
    scores, clicked = model(batch).numpy(), batch.clicked.numpy() > 0
    others = np.sort(scores[~clicked])
    below, up_to = (np.searchsorted(others, scores[clicked], side) for side in ("left", "right"))
    return float((below + up_to).mean() / 2 / len(others))
