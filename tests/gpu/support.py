"""What the tests of a device's kernels share: problems to solve with fresh random numbers, the processor's answers, and
memory that shows who wrote where. Needs the extension, torch and numpy, and nothing else of psstore.

The same code runs on the processor and on the fake device, so that the tests are known to work where there is no GPU
(tests/gpu/test_support.py).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from bench import gpu_engine
from bench.rule_case import Case, state_names

import psstore.cuda
from psstore import _core
from tests.kernels.parity import all_cases

on_a_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not psstore.cuda.is_built(), reason="this build of psstore has no CUDA kernels"),
    pytest.mark.skipif(not psstore.cuda.is_available(), reason="no CUDA device can be used here"),
]
"""Of modules whose tests need one."""

CASES = [*all_cases(), Case("reduce", {}), Case("assign", {}), Case("add", {})]
"""Every rule with every combination of its options."""

Bytes = npt.NDArray[np.uint8]

GUARD_BYTES = 256
"""Before and behind everything that a kernel is given."""

GUARD, POISON = 0xA5, 0xFF
"""What guards are made of, and what nobody has written yet: a NaN in every dtype."""

SIZES = (0, 1, 3, 15, 16, 17, 255, 256, 257, 1023, 4099, 70_001)
"""Around a 16-byte access, a block of an encoding, a block of threads, and what one block of threads works on."""

OFFSETS = (0, 16, 4, 1)
"""From an address that is aligned to 256: aligned for wide accesses, not so, and to nothing. What came from outside may
lie anywhere; what a store allocated is aligned to its elements at least (kernels/batch_cuda.h)."""

ENCODED = ("int8", "sign", "topk")

INPUTS: Mapping[str, Sequence[str]] = {
    "float32": ("float32", "bfloat16", "float16", *ENCODED),
    "float64": ("float64", "float32", "bfloat16", "float16", *ENCODED),
}
"""What may be contributed to a tensor of each dtype."""

ITEM_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}

TORCH_DTYPES = {name: getattr(torch, name) for name in ITEM_BYTES}


# ---- memory ----


class Place:
    """Bytes on an engine, `offset` beyond an aligned address, between guards."""

    def __init__(self, engine: Engine, num_bytes: int, *, offset: int = 0, item_bytes: int = 1) -> None:
        """Aligned to `item_bytes`: the offset is rounded up to that."""
        self._begin = GUARD_BYTES + -(-offset // item_bytes) * item_bytes
        self._end = self._begin + num_bytes
        self._whole = torch.full((self._end + GUARD_BYTES,), GUARD, dtype=torch.uint8, device=engine.torch_device)
        self._bytes = self._whole[self._begin : self._end]
        self._bytes.fill_(POISON)

    @property
    def address(self) -> int:
        return self._whole.data_ptr() + self._begin

    def put(self, content: Bytes) -> Place:
        self._bytes.copy_(torch.from_numpy(content))
        return self

    def get(self) -> Bytes:
        """Fails if a guard was written to."""
        whole: Bytes = self._whole.cpu().numpy()
        touched = np.flatnonzero(np.delete(whole, slice(self._begin, self._end)) != GUARD)
        assert not touched.size, f"{touched.size} bytes outside of {self._end - self._begin} were written"
        return whole[self._begin : self._end].copy()


# ---- engines ----


@dataclass(frozen=True)
class Engine(gpu_engine.Engine):
    """What its kernels make of batches."""

    def update(self, batch: _core.SliceBatch) -> None:
        self.finish_torch()
        batch.queue_reduce_update(self.queue)
        self.finish()

    def squares(self, batch: _core.SliceBatch) -> list[float]:
        sums = Place(self, 8 * len(batch))
        self.finish_torch()
        batch.queue_reduced_squares(self.queue, sums.address)
        self.finish()
        return [float(one) for one in sums.get().view(np.float64)]


@dataclass(frozen=True)
class Processor(Engine):
    """By one of the CPU's instruction sets, at once."""

    name: str = "cpu"
    instruction_set: str = "plain"

    def update(self, batch: _core.SliceBatch) -> None:
        batch.reduce_update(instruction_set=self.instruction_set)

    def squares(self, batch: _core.SliceBatch) -> list[float]:
        return batch.reduced_squares(instruction_set=self.instruction_set)


