"""Tables of rows in simulations: which there are, what workers push to them, and how rows become frames."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from psstore import _core
from psstore.client.row_bounds import Bounds
from psstore.client.row_cache import KeptPull, RowCache
from psstore.client.row_frames import pulled, pulled_frames, row_dim, with_rows, written, written_pieces
from psstore.client.tables import RULES, table_seed
from psstore.partition.router import Router
from psstore.protocol.client import Transfer
from psstore.protocol.requests import Answer
from psstore.types import RowsSpec, Tensor, TensorSpec, complete_hyper, record_bytes

from . import model
from .model import Array
from .plan import Plan

Ids = npt.NDArray[np.uint64]
Hypers = dict[int, dict[str, float]]

PARTITION_BITS = 2
"""Of tables in simulations."""

FRAME_BYTES = 100
"""Of frames of rows in simulations: several for a shard and a push."""

BOUNDS: dict[str, dict[str, Any]] = {
    "open": {},
    "lru": {"max_rows": 4 * 3, "evict": "lru"},
    "lfu": {"max_rows": 4 * 4 + 3, "evict": "lfu"},
    "ttl": {"evict": "ttl:3"},
    "ttl-bounded": {"max_rows": 4 * 4, "evict": "ttl:5"},
    "full": {"max_rows": 4 * 4},
    "after": {"max_rows": 4 * 3, "evict": "lru", "admit": "after:3"},
    "lot": {"max_rows": 4 * 5, "evict": "lfu", "admit": "probability:0.5"},
}
"""So small that they bite: ids are below NUM_IDS."""

ENCODINGS = ("float32", "bf16")
"""Of pushes: small whole numbers are exact in both."""

NUM_IDS = 32
FIRST_VALUE = 0.5
GROUP = 8
"""Of the first table; no tensor has one of them."""

GIVEN_HYPERS: dict[str, dict[str, float]] = {
    "sgd": {"lr": 0.375},
    "adagrad": {"lr": 0.25, "lr_decay": 0.125, "initial_accumulator_value": 0.5},
    "rowwise_adagrad": {"lr": 0.25, "initial_accumulator_value": 0.25},
    "adam": {"lr": 0.125},
    "momentum": {"lr": 0.125, "momentum": 0.5, "dampening": 0.25},
    "ftrl": {"lr": 0.25, "l1": 0.5, "l2": 0.125, "beta": 1.0},
}


def specs(plan: Plan) -> list[TensorSpec]:
    """The tables that workers train beside tensors."""
    found = []
    for index, ((rule, bounds), is_narrow) in enumerate(zip(plan.tables, plan.narrow_tables, strict=True)):
        name = f"rows{index}"
        rows = RowsSpec(dim=2 + index, init="constant", a=FIRST_VALUE, seed=table_seed(name, plan.flavour))
        shape, dtype = (1 << PARTITION_BITS, rows.dim), "bfloat16" if is_narrow else "float32"
        spec = TensorSpec(name=name, shape=shape, dtype=dtype, rule=RULES[rule], group=GROUP + index, rows=rows)
        found.append(Bounds(**BOUNDS[bounds]).bounded(spec))
    return found


def hypers(plan: Plan) -> Hypers:
    """The tables' hyper-parameters, by group."""
    return {GROUP + index: GIVEN_HYPERS[rule] for index, (rule, _) in enumerate(plan.tables)}


def complete_hypers(spec: TensorSpec) -> dict[str, float]:
    """Those of one table, with what nobody gave."""
    rule = next(name for name, wire_name in RULES.items() if wire_name == spec.rule)
    return complete_hyper(spec.rule, GIVEN_HYPERS[rule])


def is_table(tensor: Tensor) -> bool:
    return tensor.spec.rows is not None


def is_open(tensor: Tensor) -> bool:
    """Whether it is a table that has room for all, for good."""
    rows = tensor.spec.rows
    return rows is not None and not rows.max_rows and not rows.evict


def may_be_full(tensor: Tensor) -> bool:
    """Whether pushes to it may be refused."""
    rows = tensor.spec.rows
    return rows is not None and bool(rows.max_rows) and not rows.evict


def contribution(plan: Plan, spec: TensorSpec, *, rank: int, life: int, round: int) -> tuple[Ids, Array]:
    """Ids, of which some come twice and many are those of others, and small whole numbers for each, so that sums are
    exact."""
    assert spec.rows is not None, "it is a table"
    draw = np.random.default_rng([plan.flavour, spec.group, rank, life, round])
    ids = (NUM_IDS * draw.random(draw.integers(0, 10)) ** 2).astype(np.uint64)
    return ids, draw.integers(-8, 9, (len(ids), spec.rows.dim)).astype(np.float32)


