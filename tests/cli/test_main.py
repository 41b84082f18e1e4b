"""`psstore` as a whole: its commands, and what they load."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import psstore
from psstore.cli import server
from psstore.cli.main import app
from psstore.exit_codes import OF_COMMAND, exit_codes_of


def test_help_names_every_command() -> None:
    text = CliRunner().invoke(app, ["--help"]).stdout
    for name in ("run", "demo", "plan", "status", "top", "doctor", "kubernetes", "server", "version"):
        assert f" {name} " in text


def test_version_says_which_and_with_what() -> None:
    asked = (["version"], ["--version"], ["version", "-v"])
    plain, flag, verbose = (CliRunner().invoke(app, arguments).stdout for arguments in asked)
    built = psstore.cuda.version()
    cuda = "without CUDA" if built is None else f"CUDA {built}"
    assert plain == flag == f"psstore {psstore.__version__}, {cuda}\n"
    assert verbose.startswith(plain)
    assert "instruction sets" in verbose


def test_psstore_server_says_which_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        server.run(["--version"])
    asked = CliRunner().invoke(app, ["version"]).stdout
    assert capsys.readouterr().out == asked.replace("psstore", "psstore-server", 1)


def test_the_version_is_in_one_place(repository: Path) -> None:
    assert version("psstore") == psstore.__version__
    assert "\nversion =" not in (repository / "pyproject.toml").read_text()


def commands(group: typer.core.TyperGroup, prefix: str = "") -> Iterator[str]:
    for name, command in group.commands.items():
        if isinstance(command, typer.core.TyperGroup):
            yield from commands(command, f"{prefix}{name} ")
        else:
            yield prefix + name


@pytest.mark.parametrize(
    "command",
    ["status", "top", "trace", "bench", "doctor", "promote", "reshard --shards 2", "relay", "checkpoint save"],
)
def test_a_url_that_is_none_is_wrong_usage(command: str) -> None:
    ran = CliRunner().invoke(app, [*command.split(), "nonsense"])
    assert (ran.exit_code, ran.stdout) == (2, "")
    assert "address 'nonsense': expected ps://host:port" in ran.stderr


@pytest.mark.parametrize(("flag", "said"), [("--dtype=int8", "dtype is 'int8'"), ("--porf=1", "exit code 2")])
def test_a_flag_of_a_relay_that_is_none_is_wrong_usage(flag: str, said: str) -> None:
    """Also if it were its server's."""
    command = [sys.executable, "-m", "psstore.cli.main", "relay", "ps://127.0.0.1:1", flag]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert said in ran.stderr


@pytest.mark.parametrize("command", ["status", "top", "trace", "bench", "doctor"])
def test_a_url_of_the_environment_that_is_none_is_wrong_usage(command: str) -> None:
    ran = CliRunner().invoke(app, command.split(), env={"PSSTORE_URL": "nonsense"})
    assert (ran.exit_code, ran.stdout) == (2, "")
    assert "address 'nonsense': expected ps://host:port" in ran.stderr


def test_the_help_of_each_command_ends_with_its_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    there = set(commands(group))
    assert there | {"psstore-server"} == set(OF_COMMAND)
    helps = {name: CliRunner().invoke(app, [*name.split(), "--help"]).stdout for name in there - {"server"}}
    with pytest.raises(SystemExit):
        server.run(["--help"])
    for name, text in {**helps, "psstore-server": capsys.readouterr().out}.items():
        shown = re.findall(r"^\W*(\d+): ", text.rpartition("Exit codes:")[2], re.MULTILINE)
        assert shown == [line.partition(":")[0] for line in exit_codes_of(name)], name


@pytest.mark.parametrize("group", ["checkpoint", "kubernetes"])
def test_the_help_of_a_group_ends_with_the_exit_codes_of_its_commands(group: str) -> None:
    text = " ".join(CliRunner().invoke(app, [group, "--help"]).stdout.rpartition("Exit codes:")[2].split())
    shown = re.findall(r"(\d+): ", text)
    codes = {
        line.partition(":")[0] for name in OF_COMMAND if name.startswith(f"{group} ") for line in exit_codes_of(name)
    }
    assert shown == sorted(codes, key=int)
    if group == "checkpoint":
        assert "3: no package for that format (export, import)" in text


