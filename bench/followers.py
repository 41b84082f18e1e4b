"""What readers that follow by what changes are sent, and what they cost who trains.

    python -m bench.followers [--quick] [--part PART] [--json FILE]

A model of 4 million weights, drawn from N(0, 0.02), AdamW at a learning rate of 1e-6, gradients drawn from N(0, 1).
The parts:

bytes       What a reader in bfloat16 is sent after a step, beside the elements that have changed, counted here. The
            bound is 3.3 bytes for each of them and 64 for each slice, of which 32 are its entry in the frame's table.
codec       Encoding, and looking at changes and applying them, by one core, beside memcpy: bytes of the slice a second.
readers     The trainer's step, which pulls its weights, beside readers that take READS_PER_S versions a second each, in
            processes of their own: followers, and clients that pull all of it (float32, of one version). All of them
            share this machine's processors, hence also the shards' processor time for a version that somebody reads.
            Once as fast as steps can be taken, and once with COMPUTE_S of each step computed elsewhere, as by a GPU:
            that time is slept.
relays      Likewise, with readers behind relays, of which each has a store of its own on this machine.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection

import numpy as np

import psstore
from bench.command import Subject, run
from bench.comparison import milliseconds
from bench.compute_elsewhere import COMPUTE_S, step_name
from bench.harness import Series, Took, Turn, alternate, cpu_seconds
from bench.machine import machine
from bench.processes import FRESH, child, preload, store_server
from bench.report import Cell, Report, Table
from bench.work import Floats
from psstore import _core
from psstore.client.follow import FollowingReader
from psstore.launch.relay import Relay
from psstore.types import TensorSpec

NUM_TENSORS, TENSOR_ELEMS = 16, 1 << 18
NAMES = tuple(f"layer{number}.weight" for number in range(NUM_TENSORS))
ADAMW = {"lr": 1e-6, "weight_decay": 0.01}
BYTES_PER_CHANGE, BYTES_PER_SLICE = 3.3, 64
SHARDS = 2
READERS = (1, 16)
READS_PER_S = 5
ALONE, FOLLOWERS, PULLERS = "alone", "followers", "clients that pull"
NUM_RELAYS, NUM_BEHIND = 2, 50
BEHIND = f"{FOLLOWERS} behind {NUM_RELAYS} relays"


class Trainer:
    """One worker, which takes steps and has its weights after each."""

    def __init__(self, store: psstore.Store) -> None:
        self._store = store
        self._draw = np.random.default_rng(0)
        self._out = [np.empty(TENSOR_ELEMS, np.float32) for _ in NAMES]
        self._gradients = [self._normal() for _ in range(4 * NUM_TENSORS)]
        self._num_steps = 0
        specs = [TensorSpec(name=name, shape=(TENSOR_ELEMS,), rule="adamw", zeros=False) for name in NAMES]
        store.create_many(specs, [self._normal() * np.float32(0.02) for _ in NAMES])

    def _normal(self) -> Floats:
        return self._draw.standard_normal(TENSOR_ELEMS, np.float32)

    def step(self, compute_s: float = 0.0) -> None:
        """`compute_s`: of which this machine's processors have nothing to do."""
        time.sleep(compute_s)
        first = self._num_steps * 7 % (3 * NUM_TENSORS)
        self._num_steps += 1
        self._store.push_many(dict(zip(NAMES, self._gradients[first:], strict=False)))
        self._store.commit(ADAMW)
        self._store.pull_many(list(NAMES), out=self._out)

    def steps(self, seconds: float, compute_s: float) -> int:
        """As many as that is enough for; returns their number."""
        begin, taken = time.perf_counter(), 0
        while not taken or time.perf_counter() < begin + seconds:
            self.step(compute_s)
            taken += 1
        return taken

    def shards(self) -> list[int]:
        """Their processes."""
        return [int(one["process"]) for one in self._store.stats()]


# ---- bytes ----


