"""What the demo's processes tell each other: the command's settings, the workers' progress and results, and the report.

A worker gets the settings as JSON in its arguments. It answers with JSON lines on standard output, among whatever else
is printed there; such a line starts with the record separator, as in JSON text sequences (RFC 7464).
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from enum import Enum

import msgspec

ROUND_IMAGES = 64
"""In a round of all workers together, so that an epoch has as many rounds whatever their number."""

MIN_BATCH_IMAGES = 8

LEARNING_RATE = 0.05
"""For a round of all workers, at the start; a cosine takes it to zero at the end."""

DEFAULT_EPOCHS = 20
"""On scikit-learn's digits: 440 rounds of two workers, some seconds on two cores."""

CHAOS_EPOCHS = 100
"""Long enough on digits for a dozen processes to be killed."""

MNIST_EPOCHS = 2
"""60,000 images are 33 times as many."""

DEFAULT_EVERY = 8
"""Steps from one average to the next: some three averages per epoch of two workers on digits."""

RECORD_SEPARATOR = b"\x1e"


class Strategy(str, Enum):
    """How several workers train one model (docs/choosing.md)."""

    ps = "ps"
    allreduce = "allreduce"
    average = "average"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """One demo run, as each worker gets it."""

    num_workers: int
    epochs: int
    strategy: Strategy = Strategy.ps
    every: int = DEFAULT_EVERY
    """Steps from one average to the next."""
    lockstep: bool = True
    """Rounds are decided together; else each worker's gradients are a step of their own."""
    compression: str = "none"
    """How gradients and new values travel: a `Compression` in a word."""
    seed: int = 0
    data_dir: str | None = None
    """Directory with MNIST's IDX files; None: scikit-learn's digits."""
    weights_path: str | None = None
    """Where rank 0 writes the final weights, for comparison."""
    rendezvous_path: str | None = None
    """A file that is not there yet, by which workers without a store find each other."""
    hold_after: int | None = None
    """Round after which workers wait for their end, which a run that is to be killed must not reach before. They tell
    of every round then, so that it is known where they were."""

    @property
    def batch_images(self) -> int:
        """Images per worker and round."""
        return max(MIN_BATCH_IMAGES, ROUND_IMAGES // self.num_workers)

    @property
    def learning_rate(self) -> float:
        """Out of lockstep there are as many steps per round as workers, so each is as much smaller."""
        return LEARNING_RATE if self.lockstep else LEARNING_RATE / self.num_workers


class WorkerBegan(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A worker's process trains from here on."""

    rank: int
    process: int
    """Its id."""
    store: str | None
    """The store's address; None: it has none."""


class WorkerProgress(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Where a worker is."""

    rank: int
    round: int
    """The last one it ended."""
    rounds: int
    """In the whole training."""
    epoch: int
    epochs: int
    loss: float
    images_per_s: float
    staleness: int


class WorkerResult(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What a worker did."""

    rank: int
    done_before: int = 0
    """Rounds that were over when it began: those of a checkpoint, if any."""
    images: int
    seconds: float
    bytes_pushed: int
    bytes_pulled: int
    max_staleness: int
    accuracy: float
    """Share of the test images that the final weights recognise."""
    test_images: int
    dataset: str


class RowsProgress(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Where a worker of `--rows` is."""

    rank: int
    step: int
    """The last one it ended."""
    steps: int
    loss: float
    rows_per_s: float
    """That it looks up and trains."""
    auc: float | None
    """Measured on samples that nobody trains on; None: not measured now."""
    rows: int
    """That the tables have, when the last step is over; 0 before."""
    bytes_pushed: int
    bytes_pulled: int


class LearnerProgress(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Where a worker of `--learners` is."""

    rank: int
    round: int
    """The last that was decided, of all learners."""
    rounds: int
    loss: float
    """Measured on images that nobody trains on, with its own weights."""
    accuracy: float


class FollowerProgress(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Where a follower of `--followers` is."""

    number: int
    version: int
    """The last that it has."""
    versions: int
    """How many it has had."""
    num_bytes: int
    """That came for them."""
    whole_bytes: int
    """That they would have been."""
    accuracy: float
    """Measured on images that nobody trains on, with the version that it has."""
    is_verified: bool
    """The last version, and its hashes are the store's."""


Event = WorkerBegan | WorkerProgress | WorkerResult | RowsProgress | LearnerProgress | FollowerProgress

_decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


def emit(event: Event) -> None:
    sys.stdout.buffer.write(RECORD_SEPARATOR + msgspec.json.encode(event) + b"\n")
    sys.stdout.buffer.flush()


def parse(line: bytes) -> Event | None:
    """None for a line that is no event."""
    return _decoder.decode(line[1:]) if line.startswith(RECORD_SEPARATOR) else None


class CrashReport(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the training that was killed with everything, and went on from its last checkpoint."""

    killed_at: int
    """The last step that a worker told of."""
    num_killed: int
    """Processes: the store's and the workers."""
    went_on_from: int
    """Steps that were over in the store with which the workers went on."""
    shards_before: int
    shards_after: int
    sha256_uninterrupted: str
    """Final weights and momentum of the training that was not killed."""
    sha256_went_on: str


class ChaosReport(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the training in which one process after another was killed."""

    killed: tuple[str, ...]
    """In their order: 'leader of shard 1', 'a standby', 'worker 0'."""
    longest_wait_s: float
    """Between two steps that workers told of, which they do ten times in a second."""
    sha256_undisturbed: str
    """Final weights and momentum of the training in which nothing was killed."""
    sha256_disturbed: str


class Report(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The result of a demo run, as it is shown and as `--json` prints it."""

    strategy: str
    mode: str
    compression: str = "none"
    shards: int
    """0 for a strategy without a store."""
    workers: int
    epochs: int
    seed: int
    dataset: str
    accuracy: float
    """Share of the test images that the final weights recognise."""
    test_images: int
    images_per_s: float
    """Trained on by all workers together, per second of the slowest."""
    bytes_pushed: int
    bytes_pulled: int
    """By all workers, in training: without what creating the tensors took. Without a store: sent and received."""
    max_staleness: int
    """Rounds by which a worker was ahead of the slowest, at most."""
    seconds: float
    """From the start of the first process to the end of the last worker."""
    max_abs_weight_diff: float | None = None
    """Against one process with plain torch on the same micro-batches; only if that was asked for."""
    crash: CrashReport | None = None
    """Only if that was asked for, as the next."""
    chaos: ChaosReport | None = None


def report_of(
    results: Collection[WorkerResult],
    settings: Settings,
    *,
    mode: str,
    num_shards: int,
    seconds: float,
    max_abs_weight_diff: float | None,
    crash: CrashReport | None = None,
    chaos: ChaosReport | None = None,
) -> Report:
    first = min(results, key=lambda result: result.rank)
    return Report(
        strategy=settings.strategy.value,
        mode=mode,
        compression=settings.compression,
        shards=num_shards,
        workers=len(results),
        epochs=settings.epochs,
        seed=settings.seed,
        dataset=first.dataset,
        accuracy=first.accuracy,
        test_images=first.test_images,
        images_per_s=round(sum(result.images for result in results) / max(result.seconds for result in results), 1),
        bytes_pushed=sum(result.bytes_pushed for result in results),
        bytes_pulled=sum(result.bytes_pulled for result in results),
        max_staleness=max(result.max_staleness for result in results),
        seconds=round(seconds, 2),
        max_abs_weight_diff=max_abs_weight_diff,
        crash=crash,
        chaos=chaos,
    )