def summed(ids: Ids, gradients: Array) -> dict[int, Array]:
    """What that counts for each id."""
    sums: dict[int, Array] = {}
    for one, gradient in zip(ids.tolist(), gradients, strict=True):
        sums[one] = sums[one] + gradient if one in sums else gradient
    return sums


def sum_of_squares(plan: Plan, spec: TensorSpec, *, rank: int, life: int, round: int) -> float:
    """What the table adds to the square of its contribution's norm: of each row, of all that was pushed to it."""
    by_id = summed(*contribution(plan, spec, rank=rank, life=life, round=round))
    return sum(model.sum_of_squares(row * np.float32(plan.loss_scale)) for row in by_id.values())


def pushed(plan: Plan, table: Tensor, ways: Router, *, rank: int, life: int, round: int) -> list[Transfer]:
    """Frames of a contribution to the table."""
    ids, gradients = contribution(plan, table.spec, rank=rank, life=life, round=round)
    grouped = _core.GroupedIds(ids, PARTITION_BITS)
    encoding = ENCODINGS[int(np.random.default_rng([plan.flavour, rank, life, round]).integers(len(ENCODINGS)))]
    pieces = written_pieces("push_rows", table, grouped, ways, encoding)
    return written(table, grouped, gradients * np.float32(plan.loss_scale), pieces, encoding)


def assigned(table: Tensor, ids: Ids, values: Array, ways: Router) -> list[Transfer]:
    """Frames with new values of rows."""
    grouped = _core.GroupedIds(ids, PARTITION_BITS)
    pieces = with_rows(written_pieces("assign_rows", table, grouped, ways))
    return written(table, grouped, values, pieces)


ALL_IDS = np.arange(NUM_IDS, dtype=np.uint64)


class AskedRows:
    """Requests for rows that a table may have, or had as of a decision, and what came."""

    def __init__(self, table: Tensor, ways: Router, ids: Ids = ALL_IDS, cache: RowCache | None = None) -> None:
        """`cache`: of those that were asked for before."""
        self._grouped = _core.GroupedIds(ids, PARTITION_BITS)
        self._rows: Array = np.full((len(ids), row_dim(table)), np.nan, np.float32)
        self._kept = None
        if cache is None:
            self.transfers = pulled(table, self._grouped, self._rows.reshape(-1).view(np.uint8), ways)
        else:
            self._kept = KeptPull(cache, self._grouped, pulled_frames(table, self._grouped, ways, cache.encoding))
            self.transfers = self._kept.transfers()

    def read(self, answers: list[Answer]) -> list[tuple[int, dict[int, bytes]]]:
        """(version, value of each id) of each answer."""
        if self._kept is not None:
            self._kept.take()
            self._rows = self._kept.rows.view(np.float32).reshape(self._rows.shape)
        ids = np.frombuffer(self._grouped.ids(0, len(self._rows)), np.uint64).tolist()
        by_id = dict(zip(ids, self._rows, strict=True))
        found = []
        for transfer, answer in zip(self.transfers, answers, strict=True):
            mine = np.frombuffer(transfer.ids or b"", np.uint64, sum(transfer.table.versions())).tolist()
            found.append((answer.version, {one: by_id[one].tobytes() for one in mine}))
        return found


class ListedRows:
    """Requests for the records of all rows of a table, and what came."""

    RECORDS = 1

    def __init__(self, table: Tensor, ways: Router) -> None:
        self._record_bytes = record_bytes(table.spec)
        self._memory: dict[int, list[npt.NDArray[np.uint8]]] = {}
        by_way: dict[int, list[int]] = {}
        for partition, way in enumerate(ways.of(table)):
            by_way.setdefault(way, []).append(table.key(partition))
        self.transfers = [
            Transfer(way, self._asked(keys), partial(self._make_room, way)) for way, keys in by_way.items()
        ]

    def _asked(self, keys: list[int]) -> _core.SliceTable:
        return _core.SliceTable([(key, 0, _core.DTYPES["rows"]) for key in keys]).with_parts([self.RECORDS] * len(keys))

    def _make_room(self, way: int, table: _core.SliceTable) -> _core.Segments:
        """Again if an answer is cut off, and asked for once more."""
        self._memory[way] = [np.empty(size, np.uint8) for size in table.num_bytes()]
        return _core.Segments(self._memory[way], writable=True)

    def records(self) -> list[bytes]:
        """In the order of their bytes."""
        content = b"".join(one.tobytes() for of_way in self._memory.values() for one in of_way)
        return sorted_records(content, self._record_bytes)


def sorted_records(content: bytes, record_bytes: int) -> list[bytes]:
    """Each record of a partition, in an order that does not depend on how they lie."""
    return sorted(content[begin : begin + record_bytes] for begin in range(0, len(content), record_bytes))
