"""A place: URLs, which checkpoint is the latest, what is kept, and that one store writes to it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import msgspec
import pytest

from psstore.checkpoint.local_storage import PARTIAL_S, LocalStorage
from psstore.checkpoint.manifest import FORMAT, Manifest
from psstore.checkpoint.owned_place import OwnedPlace
from psstore.checkpoint.ownership import LEASE_S, OWNER, OwnerRecord, Ownership, read_owner, take, this_process
from psstore.checkpoint.place import COMPLETE, DAMAGED, UNFINISHED, CheckpointPlace, open_checkpoint
from psstore.checkpoint.shard_file import FORMAT_KEY, SHARD_KIND, STATE_KEY, state_in
from psstore.checkpoint.storage import Sink, Storage, write_all
from psstore.checkpoint.url import CheckpointUrl, open_storage, parse_url, version_of
from psstore.errors import BadArgument, CheckpointDamaged, CheckpointNotFound, CheckpointPlaceTaken, StorageFailed
from psstore.types import TensorSpec
from tests.checkpoint.support import make_model, write_model

SPECS = [TensorSpec(name="w", shape=(300,), rule="sgd")]


@pytest.fixture(params=["local", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "local":
        return LocalStorage(tmp_path / "place")
    return open_storage(f"memory://{tmp_path.name}/{request.node.name}")


def write(storage: Storage, version: int, *, attempt: str = "0a1b2c3d") -> Manifest:
    return write_model(storage, make_model(SPECS, decision=version, seed=version), 2, attempt=attempt)


def owned(storage: Storage, *, keep: int = 2) -> OwnedPlace:
    return OwnedPlace(CheckpointPlace(storage), take(storage, take_over=True), keep=keep)


def statuses(storage: Storage) -> dict[int, str]:
    return {found.version: found.status for found in CheckpointPlace(storage).list()}


def leave_unfinished(storage: Storage, version: int) -> None:
    write(storage, version, attempt="dead")
    storage.remove(f"v{version:012d}/manifest.json")


# ---- URLs ----


@pytest.mark.parametrize(
    ("url", "place", "version"),
    [
        ("/data/run", "/data/run", None),
        ("s3://bucket/run", "s3://bucket/run", None),
        ("s3://bucket/run@latest", "s3://bucket/run", None),
        ("s3://bucket/run@1234", "s3://bucket/run", 1234),
        ("hdfs://user@host:8020/run/@v000000000007", "hdfs://user@host:8020/run/", 7),
        ("hdfs://user@host:8020/run", "hdfs://user@host:8020/run", None),
        ("run@0", "run", 0),
    ],
)
def test_a_url_names_a_place_and_a_version(url: str, place: str, version: int | None) -> None:
    assert parse_url(url) == CheckpointUrl(place, version)


@pytest.mark.parametrize("url", ["", "/run@first", "/run@-1", "/run@", "/run@1.5"])
def test_a_url_that_names_no_version_is_refused(url: str) -> None:
    with pytest.raises(BadArgument, match=r"expected a"):
        parse_url(url)


def test_only_a_version_is_a_folder_of_a_version() -> None:
    assert version_of("v000000001234") == 1234
    assert version_of("v1000000000000") == 1_000_000_000_000
    for name in ("v1234", "v0000000001234", "x000000001234", "v00000000123a", "owner.json"):
        assert version_of(name) is None


def test_an_unknown_protocol_is_refused_with_what_to_do() -> None:
    with pytest.raises(BadArgument, match=r"nowhere://x can't be opened.*pip install 'psstore\[storage\]'"):
        open_storage("nowhere://x")


def test_a_folder_of_a_user_that_is_not_there_is_refused() -> None:
    with pytest.raises(BadArgument, match="~nobody-of-that-name/run: nobody knows whose home that is"):
        open_storage("~nobody-of-that-name/run")


def test_storage_that_is_not_there_when_it_is_opened_is_said(tmp_path: Path) -> None:
    with pytest.raises(StorageFailed, match=r"ftp://127\.0\.0\.1:1/run could not be opened: .*refused"):
        open_storage("ftp://127.0.0.1:1/run")
    (tmp_path / "no.zip").touch()
    with pytest.raises(StorageFailed, match="could not be opened: BadZipFile"):
        open_storage(f"zip://run::file://{tmp_path}/no.zip")


# ---- list and latest ----


def test_the_latest_is_the_newest_that_is_complete(storage: Storage) -> None:
    place = CheckpointPlace(storage)
    with pytest.raises(CheckpointNotFound, match="no complete checkpoint"):
        place.latest()
    for version in (9, 10, 200):
        write(storage, version)
    leave_unfinished(storage, 300)
    assert place.latest() == 200
    assert statuses(storage) == {9: COMPLETE, 10: COMPLETE, 200: COMPLETE, 300: UNFINISHED}
    with place.open() as checkpoint:
        assert checkpoint.version == 200


def test_a_damaged_latest_is_refused_and_not_passed_over(storage: Storage) -> None:
    write(storage, 1)
    manifest = write(storage, 2)
    write_all(storage, f"v000000000002/{manifest.files[0].name}", b"short")
    assert statuses(storage) == {1: COMPLETE, 2: DAMAGED}
    with CheckpointPlace(storage).open() as checkpoint, pytest.raises(CheckpointDamaged, match="it has 5 bytes"):
        _ = checkpoint.shards
    write_all(storage, "v000000000002/manifest.json", b"{}")
    assert statuses(storage) == {1: COMPLETE, 2: DAMAGED}
    with pytest.raises(CheckpointDamaged, match=r"manifest\.json is damaged"):
        CheckpointPlace(storage).open()


def test_what_is_nested_deeper_than_anybody_reads_is_damaged(storage: Storage) -> None:
    write(storage, 2)
    write_all(storage, "v000000000002/manifest.json", b'{"digest":"a","manifest":' + b"[" * 100_000)
    assert statuses(storage) == {2: DAMAGED}
    large = make_model([TensorSpec(name="w", shape=(30_000,), rule="sgd")], decision=3, whole=True)
    (record,) = write_model(storage, large, 1).files
    header = b'{"a":' * 20_000
    write_all(
        storage, f"v000000000003/{record.name}", (len(header).to_bytes(8, "little") + header).ljust(record.num_bytes)
    )
    with CheckpointPlace(storage).open(3) as checkpoint, pytest.raises(CheckpointDamaged, match="recursion"):
        _ = checkpoint.shards
    with pytest.raises(ValueError, match=r"has no state of a shard: .*recursion"):
        state_in({FORMAT_KEY: f"{SHARD_KIND} {FORMAT}", STATE_KEY: '{"more":' + "[" * 20_000}, format_number=FORMAT)


def test_open_checkpoint_takes_a_url(tmp_path: Path) -> None:
    for version in (3, 4):
        write(LocalStorage(tmp_path), version)
    for url, version in ((f"{tmp_path}", 4), (f"{tmp_path}@latest", 4), (f"file://{tmp_path}@3", 3)):
        with open_checkpoint(url) as checkpoint:
            assert checkpoint.version == version
    with pytest.raises(CheckpointNotFound, match="version 5"):
        open_checkpoint(f"{tmp_path}@5")


# ---- what is kept ----


def test_the_newest_complete_ones_are_kept(storage: Storage) -> None:
    for version in (1, 2, 3, 4):
        write(storage, version)
    leave_unfinished(storage, 5)
    leave_unfinished(storage, 2)
    assert owned(storage).tidy_up() == [5, 2, 1]
    assert statuses(storage) == {3: COMPLETE, 4: COMPLETE}
    assert owned(storage).tidy_up() == []


def test_the_newest_complete_one_is_kept_whatever_is_newer(storage: Storage) -> None:
    write(storage, 1)
    manifest = write(storage, 2)
    write_all(storage, f"v000000000002/{manifest.files[1].name}", b"")
    leave_unfinished(storage, 3)
    assert owned(storage, keep=1).tidy_up() == [3]
    assert statuses(storage) == {1: COMPLETE, 2: DAMAGED}


def test_what_is_being_written_is_left_alone(storage: Storage) -> None:
    place = owned(storage, keep=1)
    place.begin(7)
    leave_unfinished(storage, 7)
    write(storage, 3)
    assert place.tidy_up() == []
    assert statuses(storage) == {3: COMPLETE, 7: UNFINISHED}
    place.abandon(7)
    assert place.tidy_up() == [7]


def test_another_attempt_at_a_version_replaces_the_first(storage: Storage) -> None:
    write(storage, 1, attempt="first")
    place = owned(storage)
    model = make_model(SPECS, decision=1, seed=5)
    attempt = place.begin(1)
    files = write_model(storage, model, 3, attempt=attempt).files
    assert place.commit(model.state, files).attempt == attempt
    assert place.tidy_up() == []
    left = {entry.name for entry in storage.entries("v000000000001")}
    assert left == {"manifest.json", *(file.name for file in files)}
    assert statuses(storage) == {1: COMPLETE}


def test_a_folder_of_somebody_elses_keeps_no_version_from_going(storage: Storage) -> None:
    for version in (1, 2, 3, 4):
        write(storage, version)
    write_all(storage, "v000000000002/notes/x", b"mine")
    assert owned(storage, keep=1).tidy_up() == [3, 2, 1]
    assert statuses(storage) == {2: UNFINISHED, 4: COMPLETE}
    assert [entry.name for entry in storage.entries("v000000000002")] == ["notes"]


def test_a_version_that_can_not_be_removed_keeps_no_other_one_from_going(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in (1, 2, 3):
        write(storage, version)
    remove = storage.remove

    def refuse(path: str) -> None:
        if path.startswith("v000000000002/"):
            raise StorageFailed("it is locked")
        remove(path)

    monkeypatch.setattr(storage, "remove", refuse)
    with pytest.raises(StorageFailed, match="it is locked"):
        owned(storage, keep=1).tidy_up()
    assert statuses(storage) == {2: COMPLETE, 3: COMPLETE}
    write(storage, 4)
    write_all(storage, "v000000000002/left-by-another-attempt", b"")
    write(storage, 1)
    with pytest.raises(StorageFailed, match="it is locked"):
        owned(storage, keep=3).tidy_up()
    assert statuses(storage) == {2: COMPLETE, 3: COMPLETE, 4: COMPLETE}, "also where it stays, and is swept"


def test_keep_is_at_least_one(storage: Storage) -> None:
    with pytest.raises(BadArgument, match="keep is 0"):
        owned(storage, keep=0)


def test_a_store_does_not_begin_before_the_latest_unasked(storage: Storage) -> None:
    for version in (1, 2, 3):
        write(storage, version)
    owned(storage).start_at(3)
    with pytest.raises(BadArgument, match="has version 3, and the store is at version 1"):
        owned(storage).start_at(1)
    owned(storage).start_at(1, discard_newer=True)
    assert CheckpointPlace(storage).latest() == 1


# ---- who owns it ----


def lives(ownership: Ownership) -> Callable[[float], None]:
    """A sleep during which the owner says that it lives."""
    return lambda _: ownership.renew()


def rewrite_owner(storage: Storage, **changes: object) -> None:
    found = read_owner(storage)
    assert found is not None
    write_all(storage, OWNER, msgspec.json.encode(msgspec.structs.replace(found, **changes)))


def test_a_second_store_is_refused_while_the_first_lives(storage: Storage) -> None:
    first = take(storage)
    with pytest.raises(CheckpointPlaceTaken, match=f"store {first.owner} on .* lives") as caught:
        take(storage, sleep=lives(first))
    assert caught.value.details["owner"] == first.owner
    first.check()


def test_a_place_is_taken_over_after_a_lease_without_a_beat(storage: Storage) -> None:
    first = take(storage, lease_s=30)
    first.renew()
    slept: list[float] = []
    second = take(storage, sleep=slept.append)
    assert sum(slept) == pytest.approx(30)
    with pytest.raises(CheckpointPlaceTaken, match=second.owner):
        first.renew()


class OtherHand:
    """The storage, on which another store takes the place over as soon as its owner has written all of a file of that
    name that does not count yet: as where it is suspended just then."""

    def __init__(self, storage: Storage, path: str) -> None:
        self._storage = storage
        self._path = path
        self.other: Ownership | None = None

    def __getattr__(self, name: str) -> object:
        return getattr(self._storage, name)

    def create(self, path: str) -> Sink:
        sink = self._storage.create(path)
        if path == self._path and self.other is None:
            self.other = take(self._storage, take_over=True)
        return sink


def test_an_owner_that_stood_still_as_it_renewed_takes_nothing_back(storage: Storage) -> None:
    hand = OtherHand(storage, OWNER)
    first = take(cast(Storage, hand))
    with pytest.raises(CheckpointPlaceTaken):
        first.renew()
    assert hand.other is not None
    hand.other.check()


def test_an_owner_that_stood_still_as_it_committed_commits_nothing(storage: Storage) -> None:
    write(storage, 1)
    hand = cast(Storage, OtherHand(storage, "v000000000002/manifest.json"))
    place = OwnedPlace(CheckpointPlace(hand), take(hand), keep=2)
    model = make_model(SPECS, decision=2, seed=2)
    files = write_model(storage, model, 2, attempt=place.begin(2)).files
    storage.remove("v000000000002/manifest.json")
    with pytest.raises(CheckpointPlaceTaken):
        place.commit(model.state, files)
    assert CheckpointPlace(storage).latest() == 1


def test_a_place_is_taken_over_at_once_if_an_operator_says_so(storage: Storage) -> None:
    first = take(storage)
    second = take(storage, take_over=True, sleep=never)
    with pytest.raises(CheckpointPlaceTaken, match=second.owner):
        first.check()
    first.release()
    second.check()


def test_who_leads_a_store_takes_its_place_at_once_from_who_led_it_before(storage: Storage) -> None:
    """That one may live on a host that nobody hears, and reach storage."""
    first = take(storage, store="life")
    with pytest.raises(CheckpointPlaceTaken):
        take(storage, store="another life", led_before=1, sleep=lives(first))
    second = take(storage, store="life", led_before=1, sleep=never)
    with pytest.raises(CheckpointPlaceTaken, match=second.owner):
        first.renew()
    with pytest.raises(CheckpointPlaceTaken):
        take(storage, store="life", sleep=lives(second))
    second.check()


def test_an_owner_that_lost_its_place_commits_nothing(storage: Storage) -> None:
    write(storage, 1)
    place = owned(storage)
    place.begin(2)
    take(storage, take_over=True)
    model = make_model(SPECS, decision=2)
    with pytest.raises(CheckpointPlaceTaken):
        place.commit(model.state, [])
    with pytest.raises(CheckpointPlaceTaken):
        place.tidy_up()
    assert CheckpointPlace(storage).latest() == 1


def test_who_has_claimed_a_place_without_hearing_of_it_need_not_wait(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As libraries of object stores do, which ask again where no answer came."""
    claim = storage.claim
    monkeypatch.setattr(storage, "claim", lambda path, content: claim(path, content) and claim(path, content))
    take(storage, sleep=never).check()


