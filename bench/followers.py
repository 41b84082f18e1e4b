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
apart       Likewise, as if readers, relays and these' stores were on hosts of their own: they read over TCP, and run
            where the trainer and its shards leave a processor idle (SCHED_IDLE). What the shards do for them, and send
            them, is in the trainer's step. Only with compute elsewhere: else nothing is left. Beside that the relays
            alone, of which the trainer's host would see no more: two who take every version.
"""

from __future__ import annotations

import argparse
import contextlib
import os
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
from bench.processes import FRESH, child, preload, store_server, take_what_is_left
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
BARE = f"{NUM_RELAYS} relays without their stores and readers"
HERE, APART = "unix", "tcp"
"""How readers and relays read: of this host by what is chosen there, of others over TCP, by what is left to them."""


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
    """A process that works from an offset in seconds, which it is sent, until it is sent None; it answers how often.

    That is at least once, however late this machine lets it begin.
    """
    ours, theirs = FRESH.Pipe()
    with child(work, theirs, *arguments):
        theirs.close()
        with contextlib.closing(ours):
            ours.recv()
            yield ours


@contextlib.contextmanager
def _reader(url: str, place: str) -> Iterator[psstore.Store]:
    """Of a process that is a reader, there."""
    if place == APART:
        take_what_is_left(os.getpid())
    with (
        contextlib.suppress(EOFError, ConnectionError),
        psstore.connect(url, role="client", transport="tcp" if place == APART else "auto") as store,
    ):
        yield store


def _read(link: Connection, url: str, place: str, kind: str) -> None:
    with _reader(url, place) as store:
        follower = FollowingReader(store, NAMES, "bfloat16")
        out = [np.empty(store.describe(name).spec.shape, np.float32) for name in NAMES]
        read = partial(store.pull_many, NAMES, out=out, consistent=True) if kind == PULLERS else follower.next
        _work(link, read, pause_s=1 / READS_PER_S)


def _take_all(link: Connection, url: str, place: str) -> None:
    """What a store sees of a relay."""
    with _reader(url, place) as store:
        _work(link, FollowingReader(store, NAMES, "bfloat16").next, pause_s=0.0)


def _pass_on(link: Connection, url: str, place: str, own_url: str) -> None:
    """What `psstore relay --dtype bfloat16` does: every version that there is time for."""
    with _reader(url, place) as store, psstore.connect(own_url, rank=0) as own:
        if place == APART:
            for shard in own.stats():
                take_what_is_left(int(shard["process"]))
        relay, reader = Relay(own), FollowingReader(store, None, "bfloat16")
        _work(link, lambda: relay.publish(reader.next()), pause_s=0.0)


def _work(link: Connection, once: Callable[[], object], *, pause_s: float) -> None:
    once()
    link.send(None)
    while True:
        link.poll(link.recv())
        due, times = time.perf_counter(), 0
        while not times or not link.poll(max(0.0, due - time.perf_counter())):
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
        num_reads = self._end(readers)
        self._end(passing)
        self._reads_per_step.setdefault(name, []).append(num_reads / num_steps)
        return Took(took_s / num_steps, used_s / num_steps)

    def _end(self, links: Sequence[Connection]) -> int:
        """Has them end, and returns how often they worked. Nobody waits for a version that does not come."""
        for link in links:
            link.send(None)
        waiting, times = set(links), 0
        while waiting:
            self._trainer.step(self._compute_s)
            ended = {link for link in waiting if link.poll()}
            times += sum(link.recv() for link in ended)
            waiting -= ended
        return times

    def table(self, title: str, found: Mapping[str, Series]) -> Table:
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
        return Table(title, headers, rows)


def readers(rounds: int, block_s: float, compute_s: float) -> tuple[Table, Mapping[str, Series]]:
    with store_server("unix", SHARDS) as url, contextlib.ExitStack() as ends:
        beside = Beside(url, ends, block_s=block_s, compute_s=compute_s)
        links = {
            kind: [ends.enter_context(_process(_read, url, HERE, kind)) for _ in range(max(READERS))]
            for kind in (FOLLOWERS, PULLERS)
        }
        turns: dict[str, Turn] = {ALONE: partial(beside.turn, ALONE, ())}
        for count in READERS:
            for kind in (FOLLOWERS, PULLERS):
                name = f"{count} {kind}"
                turns[name] = partial(beside.turn, name, links[kind][:count])
        found = alternate(turns, warm_up=1, rounds=rounds, progress="readers")
        return beside.table("readers", found), found


# ---- relays ----


def relays(
    place: str, counts: Sequence[int], rounds: int, block_s: float, compute_s: float
) -> tuple[Table, Mapping[str, Series]]:
    """`counts`: of those who follow without a relay, in turns of their own."""
    with store_server(place, SHARDS) as url, contextlib.ExitStack() as ends:
        beside = Beside(url, ends, block_s=block_s, compute_s=compute_s)
        direct = [ends.enter_context(_process(_read, url, place, FOLLOWERS)) for _ in range(max(counts))]
        own_urls = [ends.enter_context(store_server(place, SHARDS)) for _ in range(NUM_RELAYS)]
        passing = [ends.enter_context(_process(_pass_on, url, place, own)) for own in own_urls]
        behind = [
            ends.enter_context(_process(_read, own_urls[number % NUM_RELAYS], place, FOLLOWERS))
            for number in range(NUM_BEHIND)
        ]
        bare = [ends.enter_context(_process(_take_all, url, place)) for _ in range(NUM_RELAYS)]
        turns: dict[str, Turn] = {
            ALONE: partial(beside.turn, ALONE, ()),
            **{
                f"{count} {FOLLOWERS}": partial(beside.turn, f"{count} {FOLLOWERS}", direct[:count]) for count in counts
            },
            f"{NUM_BEHIND} {BEHIND}": partial(beside.turn, f"{NUM_BEHIND} {BEHIND}", behind, passing),
            BARE: partial(beside.turn, BARE, bare),
        }
        found = alternate(turns, warm_up=1, rounds=rounds, progress=f"relays, {place}")
        title = "relays" if place == HERE else "readers and relays by what is left, over TCP"
        return beside.table(title, found), found


# ---- all ----

BESIDE: Mapping[str, Callable[..., tuple[Table, Mapping[str, Series]]]] = {
    "readers": readers,
    "relays": partial(relays, HERE, READERS[-1:]),
    "apart": partial(relays, APART, READERS),
}
PARTS = ("bytes", "codec", *BESIDE)


def measure(chosen: argparse.Namespace) -> Report:
    preload("psstore", "numpy")
    parts: Sequence[str] = chosen.part or PARTS
    tables: list[Table] = []
    summary: list[Sequence[Cell]] = []
    if "bytes" in parts:
        tables.append(bytes_sent(5 if chosen.quick else 30))
    if "codec" in parts:
        tables.append(codec(7 if chosen.quick else 50))
    for part, measured in BESIDE.items():
        where = ", by what is left" if part == "apart" else ""
        paces = (COMPUTE_S,) if part == "apart" else (0.0, COMPUTE_S)
        for compute_s in paces if part in parts else ():
            table, found = measured(*((5, 0.6) if chosen.quick else (20, 1.0)), compute_s)
            tables.append(table)
            summary += [
                ["followers", f"{step_name(compute_s)}, beside {what}{where}", milliseconds(one), ratio, None]
                for what, one in found.items()
                if what != ALONE and PULLERS not in what and (ratio := one.median / found[ALONE].median)
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
