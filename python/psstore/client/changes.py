"""Copies of tensors that go from version to version by what has changed, bit for bit.

For each slice a copy tells its shard which version it has, and is sent the elements whose bits differ since, in the
dtype of the copy (csrc/changes/changes.h), or the whole slice, as the shard finds it shorter or has nothing to compare
with (csrc/table/change_log.h). All slices are of one decision, as in a snapshot. What comes is kept aside until all of
it is here and was looked at: a copy changes as a whole, or not at all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from psstore import _core
from psstore.client.arrays import Bytes
from psstore.client.first_tensors import FirstTensors
from psstore.client.layout import Frame, Layout, OneVersion
from psstore.client.operations import Operations
from psstore.client.schema import travels_as
from psstore.errors import (
    NOT_MODIFIED,
    BadArgument,
    BadHeader,
    InternalError,
    UnknownKey,
    UnknownTensor,
    VersionGone,
)
from psstore.protocol.client import Transfer
from psstore.protocol.holds import Hold
from psstore.protocol.requests import Answer
from psstore.types import ITEM_BYTES, Tensor, applies_by_decision, slice_index

Dtypes = str | Mapping[str, str] | None
"""The dtype of all copies, or of some by name; None: each tensor's own."""

NUMPY = {"float32": "<f4", "float64": "<f8", "float16": "<f2", "bfloat16": "<i2"}
"""How numpy sees the elements. It has no bfloat16: these are integers of the same bits."""

ATTEMPTS = 5
"""How often a version is looked for that the shards can't keep, or in which a tensor is there no more."""


class Version(NamedTuple):
    """One version of some tensors, as followers get them."""

    number: int
    """The decision after which they are."""
    values: Mapping[str, np.ndarray[Any, Any]]
    skipped: int
    """Versions between the one before and this one."""
    changed: frozenset[str] = frozenset()
    """Names of those of which something came; the others have the same bits as in the version before."""
    num_bytes: int = 0
    """Bytes of values and changes that came."""
    num_whole: int = 0
    """Slices that came whole: new ones, and those whose shard keeps too little to say what has changed, or found that
    that is more than all."""
    restored: bool = False
    """The store has gone back to a checkpoint since the version before, or was connected to anew: all of it came
    anew."""


class TensorCopy:
    """A tensor as it is in the last version."""

    def __init__(self, tensor: Tensor, dtype: str) -> None:
        self.tensor = tensor
        self.dtype = dtype
        self.item_bytes = ITEM_BYTES[dtype]
        self.data: Bytes = np.zeros(tensor.spec.num_elems * self.item_bytes, np.uint8)
        self.versions: list[int | None] = [None] * len(tensor.shards)
        """The version of each slice; None: no value of it came yet."""

    @property
    def values(self) -> np.ndarray[Any, Any]:
        """Its elements, where they are."""
        return self.data.view(NUMPY[self.dtype]).reshape(self.tensor.spec.shape)


class CopiedSlice(NamedTuple):
    """A slice of a copy."""

    copy: TensorCopy
    number: int
    """Which of the tensor's slices."""
    begin: int
    end: int
    """Its bytes in the copy."""

    @property
    def had(self) -> int | None:
        return self.copy.versions[self.number]

    @property
    def num_elems(self) -> int:
        return (self.end - self.begin) // self.copy.item_bytes


class News(NamedTuple):
    """What came of a slice."""

    of: CopiedSlice
    data: Bytes
    is_whole: bool
    version: int


class AskedFrame:
    """A pull of what is new of some slices, in memory of its own."""

    def __init__(self, frame: Frame, slices: Sequence[CopiedSlice]) -> None:
        self._slices = slices
        self._way = frame.way
        self._dtypes = frame.table.dtypes()
        entries = [
            (key, 0, dtype | _core.CHANGES_BIT) for key, dtype in zip(frame.table.keys(), self._dtypes, strict=True)
        ]
        self._table = _core.SliceTable(entries)
        self._pieces: Sequence[Bytes] = ()

    def transfer(self) -> Transfer:
        self._pieces = ()  # no memory is asked for where no bytes come
        asking = [0 if one.had is None else one.had + 1 for one in self._slices]
        return Transfer(self._way, self._table.with_versions(asking), self._make_room)

    def _make_room(self, table: _core.SliceTable) -> _core.Segments:
        """Raises BadHeader for what was not asked for."""
        sizes = table.num_bytes()
        if len(sizes) != len(self._slices):
            raise BadHeader(f"a pull of {len(self._slices)} slices was answered with {len(sizes)}")
        for one, wanted, dtype, size in zip(self._slices, self._dtypes, table.dtypes(), sizes, strict=True):
            whole = one.end - one.begin
            fits = size in (0, whole) if dtype == wanted else size < whole
            if not fits or dtype & ~_core.CHANGES_BIT != wanted:
                raise BadHeader(f"a slice of {whole} bytes of dtype {wanted} came with {size} of dtype {dtype}")
        memory = np.empty(sum(sizes), np.uint8)
        self._pieces = [memory[begin:end] for begin, end in pairwise(accumulate(sizes, initial=0))]
        return _core.Segments(self._pieces, writable=True)

    def news(self, answer: Answer) -> Iterator[News]:
        """What came. Raises BadHeader for what can't be changes of what is here."""
        table = answer.table
        pieces = self._pieces or [np.empty(0, np.uint8)] * len(self._slices)
        for one, data, status, dtype, version in zip(
            self._slices, pieces, table.statuses(), table.dtypes(), table.versions(), strict=True
        ):
            if status == NOT_MODIFIED:
                if version != one.had:
                    raise BadHeader(f"a slice of version {one.had} was said to be unchanged at version {version}")
                continue
            is_whole = not dtype & _core.CHANGES_BIT
            is_said = is_whole or (one.had is not None and _core.are_changes(one.copy.item_bytes, data, one.num_elems))
            if not is_said:
                raise BadHeader(f"{data.nbytes} bytes are no changes of a slice of {one.num_elems} elements")
            yield News(one, data, is_whole, version)


