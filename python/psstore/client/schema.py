"""What this client knows of the store's tensors, so that mistakes are found before anything is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import index

from psstore import _core
from psstore.client.arrays import Array, Source, Target, fresh, source, target
from psstore.client.device.arrays import OnDevice
from psstore.client.layout import Layout
from psstore.codec.codecs import Codec
from psstore.errors import BadArgument, BadHyper, DTypeMismatch, RuleMismatch, ShapeMismatch
from psstore.protocol.client import Client, Transfer
from psstore.types import Tensor, TensorSpec, applies_by_decision, check_name, is_text
from psstore.wire.ranges import Ranges

Hypers = Mapping[str, float] | Mapping[int, Mapping[str, float]]
"""Hyper-parameters by name for all parameter groups, or by group."""

HALVES = ("bfloat16", "float16")
"""Dtypes that float32 tensors also travel as."""

NEVER = 2**64 - 1
"""A version that none is newer than: a read that asks for it brings no bytes."""

RECHECK_S = 1.0
"""A slice whose decision waits for the very push that waits here is said to have a value when it is asked again: the
wait is cut into pieces of this length. A value that comes ends it at once."""


class Schema:
    """Definitions by name, learned when they are first needed. They never change; a tensor that was dropped or
    overwritten is learned anew."""

    def __init__(
        self, client: Client, *, on_changed: Callable[[], None], on_overwritten: Callable[[Sequence[Tensor]], None]
    ) -> None:
        """`on_changed`: called when a name has come to mean something else; `on_overwritten`: with what it meant, if
        that is gone."""
        self._on_changed = on_changed
        self._on_overwritten = on_overwritten
        self._client = client
        self._tensors: dict[str, Tensor] = {}
        self._groups: set[int] | None = None
        """The result of `groups`, once it was asked for."""

    def learn(self, tensors: Iterable[Tensor]) -> None:
        overwritten = []
        for tensor in tensors:
            before = self._tensors.get(tensor.spec.name)
            if before is not None and before != tensor:
                self._on_changed()
                if before.id != tensor.id:
                    overwritten.append(before)
            self._tensors[tensor.spec.name] = tensor
        self._groups = None
        if overwritten:
            self._on_overwritten(overwritten)

    def forget(self, name: str) -> None:
        self._tensors.pop(name, None)
        self._groups = None
        self._on_changed()

    def knows(self, tensor: Tensor) -> bool:
        """Whether its name means this one here."""
        return self._tensors.get(tensor.spec.name) == tensor

    async def find(self, names: Sequence[str]) -> list[Tensor]:
        """Returns tensors by name, as `find_any`. Raises RuleMismatch, which names the first that is a table."""
        found = await self.find_any(names)
        for tensor in found:
            if tensor.spec.rows is not None:
                name = tensor.spec.name
                raise RuleMismatch(
                    f"{name!r} is a table of rows: push_rows and pull_rows take its rows, and nothing takes all of it",
                    name=name,
                )
        return found

    async def find_table(self, name: str) -> Tensor:
        """Returns a table by its name. Raises UnknownTensor; RuleMismatch if it is no table."""
        (tensor,) = await self.find_any([name])
        if tensor.spec.rows is None:
            raise RuleMismatch(f"{name!r} is a tensor and no table: push and pull take it", name=name)
        return tensor

    async def find_any(self, names: Sequence[str]) -> list[Tensor]:
        """Returns tensors and tables by name; asks the store for those that are not known here. Raises UnknownTensor,
        which names the first that the store does not have."""
        try:
            unknown = list(dict.fromkeys(name for name in names if not self._is_known(name)))
        except TypeError:  # one can't be looked up
            unknown = list(names)
        for name in unknown:
            check_name(name)
        if unknown:
            self.learn(await self._client.tensors.describe(unknown))
        return [self._tensors[name] for name in names]

    def _is_known(self, name: str) -> bool:
        """Whether somebody would say if it had come to mean something else: no shard does of a tensor without elements,
        which has no slices."""
        tensor = self._tensors.get(name)
        return tensor is not None and (tensor.spec.num_elems > 0 or tensor.spec.rows is not None)

    async def refresh(self, name: str) -> Tensor:
        check_name(name)
        self.forget(name)
        return (await self.find_any([name]))[0]

    async def within(self, ranges: Iterable[Ranges]) -> list[Tensor]:
        """The tensors whose ids are in any of these ranges, by id."""
        ids = {number for one in ranges for first, last in one for number in range(first, last + 1)}
        known = {tensor.id for tensor in self._tensors.values()}
        if not ids <= known:
            self.learn(await self._client.tensors.describe(None))
        return sorted((t for t in self._tensors.values() if t.id in ids), key=lambda tensor: tensor.id)

    def groups(self) -> set[int]:
        """Parameter groups of the tensors that are trained."""
        if self._groups is None:
            trained = (tensor.spec for tensor in self._tensors.values() if applies_by_decision(tensor.spec.rule))
            self._groups = {spec.group for spec in trained}
        return self._groups


class FirstValues:
    """Knows which tensors of one store have their first values, which their creators may still have on their way.

    A push waits for them, as a pull does: a shard takes no gradient for what has no value, since a decision that counts
    on it could not be carried out. A client asks once per tensor, before its first push of it goes; so no call that
    goes as one went before (direct.py, paced.py) meets a tensor without a value. Used on the store's loop only.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._there: set[int] = set()
        """Ids of tensors that have a first value."""

    def note(self, ids: Iterable[int]) -> None:
        """Notes tensors whose first values have come, or were sent."""
        self._there.update(ids)

    def forget(self, tensors: Sequence[Tensor]) -> None:
        """Drops what was noted of tensors that are gone."""
        self._there.difference_update(tensor.id for tensor in tensors)

    async def arrive(self, tensors: Sequence[Tensor], *, wait_s: float) -> None:
        """Returns when all tensors have their first values, or after `wait_s`: then shards refuse what is pushed."""
        unsure = [tensor for tensor in tensors if not tensor.spec.zeros and tensor.id not in self._there]
        missing = self._questions(unsure)
        asked_s = 0.0
        while missing := await self._client.without_value(missing, wait_s=asked_s):
            if not wait_s:
                return
            asked_s = min(wait_s, RECHECK_S)
            wait_s -= asked_s
        self.note(tensor.id for tensor in unsure)

    def _questions(self, tensors: Sequence[Tensor]) -> list[Transfer]:
        """Returns reads that bring no values, but say whether there are any."""
        if not tensors:
            return []
        layout = Layout(tensors, [tensor.spec.dtype for tensor in tensors], ways=self._client.ways, pull=True)
        nowhere = _core.Segments([], writable=True)
        return [
            Transfer(frame.way, frame.table.with_versions([NEVER] * len(frame.table)), nowhere)
            for frame in layout.frames
        ]


