"""What leaves a GPU encoded, and what comes to it encoded, has the processor's bytes."""

from __future__ import annotations

import pytest

from tests.gpu.payloads import check_arriving, check_changes, check_converting, check_leaving
from tests.gpu.support import Engine, on_a_gpu

pytestmark = on_a_gpu

GPU = Engine("cuda:0")

NUMBERS = [(1, 3_000_000), (7, 300_000), (500, 3000)]


@pytest.mark.parametrize(("num_slices", "most_elems"), NUMBERS)
def test_gpu_encodes_what_leaves_it(num_slices: int, most_elems: int) -> None:
    check_leaving(GPU, num_slices, most_elems=most_elems)


@pytest.mark.parametrize(("num_slices", "most_elems"), NUMBERS)
def test_gpu_decodes_what_comes_to_it(num_slices: int, most_elems: int) -> None:
    check_arriving(GPU, num_slices, most_elems=most_elems)
    check_converting(GPU, num_slices, most_elems=most_elems)


@pytest.mark.parametrize(("num_slices", "most_elems"), NUMBERS)
def test_gpu_encodes_changes_that_are_published(num_slices: int, most_elems: int) -> None:
    check_changes(GPU, num_slices, most_elems=most_elems)


@pytest.mark.sanitized
def test_gpu_encodes_and_decodes_a_few_slices() -> None:
    check_leaving(GPU, 10, most_elems=5000)
    check_arriving(GPU, 10, most_elems=5000)
    check_converting(GPU, 10, most_elems=5000)
    check_changes(GPU, 10, most_elems=5000)
