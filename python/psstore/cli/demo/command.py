"""`psstore demo`: the command. It starts a store and workers, shows how they train, and checks the result."""

from __future__ import annotations

import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from psstore.cli.choices import Mode, consistency_of, fail
from psstore.cli.demo.messages import (
    CHAOS_EPOCHS,
    DEFAULT_EPOCHS,
    DEFAULT_EVERY,
    MNIST_EPOCHS,
    Settings,
    Strategy,
    report_of,
)
from psstore.codec.compression import Compression
from psstore.errors import BadArgument
from psstore.exit_codes import EXIT_FAILED, EXIT_MISSING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.panel import Panel


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
        int | None,
        typer.Option(
            min=1,
            help=f"Passes over the data. [default: {DEFAULT_EPOCHS}, --chaos {CHAOS_EPOCHS}, MNIST {MNIST_EPOCHS}]",
        ),
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="Directory with MNIST's four IDX files, gzipped or not."),
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Also train in one process; compare the weights.")] = False,
    crash: Annotated[
        bool,
        typer.Option(
            "--crash",
            help="Also train it with checkpoints, kill all of it in the middle, and go on with one more shard from the"
            " last checkpoint; compare the bytes.",
        ),
    ] = False,
    chaos: Annotated[
        bool,
        typer.Option(
            "--chaos",
            help="Also train it with a standby for each shard while a leader, a standby or a worker is killed every two"
            " seconds; compare the bytes.",
        ),
    ] = False,
    rows: Annotated[
        bool,
        typer.Option(
            "--rows",
            help="Train a small recommender instead, with its embedding tables in the store, on clicks that a seeded"
            " generator makes.",
        ),
    ] = False,
    learners: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Train with so many learners of DiLoCo instead, which take their own steps and now and then share the"
            " weights.",
        ),
    ] = None,
    kill: Annotated[
        bool, typer.Option("--kill", help="With --learners: kill one every two seconds; another joins in its place.")
    ] = False,
    followers: Annotated[
        int | None,
        typer.Option(
            min=1, help="Train with one worker instead, whose weights so many models follow by what changes of them."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the first weights and the order of the images.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, in the last line.")] = False,
) -> None:
    """Train a small network on real handwritten digits, with real processes, here and now."""
    from rich.console import Console

    from psstore.cli.demo.chaos import train_through_chaos
    from psstore.cli.demo.crash import train_and_crash
    from psstore.cli.demo.display import Display, chaos_hashes, crash_hashes, summary
    from psstore.cli.demo.training import job_of, train

    if kill and learners is None:
        fail("--kill is for --learners: give their number, as --learners 4")
    others = {"--rows": rows, "--learners": learners is not None, "--followers": followers is not None}
    if asked := [option for option, is_asked in others.items() if is_asked]:
        _check_alone(
            asked[0],
            {
                **dict.fromkeys(asked[1:], True),
                "--strategy": strategy is not Strategy.ps,
                "--mode": mode is not Mode.sync,
                "--compression": compression != "none",
                "--epochs": epochs is not None,
                "--data-dir": data_dir is not None,
                "--compare": compare,
                "--crash": crash,
                "--chaos": chaos,
            },
        )
        if learners is not None:
            _show_learners(
                Console(stderr=as_json), shards=shards, learners=learners, seed=seed, kill=kill, as_json=as_json
            )
            return
        if followers is not None:
            _show_followers(Console(stderr=as_json), shards=shards, followers=followers, seed=seed, as_json=as_json)
            return
        _show_rows(Console(stderr=as_json), shards=shards, workers=workers, seed=seed, as_json=as_json)
        return
    _need_packages(digits=data_dir is None)
    if strategy is not Strategy.ps and mode is not Mode.sync:
        fail(f"--mode {mode.value} is a store's; --strategy {strategy.value} is synchronous")
    if strategy is Strategy.allreduce and compression != "none":
        fail(f"--compression {compression} is a store's; --strategy {strategy.value} sends float32")
    for option in (name for name, asked in (("--crash", crash), ("--chaos", chaos)) if asked):
        _check_repeatable(option, strategy, mode, compression)
    _check(compression, data_dir)
    num_shards = 0 if strategy is Strategy.allreduce else shards
    consistency = consistency_of(mode, workers=workers, backups=backups, staleness=staleness)
    console = Console(stderr=as_json)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="psstore-demo-") as directory:
        settings = Settings(
            num_workers=workers,
            epochs=epochs or (MNIST_EPOCHS if data_dir else CHAOS_EPOCHS if chaos else DEFAULT_EPOCHS),
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
        train(job_of(settings, num_shards=num_shards, consistency=consistency), display)
        seconds = time.perf_counter() - began
        difference = _compare(console, settings) if compare else None
        crashed = (
            train_and_crash(console, settings, rounds=display.round, num_shards=num_shards, consistency=consistency)
            if crash
            else None
        )
        disturbed = (
            train_through_chaos(console, settings, rounds=display.round, num_shards=num_shards, consistency=consistency)
            if chaos
            else None
        )
    report = report_of(
        display.results.values(),
        settings,
        mode=mode.value,
        num_shards=num_shards,
        seconds=seconds,
        max_abs_weight_diff=difference,
        crash=crashed,
        chaos=disturbed,
    )
    console.print(summary(report))
    if crashed is not None:
        console.print(crash_hashes(crashed), soft_wrap=True, highlight=False)
    if disturbed is not None:
        console.print(chaos_hashes(disturbed), soft_wrap=True, highlight=False)
    if as_json:
        typer.echo(msgspec.json.encode(report).decode())
    if crashed is not None and crashed.sha256_uninterrupted != crashed.sha256_went_on:
        fail("the training that was killed has ended with other bytes than the one that was not", exit_code=EXIT_FAILED)
    if disturbed is not None and disturbed.sha256_undisturbed != disturbed.sha256_disturbed:
        fail("the training that was disturbed has ended with other bytes than the quiet one", exit_code=EXIT_FAILED)


def _show_rows(console: Console, *, shards: int, workers: int, seed: int, as_json: bool) -> None:
    _need_packages(digits=False)
    from psstore.cli.demo.rows import rows_summary, train_rows

    report = train_rows(console, shards=shards, workers=workers, seed=seed)
    _tell(console, report, rows_summary(report), as_json=as_json)


def _show_learners(console: Console, *, shards: int, learners: int, seed: int, kill: bool, as_json: bool) -> None:
    _need_packages(digits=True)
    from psstore.cli.demo.learners import learners_summary, train_learners

    report = train_learners(console, shards=shards, learners=learners, seed=seed, kill=kill)
    _tell(console, report, learners_summary(report), as_json=as_json)


def _show_followers(console: Console, *, shards: int, followers: int, seed: int, as_json: bool) -> None:
    _need_packages(digits=True)
    from psstore.cli.demo.followers import followers_summary, train_followed

    report = train_followed(console, shards=shards, followers=followers, seed=seed)
    _tell(console, report, followers_summary(report), as_json=as_json)


def _tell(console: Console, report: msgspec.Struct, summary: Panel, *, as_json: bool) -> None:
    console.print(summary)
    if as_json:
        typer.echo(msgspec.json.encode(report).decode())


def _check_alone(alone: str, given: dict[str, bool]) -> None:
    """Ends the command with a sentence for an option of the usual training."""
    for option, is_given in given.items():
        if is_given:
            fail(f"{option} can't be with {alone}: leave out one of them")


def _need_packages(*, digits: bool) -> None:
    """Before anything is started: a store without workers helps nobody."""
    needed = {"torch": "torch", **({"sklearn": "scikit-learn"} if digits else {})}
    missing = [package for module, package in needed.items() if find_spec(module) is None]
    if missing:
        fail(
            f"the demo needs {' and '.join(missing)}: {sys.executable} -m pip install {' '.join(missing)}",
            exit_code=EXIT_MISSING,
        )


def _check_repeatable(option: str, strategy: Strategy, mode: Mode, compression: str) -> None:
    """Ends the command with a sentence for what can't end with the same bytes after something was killed."""
    if strategy is not Strategy.ps:
        fail(f"{option} is for --strategy ps: with {strategy.value}, workers' own state dies with them")
    if mode is not Mode.sync:
        fail(f"{option} is for --mode sync: with {mode.value}, no two trainings end with the same bytes")
    if compression != "none":
        fail(
            f"{option} can't be with --compression {compression}: what it keeps back is in workers, and dies with them"
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
    from psstore.text import counted

    if settings.strategy is Strategy.allreduce:
        return "all-reduce"
    how = f"average every {settings.every}" if settings.strategy is Strategy.average else mode.value
    compressed = "" if settings.compression == "none" else f" · {settings.compression}"
    return f"{how} · {counted(num_shards, 'shard')}{compressed}"


def _dataset(data_dir: Path | None) -> str:
    return "scikit-learn's handwritten digits" if data_dir is None else f"MNIST in {data_dir}"


def _compare(console: Console, settings: Settings) -> float:
    """The largest difference of any weight to those of plain PyTorch in this process."""
    with console.status("the same with plain PyTorch in one process …"):
        import numpy as np

        from psstore.cli.demo.worker import train_in_one_process

        expected = train_in_one_process(settings)
        assert settings.weights_path is not None
        with np.load(settings.weights_path) as trained:
            return max(float(np.abs(value.numpy() - trained[name]).max()) for name, value in expected.items())