REFERENCE = Processor()
"""What everything is compared with."""


# ---- problems ----


@dataclass(frozen=True)
class Problem:
    """A slice with everything that its step reads."""

    case: Case
    dtype: str
    num_elems: int
    inputs: tuple[str, ...]
    """Encoding of each contribution."""
    seed: int
    step: int = 1
    offset: int = 0
    """Of all its memory but the first contribution's, which is aligned to 256."""
    scale: float = 1.0
    divisor: float = 1.0
    in_place: bool = True
    shadow: bool = False
    special: bool = False
    """With NaN, infinities, zeros of both signs and denormals among the numbers."""

    @cached_property
    def value(self) -> Bytes:
        return self._numbers(0, self.dtype)

    @cached_property
    def states(self) -> dict[str, Bytes]:
        """Sums of squares are none below zero. Of the first step: poison, which is not to be read."""
        if self.step == 1:
            size = self.num_elems * ITEM_BYTES[self.dtype]
            return {name: np.full(size, POISON, np.uint8) for name in state_names(self.case)}
        return {
            name: np.abs(self._numbers(1 + index, self.dtype).view(self.dtype)).view(np.uint8)
            for index, name in enumerate(state_names(self.case))
        }

    @cached_property
    def contributions(self) -> list[tuple[Bytes, str, float]]:
        """(payload, encoding, weight) of each rank; weights are no powers of two."""
        return [
            (self._payload(100 + rank, encoding), encoding, float(np.float32(0.3 + 0.7 * rank)))
            for rank, encoding in enumerate(self.inputs)
        ]

    def _payload(self, index: int, encoding: str) -> Bytes:
        if encoding not in ENCODED:
            return self._numbers(index, encoding)
        floats = self._numbers(index, "float32")
        kept = self.num_elems // 10 if encoding == "topk" else 0
        number = _core.DTYPES[encoding]
        payload = np.empty(_core.encoded_bytes(number, self.num_elems, kept), np.uint8)
        _core.encode_slice(number, floats.data, None, payload.data, kept)
        return payload

    def _numbers(self, index: int, dtype: str) -> Bytes:
        generator = np.random.default_rng([self.seed, index])
        numbers = generator.standard_normal(self.num_elems) * 10.0 ** generator.uniform(-4, 2, self.num_elems)
        if self.special:
            odd = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, -1e-40, 1e38])
            places = generator.random(self.num_elems) < 0.2
            numbers[places] = generator.choice(odd, int(places.sum()))
        elements = torch.from_numpy(numbers).to(TORCH_DTYPES[dtype])
        return elements.view(torch.uint8).numpy() if self.num_elems else np.empty(0, np.uint8)


@dataclass
class Placed:
    """A problem in an engine's memory, and later its answer."""

    problem: Problem
    engine: Engine
    places: dict[str, Place] = field(default_factory=dict)
    """By name: what is read and written."""
    contributions: list[tuple[int, int, float, int]] = field(default_factory=list)
    kept: list[Place] = field(default_factory=list)

    def __post_init__(self) -> None:
        problem, offset = self.problem, self.problem.offset

        def place(num_bytes: int, dtype: str) -> Place:
            return Place(self.engine, num_bytes, offset=offset, item_bytes=ITEM_BYTES[dtype])

        self.places["value"] = place(problem.value.size, problem.dtype)
        self.places["value_in"] = place(problem.value.size, problem.dtype).put(problem.value)
        if problem.in_place:
            self.places["value"].put(problem.value)
        for name, state in problem.states.items():
            self.places[name] = place(state.size, problem.dtype).put(state)
        if problem.shadow:
            self.places["shadow"] = place(2 * problem.num_elems, "bfloat16")
        for rank, (payload, encoding, weight) in enumerate(problem.contributions):
            pushed = Place(self.engine, payload.size, offset=offset if rank else 0).put(payload)
            self.kept.append(pushed)
            self.contributions.append((pushed.address, _core.DTYPES[encoding], weight, payload.size))

    def add_to(self, batch: _core.SliceBatch) -> None:
        problem = self.problem
        batch.add(
            _core.RULES[problem.case.rule],
            problem.case.hyper,
            step=problem.step,
            dtype=_core.DTYPES[problem.dtype],
            num_elems=problem.num_elems,
            value=self.places["value"].address,
            value_in=0 if problem.in_place else self.places["value_in"].address,
            state={name: self.places[name].address for name in problem.states},
            contributions=self.contributions,
            divisor=problem.divisor,
            first=dict.fromkeys(problem.states, problem.step == 1),
            scale=problem.scale,
            shadow=self.places["shadow"].address if problem.shadow else 0,
        )

    def answer(self) -> dict[str, Bytes]:
        """Fails if something beside it was written to."""
        for pushed in self.kept:
            pushed.get()
        return {name: place.get() for name, place in self.places.items()}


