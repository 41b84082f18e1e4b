"""A table of rows as a dictionary: which rows there are after each decision, and what they are, by the words of
docs/rows.md.

Rows begin with a constant, and gradients and weights are small whole numbers, so that sums are exact."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from psstore.types import PARTITION_BITS, RowsSpec
from tests.support.row_rounding import halves, nearest, rounded
from tests.support.row_rules import STEPS, TO_COME, Floats, Hyper, assigned_state, new_state, num_sums

MASK = (1 << 64) - 1
HALVED_EVERY = 1024
MOST_CHANGES = 255


def hash_of(number: int) -> int:
    """MurmurHash3's finaliser, which docs/wire.md has."""
    number ^= number >> 33
    number = number * 0xFF51AFD7ED558CCD & MASK
    number ^= number >> 33
    number = number * 0xC4CEB9FE1A85EC53 & MASK
    return number ^ number >> 33


@dataclass
class Row:
    value: Any
    state: Any = None
    last: int = 0
    """The decision that changed it last."""
    changes: int = 0
    halvings: int = 0
    """Of `changes`, when they were counted."""


class Sketch:
    """Counts of contributions to ids without a row, too high at times, too low never until they are halved."""

    def __init__(self, seed: int, max_rows: int) -> None:
        self.seed = seed
        least = min(max(max_rows, 1 << 10), 1 << 18) if max_rows else 1 << 15
        self.width = 1 << (least - 1).bit_length()
        self.counters: dict[int, int] = {}
        """By place in all rows of counters; others are 0."""
        self.counted = 0

    def places(self, number: int) -> list[int]:
        first = hash_of(number ^ self.seed)
        second = hash_of(first ^ self.seed)
        return [row * self.width + ((first + row * second & MASK) >> 32) % self.width for row in range(4)]

    def of(self, number: int) -> int:
        return min(self.counters.get(place, 0) for place in self.places(number))

    def count(self, number: int, times: int) -> None:
        total = min(self.of(number) + times, MOST_CHANGES)
        for place in self.places(number):
            self.counters[place] = max(self.counters.get(place, 0), total)
        self.counted += 1
        if self.counted == 4 * self.width:
            self.counters = {place: count // 2 for place, count in self.counters.items()}
            self.counted = 0

    def counted_bytes(self) -> bytes:
        """What the store keeps of it."""
        counters = np.zeros(4 * self.width, np.uint8)
        counters[list(self.counters)] = list(self.counters.values())
        return self.counted.to_bytes(8, "little") + counters.tobytes()


@dataclass
class Partition:
    rows: dict[int, Row] = field(default_factory=dict)
    sketch: Sketch | None = None
    num_steps: int = 0


class TableModel:
    """`step` and `assign` do what a decision and a plain write do; `keys` and `pull` say what is there then."""

    def __init__(
        self,
        spec: RowsSpec,
        *,
        dtype: str = "float32",
        rule: str = "sparse_sgd",
        hyper: Hyper | None = None,
        partition_bits: int = PARTITION_BITS,
    ) -> None:
        self.spec = spec
        self.is_narrow = dtype == "bfloat16"
        self.rule = rule
        self.hyper = {"lr": 1.0} if hyper is None else hyper
        self.partition_rows = spec.max_rows >> partition_bits
        """Most rows of a partition; 0: as many as come."""
        self.decision = 0
        self.evicted = 0
        self.refused = 0
        self._shift = 64 - partition_bits
        self.partitions = [Partition() for _ in range(1 << partition_bits)]
        for one in self.partitions:
            one.sketch = Sketch(spec.seed, self.partition_rows) if spec.admit_after > 1 else None

    def skip(self) -> None:
        self.decision += 1

    def step(
        self,
        pushes: Sequence[Mapping[int, Any]],
        *,
        weights: Sequence[float] | None = None,
        divisor: float = 1.0,
        factor: float = 1.0,
    ) -> None:
        """A decision on contributions to the table: gradients by id, of members in rank order."""
        self.decision += 1
        given: dict[int, list[Any]] = {}
        for push, weight in zip(pushes, weights or [1.0] * len(pushes), strict=True):
            for number, gradient in push.items():
                given.setdefault(number, []).append(gradient * np.float32(weight))
        for partition, ids in self._by_partition(given):
            partition.num_steps += 1
            absent = [one for one in ids if one not in partition.rows]
            admitted = [one for one in absent if self._admits(partition, one, len(given[one]))]
            new = self._make_room(partition, ids, admitted)
            self.refused += sum(len(given[one]) for one in absent if one not in new)
            for one in absent:
                if partition.sketch is not None:
                    partition.sketch.count(one, len(given[one]))
            rows, numbers, gradients = [], [], []
            for one in ids:
                if one in new:
                    partition.rows[one] = Row(self._first_value(), self._first_state())
                reduced = sum(given[one]) / np.float32(divisor) * np.float32(factor)
                for row in self._rows_of(partition, one):
                    self._use(row)
                    rows.append(row)
                    numbers.append(one)
                    gradients.append(reduced)
            if rows:
                self._take_step(rows, numbers, np.array(gradients, np.float32), partition.num_steps)

    def _take_step(self, rows: Sequence[Row], numbers: Sequence[int], gradients: Floats, step: int) -> None:
        for row in rows:
            if num_sums(self.rule, self.spec.dim) and row.state[0] == TO_COME:
                row.state = self._first_state()
        values, state = np.array([row.value for row in rows]), np.array([row.state for row in rows])
        values, state = STEPS[self.rule](values, state, gradients, step, self.hyper)
        for place, (row, number) in enumerate(zip(rows, numbers, strict=True)):
            row.value, row.state = self._rounded(values[place], number), state[place]

    def _rounded(self, values: Floats, number: int) -> Floats:
        if not self.is_narrow:
            return values
        return rounded(values, seed=self.spec.seed, number=number, decision=self.decision)

    def kept(self, values: Floats) -> Floats:
        """What the table keeps of values that no step has computed."""
        return nearest(values) if self.is_narrow else values

    def _rows_of(self, partition: Partition, number: int) -> list[Row]:
        """Rows of that id that take a step: one, or none."""
        return [partition.rows[number]] if number in partition.rows else []

    def _first_value(self) -> Floats:
        return self.kept(np.full(self.spec.dim, self.spec.a, np.float32))

    def _first_state(self) -> Floats:
        return new_state(self.rule, self.spec.dim, self.hyper.get("initial_accumulator_value", 0.0))

    def assign(self, rows: Mapping[int, Any]) -> bool:
        """False: a partition had no room for its rows, which are not set; others are."""
        all_fit = True
        for partition, ids in self._by_partition(rows):
            absent = [one for one in ids if one not in partition.rows]
            if not ids:
                continue
            if len(absent) > self._most_new(partition, ids):
                all_fit = False
                continue
            self._make_room(partition, ids, absent)
            for one in ids:
                row = partition.rows.setdefault(one, Row(None))
                row.value = self.kept(rows[one])
                row.state = assigned_state(self.rule, self.spec.dim)
                self._use(row)
        return all_fit

    def takes(self, push: Mapping[int, Any]) -> bool:
        """Whether the contribution may be staged: else a partition that evicts nothing is full."""
        if self.spec.evict or not self.spec.max_rows:
            return True
        for partition, ids in self._by_partition(push):
            room = self.partition_rows - len(partition.rows)
            absent = sum(one not in partition.rows for one in ids)
            may_be_admitted = room > 0 and (partition.sketch is not None or self.spec.admit_probability < 1)
            if absent > room and not may_be_admitted:
                return False
        return True

    def keys(self) -> list[int]:
        return sorted(one for partition in self.partitions for one in partition.rows)

    def pull(self, ids: Sequence[int]) -> Any:
        first = self._first_value()
        found = [self.partitions[self.partition_of(one)].rows.get(one) for one in ids]
        return np.array([first if row is None else row.value for row in found], np.float32)

    def partition_of(self, number: int) -> int:
        return hash_of(number) >> self._shift

    def record(self, number: int, row: Row) -> bytes:
        """What the store keeps of a row."""
        usage = b""
        if self.spec.evict:
            used = row.changes << 24 | row.halvings if self.spec.evict == "lfu" else row.last
            usage = used.to_bytes(4, "little")
        return b"".join([number.to_bytes(8, "little"), self.stored(row.value), row.state.tobytes(), usage])

    def stored(self, value: Floats) -> bytes:
        """What the record of a row has of its value."""
        return halves(value).tobytes() if self.is_narrow else value.tobytes()

    # ---- what a partition does ----

    def _by_partition(self, given: Mapping[int, Any]) -> list[tuple[Partition, list[int]]]:
        """Every partition, with its ids, ascending."""
        ids: list[list[int]] = [[] for _ in self.partitions]
        for one in sorted(given):
            ids[self.partition_of(one)].append(one)
        return list(zip(self.partitions, ids, strict=True))

    def _admits(self, partition: Partition, number: int, times: int) -> bool:
        if partition.sketch is not None:
            return partition.sketch.of(number) + times >= self.spec.admit_after
        if self.spec.admit_probability < 1:
            lot = hash_of(hash_of(number ^ self.spec.seed) + self.decision & MASK)
            return (lot >> 11) / 2**53 < self.spec.admit_probability
        return True

    def _most_new(self, partition: Partition, ids: Sequence[int]) -> int:
        if not self.spec.max_rows:
            return len(ids)
        staying = [one for one in ids if one in partition.rows] if self.spec.evict else partition.rows
        return max(0, self.partition_rows - len(staying))

    def _make_room(self, partition: Partition, ids: Sequence[int], wanted: Sequence[int]) -> set[int]:
        """Evicts rows; returns those of the ids wanted that get one."""
        new = wanted[: self._most_new(partition, ids)]
        most = self.partition_rows
        needed = max(0, len(partition.rows) + len(new) - most) if most else 0
        if self.spec.evict:
            others = [one for one in partition.rows if one not in set(ids)]
            count = self._num_over(partition, others)
            if needed:
                count = max(count, needed, most // 16)
            for one in sorted(others, key=lambda one: (self._worth(partition.rows[one]), one))[:count]:
                del partition.rows[one]
                self.evicted += 1
        return set(new)

    def _num_over(self, partition: Partition, others: Sequence[int]) -> int:
        """How many rows go because of their age: none before the first of them is a sixteenth late."""
        ages = [self.decision - partition.rows[one].last for one in others]
        ttl = self.spec.ttl
        if self.spec.evict != "ttl" or max(ages, default=0) < ttl + ttl // 16:
            return 0
        return sum(age >= ttl for age in ages)

    def _worth(self, row: Row) -> tuple[int, int]:
        if self.spec.evict != "lfu":
            return row.last, 0
        return self._changes(row), row.halvings

    def _changes(self, row: Row) -> int:
        return row.changes >> min(self.decision // HALVED_EVERY - row.halvings, 8)

    def _use(self, row: Row) -> None:
        row.changes = min(self._changes(row) + 1, MOST_CHANGES)
        row.halvings = self.decision // HALVED_EVERY
        row.last = self.decision
