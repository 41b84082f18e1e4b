"""Deltas on storage: what they are read with, what becomes of them without it, and when one is written."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest

from psstore.checkpoint.hash_pool import HashPool
from psstore.checkpoint.local_storage import LocalStorage
from psstore.checkpoint.manifest import FileRecord, Manifest
from psstore.checkpoint.owned_place import OwnedPlace
from psstore.checkpoint.ownership import take
from psstore.checkpoint.place import COMPLETE, DAMAGED, CheckpointPlace
from psstore.checkpoint.reader import Checkpoint, Found, verify
from psstore.checkpoint.slots import ROWS_SHIFT, SlotRecord, SlotTable
from psstore.checkpoint.state import ShardState, StoreState, TensorRecord
from psstore.checkpoint.writer import ShardFileWriter
from psstore.errors import BadArgument, CheckpointDamaged
from psstore.types import Consistency, RowsSpec, TensorSpec
from tests.checkpoint.docs_reader import read_rows
from tests.checkpoint.support import read_parts

ROWS = RowsSpec(dim=2, init="constant")

TABLE = TensorRecord(id=1, spec=TensorSpec(name="t", shape=ROWS.shape, rule="sparse_sgd", rows=ROWS), slice_elems=2)

Rows = Mapping[int, Mapping[int, float]]
"""Of each partition what is in its rows, by id, in the order in which they lie."""

BASE: Rows = {0: {5: 1.0, 6: 1.0, 7: 1.0}, 1: {9: 1.0}, 3: {2: 1.0}}

LATER: Rows = {0: {7: 1.0, 6: 2.0, 8: 3.0}, 1: {9: 1.0}, 2: {4: 1.0}}
"""Row 5 has gone, and another lies in its place; 6 has changed, 8 and 4 are new, and a partition has no row left."""

CHANGED: Mapping[int, Sequence[int]] = {0: (6, 8), 1: (), 2: (4,)}


def record(number: int, value: float) -> bytes:
    return struct.pack("<Q2f", number, value, -value)


def records(rows: Rows, partition: int) -> bytes:
    return b"".join(record(number, value) for number, value in rows[partition].items())


def changes(rows: Rows, changed: Mapping[int, Sequence[int]], partition: int) -> bytes:
    of = rows[partition]
    return struct.pack(f"<{len(of)}Q", *of) + b"".join(record(number, of[number]) for number in changed[partition])


def state_of(version: int) -> StoreState:
    return StoreState(decision=version, consistency=Consistency(), tensors=(TABLE,), next_tensor_id=2)


def write(place: OwnedPlace, version: int, rows: Rows = LATER, changed: Mapping[int, Sequence[int]] = CHANGED) -> bool:
    """Has the place's owner write a version, and tidy up. Returns whether it is a delta, as the place said."""
    attempt = place.begin(version, has_rows=True)
    is_delta = place.base_of(version) is not None
    files = write_files(place, version, attempt, rows, changed if is_delta else None)
    place.commit(state_of(version), files)
    place.tidy_up()
    return is_delta


def write_files(
    place: OwnedPlace, version: int, attempt: str, rows: Rows, changed: Mapping[int, Sequence[int]] | None
) -> list[FileRecord]:
    slots = [
        SlotRecord(TABLE.key(partition), version, 3, len(of) << ROWS_SHIFT | bool(of)) for partition, of in rows.items()
    ]
    numbers = None if changed is None else {TABLE.key(one): len(those) for one, those in changed.items()}
    with (
        HashPool(1) as pool,
        ShardFileWriter(
            place.place.storage,
            attempt=attempt,
            state=ShardState(index=0, num_shards=1, version=version),
            tensors=(TABLE,),
            table=SlotTable.of(slots),
            pool=pool,
            changed=numbers,
        ) as writer,
    ):
        partitions = [piece.slot.key & 0xFF for piece in writer.pieces]
        for one in partitions:
            writer.write([memoryview(records(rows, one) if changed is None else changes(rows, changed, one))])
        return [writer.finish()]


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "place")


