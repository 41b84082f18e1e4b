"""Writing a checkpoint beside writing its bytes, and reading it beside reading them.

    python -m bench.checkpoint [--quick] [--megabytes M] [--folder FOLDER] [--json FILE]

A shard's slices of 256 KiB with Adam's state are written from memory to a file and brought to the disk, and read into
memory that is there. The limit writes or reads as many bytes by plain calls of the system, with one fsync and one
rename. Reading is measured twice: 'cold', the page cache having been told to let go of the files, and 'cached', where
only hashing and copying are left. The peer is torch.save with fsync, and torch.load: neither verifies.

The last two are of storage that moves PACED_MB_PER_S and no more, as many disks and networks do: the file is in memory,
and both contestants sleep for the rest of the time. They show what is left when storage is the limit.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from bench.command import Subject, run
from bench.comparison import Entry, Role, comparison, comparison_figures, comparison_summary
from bench.harness import Series, alternate
from bench.machine import machine
from bench.report import Report
from psstore.checkpoint.hash_pool import HashPool
from psstore.checkpoint.local_storage import LocalSink, LocalStorage
from psstore.checkpoint.reader import Checkpoint
from psstore.checkpoint.slots import SlotRecord, SlotTable
from psstore.checkpoint.state import ShardState, StoreState, TensorRecord
from psstore.checkpoint.writer import ShardFileWriter, commit
from psstore.partition.slicing import slice_elems
from psstore.types import Consistency, TensorSpec

VERSION = 1
PARTS = 3
"""The value, and two buffers of Adam's state."""

CALL_BYTES = 8 << 20
"""Handed over by one call, of psstore's writer as of the system's."""

PACED_MB_PER_S = 500

PSSTORE, RAW, TORCH = "psstore", "plain calls", "torch"

ROLES: Mapping[str, Role] = {PSSTORE: "psstore", RAW: "limit", TORCH: "peer"}

IN_MEMORY = Path("/dev/shm")


