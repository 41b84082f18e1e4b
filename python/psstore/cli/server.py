"""`psstore-server`: the command line of the store. argparse: importing typer takes about 50 ms more, a
third of the time to ready.

Exit status: 0 after a drain, 1 if the store was lost, 2 for an unknown flag, 3 if it can't start.
"""

from __future__ import annotations

import argparse
import sys
import typing
from collections.abc import Sequence

import msgspec

from psstore.config import choices, config_path, flag_of, resolve
from psstore.errors import PsstoreError
from psstore.server import logs
from psstore.server.settings import ServerSettings
from psstore.server.site import tcp_address
from psstore.server.supervisor import EXIT_NOT_STARTED, EXIT_OK, Supervisor

EPILOG = """\
Each setting comes from the first source that has it: its flag, the environment variable PSSTORE_<NAME>
(PSSTORE_LOG_LEVEL), the key of that name in the config file (log_level = "debug"), its default.
"""


def main() -> None:
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Returns the exit status."""
    flags = _parser().parse_args(arguments)
    try:
        resolved = resolve(ServerSettings, flags=vars(flags), file=config_path(flags.config))
        if flags.print_config:
            print(resolved)
            return EXIT_OK
        settings = resolved.settings
        logs.configure(who="supervisor", level=settings.log_level, form=settings.log_format)
        supervisor = Supervisor(settings, tcp=tcp_address(resolved))
        return supervisor.run(out=sys.stdout, ready_fd=flags.ready_fd)
    except (PsstoreError, OSError) as error:
        print(f"psstore-server: {error}", file=sys.stderr)
        return EXIT_NOT_STARTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="psstore-server",
        description="A fully sharded in-memory parameter store.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for field in msgspec.structs.fields(ServerSettings):
        _add_flag(parser, field)
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings")
    parser.add_argument("--print-config", action="store_true", help="show each setting and its source, and exit")
    parser.add_argument("--ready-fd", metavar="N", type=int, help="write the ready line as JSON to this descriptor")
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version, and exit")
    return parser


class _Version(argparse.Action):
    """Looks the version up only when it is asked for: that takes 20 ms."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        print(f"{parser.prog} {version('psstore')}")
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
