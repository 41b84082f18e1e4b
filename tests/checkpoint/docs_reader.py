"""Reads a checkpoint as docs/checkpoints.md says, with the standard library and nothing of psstore's."""

from __future__ import annotations

import hashlib
import itertools
import json
import struct
from pathlib import Path
from typing import Any

Arrays = dict[str, tuple[str, list[int], bytes]]
"""Dtype, shape and bytes by name."""


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest, verified by its digest."""
    content = (folder / "manifest.json").read_bytes()
    head, _, rest = content.partition(b',"manifest":')
    inner = rest.removesuffix(b"}\n")
    assert json.loads(head + b"}") == {"digest": hashlib.sha256(inner).hexdigest()}
    manifest: dict[str, Any] = json.loads(inner)
    assert manifest["format"] == (2 if "base" in manifest else 1)
    assert folder.name == f"v{manifest['version']:012d}"
    return manifest


def read_file(folder: Path, record: dict[str, Any]) -> tuple[dict[str, str], Arrays]:
    """Metadata and arrays of a file, each of its pieces verified."""
    content = (folder / record["name"]).read_bytes()
    assert len(content) == record["num_bytes"]
    (length,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + length])
    metadata = header.pop("__metadata__")
    begin_of_hashes, end = (8 + length + offset for offset in header["hashes"]["data_offsets"])
    hashes = content[begin_of_hashes:end]
    assert end == len(content)
    assert hashlib.sha256(hashes).hexdigest() == record["digest"]
    begin = 0
    for num_bytes, digest in struct.iter_unpack("<Q32s", hashes):
        assert hashlib.sha256(content[begin : begin + num_bytes]).digest() == digest
        begin += num_bytes
    assert begin == begin_of_hashes
    return metadata, {
        name: (one["dtype"], one["shape"], content[8 + length + one["data_offsets"][0] :][: _size(one)])
        for name, one in header.items()
        if name != "hashes"
    }


def _size(one: dict[str, Any]) -> int:
    begin, end = one["data_offsets"]
    return int(end - begin)


def read_tensors(folder: Path) -> dict[str, dict[str, bytes]]:
    """All arrays of all tensors, put together: tensor -> part -> bytes; of slices that lack a part, zeros."""
    manifest = read_manifest(folder)
    catalogue = {one["id"]: one for one in manifest["store"]["tensors"]}
    found: dict[str, dict[str, bytearray]] = {}
    for record in manifest["files"]:
        metadata, arrays = read_file(folder, record)
        if record["kind"] != "shard":
            assert metadata["psstore"] == "worker 1"
            continue
        assert metadata["psstore"] == f"shard {manifest['format']}"
        assert json.loads(metadata["shard"])["index"] == record["index"]
        slots = list(struct.iter_unpack("<4Q", arrays.pop("slots")[2]))
        for name, (dtype, _, content) in arrays.items():
            part, _, tensor = name.partition("/")
            if part in ("rows", "delta", "counted"):
                continue
            one = next(one for one in catalogue.values() if one["spec"]["name"] == tensor)
            bit = 0 if part == "value" else PARTS[one["spec"]["rule"]].index(part) + 1
            item = {"F32": 4, "F64": 8}[dtype]
            total = item
            for dim in one["spec"]["shape"]:
                total *= dim
            whole = found.setdefault(tensor, {}).setdefault(part, bytearray(total))
            at = 0
            for key, _, _, parts in slots:
                if key >> 24 == one["id"] and parts >> bit & 1:
                    begin = (key & 0xFFFFFF) * one["slice_elems"] * item
                    size = min(one["slice_elems"] * item, total - begin)
                    whole[begin : begin + size] = content[at : at + size]
                    at += size
            assert at == len(content)
    return {tensor: {part: bytes(whole) for part, whole in parts.items()} for tensor, parts in found.items()}


Records = dict[int, list[bytes]]
"""By key of a partition the records of its rows, in the order in which they lie."""


def read_rows(folder: Path) -> Records:
    """All partitions that have rows; of a delta out of it and its base."""
    manifest = read_manifest(folder)
    before: Records = {}
    if "base" in manifest:
        base = folder.with_name(f"v{manifest['base']['version']:012d}")
        assert json.loads((base / "manifest.json").read_bytes())["digest"] == manifest["base"]["digest"]
        before = read_rows(base)
    found: Records = {}
    for record in manifest["files"]:
        metadata, arrays = read_file(folder, record)
        for table in manifest["store"]["tensors"] if record["kind"] == "shard" else ():
            name = table["spec"]["name"]
            num_rows = {
                key: parts >> 16
                for key, _, _, parts in struct.iter_unpack("<4Q", arrays["slots"][2])
                if key >> 24 == table["id"] and table["spec"]["rows"] and parts >> 16
            }
            if num_rows and "base" in manifest:
                changed = dict(json.loads(metadata["changed"]))
                content = arrays[f"delta/{name}"][2]
                found |= _over(before, content, num_rows, {key: changed[key] for key in num_rows})
            elif num_rows:
                _, (total, size), content = arrays[f"rows/{name}"]
                records = iter(_cut(content, size))
                assert total == sum(num_rows.values())
                found |= {key: list(itertools.islice(records, number)) for key, number in num_rows.items()}
    return found


def _over(before: Records, content: bytes, num_rows: dict[int, int], changed: dict[int, int]) -> Records:
    """A table's partitions in a delta's file; `changed`: how many of their rows have."""
    num_changed = sum(changed.values())
    size = (len(content) - 8 * sum(num_rows.values())) // max(1, num_changed)
    found: Records = {}
    begin = 0
    for key, number in num_rows.items():
        behind = begin + 8 * number
        end = behind + changed[key] * size
        records = {record[:8]: record for record in before.get(key, ())}
        records |= {record[:8]: record for record in _cut(content[behind:end], size)}
        found[key] = [records[one] for one in _cut(content[begin:behind], 8)]
        begin = end
    assert begin == len(content)
    return found


def _cut(content: bytes, size: int) -> list[bytes]:
    return [content[begin : begin + size] for begin in range(0, len(content), size)] if content else []


PARTS = {
    "assign": (),
    "add": (),
    "reduce": (),
    "sgd": ("momentum_buffer",),
    "adam": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    "adamw": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    "adagrad": ("sum",),
    "rmsprop": ("square_avg", "momentum_buffer", "grad_avg"),
    "delayed_nesterov": ("momentum_buffer", "gradient_sum"),
}
"""State buffers of each rule, by their number from 1 on."""
