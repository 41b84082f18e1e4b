"""The scripts of docs/accelerate.md, docs/lightning.md and docs/huggingface.md, both sides as they stand: two workers
end with DDP's weights, and have logged and saved what they do under DDP. In processes: frameworks keep singletons."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.test_snippets import side_of
from tests.support.two_workers import DDP, RUN_S, STORE, assert_same_weights, run

CLOSE = 1e-6
"""torch sums the squares of a norm in float32, the store in float64: their factors differ by some 1e-7 of it."""

TRAINED = {"accelerate": "network", "lightning": "module", "huggingface": "model"}
"""Page, and what its script has trained."""

PACKAGES = {"huggingface": "transformers"}

END = """
import os
torch.save(dict({trained}.state_dict()), os.environ["RANK"] + ".pt")
torch.distributed.destroy_process_group()
"""


def script_of(page: str, sign: str, folder: Path) -> Path:
    """A side of the page's script, which in the end leaves each rank's weights."""
    path = folder / f"{page}{sign}.py"
    path.write_text(side_of(f"docs/{page}.md", sign) + END.format(trained=TRAINED[page]))
    return path


def shown(page: str, repository: Path) -> list[str]:
    """What the page says that rank 0 prints."""
    return re.findall(r"^\[rank 0\] (.*)$", (repository / "docs" / f"{page}.md").read_text(), re.M)


def saved(folder: Path) -> list[str]:
    """Files of the framework's own."""
    return sorted(str(path.relative_to(folder)) for path in (folder / "output").rglob("*"))


@pytest.mark.long
@pytest.mark.timeout(3 * RUN_S)
@pytest.mark.parametrize("page", TRAINED)
def test_two_workers_of_a_framework_train_clip_log_and_save_as_under_ddp(
    page: str, repository: Path, tmp_path: Path
) -> None:
    pytest.importorskip(PACKAGES.get(page, page))
    folders = {"-": tmp_path / "ddp", "+": tmp_path / "store"}
    outputs = [
        run(launcher, script_of(page, sign, tmp_path), folders[sign]) for sign, launcher in (("-", DDP), ("+", STORE))
    ]
    assert_same_weights(folders["-"], folders["+"], close=CLOSE)
    assert saved(folders["+"]) == saved(folders["-"])
    lines = shown(page, repository)
    assert lines
    for line in lines:
        assert [output.count(line) for output in outputs] == [1, 1], f"rank 0 alone logs: {line}"
