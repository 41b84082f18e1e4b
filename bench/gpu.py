"""Shards on a GPU: the fused pass, small slices, the way from the host and back, codecs, a store on the GPU, training.

    python -m bench.gpu [--quick] [--part PART] [--device cuda:0] [--json FILE] [--plot [FILE.png]]

Times are the device's, by events. Steps are launched while it is busy with something else, so that the host has no part
in them; all else begins on an idle device, and the host's work counts. Parameters are 1 GiB or more, far beyond the
cache, and 64 MiB where the ways to a store are compared; small slices begin with a cache that is full of something
else. The limit is a plain copy in device memory that reads and writes as many bytes together as the work has to:
gradients, value and states read once, value and states written once. bfloat16: gradients, and a copy of the value that
is written besides. "torch fused" sums W gradients by one kernel, then takes the step of torch's fused optimizer; "torch
adds + fused" adds them up one by one. In a codec the limit is a copy to the host of as many bytes as are sent.

What a part lacks here is said in the notes; the others are measured all the same.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bench.command import Subject, run
from bench.gpu_device import NoGpu, first_gpu
from bench.gpu_encode import Upload, copied, encoded
from bench.gpu_pipeline import Pipe, one_after_the_other, pipelined, plain_copies
from bench.gpu_steps import Task, adds_and_fused, copy, fused_over_list, fused_pass, gradients, mean_and_fused
from bench.gpu_targets import FUSED, LIMIT, OURS, SUMMED, Contest, results, targets
from bench.gpu_timing import Bench, Launch
from bench.harness import Turn, alternate
from bench.machine import machine
from bench.report import Chart, Report
from bench.rule_case import Case
from psstore.codec.codecs import parse

CASES = (Case("sgd", {}), Case("sgd", {"momentum": 0.9}), Case("adam", {}))

BYTES_PER_ELEM = 100
"""Of device memory, at most, that the contestants of one step need for each parameter: W = 8."""


@dataclass(frozen=True)
class Sizes:
    """In elements."""

    step: int
    small_slices: int
    small_slice: int
    host: int
    chunk: int
    store: int
    ways: int
    rounds: int


FULL = Sizes(
    step=1 << 28,
    small_slices=10_000,
    small_slice=1024,
    host=1 << 28,
    chunk=1 << 20,
    store=1 << 28,
    ways=1 << 24,
    rounds=15,
)
QUICK = replace(FULL, step=1 << 26, host=1 << 26, store=1 << 26, rounds=4)
FAKE = Sizes(step=5000, small_slices=20, small_slice=64, host=5000, chunk=2048, store=5000, ways=5000, rounds=1)
"""On a device that is none: every line runs, and the times mean nothing."""


@dataclass(frozen=True)
class Setting:
    bench: Bench
    sizes: Sizes

    def contest(
        self,
        part: str,
        what: str,
        launches: Mapping[str, Launch],
        *,
        flush: bool = False,
        host_counts: bool = True,
        warm_up: int = 3,
    ) -> Contest:
        """Lets them take turns."""
        turns: dict[str, Turn] = {
            name: self.bench.turn(launch, flush=flush, host_counts=host_counts) for name, launch in launches.items()
        }
        return Contest(
            part,
            what,
            alternate(turns, warm_up=warm_up if self.bench.is_gpu else 0, rounds=self.sizes.rounds, progress=what),
        )


def steps(setting: Setting) -> Iterator[Contest]:
    for inputs in ("float32", "bfloat16"):
        for case in CASES:
            for num_workers in (1, 4, 8):
                yield _step(setting, Task(case, num_workers, inputs, setting.sizes.step))


def _step(setting: Setting, task: Task) -> Contest:
    bench = setting.bench
    grads = gradients(bench, task)
    launches = {
        OURS: fused_pass(bench, task, grads),
        FUSED: mean_and_fused(bench, task, grads),
        LIMIT: copy(bench, task.num_bytes),
    }
    if task.num_workers > 1:
        launches[SUMMED] = adds_and_fused(bench, task, grads)
    found = setting.contest("steps", str(task), launches, host_counts=False)
    return replace(found, num_bytes=task.num_bytes, num_workers=task.num_workers, inputs=task.inputs)


def small(setting: Setting) -> Iterator[Contest]:
    num_slices, slice_elems = setting.sizes.small_slices, setting.sizes.small_slice
    for case in CASES:
        for num_workers in (1, 4):
            task = Task(case, num_workers, "float32", num_slices * slice_elems, slice_elems)
            grads = gradients(setting.bench, task)
            launches = {
                OURS: fused_pass(setting.bench, task, grads),
                FUSED: fused_over_list(setting.bench, task, grads),
                LIMIT: copy(setting.bench, task.num_bytes),
            }
            what = f"{num_slices} × {4 * slice_elems >> 10} KiB, {task}"
            yield replace(setting.contest("small", what, launches, flush=True), num_bytes=task.num_bytes)


def host(setting: Setting) -> Iterator[Contest]:
    for case in CASES[::2]:
        pipe = Pipe(setting.bench, Task(case, 1, "float32", setting.sizes.host), setting.sizes.chunk)
        launches = {
            OURS: pipelined(pipe),
            "torch, without overlap": one_after_the_other(pipe),
            LIMIT: plain_copies(pipe),
        }
        found = setting.contest("host", f"host → device → host, {case}", launches)
        yield replace(found, num_bytes=2 * pipe.num_bytes)


def encode(setting: Setting) -> Iterator[Contest]:
    for name in ("bf16", "int8", "sign", "topk"):
        codec = parse(name)
        assert codec is not None, "only 'none' is no codec"
        upload = Upload(setting.bench, codec, setting.sizes.host)
        launches = {
            OURS: encoded(upload),
            "float32, as it is": copied(setting.bench, 4 * upload.num_elems),
            LIMIT: copied(setting.bench, upload.payload_bytes),
        }
        found = setting.contest("encode", f"device → {name} → host, {4 * upload.num_elems >> 20} MiB", launches)
        yield replace(found, num_bytes=upload.payload_bytes)


def ipc(setting: Setting) -> Iterator[Contest]:
    from bench.gpu_store import EMBEDDED, PASSES, SERVED, named_stores, round_of

    bench = setting.bench
    for num_elems, part in ((setting.sizes.store, "ipc"), (setting.sizes.ways, "ways")):
        for what, homes in (("another process", SERVED), ("the same process", EMBEDDED)):
            with named_stores(bench, homes if part == "ways" else {OURS: homes[OURS]}) as stores:
                launches = {name: round_of(bench, store, num_elems) for name, store in stores.items()}
                launches[LIMIT] = copy(bench, PASSES * num_elems)
                size = f"{4 * num_elems / 2**20:.4g} MiB"
                found = setting.contest(part, f"push + SGD + pull of {size}, store in {what}", launches)
                yield replace(found, num_bytes=PASSES * num_elems)


def training(setting: Setting) -> Iterator[Contest]:
    from bench.gpu_store import EMBEDDED, SERVED, named_stores, store_adamw
    from bench.gpu_training import GPT2_SMALL, TINY, fused_adamw, training_step
    from psstore.torch.change_detection import CHECKED_ROUNDS

    bench, shape = setting.bench, GPT2_SMALL if setting.bench.is_gpu else TINY
    for part in ("training", "ways"):
        for what, homes in (("another process", SERVED), ("the same process", EMBEDDED)):
            with named_stores(bench, homes if part == "ways" else {OURS: homes[OURS]}) as stores:
                launches = {name: training_step(bench, shape, store_adamw(store)) for name, store in stores.items()}
                if part == "training":  # beside nobody who keeps the device waiting
                    launches[FUSED] = training_step(bench, shape, fused_adamw)
                title = f"transformer, {shape}, AdamW, store in {what}"
                yield setting.contest(part, title, launches, warm_up=CHECKED_ROUNDS + 2)


Part = Callable[[Setting], Iterator[Contest]]

PARTS: Mapping[str, Part] = {
    "steps": steps,
    "small": small,
    "host": host,
    "encode": encode,
    "ipc": ipc,
    "training": training,
}


def measured(options: argparse.Namespace) -> Report:
    setting = setting_of(options)
    contests: list[Contest] = []
    notes: list[str] = []
    try:
        for name in [options.part] if options.part else PARTS:
            _measure(name, setting, contests, notes, options.json)
    except KeyboardInterrupt:
        _note(notes, "not measured: what comes after this: it was stopped")
    return report(setting, contests, notes)


def _measure(name: str, setting: Setting, contests: list[Contest], notes: list[str], results: Path | None) -> None:
    """Adds what was found. Each contest is in the results as soon as it is over: this process may end at any time."""
    try:
        for contest in PARTS[name](setting):
            contests.append(contest)
            if results is not None:
                report(setting, contests, [*notes, "not measured: the rest"]).save(results)
            _free_memory()
    except Exception as error:
        _note(notes, f"{name}: not measured: {type(error).__name__}: {error}")
    _free_memory()


def _note(notes: list[str], note: str) -> None:
    notes.append(note)
    print(f"gpu: {note}", file=sys.stderr)


def setting_of(options: argparse.Namespace) -> Setting:
    """Exits if there is no such device."""
    bench = Bench(options.device)
    if not bench.is_gpu:
        return Setting(bench, FAKE)
    try:
        gpu = first_gpu()
    except NoGpu as error:
        sys.exit(f"gpu: {error}")
    sizes = QUICK if options.quick else FULL
    while sizes.step * BYTES_PER_ELEM > gpu.memory_bytes:
        sizes = replace(sizes, step=sizes.step // 2, store=sizes.store // 2)
    return Setting(bench, sizes)


def report(setting: Setting, contests: list[Contest], notes: list[str]) -> Report:
    return Report(
        subject="gpu",
        about=(__doc__ or "").partition("\n")[0],
        tables=[*([targets(contests)] if setting.bench.is_gpu else []), results(contests)],
        notes=[f"steps are of {4 * setting.sizes.step / 2**30:.3g} GiB of parameters", *notes],
        charts=[chart(contests)] if contests else [],
        figures=[
            {"part": contest.part, "title": contest.what, "name": name, "num_bytes": contest.num_bytes}
            | {"times_s": series.times_s}
            for contest in contests
            for name, series in contest.series.items()
        ],
        machine={**_described(setting.bench), **machine("torch")},
    )


def chart(contests: list[Contest]) -> Chart:
    """In ms, beside the plain copy of as many bytes."""
    series = {
        contest.what: {name: 1e3 * series.median for name, series in contest.series.items()} for contest in contests
    }
    return Chart(
        name="", title="On the GPU: ours, torch's, and a plain copy of as many bytes", unit="ms", series=series
    )


def _described(bench: Bench) -> dict[str, str | int]:
    if not bench.is_gpu:
        return {"GPU": f"none: {bench.name}"}
    gpu = first_gpu()
    return {
        "GPU": gpu.name,
        "GPU memory in GiB": gpu.memory_bytes >> 30,
        "driver for CUDA": gpu.driver,
        "torch's CUDA": str(torch.version.cuda),
    }


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--part", choices=PARTS, help="only this one")
    parser.add_argument(
        "--device", default="cuda:0", help="'fake:0' runs every line without a GPU, and measures nothing"
    )


SUBJECT = Subject("gpu", "shards on a GPU", measured, add_options, isolated=False)


if __name__ == "__main__":
    if any("not measured:" in note for note in run(SUBJECT).notes):
        sys.exit(1)
