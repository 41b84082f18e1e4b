"""What a shard process and its supervisor say to each other."""

from __future__ import annotations

import subprocess
import sys

SHARD = "from psstore.server.orders import report; input(); report('lost', 'client'); report('ready')"


def test_a_supervisor_that_is_gone_is_told_nothing_and_ends_nothing() -> None:
    command = [sys.executable, "-c", SHARD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as shard:
        assert shard.stdin is not None
        assert shard.stdout is not None
        assert shard.stderr is not None
        shard.stdout.close()
        shard.stdin.write(b"\n")
        shard.stdin.close()
        assert shard.stderr.read() == b""
        assert shard.wait() == 0
