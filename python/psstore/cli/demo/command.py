"""`psstore demo`: the command. It starts a store and workers, shows how they train, and checks the result."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from psstore.cli.choices import Mode, consistency_of, fail
from psstore.cli.demo.messages import DEFAULT_EPOCHS, DEFAULT_EVERY, MNIST_EPOCHS, Settings, Strategy, report_of
from psstore.codec.compression import Compression
from psstore.errors import BadArgument

if TYPE_CHECKING:
    from rich.console import Console

    from psstore.cli.demo.display import Display
    from psstore.launch.job import Job
    from psstore.types import Consistency

EXIT_MISSING = 3


def demo(
    strategy: Annotated[
        Strategy,
        typer.Option(
            help="ps: the store takes every step. allreduce: torch's DistributedDataParallel does, without a store."
            " average: each worker steps alone, and the store averages their weights now and then."
        ),
    ] = Strategy.ps,
    every: Annotated[int, typer.Option(min=1, help="average: steps from one average to the next.")] = DEFAULT_EVERY,
    mode: Annotated[Mode, typer.Option(help="Consistency of the store.")] = Mode.sync,
    shards: Annotated[int, typer.Option(min=1, help="Shard processes of the store.")] = 2,
    workers: Annotated[int, typer.Option(min=1, help="Worker processes.")] = 2,
    staleness: Annotated[int, typer.Option(min=0, help="ssp: rounds a worker may be ahead of the slowest.")] = 2,
    backups: Annotated[int, typer.Option(min=0, help="backup: late workers that a round does without.")] = 1,
    compression: Annotated[
        str,
        typer.Option(
            help="ps: send fewer bytes, with some loss: bf16, fp16, int8 or sign both ways, topk:0.01 for gradients, or"
            " push=sign,pull=int8."
        ),
    ] = "none",
    epochs: Annotated[
        int | None, typer.Option(min=1, help=f"Passes over the data. [default: {DEFAULT_EPOCHS}, MNIST {MNIST_EPOCHS}]")
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="Directory with MNIST's four IDX files, gzipped or not."),
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Also train in one process; compare the weights.")] = False,
    seed: Annotated[int, typer.Option(help="Of the first weights and the order of the images.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, in the last line.")] = False,
) -> None:
    """Train a small network on real handwritten digits, with real processes, here and now."""
    from rich.console import Console

    from psstore.cli.demo.display import Display, summary

    _need_packages(digits=data_dir is None)
    if strategy is not Strategy.ps and mode is not Mode.sync:
        fail(f"--mode {mode.value} is a store's; --strategy {strategy.value} is synchronous")
    if strategy is not Strategy.ps and compression != "none":
        fail(f"--compression {compression} is a store's; --strategy {strategy.value} sends float32")
    _check(compression, data_dir)
    num_shards = 0 if strategy is Strategy.allreduce else shards
    consistency = consistency_of(mode, workers=workers, backups=backups, staleness=staleness)
    console = Console(stderr=as_json)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="psstore-demo-") as directory:
        settings = Settings(
            num_workers=workers,
            epochs=epochs or (DEFAULT_EPOCHS if data_dir is None else MNIST_EPOCHS),
            strategy=strategy,
            every=every,
            lockstep=consistency.lockstep,
            compression=compression,
            seed=seed,
            data_dir=None if data_dir is None else str(data_dir.resolve()),
            weights_path=str(Path(directory) / "weights.npz"),
            rendezvous_path=str(Path(directory) / "rendezvous"),
        )
        display = Display(
            console, how=_how(settings, mode, num_shards), num_workers=workers, dataset=_dataset(data_dir)
        )
        _train(_job(settings, num_shards, consistency), display)
        seconds = time.perf_counter() - began
        difference = _compare(console, settings) if compare else None
    report = report_of(
        display.results.values(),
        settings,
        mode=mode.value,
        num_shards=num_shards,
        seconds=seconds,
        max_abs_weight_diff=difference,
    )
    console.print(summary(report))
    if as_json:
        typer.echo(msgspec.json.encode(report).decode())


def _need_packages(*, digits: bool) -> None:
    """Before anything is started: a store without workers helps nobody."""
    needed = {"torch": "torch", **({"sklearn": "scikit-learn"} if digits else {})}
    missing = [package for module, package in needed.items() if find_spec(module) is None]
    if missing:
        fail(
            f"the demo needs {' and '.join(missing)}: {sys.executable} -m pip install {' '.join(missing)}",
            exit_code=EXIT_MISSING,
        )


def _check(compression: str, data_dir: Path | None) -> None:
    """Before anything is started: ends the command with a sentence for what workers would refuse."""
    from psstore.cli.demo.data import read_mnist

    try:
        Compression.of(compression)
        if data_dir is not None:
            read_mnist(data_dir)
    except BadArgument as error:
        fail(error.message)


def _how(settings: Settings, mode: Mode, num_shards: int) -> str:
    from psstore.cli.demo.display import count

    if settings.strategy is Strategy.allreduce:
        return "all-reduce"
    how = f"average every {settings.every}" if settings.strategy is Strategy.average else mode.value
    compressed = "" if settings.compression == "none" else f" · {settings.compression}"
    return f"{how} · {count(num_shards, 'shard')}{compressed}"


def _dataset(data_dir: Path | None) -> str:
    return "scikit-learn's handwritten digits" if data_dir is None else f"MNIST in {data_dir}"


def _job(settings: Settings, shards: int, consistency: Consistency) -> Job:
    """One CPU thread per worker: they are as many as the user wants cores for."""
    from psstore.launch.environment import find_gpus
    from psstore.launch.job import Job

    described = msgspec.json.encode(settings).decode()
    return Job(
        command=[sys.executable, "-u", "-m", "psstore.cli.demo.worker", described],
        num_shards=shards,
        consistency=consistency,
        environ=os.environ,
        gpus=find_gpus(os.environ),
    )


def _train(job: Job, display: Display) -> None:
    """Ends the command if the training fails."""
    from psstore.launch.job import run_job

    with display:
        outcome = asyncio.run(run_job(job, deliver=display.deliver))
    if outcome.exit_code != 0:
        fail(f"{outcome.reason}; everything was stopped", exit_code=outcome.exit_code)


def _compare(console: Console, settings: Settings) -> float:
    """The largest difference of any weight to those of plain PyTorch in this process."""
    with console.status("the same with plain PyTorch in one process …"):
        import numpy as np

        from psstore.cli.demo.worker import train_in_one_process

        expected = train_in_one_process(settings)
        assert settings.weights_path is not None
        with np.load(settings.weights_path) as trained:
            return max(float(np.abs(value.numpy() - trained[name]).max()) for name, value in expected.items())
