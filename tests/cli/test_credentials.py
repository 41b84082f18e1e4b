"""Commands that are a store's clients prove themselves by options as they do by the environment."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from psstore.cli.credentials import VARIABLES
from psstore.cli.main import app
from tests.support.certificates import TestCA
from tests.support.server_process import StoreProcess

pytestmark = [pytest.mark.sockets, pytest.mark.one_loop]


@pytest.mark.parametrize(
    "command", ["status", "top", "doctor", "bench", "trace", "promote", "reshard", "checkpoint save"], ids=str.split
)
def test_every_client_has_the_options(command: str) -> None:
    told = CliRunner().invoke(app, [*command.split(), "--help"]).output
    for name in VARIABLES:
        assert f"--{name.replace('_', '-')}" in told


def test_commands_go_by_options(tmp_path: Path) -> None:
    ca = TestCA(tmp_path)
    host = ca.issue("127.0.0.1", "localhost")
    token = tmp_path / "token"
    token.write_text("5" * 32)
    token.chmod(0o600)
    before = dict(os.environ)
    flags = [*host.flags(ca=ca.pem), "--token-file", str(token)]
    place = ["--checkpoint", str(tmp_path / "run"), "--checkpoint-every", "1000000"]
    with StoreProcess(*flags, *place) as process:
        for command, answer in (
            (["status", process.url], "version 0"),
            (["top", process.url, "--once", "--every", "0.1"], "version 0"),
            (["doctor", process.url], "nothing is wrong"),
            (["checkpoint", "save", process.url], "is written"),
            (["reshard", process.url, "--shards", "1"], "has 1 shard already"),
        ):
            proved = CliRunner().invoke(app, [*command, *flags, "--tls-ca", str(ca.pem)])
            assert answer in proved.output, (command, proved.output)
            assert answer not in CliRunner().invoke(app, command).output
    assert os.environ == before


def test_a_file_that_is_not_there_is_said_before_anything_is_asked(tmp_path: Path) -> None:
    ran = CliRunner().invoke(app, ["status", "ps://127.0.0.1:1", "--tls-ca", str(tmp_path / "none")])
    assert ran.exit_code == 2
    assert "Invalid value for '--tls-ca'" in ran.output
