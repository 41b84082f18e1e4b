"""What the kernels' tests share: random contributions in every encoding, at odd addresses, and their sum in numpy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from bench.rule_case import Case, state_names
from hypothesis import settings
from hypothesis import strategies as st

from psstore import _core
from tests.kernels.parity import Array

INSTRUCTION_SETS = _core.instruction_sets()

TORCH_DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

ENCODINGS = {
    "float32": ("float32", "bfloat16", "float16"),
    "float64": ("float64", "float32", "bfloat16", "float16"),
}
"""What may be contributed to a tensor of each dtype."""

SIZES = (0, 1, 15, 16, 17, 33, 4099)
"""Around the widths of vector registers and of the lanes; eight blocks of 512 and a rest that fills no register."""

seeds = st.integers(0, 2**32 - 1)
"""Numbers that are new in each run; a failure names its seed."""

few_examples = settings(deadline=None, max_examples=8)
"""For tests that go over every size, dtype and encoding with each seed."""

Contributions = Sequence[tuple[torch.Tensor, float]]


def random(num_elems: int, dtype: str, *, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_elems, generator=generator, dtype=torch.float64).to(TORCH_DTYPES[dtype])


def random_contributions(num_elems: int, dtype: str, *, seed: int) -> Contributions:
    """One of each encoding that the tensor takes, with weights that are no powers of two."""
    return [
        (random(num_elems, encoding, seed=seed + rank), 0.3 + 0.7 * rank)
        for rank, encoding in enumerate(ENCODINGS[dtype])
    ]


def data(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor; numpy has no bfloat16, and torch no view of an empty array of numpy's."""
    elements = tensor if tensor.numel() else tensor.new_empty(0)
    view: memoryview = elements.view(torch.uint8).numpy().data
    return view


def name_of(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def as_given(contributions: Contributions) -> list[tuple[memoryview, int, float]]:
    """As the core takes them."""
    return [(data(grad), _core.DTYPES[name_of(grad)], weight) for grad, weight in contributions]


def at_odd_addresses(contributions: Contributions) -> list[tuple[memoryview, int, float]]:
    """The same, each in memory of its own that is aligned to nothing."""
    return [(odd_copy(view), dtype, weight) for view, dtype, weight in as_given(contributions)]


def odd_copy(view: memoryview) -> memoryview:
    memory = np.empty(1 + view.nbytes, np.uint8)
    memory[1:] = view
    shifted: memoryview = memory[1:].data
    return shifted


def first_step(
    case: Case,
    value: Array,
    contributions: Contributions,
    *,
    divisor: float = 1.0,
    scale: float = 1.0,
    base: Array | None = None,
    compensation: float = 0.0,
    instruction_set: str | None = None,
) -> list[bytes]:
    """Value and state after the first step, everything at odd addresses."""
    after = odd_copy(memoryview(value.tobytes()))
    state = {name: odd_copy(memoryview(value.tobytes())) for name in state_names(case)}
    _core.reduce_update(
        _core.RULES[case.rule],
        case.hyper,
        step=1,
        value=after,
        state=state,
        contributions=at_odd_addresses(contributions),
        divisor=divisor,
        dtype=_core.DTYPES[str(value.dtype)],
        first=dict.fromkeys(state, True),
        scale=scale,
        base=None if base is None else odd_copy(memoryview(base.tobytes())),
        compensation=compensation,
        instruction_set=instruction_set,
    )
    return [bytes(after), *map(bytes, state.values())]


def reference_sum(dtype: str, contributions: Contributions, divisor: float) -> Array:
    """Each product, sum and quotient rounded by itself, in the order given. Weights are floats."""
    kind = np.dtype(dtype).type
    total: Array | None = None
    for grad, weight in contributions:
        product: Array = kind(np.float32(weight)) * grad.to(TORCH_DTYPES[dtype]).numpy()
        total = product if total is None else total + product
    assert total is not None
    return total if divisor == 1.0 else total / kind(divisor)


def same_bits(left: Array, right: Array) -> bool:
    return left.dtype == right.dtype and left.tobytes() == right.tobytes()