class Model:
    """A model of one shard, whose bytes are views of one buffer."""

    def __init__(self, num_bytes: int) -> None:
        spec = TensorSpec(name="w", shape=(num_bytes // PARTS // 4,), rule="adam")
        self.tensor = TensorRecord(id=1, spec=spec, slice_elems=slice_elems(spec))
        keys = [self.tensor.key(index) for index in range(self.tensor.num_slices)]
        self.table = SlotTable.of(SlotRecord(key, VERSION, VERSION, 0b111) for key in keys)
        self.memory = memoryview(bytearray(os.urandom(1 << 20)) * (-(-num_bytes // (1 << 20)) + 1))
        self.num_bytes = PARTS * spec.num_elems * 4

    def state(self) -> StoreState:
        return StoreState(decision=VERSION, consistency=Consistency(), tensors=(self.tensor,), next_tensor_id=2)

    def calls(self, sizes: Sequence[int]) -> Iterator[list[memoryview]]:
        """Views of these sizes, one after the other, as many as one call takes."""
        some: list[memoryview] = []
        begin = some_bytes = 0
        for size in sizes:
            some.append(self.memory[begin : begin + size])
            begin += size
            some_bytes += size
            if some_bytes >= CALL_BYTES:
                yield some
                some, some_bytes = [], 0
        if some:
            yield some


class Pace:
    """Lets bytes through at PACED_MB_PER_S, whoever brings them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free_at = time.perf_counter()

    @contextlib.contextmanager
    def moving(self, num_bytes: int) -> Iterator[None]:
        """What happens meanwhile, happens beside it."""
        with self._lock:
            self._free_at = max(self._free_at, time.perf_counter()) + num_bytes / (1e6 * PACED_MB_PER_S)
            until = self._free_at
        yield
        time.sleep(max(0.0, until - time.perf_counter()))


class PacedStorage(LocalStorage):
    """Storage of that speed."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._pace = Pace()

    def create(self, path: str) -> PacedSink:
        return PacedSink(self, path, self._pace)

    def read(self, path: str, begin: int, targets: Sequence[memoryview]) -> int:
        with self._pace.moving(sum(target.nbytes for target in targets)):
            return super().read(path, begin, targets)


class PacedSink(LocalSink):
    """A file of it."""

    def __init__(self, storage: LocalStorage, path: str, pace: Pace) -> None:
        super().__init__(storage, path)
        self._pace = pace

    def write(self, views: Sequence[memoryview]) -> None:
        with self._pace.moving(sum(view.nbytes for view in views)):
            super().write(views)


def write_checkpoint(model: Model, storage: LocalStorage, pool: HashPool) -> None:
    with ShardFileWriter(
        storage,
        attempt="bench",
        state=ShardState(index=0, num_shards=1, version=VERSION),
        tensors=[model.tensor],
        table=model.table,
        pool=pool,
    ) as writer:
        for views in model.calls([piece.num_bytes for piece in writer.pieces]):
            writer.write(views)
        commit(storage, attempt="bench", store=model.state(), files=[writer.finish()])


def write_plainly(model: Model, folder: Path) -> None:
    folder.mkdir()
    fd = os.open(folder / "new", os.O_WRONLY | os.O_CREAT)
    for begin in range(0, model.num_bytes, CALL_BYTES):
        left = model.memory[begin : min(begin + CALL_BYTES, model.num_bytes)]
        while left:
            left = left[os.write(fd, left) :]
    os.fsync(fd)
    os.close(fd)
    os.rename(folder / "new", folder / "file")


def write_with_torch(model: Model, folder: Path) -> None:
    import torch  # only who measures it needs it

    folder.mkdir()
    third = model.num_bytes // PARTS
    arrays = {
        str(i): torch.frombuffer(model.memory, dtype=torch.float32, count=third // 4, offset=i * third)
        for i in range(PARTS)
    }
    with open(folder / "file", "wb") as file:
        torch.save(arrays, file)
        file.flush()
        os.fsync(file.fileno())


def read_checkpoint(model: Model, storage: LocalStorage, pool: HashPool) -> None:
    taken = 0

    def into(_: SlotRecord, __: int, num_bytes: int) -> memoryview:
        nonlocal taken
        taken += num_bytes
        return model.memory[taken - num_bytes : taken]

    with Checkpoint(storage, VERSION, pool=pool) as checkpoint:
        for _ in checkpoint.read(None, into):
            pass
    assert taken == model.num_bytes


def read_plainly(model: Model, folder: Path) -> None:
    fd = os.open(folder / "file", os.O_RDONLY)
    for begin in range(0, model.num_bytes, CALL_BYTES):
        left, at = model.memory[begin : min(begin + CALL_BYTES, model.num_bytes)], begin
        while left:
            got = os.preadv(fd, [left], at)
            left, at = left[got:], at + got
    os.close(fd)


def write_paced(model: Model, storage: PacedStorage) -> None:
    sink = storage.create("file")
    for begin in range(0, model.num_bytes, CALL_BYTES):
        sink.write([model.memory[begin : min(begin + CALL_BYTES, model.num_bytes)]])
    sink.commit()


def read_paced(model: Model, storage: PacedStorage) -> None:
    for begin in range(0, model.num_bytes, CALL_BYTES):
        storage.read("file", begin, [model.memory[begin : min(begin + CALL_BYTES, model.num_bytes)]])


def read_with_torch(folder: Path) -> None:
    import torch

    torch.load(folder / "file", weights_only=True)


def forget(folder: Path) -> None:
    """Has the page cache let go of the files, which are on the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def measure(model: Model, folder: Path, *, rounds: int) -> dict[str, dict[str, Series]]:
    """By what is done, then by who does it."""
    with HashPool() as pool:
        writers: dict[str, Callable[[Path], None]] = {
            PSSTORE: lambda at: write_checkpoint(model, LocalStorage(at), pool),
            RAW: lambda at: write_plainly(model, at),
            TORCH: lambda at: write_with_torch(model, at),
        }
        readers: dict[str, Callable[[Path], None]] = {
            PSSTORE: lambda at: read_checkpoint(model, LocalStorage(at), pool),
            RAW: lambda at: read_plainly(model, at),
            TORCH: read_with_torch,
        }
        found = {
            "write": alternate(
                {name: _writing(write, folder / "new") for name, write in writers.items()},
                warm_up=1,
                rounds=rounds,
                progress="write",
            )
        }
        for name, write in writers.items():
            write(folder / name)
        for how, before in (("read, cold", forget), ("read, cached", _nothing)):
            turns = {name: _reading(read, folder / name, before) for name, read in readers.items()}
            found[how] = alternate(turns, warm_up=1, rounds=rounds, progress=how)
        return {**found, **_measure_paced(model, pool, rounds=rounds)}


def _measure_paced(model: Model, pool: HashPool, *, rounds: int) -> dict[str, dict[str, Series]]:
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as at:
        folder = Path(at)
        writers: dict[str, Callable[[Path], None]] = {
            PSSTORE: lambda at: write_checkpoint(model, PacedStorage(at), pool),
            RAW: lambda at: write_paced(model, PacedStorage(at)),
        }
        readers: dict[str, Callable[[Path], None]] = {
            PSSTORE: lambda at: read_checkpoint(model, PacedStorage(at), pool),
            RAW: lambda at: read_paced(model, PacedStorage(at)),
        }
        speed = f"{PACED_MB_PER_S} MB/s"
        writing = {name: _writing(write, folder / "new") for name, write in writers.items()}
        found = {f"write, {speed}": alternate(writing, warm_up=1, rounds=rounds, progress=f"write, {speed}")}
        for name, write in writers.items():
            write(folder / name)
        reading = {name: _reading(read, folder / name, _nothing) for name, read in readers.items()}
        return {**found, f"read, {speed}": alternate(reading, warm_up=1, rounds=rounds, progress=f"read, {speed}")}


def _writing(write: Callable[[Path], None], folder: Path) -> Callable[[], float]:
    """A turn: what the contestant before wrote is removed first, so that each finds as much memory free, and all is on
    the disk when it begins."""

    def turn() -> float:
        shutil.rmtree(folder, ignore_errors=True)
        os.sync()
        begin = time.perf_counter()
        write(folder)
        return time.perf_counter() - begin

    return turn


def _reading(read: Callable[[Path], None], folder: Path, before: Callable[[Path], None]) -> Callable[[], float]:
    def turn() -> float:
        before(folder)
        begin = time.perf_counter()
        read(folder)
        return time.perf_counter() - begin

    return turn


def _nothing(_: Path) -> None:
    pass


# ---- showing ----


def checkpoint(arguments: argparse.Namespace) -> Report:
    model = Model(arguments.megabytes << 20)
    with contextlib.ExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory(dir=arguments.folder)))
        found = measure(model, folder, rounds=2 if arguments.quick else 9)
    entries = {
        how: [
            Entry(name, ROLES[name], series[name], model.num_bytes, limit=RAW if name == PSSTORE else "")
            for name in series
        ]
        for how, series in found.items()
    }
    return Report(
        "checkpoint",
        f"A shard's checkpoint of {model.num_bytes >> 20} MiB (Adam: value and two buffers, slices of 256 KiB), written"
        " from memory and brought to the disk, and read into memory. × limit: as many bytes by plain calls, written"
        " with one fsync, or read; 0.9 of its speed is 1.11 times its time, 0.8 is 1.25. Cold: the page cache let go of"
        f" the files. {PACED_MB_PER_S} MB/s: storage that is no faster.",
        [comparison(how, one) for how, one in entries.items()],
        figures=[figure for how, one in entries.items() for figure in comparison_figures(how, one)],
        summary=[row for how, one in entries.items() for row in comparison_summary("checkpoint", how, one)],
        machine=machine("torch"),
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--megabytes", type=int, default=256, metavar="M", help="of the checkpoint, in MiB")
    parser.add_argument(
        "--folder", type=Path, help="on the disk that is to be measured (default: the system's for temporary files)"
    )


SUBJECT = Subject("checkpoint", __doc__.splitlines()[0], checkpoint, add_options, isolated=False)

if __name__ == "__main__":
    run(SUBJECT)
