"""Commands that pages name are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer
from typer.core import TyperGroup

from psstore.cli.main import app
from tests.docs.test_links import PAGES, ROOT

NAMED = re.compile(r"(?:^|`)psstore ([a-z]+) ([a-z]+)", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_groups_are_there(page: Path) -> None:
    commands = typer.main.get_command(app)
    assert isinstance(commands, TyperGroup)
    for first, second in NAMED.findall(page.read_text()):
        group = commands.commands.get(first)
        assert not isinstance(group, TyperGroup) or second in group.commands, f"psstore {first} {second}"
