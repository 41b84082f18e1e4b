"""`psstore checkpoint`: what is in a place of checkpoints, whether it is right, and to and from others' formats."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from psstore.cli.choices import fail
from psstore.cli.credentials import with_credentials
from psstore.errors import BadArgument, PsstoreError, StorageError, UsageError
from psstore.exit_codes import EXIT_FAILED, EXIT_MISSING, EXIT_USAGE

if TYPE_CHECKING:
    from psstore.checkpoint.place import FoundCheckpoint, OpenedUrl

WIDEST = 1000
"""Columns of a terminal that no table needs. In a narrow one lines are broken, and no figure is cut."""

app = typer.Typer(no_args_is_help=True, help="List, verify, export and import checkpoints.")

Url = Annotated[str, typer.Argument(metavar="URL", help="Folder or URL of a run's checkpoints.", show_default=False)]

UrlAndVersion = Annotated[
    str,
    typer.Argument(metavar="URL[@VERSION]", help="One checkpoint; without @VERSION the latest.", show_default=False),
]

AllowPickle = Annotated[
    bool, typer.Option("--allow-pickle", help="torch.distributed.checkpoint's own files: they are pickles.")
]


class Form(str, Enum):
    """What `export` writes."""

    torch = "torch"
    safetensors = "safetensors"
    dcp = "dcp"


class CheckpointLine(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint as `ls --json` prints it."""

    version: int
    status: str
    shards: int = 0
    workers: int = 0
    tensors: int = 0
    bytes: int = 0
    created: float | None = None
    """Unix time in seconds."""
    problem: str | None = None


@app.command("ls")
def list_checkpoints(
    url: Url, as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False
) -> None:
    """List the checkpoints of a place, the oldest first."""
    from psstore.checkpoint.reader import read_manifest

    with _said():
        opened = _open(url)
        place = opened.place
        if opened.version is not None and opened.version not in place.folders():
            read_manifest(place.storage, opened.version)  # raises, unless it has come meanwhile
        found = place.list() if opened.version is None else [place.look_at(opened.version)]
        lines = [_line(one) for one in found]
        if as_json:
            for line in lines:
                typer.echo(msgspec.json.encode(line).decode())
        else:
            _show(place.storage.url, lines)


@app.command()
def verify(
    url: UrlAndVersion,
    every: Annotated[bool, typer.Option("--all", help="All that are complete, not only one.")] = False,
) -> None:
    """Read every byte of a checkpoint and hold it against its hashes."""
    from psstore.checkpoint import reader
    from psstore.checkpoint.place import UNFINISHED

    with _said():
        place, version = _open(url)
        if every and version is not None:
            raise BadArgument(f"--all verifies every version: leave out @{version}, or --all")
        if every:
            versions = [one.version for one in place.list() if one.status != UNFINISHED] or [place.latest()]
        else:
            versions = [place.latest() if version is None else version]
        wrong = 0
        found: dict[int, reader.Found] = {}
        for one in versions:
            begin = time.perf_counter()
            try:
                manifest = reader.verify(place.storage, one, found=found)
            except StorageError as error:
                if not every:
                    raise
                wrong += 1
                typer.echo(f"psstore: {error.message}", err=True)
                continue
            seconds = time.perf_counter() - begin
            size = f"{manifest.num_bytes:,} bytes in {len(manifest.files)} files"
            typer.echo(f"version {one}: {size} are right ({seconds:.1f} s)")
        if wrong:
            fail(f"{wrong} of {len(versions)} checkpoints are damaged, or can't be read", exit_code=EXIT_FAILED)


@app.command()
@with_credentials
def save(
    store: Annotated[str, typer.Argument(metavar="STORE", help="A running store: ps://host:port.", show_default=False)],
    url: Annotated[
        str | None, typer.Argument(help="Where to, as its shards see it (default: its --checkpoint).")
    ] = None,
    wait: Annotated[float, typer.Option(help="Seconds that it may take.")] = 3600.0,
) -> None:
    """Have a running store write a checkpoint, beside its training."""
    import psstore

    with _said(), psstore.connect(store, role="client") as client:
        version = client.checkpoint(url, wait_s=wait)
        typer.echo(f"version {version} is written" + (f" to {url}" if url is not None else ""))