def placed(problems: Sequence[Problem], engine: Engine) -> tuple[list[Placed], _core.SliceBatch]:
    """The problems in the engine's memory, and the batch that solves all of them."""
    all_placed = [Placed(problem, engine) for problem in problems]
    batch = _core.SliceBatch()
    for one in all_placed:
        one.add_to(batch)
    return all_placed, batch


def answers(problems: Sequence[Problem], engine: Engine) -> list[dict[str, Bytes]]:
    """Of one batch with all of them."""
    all_placed, batch = placed(problems, engine)
    engine.update(batch)
    return [one.answer() for one in all_placed]


def assert_same_answers(problems: Sequence[Problem], engine: Engine) -> None:
    """The engine's are the processor's, bit by bit; of a NaN only that it is one."""
    compare(problems, answers(problems, engine), answers(problems, REFERENCE))


def compare(problems: Sequence[Problem], ours: Sequence[dict[str, Bytes]], theirs: Sequence[dict[str, Bytes]]) -> None:
    for problem, left, right in zip(problems, ours, theirs, strict=True):
        for name in right:
            dtype = "bfloat16" if name == "shadow" else problem.dtype
            where = first_difference(left[name], right[name], dtype)
            assert where is None, f"{name}[{where}] of {problem}"


def first_difference(left: Bytes, right: Bytes, dtype: str) -> int | None:
    """Index of the first element that has other bits, unless both are NaN."""
    if left.size != right.size:
        return 0
    bits = [side.view(f"u{ITEM_BYTES[dtype]}") for side in (left, right)]
    nans = [_is_nan(side, dtype) for side in (left, right)]
    different = np.flatnonzero((bits[0] != bits[1]) & ~(nans[0] & nans[1]))
    return int(different[0]) if different.size else None


def _is_nan(content: Bytes, dtype: str) -> npt.NDArray[Any]:
    if not content.size:
        return np.empty(0, bool)
    return torch.from_numpy(content.copy()).view(TORCH_DTYPES[dtype]).isnan().numpy()


# ---- what is tried ----


def fresh_seed() -> int:
    """New in each run; a failure names it with the problem."""
    return random.SystemRandom().getrandbits(32)


def problems_of(case: Case, *, seed: int, dtype: str = "float32", special: bool = False) -> list[Problem]:
    """Every size, at each offset in turn, with 1, 2, 4 and 8 contributions of one encoding, with a number for which
    there is no special kernel, with all encodings mixed, and with none."""
    choose = random.Random(seed)
    encodings = INPUTS[dtype]
    problems = []
    for index, num_elems in enumerate(SIZES):
        one = encodings[index % len(encodings)]
        mixed = tuple(choose.choices(encodings, k=choose.randint(2, 9)))
        inputs = choose.choice([(one,), (one,) * 2, (one,) * 4, (one,) * 8, (one,) * 3, mixed, mixed, ()])
        problems.append(
            Problem(
                case,
                dtype,
                num_elems,
                inputs,
                seed=choose.getrandbits(32),
                step=choose.choice([1, 2, 1000]),
                offset=OFFSETS[(index + seed) % len(OFFSETS)],
                scale=choose.choice([1.0, 0.37]),
                divisor=choose.choice([1.0, 3.0, float(len(inputs) or 1)]),
                in_place=choose.random() < 0.5,
                shadow=choose.random() < 0.5,
                special=special,
            )
        )
    return problems


# ---- what is checked, on any engine ----


def check_case(engine: Engine, case: Case) -> None:
    for dtype in INPUTS:
        for special in (False, True):
            assert_same_answers(problems_of(case, seed=fresh_seed(), dtype=dtype, special=special), engine)


