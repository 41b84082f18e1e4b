"""What must hold of rows: what the decisions say, by a model that knows nothing but these and what workers pushed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from psstore.types import Tensor, TensorSpec, record_bytes
from psstore.wire.messages import DecisionFact
from psstore.wire.ranges import contains
from tests.support.row_model import Partition, Row, TableModel
from tests.support.row_rules import assigned_state

from . import rows
from .archive import Archived
from .assigner import IDS
from .history import Assigned, History
from .plan import Plan


class TrainedTable(TableModel):
    """A table whose rows may be assigned at any of several decisions: it knows each way that they may be."""

    def __init__(self, spec: TensorSpec) -> None:
        assert spec.rows is not None, "it is a table"
        hyper = rows.complete_hypers(spec)
        bits = rows.PARTITION_BITS
        super().__init__(spec.rows, dtype=spec.dtype, rule=spec.rule, hyper=hyper, partition_bits=bits)
        self.assigned: dict[int, dict[tuple[int, int], Row]] = {}
        """id -> (number of the assignment, decision after which it came) -> the row as it is if that was the last."""

    def may_assign(self, one: Assigned) -> None:
        for number in IDS:
            value = self.kept(np.full(self.spec.dim, one.value, np.float32))
            row = Row(value, assigned_state(self.rule, self.spec.dim))
            self.assigned.setdefault(number, {})[one.number, self.decision] = row

    def _rows_of(self, partition: Partition, number: int) -> list[Row]:
        return [*super()._rows_of(partition, number), *self.assigned.get(number, {}).values()]

    def ways_of(self, number: int, *, least: int) -> list[Row | None]:
        """What there may be of that id, if the assignment `least`, or a later one, was the last. None: no row."""
        ways: list[Row | None] = [
            row for (assigned, _), row in self.assigned.get(number, {}).items() if assigned >= least
        ]
        if least < 0 or number not in IDS:
            ways.insert(0, self.partitions[self.partition_of(number)].rows.get(number))
        return ways


def after_each_decision(plan: Plan, history: History, spec: TensorSpec, tensor: Tensor) -> Iterator[TrainedTable]:
    """The table as it is after no decision, one, two, and so on."""
    table = TrainedTable(spec)
    for decision in [None, *history.decisions]:
        if decision is not None:
            take(plan, history, table, spec, tensor, decision)
        for one in history.assigned:
            if one.table == spec.name and one.since <= table.decision <= one.until:
                table.may_assign(one)
        yield table


def take(
    plan: Plan, history: History, table: TrainedTable, spec: TensorSpec, tensor: Tensor, decision: DecisionFact
) -> None:
    factor = history.factors.get(decision.number, 1.0) if decision.max_norm is not None else 1.0
    lied = history.lied
    members = [m for m in decision.members if contains(m.present, tensor.id)]
    there = [m for m in members if (m.rank, m.incarnation, m.round) not in lied]
    if decision.skip or factor is None or not there:
        table.skip()
        return
    pushes = [
        rows.summed(*rows.contribution(plan, spec, rank=m.rank, life=m.incarnation, round=m.round)) for m in there
    ]
    weights = [member.weight * plan.loss_scale for member in there]
    table.step(pushes, weights=weights, divisor=decision.divisor, factor=factor)


def rows_are_what_the_decisions_say(plan: Plan, history: History) -> None:
    """Whatever was read, listed or written down of rows, and what is there in the end."""
    for spec in rows.specs(plan):
        tensor = history.tensors.get(spec.name)
        if tensor is not None:
            check_table(plan, history, spec, tensor)


def check_table(plan: Plan, history: History, spec: TensorSpec, tensor: Tensor) -> None:
    reads = [one for one in history.row_reads if one.table == spec.name]
    lists = [one for one in history.row_lists if one.table == spec.name]
    versions = {one.version for of_kind in (reads, lists, history.archived) for one in of_kind}
    is_final = spec.name in history.rows and history.torn is None
    for version, table in enumerate(after_each_decision(plan, history, spec, tensor)):
        is_last = version == len(history.decisions)
        if version not in versions and not is_last:
            continue
        for read in (one for one in reads if one.version == version):
            for number, value in read.values.items():
                first = np.full(table.spec.dim, table.spec.a, np.float32)
                ways = [first if row is None else row.value for row in table.ways_of(number, least=read.least)]
                assert any(value == way.tobytes() for way in ways), (
                    f"{read.reader} read row {number} of {spec.name} as of {version} as"
                    f" {np.frombuffer(value, np.float32)}: {ways}"
                )
        for listed in (one for one in lists if one.version == version):
            records_are_explained(table, spec, list(listed.records), f"{listed.reader} listed, as of {version},")
            for record in listed.records:
                pulled = listed.values[int.from_bytes(record[:8], "little")]
                value = table.stored(np.frombuffer(pulled, np.float32))
                assert record[8 : 8 + len(value)] == value, (
                    f"{listed.reader} held {version}, pulled {pulled!r} and listed {record!r}"
                )
        for written in (one for one in history.archived if one.version == version):
            check_written(table, spec, tensor, written)
        if is_last and is_final:
            check_final(table, spec, history.rows[spec.name], history.last_assigned(spec.name))


def records_are_explained(
    table: TrainedTable, spec: TensorSpec, records: list[bytes], who: str, *, least: int = -1
) -> None:
    found = {int.from_bytes(record[:8], "little"): record for record in records}
    assert len(found) == len(records), f"{who} a row of {spec.name} twice"
    for number in range(rows.NUM_IDS):
        ways = table.ways_of(number, least=least)
        expected = [None if row is None else table.record(number, row) for row in ways]
        assert found.get(number) in expected, f"{who} row {number} of {spec.name} as {found.get(number)!r}: {expected}"
    assert set(found) <= set(range(rows.NUM_IDS)), f"{who} rows {sorted(found)}"


def check_written(table: TrainedTable, spec: TensorSpec, tensor: Tensor, written: Archived) -> None:
    """A checkpoint has the rows, and what admission has counted."""
    records: list[bytes] = []
    for partition in range(len(tensor.shards)):
        slot = next((s[tensor.key(partition)] for s in written.shards.values() if tensor.key(partition) in s), None)
        if slot is None:  # the shard had not heard of the table
            continue
        records += rows.sorted_records(slot.parts.get(0, b""), record_bytes(spec))
        check_counts(table, partition, slot.parts.get(1), f"version {written.version} has")
        steps = table.partitions[partition].num_steps
        assert slot.record.steps == steps, f"version {written.version} has {slot.record.steps} steps, not {steps}"
    records_are_explained(table, spec, records, f"version {written.version} has", least=written.assigned[spec.name])


def check_counts(table: TrainedTable, partition: int, counted: bytes | None, who: str) -> None:
    here = table.partitions[partition]
    expected = here.sketch.counted_bytes() if here.sketch is not None and here.num_steps else None
    assert counted == expected, f"{who} other counts of partition {partition}"


def check_final(table: TrainedTable, spec: TensorSpec, found: Sequence[Mapping[str, bytes]], least: int) -> None:
    records = [one for state in found for one in rows.sorted_records(state["rows"], record_bytes(spec))]
    for partition, state in enumerate(found):
        check_counts(table, partition, state.get("counted"), "the store has")
    records_are_explained(table, spec, records, "the store has", least=least)
