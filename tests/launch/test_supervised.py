"""What works for a supervisor ends with it, while the store that it asks does not answer."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable

import msgspec
import pytest

from psstore.checkpoint.interval import CheckpointInterval
from psstore.config import Credentials
from psstore.exit_codes import EXIT_FAILED
from psstore.server.processes import CheckpointDuty, ReshardDuty
from tests.support.server_process import END_S, START_S

PLACE = "/nowhere"


def checkpoint_duty(url: str) -> CheckpointDuty:
    return CheckpointDuty(
        url=url,
        credentials=Credentials(),
        place=PLACE,
        interval=CheckpointInterval(decisions=1),
        began_at=0,
        log_level="info",
        log_format="text",
    )


def reshard_duty(url: str) -> ReshardDuty:
    return ReshardDuty(
        client="c" * 32, url=url, credentials=Credentials(), place=PLACE, log_level="info", log_format="text"
    )


@pytest.mark.sockets
@pytest.mark.one_loop
@pytest.mark.parametrize(("module", "duty_at"), [("checkpointing", checkpoint_duty), ("resharding", reshard_duty)])
def test_it_ends_with_the_supervisor(module: str, duty_at: Callable[[str], msgspec.Struct]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(START_S)
        url = f"ps://127.0.0.1:{silent.getsockname()[1]}"
        command = [sys.executable, "-m", f"psstore.launch.{module}"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(duty_at(url)) + b"\n")
            process.stdin.flush()
            asked, _ = silent.accept()
            with asked:
                assert process.poll() is None, "it waits for an answer"
                process.stdin.close()
                assert process.wait(END_S) == EXIT_FAILED
