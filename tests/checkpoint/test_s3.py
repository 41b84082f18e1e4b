"""Checkpoints on S3, by moto: a server of its own in this process, and s3fs as users have it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from psstore.checkpoint.owned_place import OwnedPlace
from psstore.checkpoint.ownership import take
from psstore.checkpoint.place import COMPLETE, DAMAGED, CheckpointPlace, open_checkpoint
from psstore.checkpoint.reader import verify
from psstore.checkpoint.storage import Storage, write_all
from psstore.checkpoint.url import open_storage
from psstore.errors import CheckpointDamaged, CheckpointNotFound, CheckpointPlaceTaken, StorageFailed
from psstore.types import TensorSpec
from tests.checkpoint.support import make_model, read_model, sha256, specs_of_every_rule, write_model


@pytest.fixture(scope="module")
def options() -> Iterator[dict[str, Any]]:
    """What s3fs needs to find the server."""
    pytest.importorskip("s3fs")  # here, as both take a second, which each of pytest's workers would
    moto = pytest.importorskip("moto.server")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    found: dict[str, Any] = {"endpoint_url": f"http://{host}:{port}", "key": "k", "secret": "s"}
    storage = open_storage("s3://bucket", **found)
    storage._fs.mkdir("bucket")  # type: ignore[attr-defined]
    yield found
    server.stop()


def storage_at(path: str, options: dict[str, Any]) -> Storage:
    return open_storage(f"s3://bucket/{path}", **options)


def test_what_was_written_to_s3_is_read_from_there(options: dict[str, Any]) -> None:
    model = make_model(specs_of_every_rule())
    write_model(storage_at("run", options), model, 3)
    verify(storage_at("run", options), 1234)
    with open_checkpoint("s3://bucket/run@latest", **options) as checkpoint:
        assert sha256(read_model(checkpoint, 2)) == sha256(model)


def test_large_files_go_up_in_parts(options: dict[str, Any]) -> None:
    model = make_model([TensorSpec(name="w", shape=(7_500_000,), rule="sgd")], slice_elems=1 << 16, whole=True)
    write_model(storage_at("large", options), model, 1)
    with open_checkpoint("s3://bucket/large@1234", **options) as checkpoint:
        assert checkpoint.manifest.num_bytes > 50 << 20
        assert sha256(read_model(checkpoint, 1)) == sha256(model)


def test_a_place_on_s3_is_kept_tidy_and_has_one_owner(options: dict[str, Any]) -> None:
    storage = storage_at("owned", options)
    with pytest.raises(CheckpointNotFound):
        CheckpointPlace(storage).latest()
    first = take(storage)
    with pytest.raises(CheckpointPlaceTaken, match="lives"):
        take(storage_at("owned", options), sleep=lambda _: first.renew())
    for version in (1, 2, 3):
        write_model(storage, make_model(specs_of_every_rule(), decision=version), 2)
    storage.remove("v000000000003/manifest.json")
    assert OwnedPlace(CheckpointPlace(storage), first, keep=1).tidy_up() == [3, 1]
    left = CheckpointPlace(storage_at("owned", options))
    assert [(found.version, found.status) for found in left.list()] == [(2, COMPLETE)]


def test_damage_on_s3_is_found(options: dict[str, Any]) -> None:
    storage = storage_at("damaged", options)
    manifest = write_model(storage, make_model(specs_of_every_rule()), 2)
    write_all(storage, f"v000000001234/{manifest.files[1].name}", b"x" * manifest.files[1].num_bytes)
    with pytest.raises(CheckpointDamaged, match=manifest.files[1].name):
        verify(storage, 1234)
    storage.remove(f"v000000001234/{manifest.files[0].name}")
    assert [found.status for found in CheckpointPlace(storage).list()] == [DAMAGED]


def test_an_abandoned_upload_leaves_nothing(options: dict[str, Any]) -> None:
    storage = storage_at("abandoned", options)
    sink = storage.create("folder/file")
    sink.write([memoryview(bytes(60 << 20))])  # more than a part: the upload has begun
    sink.abandon()
    del sink
    assert storage.entries("folder") == []


def test_a_bucket_that_is_not_there_is_said(options: dict[str, Any]) -> None:
    with pytest.raises(StorageFailed, match=r"s3://nowhere/run/v000000001234/.* could not be written"):
        write_model(open_storage("s3://nowhere/run", **options), make_model([]), 1)
