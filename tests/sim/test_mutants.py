"""Whoever breaks a rule is found out: each mutant breaks one, and the simulator's checks notice it under some seed."""

from __future__ import annotations

import pytest

from tests.sim.mutant_seeds import COMMON, RARE, WHERE, is_noticed, recorded

MAX_SEEDS_FOR_RARE = 5_000


@pytest.mark.parametrize("name", COMMON)
def test_simulator_notices_that(name: str) -> None:
    assert is_noticed(name, recorded()[name]), (
        f"its seed finds nothing wrong {WHERE[name]}: python -m tests.sim.mutant_seeds looks for one that does"
    )


def test_every_seed_is_of_a_mutant() -> None:
    assert set(recorded()) == set(COMMON)


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", sorted(RARE))
def test_simulator_notices_sooner_or_later_that(name: str) -> None:
    assert any(is_noticed(name, seed) for seed in range(MAX_SEEDS_FOR_RARE)), f"{MAX_SEEDS_FOR_RARE} seeds find nothing"
