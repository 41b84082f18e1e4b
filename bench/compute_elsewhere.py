"""Steps whose compute takes nothing of this machine, as a GPU's: what the store does meanwhile costs them no time."""

from __future__ import annotations

COMPUTE_S = 0.05
"""Slept in a step."""


def step_name(compute_s: float) -> str:
    """A step of which so much is slept, in a table."""
    return f"a step with {1e3 * compute_s:g} ms of compute elsewhere" if compute_s else "a step"