@app.command("export")
def export_to(
    url: UrlAndVersion,
    folder: Annotated[Path, typer.Argument(help="Where the files go.", show_default=False)],
    form: Annotated[
        Form,
        typer.Option(
            "--format",
            help="torch: model.safetensors, model.pt, optimizer.pt; safetensors: the first of them, without torch; dcp:"
            " a folder of torch.distributed.checkpoint's. Beside any of them tables.safetensors, of tables of rows.",
        ),
    ] = Form.torch,
    allow_pickle: AllowPickle = False,
) -> None:
    """Write a checkpoint as files that need no psstore."""
    from psstore.checkpoint.exchange.exporting import export_checkpoint

    with _said():
        place, version = _open(url)
        with place.open(version) as checkpoint:
            written = export_checkpoint(checkpoint, folder, form=form.value, allow_pickle=allow_pickle)
            typer.echo(f"version {checkpoint.version} of {place.storage.url}:")
        for path in written:
            typer.echo(f"  {path}  {path.stat().st_size:,} bytes")


@app.command("import")
def import_from(
    url: Url,
    model: Annotated[
        Path, typer.Argument(help="model.safetensors, model.pt, or a folder of torch.distributed.checkpoint's.")
    ],
    optimizer: Annotated[Path | None, typer.Option(help="optimizer.pt: a torch optimizer's state_dict().")] = None,
    rule: Annotated[
        str | None,
        typer.Option(
            help="sgd, adam, adamw, adagrad, rmsprop or delayed_nesterov, if the optimizer's file does not tell."
        ),
    ] = None,
    names: Annotated[
        Path | None, typer.Option(help="Names of the trained parameters, one a line, in the optimizer's order.")
    ] = None,
    version: Annotated[int, typer.Option(min=0, help="Which version it becomes.")] = 0,
    allow_pickle: AllowPickle = False,
) -> None:
    """Make a checkpoint of others' files."""
    from psstore.checkpoint.exchange.importing import import_model
    from psstore.checkpoint.exchange.whole_model import write_whole_model

    with _said():
        opened = _open(url)
        if opened.version is not None:
            fail(f"{url}: import takes the place's URL; say the version with --version {opened.version}")
        imported = import_model(
            model,
            optimizer=optimizer,
            rule=rule,
            names=_names_in(names) if names is not None else None,
            version=version,
            allow_pickle=allow_pickle,
        )
        manifest = write_whole_model(opened.place, imported)
        rules = ", ".join(dict.fromkeys(tensor.spec.rule for tensor in imported.tensors)) or "none"
        count = f"{len(imported.tensors)} tensors, {manifest.num_bytes:,} bytes"
        typer.echo(f"{opened.place.storage.url}@{version}: {count}, rules: {rules}")


def _names_in(file: Path) -> list[str]:
    try:
        return [line for line in file.read_text(encoding="utf-8").splitlines() if line]
    except UnicodeDecodeError as error:
        fail(f"{file}: {error}; expected names of parameters, one a line, in UTF-8")


@contextmanager
def _said() -> Iterator[None]:
    """Ends the command with a sentence, and the exit status that says whose matter it is."""
    try:
        yield
    except UsageError as error:
        fail(error.message, exit_code=EXIT_USAGE)
    except PsstoreError as error:
        fail(error.message, exit_code=EXIT_FAILED)
    except ModuleNotFoundError as error:
        package = "'psstore[torch]'" if error.name == "torch" else error.name
        fail(f"{error}; install it, as with: pip install {package}", exit_code=EXIT_MISSING)


def _open(url: str) -> OpenedUrl:
    from psstore.checkpoint.place import open_place

    return open_place(url)


def _line(found: FoundCheckpoint) -> CheckpointLine:
    manifest = found.manifest
    if manifest is None:
        return CheckpointLine(version=found.version, status=found.status, problem=found.problem or None)
    return CheckpointLine(
        version=found.version,
        status=found.status,
        shards=len(manifest.of_kind("shard")),
        workers=len(manifest.of_kind("worker")),
        tensors=len(manifest.store.tensors),
        bytes=manifest.num_bytes,
        created=manifest.created,
        problem=found.problem or None,
    )


def _show(url: str, lines: list[CheckpointLine]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if not lines:
        typer.echo(f"{url} has no checkpoints")
        return
    table = Table(title=Text(url), title_justify="left")
    for heading in ("version", "bytes", "shards", "workers", "tensors"):
        table.add_column(heading, justify="right")
    table.add_column("written (UTC)", no_wrap=True)
    table.add_column("status", no_wrap=True)
    for line in lines:
        when = "" if line.created is None else time.strftime("%Y-%m-%d %H:%M", time.gmtime(line.created))
        figures = [f"{one:,}" for one in (line.bytes, line.shards, line.workers, line.tensors)]
        table.add_row(str(line.version), *(figures if line.created is not None else [""] * 4), when, line.status)
    console = Console()
    console.width = max(console.width, console.measure(table, options=console.options.update(width=WIDEST)).maximum)
    console.print(table)
    for line in lines:
        if line.problem is not None:
            typer.echo(line.problem)
