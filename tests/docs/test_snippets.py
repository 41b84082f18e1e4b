"""What the documentation shows runs: each page's Python is put together into programs and run by `psstore run`.

A program is the page's blocks in their order, each at its own line, so that a traceback names the page's lines:

    ```python                 runs
    ```diff                   its new side runs; its old side is valid Python
    <!-- run: --mode ssp -->  a new program begins, in a store of its own with these flags: the page's first block
                              again, then what follows
    <!-- skip: reason -->     the next block is not run
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.fork_server import run

REPOSITORY = Path(__file__).resolve().parents[2]

PAGES = (
    "README.md",
    "docs/pytorch.md",
    "docs/readers.md",
    "docs/learners.md",
    "docs/coming_from_ddp.md",
    "docs/coming_from_horovod.md",
    "docs/coming_from_tensorflow.md",
)

RUN_S = 110.0

FLAGS = ("--shards", "2", "--workers", "2")

TOKEN = re.compile(
    r"^<!-- run: (?P<flags>.*?) -->$|^<!-- skip: (?P<reason>.+?) -->$"
    r"|^```(?P<language>python|diff)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass
class Program:
    """Blocks with the lines of the page at which they stand, counted from 0."""

    page: str
    flags: tuple[str, ...] = ()
    blocks: list[tuple[int, str]] = field(default_factory=list)

    def source(self) -> str:
        lines: list[str] = []
        for first_line, code in self.blocks:
            lines += [""] * (first_line - len(lines))
            lines += code.splitlines()
        return "\n".join(lines) + "\n"


def programs(page: str) -> Iterator[Program]:
    text = (REPOSITORY / page).read_text()
    program, opening, skipped = Program(page), None, False
    for found in TOKEN.finditer(text):
        if found["flags"] is not None:
            yield program
            assert opening is not None, f"{page} begins a new program before its first block"
            program = Program(page, tuple(found["flags"].split()), [opening])
        elif found["reason"] is not None:
            skipped = True
        elif skipped:
            skipped = False
        else:
            block = (text.count("\n", 0, found.start("code")), new_side(found))
            opening = opening or block
            program.blocks.append(block)
    yield program


def new_side(block: re.Match[str]) -> str:
    if block["language"] == "python":
        return block["code"]
    ast.parse(side(block["code"], "-"))
    return side(block["code"], "+")


def side(diff: str, sign: str) -> str:
    """Of a diff: its common lines and those with the sign. The others are empty, so that lines keep their place."""
    return "".join(line[1:] if line[0] in (" ", sign) else "\n" for line in diff.splitlines(keepends=True))


def side_of(page: str, sign: str) -> str:
    """Of the one diff that a page has."""
    (diff,) = re.findall(r"^```diff\n(.*?)^```$", (REPOSITORY / page).read_text(), re.MULTILINE | re.DOTALL)
    return side(diff, sign)


EVERY_PROGRAM = [(page, number) for page in PAGES for number, _ in enumerate(programs(page))]


@pytest.mark.parametrize(("page", "number"), EVERY_PROGRAM)
def test_the_python_of_a_page_runs(page: str, number: int, tmp_path: Path) -> None:
    program = list(programs(page))[number]
    script = tmp_path / (Path(page).stem + ".py")
    script.write_text(program.source())
    command = [sys.executable, "-m", "psstore.cli.main", "run", *FLAGS, *program.flags, str(script)]
    ran = run(command, cwd=tmp_path, timeout_s=RUN_S)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_script_to_be_killed_trains_and_says_what_its_weights_are(tmp_path: Path) -> None:
    """Of docs/failures.md, with fewer steps."""
    (script, *_) = re.findall(r"^```python\n(.*?)^```$", (REPOSITORY / "docs/failures.md").read_text(), re.M | re.S)
    assert "stop_at=5000" in script
    (tmp_path / "train.py").write_text(script.replace("stop_at=5000", "stop_at=5"))
    command = [sys.executable, "-m", "psstore.cli.main", "run", *FLAGS, "train.py"]
    ran = run(command, cwd=tmp_path, timeout_s=RUN_S)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    first, second = re.findall(r"^\[rank \d\] (version 5: \w{16})$", ran.stdout, re.M)
    assert first == second