def test_what_dead_owners_have_left_of_their_word_is_removed(tmp_path: Path) -> None:
    """Of one that is saying it just now nothing is."""
    storage = LocalStorage(tmp_path)
    for name, age_s in (("dead", 2 * PARTIAL_S), ("alive", 0.0)):
        left = tmp_path / f".{OWNER}.{name}.partial"
        left.touch()
        os.utime(left, (time.time() - age_s,) * 2)
    take(storage, sleep=never)
    assert sorted(entry.name for entry in storage.entries("")) == [f".{OWNER}.alive.partial", OWNER]


def test_a_released_place_is_free(storage: Storage) -> None:
    first = take(storage)
    first.release()
    take(storage, sleep=never)


def test_a_record_that_was_lost_is_written_again(storage: Storage) -> None:
    first = take(storage)
    storage.remove(OWNER)
    first.check()
    with pytest.raises(CheckpointPlaceTaken, match=f"store {first.owner} on .* lives"):
        take(storage, sleep=lives(first))


def test_a_record_that_is_gone_after_a_machine_was_suspended_may_have_been_anothers(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that stands still meanwhile would have it lost just now."""
    first = take(storage)
    begun, awake = time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME)
    monkeypatch.setattr(time, "monotonic", lambda: begun)
    monkeypatch.setattr(time, "clock_gettime", lambda clock: awake + 3600 if clock == time.CLOCK_BOOTTIME else begun)
    storage.remove(OWNER)
    with pytest.raises(CheckpointPlaceTaken, match="somebody who has left again has taken this place over"):
        first.renew()


def test_a_record_that_is_gone_after_a_lease_may_have_been_anothers(storage: Storage) -> None:
    first = take(storage, lease_s=0)
    storage.remove(OWNER)
    with pytest.raises(CheckpointPlaceTaken, match="somebody who has left again has taken this place over"):
        first.renew()
    assert read_owner(storage) is None


def test_a_dead_process_of_this_machine_is_no_owner(storage: Storage) -> None:
    take(storage)
    child = subprocess.run(
        [sys.executable, "-c", "from psstore.checkpoint.ownership import this_process as p; print(p())"],
        check=True,
        capture_output=True,
        text=True,
    )
    rewrite_owner(storage, process=child.stdout.strip())
    take(storage, sleep=never)


def test_a_process_elsewhere_or_alive_is_watched(storage: Storage) -> None:
    for process in (this_process(), "", this_process().replace("pid:", "other:"), "what else"):
        write_all(storage, OWNER, msgspec.json.encode(OwnerRecord(owner="x", process=process)))
        slept: list[float] = []
        take(storage, sleep=slept.append)
        assert slept


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b'{"owner":"x","lease_s":1e9}',
        b'{"owner":"x","lease_s":-1}',
        b'{"owner":"x","since":1e300}',
        b'{"owner":"x","more":' + b"[" * 50_000,
    ],
)
def test_a_record_that_can_not_be_made_out_is_watched(storage: Storage, content: bytes) -> None:
    write_all(storage, OWNER, content)
    slept: list[float] = []
    take(storage, sleep=slept.append)
    assert sum(slept) == pytest.approx(LEASE_S)


def test_a_process_is_told_from_all_others() -> None:
    assert str(os.getpid()) in this_process().split()
    assert this_process() == this_process()


def never(_: float) -> None:
    raise AssertionError("nobody had to wait")
