"""The result of a demo run, as it is shown and as `--json` prints it."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from psstore.cli.demo.events import Finished


class Report(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
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


def report_of(
    finished: Collection[Finished],
    *,
    strategy: str,
    mode: str,
    compression: str,
    num_shards: int,
    epochs: int,
    seed: int,
    seconds: float,
    max_abs_weight_diff: float | None,
) -> Report:
    first = min(finished, key=lambda one: one.rank)
    return Report(
        strategy=strategy,
        mode=mode,
        compression=compression,
        shards=num_shards,
        workers=len(finished),
        epochs=epochs,
        seed=seed,
        dataset=first.dataset,
        accuracy=first.accuracy,
        test_images=first.test_images,
        images_per_s=round(sum(one.images for one in finished) / max(one.seconds for one in finished), 1),
        bytes_pushed=sum(one.bytes_pushed for one in finished),
        bytes_pulled=sum(one.bytes_pulled for one in finished),
        max_staleness=max(one.max_staleness for one in finished),
        seconds=round(seconds, 2),
        max_abs_weight_diff=max_abs_weight_diff,
    )
