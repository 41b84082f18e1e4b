"""The tables of docs/wire.md are the core's: every operation, error, dtype and limit, with its number."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from psstore import _core

ROW = re.compile(r"^\| `?(\w+)`? \| (\d+) \|", re.MULTILINE)
LIMITS = ("MAX_SLICES", "MAX_BODY_BYTES", "MAX_PAYLOAD_BYTES", "PRE_AUTH_MAX_BYTES")


@pytest.fixture(scope="module")
def document(repository: Path) -> str:
    return (repository / "docs" / "wire.md").read_text()


def rows_after(document: str, title: str) -> dict[str, int]:
    """name -> number of each row of the first table that comes after `title`."""
    table = document.partition(title)[2].partition("\n## ")[0]
    return {name: int(number) for name, number in ROW.findall(table)}


def test_every_operation_is_documented_with_its_number(document: str) -> None:
    assert rows_after(document, "\n## Operations\n") == dict(_core.OPS)


def test_every_error_is_documented_with_its_number(document: str) -> None:
    assert rows_after(document, "\n## Errors\n") == dict(_core.ERROR_CODES)


def test_every_limit_is_documented_with_its_value(document: str) -> None:
    assert rows_after(document, "\n## Limits\n") == {name: getattr(_core, name) for name in LIMITS}


def test_every_dtype_is_documented_with_its_number(document: str) -> None:
    assert rows_after(document, "| dtype | number |") == dict(_core.DTYPES)


def test_every_state_buffer_is_documented_with_its_part(document: str) -> None:
    table = document.partition("| rule | part 1 |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()[2:]]
    documented = {rule: tuple(filter(None, states)) for rules, *states in rows for rule in rules.split(", ")}
    assert documented == {rule: states for rule, states in _core.STATES.items() if states}


def test_replies_follow_their_requests() -> None:
    """A request's number is even and its reply's the next; a few have no reply, ERROR answers any."""
    numbers = set(_core.OPS.values()) - {_core.OPS["ERROR"]}
    requests = {number for number in numbers if number % 2 == 0}
    without_reply = {_core.OPS[name] for name in ("HEARTBEAT", "RELEASE", "COMPLETE", "RETIRE")}
    assert {number + 1 for number in requests} - numbers == {number + 1 for number in without_reply}
    assert {number - 1 for number in numbers - requests} <= requests
