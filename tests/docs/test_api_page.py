"""The page of the API has every name that packages offer, and every call that a store can start."""

from __future__ import annotations

from pathlib import Path

import pytest

import psstore
import psstore.torch

PAGE = (Path(__file__).resolve().parents[2] / "docs/api.md").read_text()


@pytest.mark.parametrize("package", [psstore, psstore.torch], ids=lambda package: package.__name__)
def test_what_a_package_offers_is_on_the_page(package: object) -> None:
    names: list[str] = package.__all__  # type: ignore[attr-defined]
    offered = {name: getattr(package, name) for name in names}
    missing = [name for name, one in offered.items() if f"::: {one.__module__}.{one.__qualname__}\n" not in PAGE]
    assert not missing


def test_each_call_that_is_started_is_on_the_page() -> None:
    started = [name for name in dir(psstore.Store) if name.startswith("start_")]
    assert started
    assert not [name for name in started if f"`{name}`" not in PAGE]
