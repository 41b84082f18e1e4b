"""The manifest of a checkpoint: which files belong to it, what each must be, and the store's part. Written last.

    {"digest":"<SHA-256 of the bytes of the object that follows>","manifest":{…}}\\n

Canonical JSON: keys sorted, no spaces, so that the same manifest is the same bytes, and any other byte is refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from psstore.checkpoint.state import StoreState
from psstore.checkpoint.tensor_file import NOT_DECODED, digest_of
from psstore.errors import CheckpointDamaged, CheckpointUnsupported, PsstoreError

FORMAT = 1
"""Number of the format. A reader refuses larger ones; what is added to it and may be ignored does not change it."""

DELTA_FORMAT = 2
"""Number of a delta's: who does not know what that is would take it for all rows."""

MANIFEST = "manifest.json"

MAX_MANIFEST_BYTES = 1 << 30
"""Read at most. A million tensors take about 200 MB."""

_FILE_NAME = re.compile(r"[a-z]+-\d{5}[a-z0-9.-]*\.safetensors")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What whoever wrote a file answers for: small, and all that the one who commits needs."""

    name: str
    kind: str
    """'shard' or 'worker'."""
    index: int
    """Number of the shard, or the worker's rank."""
    num_bytes: int
    digest: str
    """SHA-256 of its hashes (tensor_file.py), in hexadecimal."""


class BaseRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoint that a delta is to be read with."""

    version: int
    digest: str
    """That of its manifest."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A checkpoint as it was committed."""

    format: int
    psstore: str
    """The version that wrote it."""
    version: int
    """The decision that it is at."""
    attempt: str
    """In the names of its files: what another attempt at this version left is not taken for part of it."""
    created: float
    """Unix time in seconds. For people: nothing depends on it."""
    files: tuple[FileRecord, ...]
    store: StoreState
    base: BaseRecord | None = None
    """What it is a delta of, a checkpoint of the same place that is none; None: it has all rows."""

    def of_kind(self, kind: str) -> tuple[FileRecord, ...]:
        return tuple(sorted((file for file in self.files if file.kind == kind), key=lambda file: file.index))

    @property
    def num_bytes(self) -> int:
        """Bytes of its files together."""
        return sum(file.num_bytes for file in self.files)


class Sealed(msgspec.Struct, frozen=True):
    """A manifest's file."""

    digest: str
    manifest: msgspec.Raw


class _FormatOnly(msgspec.Struct, frozen=True):
    format: int


def encode_manifest(manifest: Manifest) -> bytes:
    """The file. Equal manifests give equal bytes."""
    return _seal(canonical_json(manifest))


def canonical_json(record: object) -> bytes:
    """Keys sorted, no spaces. Keys that are numbers become texts, bytes become base64."""
    return msgspec.json.encode(msgspec.to_builtins(record, str_keys=True), order="sorted")


def _seal(content: bytes) -> bytes:
    return msgspec.json.encode(Sealed(digest_of(content).hex(), msgspec.Raw(content))) + b"\n"


def manifest_digest(content: bytes) -> str:
    """What names a manifest beyond doubt, of one that was decoded."""
    return msgspec.json.decode(content, type=Sealed).digest


def decode_manifest(content: bytes, *, name: str, version: int) -> Manifest:
    """`name`: the file's, for messages; `version`: that its folder says. Raises CheckpointDamaged, and
    CheckpointUnsupported for a format that this psstore does not know."""
    try:
        sealed = msgspec.json.decode(content, type=Sealed)
        if _seal(bytes(sealed.manifest)) != content:
            raise ValueError(f"its digest is {sealed.digest}, and its content has {digest_of(sealed.manifest).hex()}")
        number = msgspec.json.decode(sealed.manifest, type=_FormatOnly).format
        if not 1 <= number <= DELTA_FORMAT:
            raise CheckpointUnsupported(
                f"{name} has format {number}; this psstore reads formats up to {DELTA_FORMAT}: read it with the version"
                " that wrote it, or a later one",
                file=name,
                format=number,
            )
        manifest = msgspec.json.decode(sealed.manifest, type=Manifest)
        check_manifest(manifest, version=version)
    except PsstoreError:
        raise
    except (ValueError, *NOT_DECODED) as error:
        raise damaged(name, str(error)) from None
    return manifest


def check_manifest(manifest: Manifest, *, version: int) -> None:
    """What must hold between the parts of a manifest. Raises ValueError that says what does not."""
    if (manifest.version, manifest.store.decision) != (version, version):
        raise ValueError(f"it is that of version {manifest.version}, in the folder of version {version}")
    base = manifest.base
    if manifest.format != (FORMAT if base is None else DELTA_FORMAT):
        raise ValueError(f"it has format {manifest.format}, and {'no' if base is None else 'a'} base")
    if base is not None and not (base.version < version and _DIGEST.fullmatch(base.digest)):
        raise ValueError(f"its base is version {base.version}, digest {base.digest!r}; expected one before {version}")
    for file in manifest.files:
        if not (_FILE_NAME.fullmatch(file.name) and _DIGEST.fullmatch(file.digest) and file.num_bytes > 0):
            raise ValueError(f"it names file {file.name!r} of {file.num_bytes} bytes, digest {file.digest!r}")
    numbers = [file.index for file in manifest.of_kind("shard")]
    if numbers != list(range(len(numbers))) or not numbers:
        raise ValueError(f"it names the files of shards {numbers}; expected each from 0 on once")
    if len({tensor.spec.name for tensor in manifest.store.tensors}) != len(manifest.store.tensors):
        raise ValueError("its catalogue has two tensors of one name")
    ids = [tensor.id for tensor in manifest.store.tensors]
    if ids != sorted(set(ids)):
        raise ValueError("its catalogue of tensors is not in the order of their ids")
    for tensor in manifest.store.tensors:
        try:
            tensor.spec.check()
        except PsstoreError as error:
            raise ValueError(error.message) from None
        if tensor.slice_elems < 1:
            raise ValueError(f"tensor {tensor.spec.name!r} has slices of {tensor.slice_elems} elements")


def damaged(name: str, what: str, *, expected: str = "") -> CheckpointDamaged:
    """The error about a file that is not what was written."""
    return CheckpointDamaged(
        f"{name} is damaged: {what}{f'; expected {expected}' if expected else ''}. Take another version of this place"
        " (psstore checkpoint ls), or another copy of the file",
        file=name,
    )


def names(files: Sequence[FileRecord]) -> set[str]:
    return {file.name for file in files}
