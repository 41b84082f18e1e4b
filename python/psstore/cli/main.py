"""`psstore`: the command line of everything but the server, which has its own (`psstore-server`).

Each command is a module that is imported when it is called, so that `psstore version` does not wait for rich.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from psstore.cli.bench import bench
from psstore.cli.checkpoint import app as checkpoint
from psstore.cli.demo.command import demo
from psstore.cli.doctor import doctor
from psstore.cli.kubernetes import app as kubernetes
from psstore.cli.plan import plan
from psstore.cli.promote import promote
from psstore.cli.relay import relay
from psstore.cli.reshard import reshard
from psstore.cli.run import run
from psstore.cli.standard_output import refusals_said_by
from psstore.cli.status import status
from psstore.cli.top import top
from psstore.cli.trace import trace
from psstore.cli.version import version_text
from psstore.exit_codes import exit_codes_of, exit_codes_of_group

app = typer.Typer(
    name="psstore",
    help="A fully sharded in-memory parameter store for PyTorch.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

AS_IS = {"allow_extra_args": True, "ignore_unknown_options": True}
"""What follows belongs to another program."""

app.command(context_settings={"allow_interspersed_args": False})(run)
app.command()(demo)
app.command()(plan)
app.command()(bench)
app.command()(status)
app.command()(promote)
app.command()(reshard)
app.command(context_settings=AS_IS)(relay)
app.command()(top)
app.command()(trace)
app.command()(doctor)
app.add_typer(checkpoint, name="checkpoint")
app.add_typer(kubernetes, name="kubernetes")


@app.command(context_settings={**AS_IS, "help_option_names": []}, add_help_option=False)
def server(context: typer.Context) -> None:
    """Start a store: the same as `psstore-server`."""
    from psstore.cli import server as program

    raise typer.Exit(program.run(context.args))


@app.command()
def version(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Also Python, CPU kernels, GPUs.")] = False,
) -> None:
    """Say which psstore this is."""
    from psstore import _core

    typer.echo(f"psstore {version_text()}")
    if verbose:
        typer.echo(f"python {sys.version.split()[0]}")
        typer.echo(f"instruction sets {', '.join(_core.instruction_sets())}")
        typer.echo(f"{_core.cuda_device_count()} CUDA devices")


def _say_version(asked: bool) -> None:
    if asked:
        version()
        raise typer.Exit


@app.callback()
def _options(
    _: Annotated[bool, typer.Option("--version", callback=_say_version, help="The same as `psstore version`.")] = False,
) -> None:
    """Before any command."""


def _show_exit_codes() -> None:
    """At the end of the --help of each command, and of each group of them."""
    for name, group in (("", app), ("checkpoint", checkpoint), ("kubernetes", kubernetes)):
        if name:
            group.info.epilog = _list_of(exit_codes_of_group(name))
        for command in group.registered_commands:
            assert command.callback is not None
            codes = exit_codes_of(f"{name} {command.name or command.callback.__name__}".strip())
            command.epilog = _list_of(codes)


def _list_of(codes: list[str]) -> str:
    return "\n\n".join(["Exit codes:", *(f"- {line}" for line in codes)])


_show_exit_codes()


def main() -> None:
    with refusals_said_by("psstore"):
        app()


if __name__ == "__main__":
    main()
