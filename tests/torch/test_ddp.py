"""The same script under plain torch, DistributedDataParallel and psstore ends with the same weights.

With one worker psstore's bits are plain torch's, and with two they are DDP's: DDP halves each gradient, which is
exact, and adds the halves, and a sum of two does not depend on the order. With more workers DDP adds in the order of
its ring and psstore in that of the ranks; each addition may then round otherwise, by half an ulp of its sum. To whole
batches in one process both are as far as sums over a batch and sums of two parts' sums are from each other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from tests.torch.ddp_parity import Difference, difference
from tests.torch.ddp_scripts import FEATURES, Feature
from tests.torch.ddp_trainers import DdpWorkers, Weights, train_alone_on_store, train_locally, train_on_store

EXACT = 0.0

ROUNDED = 1e-5
"""Weights are below 4, an ulp is up to 2.4e-7 there, and 12 steps round a few hundred times."""

OF_ITS_OWN = float("inf")

ALONE: Mapping[str, float] = {
    "AdamW": ROUNDED,  # torch's square root is not always the correctly rounded one
    "clipping the global norm": ROUNDED,  # torch sums squares in float32, the store in float64
    "`Replicas`, two per worker": ROUNDED,  # sums over the batch are sums of two parts' sums
}
"""Feature -> how far from plain torch one worker may be, where it is not bit for bit."""

TOGETHER: Mapping[str, float] = {
    "AdamW": ROUNDED,
    "clipping the global norm": ROUNDED,
    "torch's `clip_grad_norm_` left as it is": 1e-6,  # for the same reason, and not for more
    "`Replicas`, two per worker": ROUNDED,
}
"""Feature -> how far from DDP two workers may be."""

WHOLE: Mapping[str, float] = {
    "`GradScaler`, fp16, one overflow": 1e-2,  # fp16 has 11 bits; products of a part round as its sums do
    "bf16 autocast": 5e-2,  # 8 bits
    "BatchNorm and its buffers": OF_ITS_OWN,  # statistics of a part are not those of the whole
}
"""Feature -> how far from whole batches in one process two workers may be, where it is more than rounding."""


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """How torch splits a sum among its threads is part of its result."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def ddp_workers() -> Iterator[DdpWorkers]:
    with DdpWorkers() as workers:
        yield workers


each_feature = pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)


def assert_within(bound: float, left: Weights, right: Weights) -> None:
    found = difference(left, right)
    assert isinstance(found, Difference)
    assert found.absolute <= bound, f"the weights differ by {found}"


@each_feature
def test_one_worker_trains_as_plain_torch_does(feature: Feature) -> None:
    local = train_locally(feature.script)
    assert_within(ALONE.get(feature.name, EXACT), train_alone_on_store(feature.script, feature.store), local)


@each_feature
def test_two_workers_train_as_ddp_does(feature: Feature, ddp_workers: DdpWorkers) -> None:
    together = train_on_store(feature.script, feature.store)
    assert_within(TOGETHER.get(feature.name, EXACT), together[0], ddp_workers.train(feature.script, feature.ddp)[0])


@each_feature
def test_two_workers_train_as_one_process_with_whole_batches_does(feature: Feature) -> None:
    together = train_on_store(feature.script, feature.store)
    assert_within(WHOLE.get(feature.name, ROUNDED), together[0], train_locally(feature.script))


@pytest.mark.parametrize(
    "feature",
    [feature for feature in FEATURES if feature.name != "uneven batches"],  # where one worker leaves before the end
    ids=lambda feature: feature.name,
)
def test_both_workers_end_with_the_same_weights(feature: Feature) -> None:
    assert_within(EXACT, *train_on_store(feature.script, feature.store))


def test_the_table_in_the_documentation_has_every_feature(repository: Path) -> None:
    page = (repository / "docs" / "pytorch.md").read_text()
    rows = re.search(r"^\| feature \|.*\n\|-.*\n((?:\|.*\n)+)", page, re.MULTILINE)
    assert rows is not None
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows[1].splitlines()] == [one.name for one in FEATURES]
    assert "missing" not in rows[1]