def bytes_sent(num_steps: int) -> Table:
    rows: list[list[Cell]] = []
    num_slices = NUM_TENSORS * -(-4 * TENSOR_ELEMS // (256 << 10))
    for missed in (0, 3):
        with psstore.LocalStore(shards=SHARDS) as local:
            trainer = Trainer(local.connect(rank=0))
            others = FollowingReader(local.connect(role="client"), NAMES, "bfloat16")
            reader = FollowingReader(local.connect(role="client"), NAMES, "bfloat16")
            trainer.step()
            reader.next()
            others.next()
            shares, each, bounds = [], [], []
            for _ in range(num_steps):
                before = {name: value.copy() for name, value in reader.values.items()}
                for _ in range(1 + missed):
                    trainer.step()
                    others.next()
                version = reader.next()
                changed = sum(int((before[name] != value).sum()) for name, value in version.values.items())
                sent = version.num_bytes + _core.SLICE_ENTRY_BYTES * num_slices
                shares.append(100 * changed / (NUM_TENSORS * TENSOR_ELEMS))
                each.append(version.num_bytes / changed)
                bounds.append(sent / (BYTES_PER_CHANGE * changed + BYTES_PER_SLICE * num_slices))
        medians = [statistics.median(one) for one in (shares, each, bounds)]
        whole = 2 * NUM_TENSORS * TENSOR_ELEMS
        saved = whole / (medians[1] * medians[0] / 100 * whole / 2)
        rows.append([f"{missed} versions missed", *medians, saved])
    headers = ("bfloat16", "changed, %", "bytes per changed element", "× bound", "whole, × what came")
    return Table("bytes", headers, rows)


# ---- codec ----


def codec(rounds: int) -> Table:
    draw = np.random.default_rng(1)
    before = draw.integers(0, 1 << 16, 1 << 16, np.uint16)
    rows: list[list[Cell]] = []
    for share in (0.016, 0.034):
        after = np.where(draw.random(before.size) < share, before ^ 1, before).astype(np.uint16)
        payload = _core.encode_changes(2, before, after)
        assert payload is not None
        room = before.copy()
        turns: dict[str, Turn] = {
            "memcpy": partial(_times, partial(np.copyto, room, before)),
            "encode": partial(_times, partial(_core.encode_changes, 2, before, after)),
            "apply": partial(_times, partial(_core.apply_changes, 2, payload, room)),
        }
        found = alternate(turns, warm_up=1, rounds=rounds, progress="codec")
        speeds = [200 * before.nbytes / found[name].median / 1e9 for name in turns]
        rows.append([f"128 KiB of 2-byte elements, {100 * share:g} % changed", *speeds])
    return Table("codec", ("GB/s of the slice, one core", "memcpy", "encode", "look at and apply"), rows)


def _times(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    for _ in range(200):
        work()
    return time.perf_counter() - begin


# ---- readers ----


@contextlib.contextmanager
def _process(work: Callable[..., None], *arguments: str) -> Iterator[Connection]:
    """A process that works from when it is sent an offset in seconds until it is sent None, and answers how often."""
    ours, theirs = FRESH.Pipe()
    with child(work, theirs, *arguments):
        theirs.close()
        with contextlib.closing(ours):
            ours.recv()
            yield ours


def _read(link: Connection, url: str, kind: str) -> None:
    with contextlib.suppress(EOFError, ConnectionError), psstore.connect(url, role="client") as store:
        follower = FollowingReader(store, NAMES, "bfloat16")
        out = [np.empty(store.describe(name).spec.shape, np.float32) for name in NAMES]
        read = partial(store.pull_many, NAMES, out=out, consistent=True) if kind == PULLERS else follower.next
        _work(link, read, pause_s=1 / READS_PER_S)


def _pass_on(link: Connection, url: str, own_url: str) -> None:
    """What `psstore relay` does: every version that there is time for."""
    with contextlib.suppress(EOFError, ConnectionError), psstore.connect(own_url, rank=0) as own:
        relay, reader = Relay(own), psstore.follow(url)
        _work(link, lambda: relay.publish(reader.next()), pause_s=0.0)


def _work(link: Connection, once: Callable[[], object], *, pause_s: float) -> None:
    once()
    link.send(None)
    while True:
        due, times = time.perf_counter() + link.recv(), 0
        while not link.poll(max(0.0, due - time.perf_counter())):
            once()
            times += 1
            due = max(due + pause_s, time.perf_counter())
        link.recv()
        link.send(times)


class Beside:
    """The trainer's step beside others, who take turns."""

    def __init__(self, url: str, ends: contextlib.ExitStack, *, block_s: float, compute_s: float) -> None:
        self._trainer = Trainer(ends.enter_context(psstore.connect(url, rank=0)))
        self._trainer.step()
        self._block_s, self._compute_s = block_s, compute_s
        self._reads_per_step: dict[str, list[float]] = {}

    def turn(self, name: str, readers: Sequence[Connection], passing: Sequence[Connection] = ()) -> Took:
        """`passing`: who passes versions on to these readers, and goes on until they are done."""
        for link in passing:
            link.send(0.0)
        for number, link in enumerate(readers):
            link.send((number + 0.5) / len(readers) / READS_PER_S)
        shards = self._trainer.shards()
        used_s, begin = cpu_seconds(shards), time.perf_counter()
        num_steps = self._trainer.steps(self._block_s, self._compute_s)
        took_s, used_s = time.perf_counter() - begin, cpu_seconds(shards) - used_s
        for link in (*readers, *passing):
            link.send(None)
            self._trainer.step()  # nobody waits for a version that does not come
        num_reads = sum(link.recv() for link in readers)
        for link in passing:
            link.recv()
        self._reads_per_step.setdefault(name, []).append(num_reads / num_steps)
        return Took(took_s / num_steps, used_s / num_steps)

    def table(self, found: Mapping[str, Series]) -> Table:
        rows: list[list[Cell]] = []
        for what, one in found.items():
            reads = statistics.median(self._reads_per_step[what])
            each = 1e3 * (one.cpu_s - found[ALONE].cpu_s) / reads if reads else None
            rows.append([what, milliseconds(one), one.median / found[ALONE].median, reads / one.median, each])
        headers = (
            step_name(self._compute_s),
            "ms: median (min–max)",
            "× alone",
            "versions a second",
            "ms of the shards' processors for one",
        )
        return Table("readers", headers, rows)


def readers(rounds: int, block_s: float, compute_s: float) -> tuple[Table, Mapping[str, Series]]:
    with store_server("unix", SHARDS) as url, contextlib.ExitStack() as ends:
        beside = Beside(url, ends, block_s=block_s, compute_s=compute_s)
        links = {
            kind: [ends.enter_context(_process(_read, url, kind)) for _ in range(max(READERS))]
            for kind in (FOLLOWERS, PULLERS)
        }
        turns: dict[str, Turn] = {ALONE: partial(beside.turn, ALONE, ())}
        for count in READERS:
            for kind in (FOLLOWERS, PULLERS):
                name = f"{count} {kind}"
                turns[name] = partial(beside.turn, name, links[kind][:count])
        found = alternate(turns, warm_up=1, rounds=rounds, progress="readers")
        return beside.table(found), found


# ---- relays ----


def relays(rounds: int, block_s: float, compute_s: float) -> tuple[Table, Mapping[str, Series]]:
    count = max(READERS)
    with store_server("unix", SHARDS) as url, contextlib.ExitStack() as ends:
        beside = Beside(url, ends, block_s=block_s, compute_s=compute_s)
        direct = [ends.enter_context(_process(_read, url, FOLLOWERS)) for _ in range(count)]
        own_urls = [ends.enter_context(store_server("unix", SHARDS)) for _ in range(NUM_RELAYS)]
        passing = [ends.enter_context(_process(_pass_on, url, own)) for own in own_urls]
        behind = [
            ends.enter_context(_process(_read, own_urls[number % NUM_RELAYS], FOLLOWERS))
            for number in range(NUM_BEHIND)
        ]
        turns: dict[str, Turn] = {
            ALONE: partial(beside.turn, ALONE, ()),
            f"{count} {FOLLOWERS}": partial(beside.turn, f"{count} {FOLLOWERS}", direct),
            f"{NUM_BEHIND} {BEHIND}": partial(beside.turn, f"{NUM_BEHIND} {BEHIND}", behind, passing),
        }
        found = alternate(turns, warm_up=1, rounds=rounds, progress="relays")
        return beside.table(found), found


# ---- all ----

PARTS = ("bytes", "codec", "readers", "relays")


def measure(chosen: argparse.Namespace) -> Report:
    preload("psstore", "numpy")
    parts: Sequence[str] = chosen.part or PARTS
    tables: list[Table] = []
    summary: list[Sequence[Cell]] = []
    if "bytes" in parts:
        tables.append(bytes_sent(5 if chosen.quick else 30))
    if "codec" in parts:
        tables.append(codec(7 if chosen.quick else 50))
    for part, measured in (("readers", readers), ("relays", relays)):
        for compute_s in (0.0, COMPUTE_S) if part in parts else ():
            table, found = measured(*((5, 0.6) if chosen.quick else (20, 1.0)), compute_s)
            tables.append(table)
            summary += [
                ["followers", f"{step_name(compute_s)}, beside {what}", milliseconds(one), ratio, None]
                for what, one in found.items()
                if FOLLOWERS in what and (ratio := one.median / found[ALONE].median)
            ]
    return Report(
        subject="followers",
        about=(
            f"{NUM_TENSORS} tensors of {TENSOR_ELEMS:,} float32 on {SHARDS} shards, AdamW at a learning rate of"
            f" {ADAMW['lr']:g}, one worker. Bound: {BYTES_PER_CHANGE} bytes for each element that has changed and"
            f" {BYTES_PER_SLICE} for each slice. Readers take {READS_PER_S} versions a second each."
        ),
        tables=tables,
        summary=summary,
        machine=machine(),
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--part", action="append", choices=PARTS, help="only this one")


SUBJECT = Subject("followers", __doc__.splitlines()[0], measure, _add_options)

if __name__ == "__main__":
    run(SUBJECT)
