"""`psstore trace`: a timeline of the next steps of all workers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from psstore.cli.choices import StoreUrl, fail
from psstore.cli.credentials import with_credentials
from psstore.cli.ending import end_as_by_ctrl_c
from psstore.exit_codes import EXIT_FAILED, EXIT_MISSING

if TYPE_CHECKING:
    from psstore.launch.timeline import Steps

LOOK_S = 0.1
"""Between two looks how far workers are."""


@with_credentials
def trace(
    url: StoreUrl = "",
    steps: Annotated[int, typer.Option(min=1, help="How many.")] = 20,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where to write the timeline.")] = Path("trace.json"),
    patience: Annotated[float, typer.Option(min=0, metavar="SECONDS", help="How long that may take.")] = 300.0,
) -> None:
    """Write a timeline of the next steps, for Perfetto (ui.perfetto.dev) or chrome://tracing: each worker's compute,
    push, commit and pull, and for whom it waits. Workers and this command need PSSTORE_TRACE: a folder that all of them
    see."""
    import msgspec

    from psstore.client.connect import connect
    from psstore.client.store_status import CONNECT_S, look_at
    from psstore.config import worker_environment
    from psstore.errors import PsstoreError
    from psstore.launch.timeline import timeline, whole_steps

    end_as_by_ctrl_c()
    folder = worker_environment().trace
    if folder is None:
        fail("PSSTORE_TRACE is not set: to a folder that this command and all workers see, before they start")
    try:
        with connect(url or None, role="client", connect_timeout_s=CONNECT_S) as store:
            ranks, apart = look_at(store).live, store.consistency.mode == "async"
        if not ranks:
            fail("no worker trains there", exit_code=EXIT_FAILED)
        workers = collect(folder, ranks, steps, patience, apart=apart)
        found = {rank: whole[:steps] for rank, whole in whole_steps(workers, apart=apart).items()}
        if any(len(whole) < steps for whole in found.values()):
            fail(f"{reason(workers, folder)} within {patience:g} s", exit_code=EXIT_FAILED)
        out.write_bytes(msgspec.json.encode(timeline(workers, found, apart=apart)))
    except PsstoreError as error:
        fail(error.message, exit_code=EXIT_MISSING)
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}", exit_code=EXIT_FAILED)
    first = found[ranks[0]]
    which = f"{steps} steps of each" if apart else f"steps {first[0]} to {first[-1]}"
    typer.echo(f"{which} of {len(ranks)} workers: {out}")


def collect(
    folder: Path, ranks: tuple[int, ...], num_steps: int, patience_s: float, *, apart: bool
) -> dict[int, Steps]:
    """What workers note until all have noted so many whole steps, or that time is over. Raises OSError."""
    from psstore.client.traced import WANTED, path_of, who_asks
    from psstore.launch.timeline import read_spans, whole_steps

    for rank in ranks:
        path_of(folder, rank).unlink(missing_ok=True)  # of another time
    wanted = folder / WANTED
    wanted.touch()
    own = who_asks(wanted)
    until = time.monotonic() + patience_s
    try:
        while True:
            workers = {rank: read_spans(folder, rank) for rank in ranks}
            whole = whole_steps(workers, apart=apart).values()
            if all(len(steps) >= num_steps for steps in whole) or time.monotonic() > until:
                return workers
            if who_asks(wanted) != own:
                fail(f"another trace has begun in {folder}: workers note for one at a time", exit_code=EXIT_FAILED)
            time.sleep(LOOK_S)
    finally:
        if who_asks(wanted) == own:
            wanted.unlink(missing_ok=True)


def reason(workers: dict[int, Steps], folder: Path) -> str:
    """Why there are too few steps."""
    silent = [rank for rank, steps in workers.items() if not steps]
    if silent:
        return f"rank {silent[0]} has noted nothing in {folder} (is PSSTORE_TRACE set where it runs?)"
    return "workers have not taken so many steps"