class Copies:
    """The tensors that one reader follows. Used by one call at a time."""

    def __init__(self, names: Sequence[str] | None, dtypes: Dtypes) -> None:
        """`names`: None for all tensors that there are whenever a version is asked for. Raises BadArgument."""
        if isinstance(names, str):
            raise BadArgument(f"names is {names!r}; expected several, as [{names!r}]")
        asked = [] if dtypes is None else [dtypes] if isinstance(dtypes, str) else list(dtypes.values())
        for dtype in asked:
            if dtype not in NUMPY:
                raise BadArgument(f"dtype is {dtype!r}; expected one of {', '.join(NUMPY)}")
        self._names = None if names is None else tuple(dict.fromkeys(names))
        self._dtypes = dtypes
        self.number: int | None = None
        """The decision after which the copies are; None: nothing came yet, or the store has gone back behind them."""
        self._copies: dict[str, TensorCopy] = {}
        self._restored = False
        self._first = FirstTensors(self._names)
        self._asked: tuple[Layout, list[AskedFrame]] | None = None
        """The frames of the last pull."""

    @property
    def values(self) -> dict[str, np.ndarray[Any, Any]]:
        return {name: copy.values for name, copy in self._copies.items()}

    def forget(self) -> None:
        """Has all of the next version come anew: the store has gone back behind what is here, which stays till then."""
        self._asked, self.number, self._restored = None, None, True

    def sha256(self) -> str:
        """A hash of all bits, names, shapes and dtypes; equal where all of these are equal."""
        digest = hashlib.sha256()
        for name, copy in sorted(self._copies.items()):
            digest.update(f"{name!r} {copy.dtype} {copy.tensor.spec.shape}\n".encode())
            digest.update(copy.data)
        return digest.hexdigest()

    async def advance(self, operations: Operations, *, wait_s: float | None) -> Version:
        """Goes to the newest version: as soon as its tensors are there if nothing came before, else as soon as there is
        one after the last. `wait_s`: how long to wait for that. To bring it may take the store's `wait_s`: who waits
        for less, and asks again, would be sent its first bytes again and again.

        Raises what a snapshot's pulls raise; DeadlineExceeded. Nothing has changed then."""
        if self.number is None:
            await self._first.arrive(operations, wait_s=wait_s)
        else:
            await operations.newer(self.number, wait_s=wait_s)
        return await self._find_version(operations, wait_s, is_checked=False)

    async def verify(self, operations: Operations, *, wait_s: float | None) -> Version:
        """Goes to the newest version, be it the one that is here, reads all trained tensors of that version whole, too,
        and compares. Raises as `advance`; InternalError that names a tensor that is not the same."""
        return await self._find_version(operations, wait_s, is_checked=True)

    async def _find_version(self, operations: Operations, wait_s: float | None, *, is_checked: bool) -> Version:
        for _ in range(ATTEMPTS - 1):
            try:
                return await self._take_version(operations, wait_s, is_checked)
            except (VersionGone, UnknownKey):
                continue  # its tensors are looked up again
            except UnknownTensor:
                if self._names is not None:
                    raise
        return await self._take_version(operations, wait_s, is_checked)

    async def _take_version(self, operations: Operations, wait_s: float | None, is_checked: bool) -> Version:
        copies = await self._looked_up(operations)
        layout, frames = self._frames(operations, copies)

        async def take(hold: Hold | OneVersion) -> tuple[int, list[News]]:
            number, news = await self._pull(operations, layout, frames, hold, wait_s)
            if not isinstance(hold, Hold):
                return number, news
            if is_checked:
                await _compare(operations, copies, news, hold, wait_s)
            return hold.version, news

        may_be = not is_checked and bool(frames) and layout.is_a_frame_each
        return self._taken(copies, *await operations.one_version.read(take, may_be=may_be, wait_s=wait_s))

    async def _looked_up(self, operations: Operations) -> dict[str, TensorCopy]:
        """The tensors to be read, those that are here as they are. Raises UnknownTensor, RuleMismatch."""
        schema = operations.context.schema
        if self._names is not None:
            tensors = await schema.find(self._names)
        else:
            everything = await schema.find_any(await operations.client.tensors.keys())
            tensors = [tensor for tensor in everything if tensor.spec.rows is None]
        copies = {}
        for tensor in tensors:
            name = tensor.spec.name
            here = self._copies.get(name)
            if here is not None and self.number is not None and here.tensor.id == tensor.id:
                copies[name] = here
                continue
            copies[name] = TensorCopy(tensor, self._dtype_of(tensor))
            if here is not None and self.number is None and here.data.size == copies[name].data.size:
                copies[name].data = here.data  # which is written once all has come
        dropped = [copy.tensor for name, copy in self._copies.items() if name not in copies]
        if dropped and self.number is not None:  # else they are another store's
            operations.context.forget_dropped(dropped)
        return copies

    def _dtype_of(self, tensor: Tensor) -> str:
        own, name = tensor.spec.dtype, tensor.spec.name
        asked = self._dtypes if self._dtypes is None or isinstance(self._dtypes, str) else self._dtypes.get(name)
        return own if asked is None or not travels_as(own, asked) else asked

    def _frames(self, operations: Operations, copies: Mapping[str, TensorCopy]) -> tuple[Layout, list[AskedFrame]]:
        all_of_them = list(copies.values())
        layout = operations.context.layouts.of(
            [copy.tensor for copy in all_of_them], [copy.dtype for copy in all_of_them], pull=True
        )
        is_known = self._asked is not None and self._asked[0] is layout
        if self._asked is not None and is_known and all(self._copies.get(name) is c for name, c in copies.items()):
            return self._asked
        frames = [
            AskedFrame(
                frame,
                [
                    CopiedSlice(all_of_them[piece.position], slice_index(key), piece.begin, piece.end)
                    for piece, key in zip(frame.ranges, frame.table.keys(), strict=True)
                ],
            )
            for frame in layout.frames
        ]
        self._asked = layout, frames
        return self._asked

    async def _pull(
        self,
        operations: Operations,
        layout: Layout,
        frames: Sequence[AskedFrame],
        hold: Hold | OneVersion,
        wait_s: float | None,
    ) -> tuple[int, list[News]]:
        """The newest version of which something came, and what came."""
        transfers, timeout_s = [frame.transfer() for frame in frames], operations.context.patience(None)
        answers = await operations.reading.receive(layout, transfers, wait_s, hold, timeout_s=timeout_s)
        news = [one for frame, answer in zip(frames, answers, strict=True) for one in frame.news(answer)]
        heard = [answer.version for answer in answers]
        if not layout.is_trained:  # no decision changes it, and none is waited for where it lies
            heard.append(operations.client.shards[0].version)
        return max(heard, default=0), news

    def _taken(self, copies: dict[str, TensorCopy], number: int, news: Sequence[News]) -> Version:
        for one in news:
            of, data = one.of, of_copy(one.of)
            if one.is_whole:
                data[:] = one.data
            else:
                _core.apply_changes(of.copy.item_bytes, one.data, data)
            of.copy.versions[of.number] = one.version
        skipped = 0 if self.number is None else max(0, number - self.number - 1)
        restored, self._restored = self._restored, False
        self._copies, self.number = copies, number
        return Version(
            number,
            self.values,
            skipped,
            changed=frozenset(one.of.copy.tensor.spec.name for one in news),
            num_bytes=sum(one.data.nbytes for one in news),
            num_whole=sum(one.is_whole for one in news),
            restored=restored,
        )