BASH = shutil.which("bash")


@pytest.mark.skipif(BASH is None, reason="needs bash")
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("psstore check", {"checkpoint"}),
        ("psstore run --sh", {"--shards"}),
        ("psstore checkpoint ver", {"verify"}),
        ("psstore-server --sh", {"--shards", "--shards-at", "--shard-index"}),
    ],
)
def test_a_shell_completes_what_is_typed(typed: str, offered: set[str]) -> None:
    """As bash does it: by the function that `complete` registered for the first word."""
    script = f"""
        eval "$(psstore --show-completion bash)"; eval "$(psstore-server --print-completion bash)"
        COMP_LINE='{typed}'; COMP_POINT=${{#COMP_LINE}}; COMP_WORDS=({typed}); COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
        [[ $(complete -p ${{COMP_WORDS[0]}}) =~ -F\\ ([a-z_]+) ]]; ${{BASH_REMATCH[1]}} ${{COMP_WORDS[0]}}
        echo "${{COMPREPLY[@]}}"
    """
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run([str(BASH), "-c", script], env=environ, capture_output=True, text=True)
    assert set(done.stdout.split()) == offered, done.stderr


def test_server_is_psstore_server_with_its_own_flags_and_exit_status() -> None:
    def both(*flags: str) -> list[tuple[int, str]]:
        starts = (["psstore.cli.main", "server"], ["psstore.cli.server"])
        ran = [
            subprocess.run([sys.executable, "-m", *start, *flags], capture_output=True, text=True) for start in starts
        ]
        return [(one.returncode, one.stdout) for one in ran]

    one, other = both("--print-config", "--shards", "3")
    assert one == other
    assert one[0] == 0
    assert [code for code, _ in both("--shards", "zero")] == [3, 3]


SAYING = {
    "version": ("psstore.cli.main", "version"),
    "help": ("psstore.cli.main", "--help"),
    "plan": ("psstore.cli.main", "plan", "--shards", "2", "--model", "gpt2"),
    "help of the server": ("psstore.cli.server", "--help"),
    "completion of the server": ("psstore.cli.server", "--print-completion", "zsh"),
    "config of the server": ("psstore.cli.server", "--print-config"),
}
"""Programs with arguments that have them write to standard output, some more than a buffer, and end."""


def ended(arguments: tuple[str, ...], output: int) -> tuple[int, str]:
    """Exit code and stderr of a program with that standard output."""
    ran = subprocess.run([sys.executable, "-m", *arguments], stdout=output, stderr=subprocess.PIPE, text=True)
    return ran.returncode, ran.stderr


@pytest.mark.parametrize("arguments", SAYING.values(), ids=SAYING)
def test_what_the_system_refuses_is_said_in_a_sentence(arguments: tuple[str, ...]) -> None:
    program = arguments[0].removesuffix(".main").replace("psstore.cli.server", "psstore-server").removesuffix(".cli")
    with open("/dev/full", "w") as full:
        assert ended(arguments, full.fileno()) == (1, f"{program}: [Errno 28] No space left on device\n")


@pytest.mark.parametrize("arguments", SAYING.values(), ids=SAYING)
def test_a_program_ends_quietly_where_nobody_reads_on(arguments: tuple[str, ...]) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        assert ended(arguments, write) == (1, "")
    finally:
        os.close(write)


@pytest.mark.parametrize("arguments", [("plan", "gpt2"), ("plan", "--help"), ("doctor", "--help")])
@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_letters_that_a_terminal_does_not_have_are_left_out(encoding: str, arguments: tuple[str, ...]) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "psstore.cli.main", *arguments],
        env={**os.environ, "PYTHONIOENCODING": encoding},
        capture_output=True,
        encoding=encoding,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "?" in ran.stdout


def test_the_command_line_loads_torch_for_no_command_that_needs_none() -> None:
    program = "import sys; from psstore.cli.main import app; print('torch' in sys.modules, 'numpy' in sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert loaded == "False False\n"
