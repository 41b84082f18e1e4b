"""Which bytes of which tensor go into which frame: worked out once per list of tensors, used every round."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from psstore import _core
from psstore.client.arrays import Array, Bytes
from psstore.codec.codecs import Codecs, dtype_of, payload_bytes
from psstore.errors import NO_STATE, NOT_MODIFIED
from psstore.partition.packing import EARLY_FRAME_BYTES, FRAME_BYTES, SliceRef, pack
from psstore.partition.router import Router
from psstore.protocol.client import Transfer
from psstore.protocol.holds import Hold
from psstore.protocol.requests import Answer
from psstore.types import Tensor, applies_by_decision

T = TypeVar("T")

Reply = Answer | _core.Frame
"""The answer to a frame; its `table` says what came of each slice."""

MAX_LAYOUTS = 1024
"""Layouts kept. A training loop has one for its pull and one for each bucket of gradients, of 512 KiB or more."""


class Range(NamedTuple):
    """Bytes [begin, end) of the tensor at `position`."""

    position: int
    begin: int
    end: int


class Frame(NamedTuple):
    """One frame to or from one shard."""

    way: int
    """The session that it goes over."""
    table: _core.SliceTable
    ranges: tuple[Range, ...]


class Layout:
    """The frames of one list of tensors in given dtypes or codecs, in one direction.

    `part`: 0 for the values, i for a buffer of rule state. `near`: the ways to shards that share a device with the
    arrays. `early`: for rounds that were committed early, over sockets."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        dtypes: Sequence[str],
        *,
        ways: Router,
        pull: bool,
        part: int = 0,
        near: Collection[int] = (),
        early: bool = False,
    ) -> None:
        self.tensors = tuple(tensors)
        self.names = tuple(tensor.spec.name for tensor in tensors)
        self.ids = frozenset(tensor.id for tensor in tensors)
        self.is_trained = any(applies_by_decision(tensor.spec.rule) for tensor in tensors)
        """True if decisions change some of the values."""
        self.num_bytes = 0
        self.dtypes = tuple(dtypes)
        """Dtype or codec of each tensor."""
        self.answers: Sequence[Reply] = ()
        """Answers to the last pull of this layout."""
        self._pull = pull
        self.frames: list[Frame] = []
        for packed in pack(tensors, ways, near=near, frame_bytes=EARLY_FRAME_BYTES if early else FRAME_BYTES):
            entries = []
            ranges = []
            for ref in packed.slices:
                dtype = dtypes[ref.position]
                begin, size = _place(tensors[ref.position], ref, dtype)
                entries.append((ref.key, 0 if pull else size, _core.DTYPES[dtype_of(dtype)]))
                ranges.append(Range(ref.position, begin, begin + size))
                self.num_bytes += size
            table = _core.SliceTable(entries)
            if part:
                table = table.with_parts([part] * len(entries))
            self.frames.append(Frame(packed.way, table, tuple(ranges)))
        forms = [(_core.DTYPES[dtype_of(d)], t.spec.shape) for t, d in zip(tensors, dtypes, strict=True)]
        self._map = _core.FrameMap(forms, [frame.ranges for frame in self.frames])
        self.ways = frozenset(frame.way for frame in self.frames)
        self.is_a_frame_each = len(self.frames) == len(self.ways)
        """Whether no shard has more than one of the frames."""
        self.frame_plan = _core.FramePlan(
            self._map, [frame.way for frame in self.frames], [frame.table for frame in self.frames]
        )
        """The frames, as the extension has them."""

    def transfers(self, memories: Sequence[Bytes], *, newer_than: int | None = None) -> list[Transfer]:
        """`memories`: each tensor's bytes. They stay as they are until the transfers are answered."""
        return self._to_or_from(self._map.of_bytes(memories, writable=self._pull), newer_than)

    def transfers_of(self, arrays: Sequence[Array], *, newer_than: int | None = None) -> list[Transfer] | None:
        """Transfers for the caller's own arrays, without a step in Python for each. None: one of them does not fit, or
        has to be copied first."""
        segments = self._map.of_arrays(arrays, writable=self._pull)
        return None if segments is None else self._to_or_from(segments, newer_than)

    def fresh(self) -> list[Array]:
        """Returns new numpy arrays, one for each tensor."""
        return [np.empty(t.spec.shape, dtype) for t, dtype in zip(self.tensors, self.dtypes, strict=True)]

    def _to_or_from(self, segments: Sequence[_core.Segments], newer_than: int | None) -> list[Transfer]:
        return [
            Transfer(frame.way, asking(frame.table, newer_than), memory)
            for frame, memory in zip(self.frames, segments, strict=True)
        ]

    def absent(self, answers: Sequence[Reply]) -> set[int]:
        """Positions of the tensors of which some slice has no such rule state."""
        return {
            piece.position
            for frame, answer in zip(self.frames, answers, strict=True)
            for piece, status in zip(frame.ranges, answer.table.statuses(), strict=True)
            if status == NO_STATE
        }

    def unchanged(self, answers: Sequence[Reply]) -> tuple[set[int], list[int]]:
        """Positions of the tensors of which nothing came, and of those of which only some slices came."""
        if not any(answer.table.has_status(NOT_MODIFIED) for answer in answers):
            return set(), []
        if all(set(answer.table.statuses()) == {NOT_MODIFIED} for answer in answers):
            return set(range(len(self.tensors))), []  # as most often, by who asks again and again
        came: set[int] = set()
        missing: set[int] = set()
        for frame, answer in zip(self.frames, answers, strict=True):
            for piece, status in zip(frame.ranges, answer.table.statuses(), strict=True):
                (missing if status == NOT_MODIFIED else came).add(piece.position)
        return set(range(len(self.tensors))) - came, sorted(missing & came)

    def version(self, answers: Sequence[Reply], name: str) -> int:
        """The version of that tensor's oldest slice, as answered: all of the tensor is at least at it."""
        return min(
            (
                version
                for frame, answer in zip(self.frames, answers, strict=True)
                for piece, version in zip(frame.ranges, answer.table.versions(), strict=True)
                if self.tensors[piece.position].spec.name == name
            ),
            default=0,
        )


