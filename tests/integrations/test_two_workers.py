"""Two workers, in a process group of their framework's or each with a Trainer of its own, killed and started again by
the same command."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations import two_workers
from tests.support.two_workers import RUN_S


@pytest.mark.long
@pytest.mark.timeout(3 * RUN_S)
@pytest.mark.parametrize("how", ["alone", "group"])
@pytest.mark.parametrize(("framework", "package"), [("lightning", "lightning"), ("huggingface", "transformers")])
def test_two_workers_go_on_from_the_storage_that_they_left(
    framework: str, package: str, how: str, tmp_path: Path
) -> None:
    pytest.importorskip(package)

    def run(place: Path, num_shards: int) -> str:
        script = str(Path(two_workers.__file__))
        flags = ["--shards", str(num_shards), "--workers", "2", "--checkpoint", str(place), "--checkpoint-every", "2"]
        command = [sys.executable, "-m", "psstore.cli.main", "run", *flags, script, framework, how, str(place)]
        environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "GLOO_SOCKET_IFNAME": "lo"}
        done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=RUN_S)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    first, second = run(tmp_path / "place", 1), run(tmp_path / "copy", 3)
    assert set(re.findall(r"began (\d+)", first)) == {"0"}
    began = set(re.findall(r"began (\d+)", second))
    assert len(began) == 1
    assert "0" not in began
    ended = sorted(re.findall(r"ended (.*)", first))
    assert len(ended) == 2
    assert ended == sorted(re.findall(r"ended (.*)", second))