def owned(storage: LocalStorage, *, keep: int = 10, full_every: int = 3) -> OwnedPlace:
    return OwnedPlace(CheckpointPlace(storage), take(storage, take_over=True), keep=keep, full_every=full_every)


def statuses(storage: LocalStorage) -> dict[int, str]:
    return {found.version: found.status for found in CheckpointPlace(storage).list()}


def manifest_of(storage: LocalStorage, version: int) -> Manifest:
    with Checkpoint(storage, version) as checkpoint:
        return checkpoint.manifest


def test_a_delta_is_read_as_a_whole_one_is(storage: LocalStorage) -> None:
    place = owned(storage)
    assert not write(place, 1, BASE)
    assert write(place, 2)
    verify(storage, 2)
    with Checkpoint(storage, 2) as checkpoint:
        assert [slot.num_rows for slot in checkpoint.slots()] == [3, 1, 1]
        found = read_parts(checkpoint, None)
        assert found == {TABLE.key(one): {0: records(LATER, one)} for one in LATER}
        assert read_parts(checkpoint, frozenset([TABLE.key(1)])) == {TABLE.key(1): {0: records(LATER, 1)}}


def test_the_page_is_enough_to_read_a_delta(storage: LocalStorage) -> None:
    place = owned(storage)
    for version, rows in ((1, BASE), (2, LATER)):
        write(place, version, rows)
        expected = {TABLE.key(one): [record(*row) for row in of.items()] for one, of in rows.items()}
        assert read_rows(storage.root / f"v{version:012d}") == expected


def test_of_so_many_checkpoints_one_is_whole(storage: LocalStorage) -> None:
    place = owned(storage)
    assert [write(place, version) for version in range(1, 8)] == [False, True, True, False, True, True, False]
    bases = {found.version: found.manifest.base for found in CheckpointPlace(storage).list() if found.manifest}
    assert {version: base.version for version, base in bases.items() if base} == {2: 1, 3: 1, 5: 4, 6: 4}


def test_every_checkpoint_is_whole_unless_one_says_otherwise(storage: LocalStorage) -> None:
    place = OwnedPlace(CheckpointPlace(storage), take(storage), keep=9)
    assert [write(place, version) for version in range(1, 4)] == [False] * 3
    with pytest.raises(BadArgument, match="full_every is 0"):
        owned(storage, full_every=0)


def test_what_a_store_writes_first_is_whole(storage: LocalStorage) -> None:
    """What its shards were in another life, and how many, nobody knows."""
    assert not write(owned(storage), 1)
    assert not write(owned(storage), 2)


def test_a_store_without_tables_writes_no_deltas(storage: LocalStorage) -> None:
    place = owned(storage)
    write(place, 1)
    place.begin(2)
    assert place.base_of(2) is None


def test_a_version_that_is_written_again_is_no_delta_of_itself(storage: LocalStorage) -> None:
    place = owned(storage)
    assert [write(place, version) for version in (1, 1, 2)] == [False, False, True]
    verify(storage, 2)


@pytest.mark.parametrize(("full_every", "is_delta_again"), [(2, False), (3, True)])
def test_a_delta_that_is_written_again_takes_nothing_from_its_base(
    storage: LocalStorage, full_every: int, *, is_delta_again: bool
) -> None:
    """As a store does that is asked to end at a version that a client had it write."""
    place = owned(storage, keep=1, full_every=full_every)
    assert [write(place, version, rows) for version, rows in ((1, BASE), (2, LATER))] == [False, True]
    assert write(place, 2) == is_delta_again
    assert statuses(storage) == ({1: COMPLETE, 2: COMPLETE} if is_delta_again else {2: COMPLETE})
    verify(storage, 2)
    with Checkpoint(storage, 2) as checkpoint:
        assert read_parts(checkpoint, None) == {TABLE.key(one): {0: records(LATER, one)} for one in LATER}


def test_an_attempt_that_fails_changes_nothing_of_the_next(storage: LocalStorage) -> None:
    place = owned(storage)
    write(place, 1, BASE)
    attempt = place.begin(2, has_rows=True)
    write_files(place, 2, attempt, LATER, CHANGED)
    place.abandon(2)
    assert write(place, 3)
    assert statuses(storage) == {1: COMPLETE, 3: COMPLETE}
    with Checkpoint(storage, 3) as checkpoint:
        assert read_parts(checkpoint, None)[TABLE.key(0)] == {0: records(LATER, 0)}