def _place(tensor: Tensor, ref: SliceRef, dtype: str) -> tuple[int, int]:
    """Returns the slice's first byte in its tensor's, and its number of bytes. All slices before it are full ones."""
    before = ref.begin // tensor.slice_elems
    return before * payload_bytes(dtype, tensor.slice_elems), payload_bytes(dtype, ref.end - ref.begin)


def asking(table: _core.SliceTable, newer_than: int | None) -> _core.SliceTable:
    """Returns the table of a pull of what is newer than that version; shards leave out the rest."""
    return table if newer_than is None else table.with_versions([newer_than + 1] * len(table))


class Push(NamedTuple):
    """A push as it was asked for: the arguments of `Operations.push_many`."""

    names: tuple[str, ...]
    values: Sequence[Array]
    op: str | None = None
    codec: Codecs | None = None
    loss_scale: float | None = None

    @property
    def cache_key(self) -> Hashable:
        """Everything that can change how the push is encoded, except the types of its arrays: a cache key. None: not to
        be cached."""
        return ("push", self.names, self.op) if self.codec is None else None


class OneVersion:
    """Whether all that a pull brings is of one version, by what the shards' answers say."""

    def __init__(self) -> None:
        self._versions: set[int] = set()
        self._restored = False

    def heard(self, answers: Iterable[Answer]) -> None:
        for answer in answers:
            self._versions.add(answer.version)
            self._restored |= answer.restored

    def __bool__(self) -> bool:
        """A shard answers each frame as of one decision. What was restored since is as of the same one, so that of two
        frames of one version one may have it and the other not."""
        return len(self._versions) <= 1 and not self._restored


class Pull(NamedTuple):
    """A pull as it was asked for: the arguments of `Operations.pull_many`."""

    names: tuple[str, ...]
    out: Sequence[Array] | None
    if_newer_than: int | None = None
    dtype: str | None = None
    codec: Codecs | None = None
    wait_s: float | None = None
    hold: Hold | OneVersion | None = None
    """Read as of that decision, or find out whether all that comes is of one; None: the newest."""

    @property
    def cache_key(self) -> Hashable:
        return ("pull", self.names, self.dtype, self.out is None) if self.codec is None else None


class Layouts:
    """The layouts used of late, and what calls came to that may be made again."""

    def __init__(self, ways: Router) -> None:
        self._ways = ways
        self._known: OrderedDict[tuple[object, ...], Layout] = OrderedDict()
        self._plans: tuple[OrderedDict[Hashable, _core.CallPlan], ...] = (OrderedDict(), OrderedDict())
        """Plans of calls of late by cache key: in ordinary rounds, and in early ones."""
        self.plans = [self._plans[False]]
        """The plans for rounds like the present one. A list of one, which the extension holds: its item is replaced."""

    @property
    def early(self) -> bool:
        """True if the present round was committed early, over sockets: frames are short then."""
        return self.plans[0] is self._plans[True]

    @early.setter
    def early(self, early: bool) -> None:
        self.plans[0] = self._plans[early]

    def of(
        self,
        tensors: Sequence[Tensor],
        dtypes: Sequence[str],
        *,
        pull: bool,
        near: frozenset[int] = frozenset(),
        early: bool = False,
    ) -> Layout:
        """Returns the layout of these tensors, made if it was not used of late. `near`, `early`: see `Layout`."""
        key = (pull, near, early, *[tensor.id for tensor in tensors], *dtypes)
        layout = self._known.get(key)
        if layout is None:
            layout = Layout(tensors, dtypes, ways=self._ways, pull=pull, near=near, early=early)
        _use(self._known, key, layout)
        return layout

    def plan(self, cache_key: Hashable) -> _core.CallPlan | None:
        """Returns what such a call came to the last time in such a round; None if that was long ago or never."""
        try:
            return self.plans[0].get(cache_key)
        except TypeError:  # a name that can't be looked up, such as a list: who looks at each complains of it
            return None

    def note(self, cache_key: Hashable, op: str, layout: Layout) -> None:
        """Notes what a call came to: the next one with arrays of the same types will come to the same."""
        _use(self.plans[0], cache_key, _core.CallPlan(op, layout, layout.frame_plan))

    def forget(self, tensors: Sequence[Tensor]) -> None:
        """Drops the layouts of tensors that are gone."""
        gone = {tensor.id for tensor in tensors}
        for key in [key for key, layout in self._known.items() if not layout.ids.isdisjoint(gone)]:
            del self._known[key]

    def forget_plans(self) -> None:
        """Drops all plans: a name has come to mean something else."""
        for plans in self._plans:
            plans.clear()


def _use(lately: OrderedDict[Any, T], key: Hashable, value: T) -> None:
    """Sets a key of a cache that keeps the `MAX_LAYOUTS` entries used last."""
    lately[key] = value
    lately.move_to_end(key)
    if len(lately) > MAX_LAYOUTS:
        lately.popitem(last=False)