def spec_for(
    name: str,
    value: Source | None,
    *,
    shape: Sequence[int] | None,
    dtype: str | None,
    rule: str,
    group: int,
    reduction: str = "mean",
    trim: int = 0,
    compensation: float = 0.0,
) -> TensorSpec:
    """The spec that `create` asks for: shape and dtype come from the value, unless they are given."""
    if shape is None:
        if value is None:
            raise BadArgument(f"create {name!r}: give a value, or a shape for zeros")
        shape = value.shape
    try:
        dims = tuple(map(index, shape))
    except TypeError:
        raise BadArgument(f"create {name!r}: shape is {shape!r}; expected integers, as in (3, 4)") from None
    if dtype is None:
        dtype = "float32" if value is None or value.dtype in HALVES else value.dtype
    spec = TensorSpec(
        name=name,
        shape=dims,
        dtype=dtype,
        rule=rule,
        group=group,
        zeros=value is None,
        reduction=reduction,
        trim=trim,
        compensation=compensation,
    )
    spec.check()
    if value is not None:
        check_fit("create", spec, value)
    return spec


def as_source(what: str, spec: TensorSpec, value: Array) -> Source:
    """The value's bytes, if it fits the tensor. Raises ShapeMismatch, DTypeMismatch."""
    found = source(value, dtype=spec.dtype)
    check_fit(what, spec, found)
    return found


def as_pushed(spec: TensorSpec, value: Array) -> Source | OnDevice:
    """Checks a value to push; what is on a device is taken from there."""
    if not isinstance(value, OnDevice):
        return as_source("push", spec, value)
    check_fit("push", spec, value)
    return value


def as_target(spec: TensorSpec, out: Array | None, dtype: str | None) -> Target | OnDevice:
    """Returns the target of a pull: `out` if it fits, or new memory without it. Raises ShapeMismatch, DTypeMismatch."""
    if out is None:
        wanted = spec.dtype if dtype is None else dtype
        if not travels_as(spec.dtype, wanted):
            raise DTypeMismatch(
                f"pull {spec.name!r}: it is {spec.dtype} and can't be had as {wanted!r}", name=spec.name
            )
        return fresh(spec.shape, wanted)
    receiver = out if isinstance(out, OnDevice) else target(out)
    if dtype is not None and receiver.dtype != dtype:
        raise DTypeMismatch(f"pull {spec.name!r}: out= is {receiver.dtype}, dtype= says {dtype!r}", name=spec.name)
    check_fit("pull", spec, receiver)
    return receiver