def test_what_a_kept_one_is_a_delta_of_stays(storage: LocalStorage) -> None:
    place = owned(storage, keep=2, full_every=4)
    there = []
    for version in range(1, 8):
        write(place, version)
        there.append(sorted(statuses(storage)))
    assert there == [[1], [1, 2], [1, 2, 3], [1, 3, 4], [1, 4, 5], [5, 6], [5, 6, 7]]


def test_a_delta_without_its_base_is_damaged(storage: LocalStorage) -> None:
    place = owned(storage)
    write(place, 1, BASE)
    write(place, 2)
    storage.remove("v000000000001/manifest.json")
    with pytest.raises(CheckpointDamaged, match="it is missing; version 2 has what changed since version 1"):
        Checkpoint(storage, 2)
    assert statuses(storage)[2] == DAMAGED


def test_a_delta_of_another_base_is_damaged(storage: LocalStorage) -> None:
    place = owned(storage)
    write(place, 1, BASE)
    write(place, 2)
    write(owned(storage), 1, LATER)
    with pytest.raises(CheckpointDamaged, match=r"its digest is .* can't be read without it"):
        Checkpoint(storage, 2)


def test_damage_of_a_base_is_found_in_its_deltas(storage: LocalStorage) -> None:
    place = owned(storage)
    write(place, 1, BASE)
    write(place, 2)
    (file,) = manifest_of(storage, 1).files
    path = storage.root / "v000000000001" / file.name
    content = path.read_bytes()
    path.write_bytes(content.replace(record(7, 1.0), record(7, 1.5)))
    with pytest.raises(CheckpointDamaged, match=file.name):
        verify(storage, 2)
    with Checkpoint(storage, 2) as checkpoint, pytest.raises(CheckpointDamaged, match=file.name):
        read_parts(checkpoint, None)
    path.unlink()
    assert statuses(storage) == {1: DAMAGED, 2: DAMAGED}


@pytest.mark.parametrize("is_damaged", [False, True])
def test_who_verifies_many_reads_a_base_once(storage: LocalStorage, *, is_damaged: bool) -> None:
    place = owned(storage)
    write(place, 1, BASE)
    sizes = {1: verified_bytes(storage, 1)}
    for version in (2, 3):
        write(place, version)
        sizes[version] = verified_bytes(storage, version) - sizes[1]
    if is_damaged:
        (file,) = manifest_of(storage, 1).files
        path = storage.root / "v000000000001" / file.name
        path.write_bytes(path.read_bytes().replace(record(7, 1.0), record(7, 1.5)))
    seen: list[int] = []
    found: dict[int, Found] = {}
    for version in (3, 1, 2):
        with pytest.raises(CheckpointDamaged, match="v000000000001") if is_damaged else nullcontext():
            verify(storage, version, progress=seen.append, found=found)
    assert sum(seen) < sizes[1] if is_damaged else sum(seen) == sum(sizes.values())


def verified_bytes(storage: LocalStorage, version: int) -> int:
    seen: list[int] = []
    verify(storage, version, progress=seen.append)
    return sum(seen)


def test_a_row_that_neither_has_is_damage(storage: LocalStorage) -> None:
    place = owned(storage)
    write(place, 1, BASE)
    write(place, 2, changed={**CHANGED, 0: (6,)})
    with Checkpoint(storage, 2) as checkpoint, pytest.raises(CheckpointDamaged, match="row 8 is neither"):
        read_parts(checkpoint, None)


def test_a_delta_whose_base_went_is_not_committed_and_the_next_is_whole(storage: LocalStorage) -> None:
    place = owned(storage)
    write(place, 1, BASE)
    storage.remove("v000000000001/manifest.json")
    with pytest.raises(CheckpointDamaged):
        write(place, 2)
    place.abandon(2)
    assert not write(place, 3)