def of_copy(one: CopiedSlice) -> Bytes:
    """The slice's bytes, where they are."""
    return one.copy.data[one.begin : one.end]


async def _compare(
    operations: Operations,
    copies: Mapping[str, TensorCopy],
    news: Sequence[News],
    hold: Hold,
    wait_s: float | None,
) -> None:
    """Reads what is held whole, and compares it with the copies as they will be. Raises InternalError."""
    trained = [copy for copy in copies.values() if applies_by_decision(copy.tensor.spec.rule)]
    layout = operations.context.layouts.of([c.tensor for c in trained], [c.dtype for c in trained], pull=True)
    wholes = [np.empty(copy.data.nbytes, np.uint8) for copy in trained]
    timeout_s = operations.context.patience(None)
    await operations.reading.receive(layout, layout.transfers(wholes), wait_s, hold, timeout_s=timeout_s)
    future = {copy.tensor.id: copy.data.copy() for copy in trained}
    for one in news:
        of = one.of
        if (data := future.get(of.copy.tensor.id)) is None:
            continue
        if one.is_whole:
            data[of.begin : of.end] = one.data
        else:
            _core.apply_changes(of.copy.item_bytes, one.data, data[of.begin : of.end])
    for copy, whole in zip(trained, wholes, strict=True):
        if hashlib.sha256(future[copy.tensor.id]).digest() != hashlib.sha256(whole).digest():
            name = copy.tensor.spec.name
            raise InternalError(f"the copy of {name!r} is not what version {hold.version} of it is", name=name)