def check_fit(what: str, spec: TensorSpec, array: Source | Target | OnDevice) -> None:
    """Raises ShapeMismatch or DTypeMismatch with what was expected and what came."""
    if tuple(array.shape) != spec.shape:
        raise ShapeMismatch(
            f"{what} {spec.name!r}: expected shape {spec.shape}, got {tuple(array.shape)}; reshape it",
            name=spec.name,
        )
    if not travels_as(spec.dtype, array.dtype):
        allowed = (spec.dtype, *HALVES) if spec.dtype == "float32" else (spec.dtype,)
        raise DTypeMismatch(
            f"{what} {spec.name!r}: expected dtype {' or '.join(allowed)}, got {array.dtype}; convert it first",
            name=spec.name,
        )


def travels_as(master: str, encoding: str) -> bool:
    """True if a tensor may travel so: in its own dtype, float32 also in half precision (as csrc/table/schema.h has
    it)."""
    return encoding == master or (master == "float32" and encoding in HALVES)


def write_op(spec: TensorSpec, op: str | None) -> str:
    """The wire operation of a push. Raises RuleMismatch if the tensor does not take it."""
    if applies_by_decision(spec.rule):
        if op is not None:
            raise RuleMismatch(
                f"push {spec.name!r}: rule {spec.rule!r} takes gradients; op={op!r} is for plain tensors"
            )
        return "PUSH"
    chosen = spec.rule if op is None else op
    if chosen not in ("assign", "add"):
        raise BadArgument(f"push {spec.name!r}: op is {op!r}; expected 'assign' or 'add'")
    if chosen == "assign" and spec.rule == "add":
        raise RuleMismatch(
            f"push {spec.name!r}: its rule is 'add', so it can't be assigned; create it with rule='assign'"
        )
    return chosen.upper()


def check_encodes(spec: TensorSpec, wire_op: str, codec: Codec | None) -> None:
    """Raises DTypeMismatch, BadArgument for a push that can't be in that codec."""
    if codec is None:
        return
    _check_coded("push", spec, codec)
    if wire_op == "ASSIGN":
        raise BadArgument(
            f"push {spec.name!r}: a codec is for gradients and what is added, not for what is assigned: leave codec="
            " out, or push half precision"
        )


def check_decodes(spec: TensorSpec, codec: Codec | None) -> None:
    """Raises DTypeMismatch, BadArgument, RuleMismatch for a pull that can't be in that codec."""
    if codec is None:
        return
    _check_coded("pull", spec, codec)
    if not codec.pulls:
        raise BadArgument(f"pull {spec.name!r}: codec {codec.name!r} is for pushes; pull in bf16, fp16, int8 or sign")
    if codec.follows and not applies_by_decision(spec.rule):
        raise RuleMismatch(
            f"pull {spec.name!r}: deltas are of tensors that are trained, and its rule is {spec.rule!r}: pull it whole"
        )


def _check_coded(what: str, spec: TensorSpec, codec: Codec) -> None:
    if spec.dtype != "float32":
        raise DTypeMismatch(
            f"{what} {spec.name!r}: it is {spec.dtype}, and codec {codec.name!r} is for float32", name=spec.name
        )


def per_group(hypers: Hypers | None, groups: set[int]) -> dict[int, dict[str, float]]:
    """Returns `hypers` as the wire has them, by parameter group. A single set is for every group."""
    if not hypers:
        return {}
    if not isinstance(hypers, (dict, Mapping)):  # an abstract class takes long to ask
        raise BadArgument(f"hypers: expected {{'lr': 0.1}} or {{group: {{'lr': 0.1}}}}, got {hypers!r}")
    by_group: dict[int, dict[str, float]] = {}
    common: dict[str, float] = {}
    for key, value in hypers.items():
        if isinstance(key, int) and isinstance(value, Mapping):
            by_group[key] = {name: _number(name, number) for name, number in value.items()}
        elif isinstance(key, str) and (isinstance(value, float) or not isinstance(value, Mapping)):
            common[key] = _number(key, value)
        else:
            raise BadArgument(f"hypers: expected {{'lr': 0.1}} or {{group: {{'lr': 0.1}}}}, got {key!r}: {value!r}")
    if common and by_group:
        raise BadArgument("hypers: name hyper-parameters for all groups or by group, not both")
    return by_group or {group: dict(common) for group in sorted(groups)}


def _number(name: str, value: object) -> float:
    if not is_text(name):
        raise BadHyper(f"hyper-parameter {name!r}: expected text that UTF-8 can say")
    try:
        return float(value)  # type: ignore[arg-type]  # whatever has a __float__, as a tensor of one element
    except (TypeError, ValueError, OverflowError):
        raise BadHyper(f"hyper-parameter {name!r} is {value!r}; expected a number") from None
