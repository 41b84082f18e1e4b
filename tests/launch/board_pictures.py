"""The pictures of the board that the documentation shows: `python -m tests.launch.board_pictures docs/images`."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from tests.launch.test_board import training
from tests.support.browser import open_page

TRAINED_S = 75.0
"""Until there is something to see."""


FLAGS = ("--standbys", "1", "--mode", "ssp", "--staleness", "4", "--checkpoint-every", "20s")


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as checkpoints,
        training(*FLAGS, "--checkpoint", checkpoints) as process,
        open_page(f"{process.ready['metrics']}/", scheme="light", height=660) as light,
        open_page(f"{process.ready['metrics']}/", scheme="dark", height=660) as dark,
    ):
        time.sleep(TRAINED_S)
        light.screenshot(folder / "board-light.png")
        dark.screenshot(folder / "board-dark.png")


if __name__ == "__main__":
    main()