def check_mixed_batch(engine: Engine, *, num_problems: int) -> None:
    """Of all rules, options and dtypes."""
    choose = random.Random(fresh_seed())
    problems = [
        choose.choice(problems_of(choose.choice(CASES), seed=choose.getrandbits(32), dtype=choose.choice([*INPUTS])))
        for _ in range(num_problems)
    ]
    assert_same_answers(problems, engine)


def check_squares(engine: Engine) -> None:
    for dtype in INPUTS:
        problems = problems_of(Case("sgd", {}), seed=fresh_seed(), dtype=dtype)
        (here, ours), (there, theirs) = (placed(problems, one) for one in (engine, REFERENCE))
        found, expected = engine.squares(ours), REFERENCE.squares(theirs)
        for one in (*here, *there):  # whose memory the batches name
            one.answer()
        for problem, left, right in zip(problems, found, expected, strict=True):
            assert left == right, f"{left!r} is not {right!r}: {problem}"


def check_conversions(engine: Engine, num_elems: int) -> None:
    for source in ITEM_BYTES:
        problem = Problem(Case("reduce", {}), "float32", num_elems, (source,), seed=fresh_seed(), special=True)
        content = problem.contributions[0][0]
        for target in ITEM_BYTES:
            expected = np.empty(num_elems * ITEM_BYTES[target], np.uint8)
            _core.convert(content.data, _core.DTYPES[source], expected.data, _core.DTYPES[target])
            for offset in OFFSETS:
                read = Place(engine, content.size, offset=offset).put(content)
                written = Place(engine, expected.size, offset=offset)
                engine.finish_torch()
                _core.queue_convert(
                    engine.queue,
                    from_dtype=_core.DTYPES[source],
                    to_dtype=_core.DTYPES[target],
                    source=read.address,
                    destination=written.address,
                    num_elems=num_elems,
                )
                engine.finish()
                where = first_difference(written.get(), expected, target)
                assert where is None, f"element {where} of {num_elems}, {source} to {target}, offset {offset}"


def check_codec(engine: Engine, encoding: str, num_elems: int, *, special: bool, with_residual: bool) -> None:
    """Encodes, with what was left before, and decodes: payload, residual and what is said are the processor's."""
    number, kept = _core.DTYPES[encoding], num_elems // 7 if encoding == "topk" else 0
    problem = Problem(Case("reduce", {}), "float32", num_elems, ("float32",), seed=fresh_seed(), special=special)
    source, residual = problem.contributions[0][0], problem.value
    expected = np.full(_core.encoded_bytes(number, num_elems, kept), POISON, np.uint8)
    left = residual.copy()
    _core.encode_slice(number, source.data, left.data if with_residual else None, expected.data, kept)
    said = np.empty_like(source)
    _core.decode_slice(number, expected.data, said.data)
    for offset in OFFSETS:
        what = f"{encoding} of {num_elems}, offset {offset}: {problem}"
        read, rest, decoded = (Place(engine, source.size, offset=offset, item_bytes=4) for _ in range(3))
        read.put(source)
        rest.put(residual)
        payload = Place(engine, expected.size, offset=offset)
        engine.finish_torch()
        address = rest.address if with_residual else 0
        _core.queue_encode(
            engine.queue,
            number,
            source=read.address,
            residual=address,
            payload=payload.address,
            num_elems=num_elems,
            k=kept,
        )
        _core.queue_decode(
            engine.queue,
            number,
            payload=payload.address,
            num_bytes=expected.size,
            destination=decoded.address,
            num_elems=num_elems,
        )
        engine.finish()
        read.get()
        if not special or encoding != "sign":  # whose bits below a NaN's scale may differ
            assert _same_payload(payload.get(), expected), f"payload of {what}"
        assert first_difference(rest.get(), left if with_residual else residual, "float32") is None, f"rest of {what}"
        assert first_difference(decoded.get(), said, "float32") is None, f"decoded {what}"


def _same_payload(left: Bytes, right: Bytes) -> bool:
    """But for the bits of a NaN, which may stand where a float is: a scale, or a value."""
    whole = left.size // 4 * 4
    as_floats = first_difference(left[:whole], right[:whole], "float32") is None
    return as_floats and bool((left[whole:] == right[whole:]).all())
