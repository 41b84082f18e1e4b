"""`psstore-server`: the command line of the store. argparse: importing typer takes about 50 ms more, a
third of the time to ready.
"""

from __future__ import annotations

import argparse
import sys
import typing
from collections.abc import Sequence

import msgspec

from psstore.cli.standard_output import refusals_said_by
from psstore.config import Resolved, choices, config_path, flag_of, resolve
from psstore.errors import PsstoreError
from psstore.exit_codes import EXIT_MISSING, EXIT_OK, exit_codes_of
from psstore.server import logs
from psstore.server.leave import leave
from psstore.server.settings import ServerSettings
from psstore.server.site import tcp_address
from psstore.server.supervisor import Supervisor

EPILOG = """\
Each setting comes from the first source that has it: its flag, the environment variable PSSTORE_<NAME>
(PSSTORE_LOG_LEVEL), the key of that name in the config file (log_level = "debug"), its default.
"""


def main() -> None:
    with refusals_said_by("psstore-server"):
        code = run(sys.argv[1:])
    leave(code)


def run(arguments: Sequence[str]) -> int:
    """Returns the exit status."""
    flags = _parser().parse_args(arguments)
    try:
        resolved = resolve(ServerSettings, flags=vars(flags), file=config_path(flags.config))
        if not flags.print_config:
            return _serve(resolved, ready_fd=flags.ready_fd)
    except (PsstoreError, OSError) as error:
        print(f"psstore-server: {error}", file=sys.stderr)
        return EXIT_MISSING
    print(resolved)
    return EXIT_OK


def _serve(resolved: Resolved[ServerSettings], *, ready_fd: int | None) -> int:
    settings = resolved.settings
    logs.configure(who="supervisor", level=settings.log_level, form=settings.log_format)
    supervisor = Supervisor(settings, tcp=tcp_address(resolved))
    return supervisor.run(out=sys.stdout, ready_fd=ready_fd)


def _parser() -> argparse.ArgumentParser:
    parser = _ServerParser(
        prog="psstore-server",
        description="A fully sharded in-memory parameter store.",
        epilog="\n".join([EPILOG, "Exit codes:", *(f"  {line}" for line in exit_codes_of("psstore-server"))]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for field in msgspec.structs.fields(ServerSettings):
        _add_flag(parser, field)
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings")
    parser.add_argument("--print-config", action="store_true", help="show each setting and its source, and exit")
    parser.add_argument("--ready-fd", metavar="N", type=int, help="write the ready line as JSON to this descriptor")
    parser.add_argument(
        "--print-completion",
        choices=("bash", "zsh", "fish"),
        action=_Completion,
        help='show what makes a shell complete these flags, as: eval "$(psstore-server --print-completion bash)"',
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version, and exit")
    return parser


class _ServerParser(argparse.ArgumentParser):
    def print_help(self, file: typing.Any = None) -> None:
        """As argparse does, which says nothing where the system refuses it."""
        print(self.format_help(), end="", file=file)


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from psstore.cli.version import version_text

        print(f"{parser.prog} {version_text()}")
        parser.exit()


class _Completion(argparse.Action):
    """Imports what it takes only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, _: object, shell: object, *__: object) -> None:
        from shtab import complete

        print(complete(parser, str(shell)))
        parser.exit()


def _add_flag(parser: argparse.ArgumentParser, field: msgspec.structs.FieldInfo) -> None:
    """The flag of one setting. Its text is converted and checked where variables and files are, too."""
    kind, *metas = typing.get_args(field.type)
    text = " ".join(meta.description for meta in metas if meta.description)
    if kind is bool:
        parser.add_argument(flag_of(field.name), action=argparse.BooleanOptionalAction, help=text)
        return
    if field.default is not None:
        text += f" (default: {field.default})"
    named = choices(kind)
    metavar = "{" + ",".join(named) + "}" if named else field.name.upper()
    parser.add_argument(flag_of(field.name), metavar=metavar, help=text)


if __name__ == "__main__":
    main()
