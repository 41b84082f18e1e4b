"""What the house holds to: a class name means one thing in the whole package, a docstring can be read alone, and tests
lie where they are looked for."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

NOT_ALONE = ("Of", "Those", "They", "It", "The same")
"""A docstring that begins with one of these needs the sentence above it."""


@pytest.fixture(scope="module")
def sources(repository: Path) -> dict[str, ast.Module]:
    """Each module of the package, by its path below it."""
    root = repository / "python" / "psstore"
    return {str(path.relative_to(root)): ast.parse(path.read_text()) for path in sorted(root.rglob("*.py"))}


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of each string that stands alone: of modules, classes and functions, and below attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value.strip()


def test_a_class_name_means_one_thing(sources: dict[str, ast.Module]) -> None:
    homes = defaultdict(list)
    for path, tree in sources.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(path)
    twice = {name: paths for name, paths in homes.items() if len(paths) > 1}
    assert not twice, f"defined more than once: {twice}"


def test_a_docstring_can_be_read_alone(sources: dict[str, ast.Module]) -> None:
    found = {
        path: lines
        for path, tree in sources.items()
        if (lines := [f"{line}: {text}" for line, text in docstrings(tree) if text.startswith(starts())])
    }
    assert not found, f"begin with {', '.join(NOT_ALONE)}: {found}"


def starts() -> tuple[str, ...]:
    """Word by word: 'Often' and 'Items' are fine."""
    return tuple(f"{words}{end}" for words in NOT_ALONE for end in " ,.:")
