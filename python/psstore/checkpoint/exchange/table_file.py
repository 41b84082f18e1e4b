"""Tables of rows as arrays of others' formats: ids, rows, and what the update rule keeps of each.

ids/NAME (rows,) u64, ascending    rows/NAME (rows, dim) as the table keeps them    STATE/NAME (rows, dim), or (rows, 1)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from psstore import _core
from psstore.checkpoint.exchange.safetensors_file import BFLOAT16, write_safetensors
from psstore.checkpoint.exchange.whole_model import AnyArray
from psstore.checkpoint.reader import Checkpoint
from psstore.checkpoint.slots import SlotRecord
from psstore.types import ID_BYTES, TensorSpec, record_bytes

TABLES_FILE = "tables.safetensors"
"""Name of the file that an export has of all tables."""

STATES: Mapping[str, Sequence[str]] = {
    "sparse_sgd": (),
    "sparse_adagrad": ("sum",),
    "rowwise_adagrad": ("sum",),
    "sparse_adam": ("exp_avg", "exp_avg_sq"),
    "sparse_momentum": ("momentum_buffer",),
    "ftrl": ("accumulator", "linear"),
}
"""What each rule of rows keeps of a row, in the order of its record; torch's names, and Keras' of ftrl."""

STORED: Mapping[str, np.dtype[Any]] = {"float32": np.dtype(np.float32), "bfloat16": BFLOAT16}
"""Elements of a record, by the name of their dtype."""


def table_arrays(spec: TensorSpec, records: AnyArray) -> dict[str, AnyArray]:
    """The arrays of a table with these records, (rows, bytes of one) u8 in any order."""
    assert spec.rows is not None, "it is a table"
    ids = np.ascontiguousarray(records[:, :ID_BYTES]).view(np.uint64).reshape(-1)
    order = np.argsort(ids)
    dim, name, begin = spec.rows.dim, spec.name, ID_BYTES
    width = 1 if spec.rule == "rowwise_adagrad" else dim
    columns = [("rows", dim, STORED[spec.dtype]), *((state, width, STORED["float32"]) for state in STATES[spec.rule])]
    arrays: dict[str, AnyArray] = {f"ids/{name}": ids[order]}
    for column, elems, dtype in columns:
        end = begin + elems * dtype.itemsize
        arrays[f"{column}/{name}"] = records[order, begin:end].view(dtype)
        begin = end
    return arrays


def write_table(path: Path, spec: TensorSpec, records: AnyArray) -> None:
    """Writes one table as safetensors. Raises OSError."""
    write_safetensors(path, table_arrays(spec, records))


def read_tables(checkpoint: Checkpoint) -> dict[str, AnyArray]:
    """The arrays of all tables of a checkpoint, whose rows are in memory then. Raises what reading raises."""
    tables = {record.id: record.spec for record in checkpoint.store.tensors if record.spec.rows is not None}
    keys = frozenset(slot.key for slot in checkpoint.slots() if slot.key >> _core.SLICE_INDEX_BITS in tables)
    records: dict[int, list[AnyArray]] = {number: [] for number in tables}

    def into(slot: SlotRecord, part: int, num_bytes: int) -> memoryview:
        piece = np.empty(num_bytes, np.uint8)
        if part == 0:
            records[slot.key >> _core.SLICE_INDEX_BITS].append(piece)
        return memoryview(piece)

    for _ in checkpoint.read(keys, into):
        pass
    arrays: dict[str, AnyArray] = {}
    for number, spec in tables.items():
        together = np.concatenate([np.empty(0, np.uint8), *records.pop(number)])
        arrays |= table_arrays(spec, together.reshape(-1, record_bytes(spec)))
    return arrays
