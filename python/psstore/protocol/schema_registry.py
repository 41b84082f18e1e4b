"""Which tensors exist, where their slices live, and who gives them their first value. Part of the coordinator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from psstore import _core
from psstore.errors import (
    BadArgument,
    DTypeMismatch,
    OutOfMemory,
    RuleMismatch,
    ShapeMismatch,
    TensorExists,
    UnknownTensor,
)
from psstore.partition.placement import Unplaced, place_tensors
from psstore.partition.slicing import slice_elems
from psstore.protocol.signing import Signer
from psstore.types import ITEM_BYTES, Consistency, Tensor, TensorSpec, applies_by_decision
from psstore.wire.messages import Create, Created, Described, DropFact, Dropped, Signed, encode_body

MOST_SAID = 8
"""Tensors of another shape that an error names, where all of them would be the whole model."""

ADVICE = "use another name, or exist='overwrite'"


class Group(NamedTuple):
    """A parameter group: what its tensors have in common."""

    rule: str
    dtype: str
    """The narrowest dtype in which steps of its tensors are computed."""


class SchemaRegistry:
    """Names to tensors. A definition never changes; an overwritten tensor gets a new id."""

    def __init__(
        self, *, num_shards: int, signer: Signer, consistency: Consistency, max_bytes: int | None = None
    ) -> None:
        """`consistency`: of those who train the tensors. `max_bytes`: of all values together; None: each shard says for
        itself what it has no room for."""
        self._signer = signer
        self._consistency = consistency
        self._max_bytes = max_bytes
        self._tensors: dict[str, Tensor] = {}
        self._signed: dict[str, Signed] = {}
        self._groups: dict[int, Group] = {}
        self._group_sizes: Counter[int] = Counter()
        """Tensors of each of them."""
        self._loads_bytes = [0] * num_shards
        self._next_id = 1
        self._initialisers: dict[int, str | None] = {}
        """Tensor id -> client that is to send its first value, until it says READY."""
        self._created: Created | None = None
        """The last answer to a CREATE."""

    def groups(self) -> Mapping[int, Group]:
        """The parameter groups that have tensors."""
        return self._groups

    @property
    def loads_bytes(self) -> Sequence[int]:
        return self._loads_bytes

    def create(self, client: str, request: Create, *, is_gone: Callable[[str], bool]) -> Created:
        """Creates all of the tensors. Raises an error that names the first that can't be, or those that have another
        shape than the store's, and nothing has changed then.

        `is_gone`: False for a client that can still be expected to send first values.
        """
        groups = {number: group.rule for number, group in self._groups.items()}
        if request.exist == "match":
            self._check_shapes(request.specs)
        names: set[str] = set()
        for spec in request.specs:
            if spec.name in names:
                raise BadArgument(f"tensor {spec.name!r} is named twice in one request; names must be unique")
            names.add(spec.name)
            self._check(spec, request, groups)
        self._check_room(request)
        there = [self._tensors[spec.name] for spec in request.specs if spec.name in self._tensors]
        replaced = there if request.exist == "overwrite" else []
        new = self._placed([spec for spec in request.specs if replaced or spec.name not in self._tensors], replaced)
        tensors = {tensor.spec.name: tensor for tensor in (*there, *new)}
        signed = {tensor.spec.name: self._signer.sign(tensor) for tensor in new}
        created = Created(
            tensors=tuple(signed.get(spec.name) or self._signed[spec.name] for spec in request.specs),
            dropped=(self._signer.sign(DropFact(ids=tuple(one.id for one in replaced))),) if replaced else (),
            made=tuple(tensor.spec.name for tensor in new),
            initialise=tuple(tensors[spec.name].id for spec in request.specs if request.offer),
        )
        _check_size(created)
        for tensor in replaced:
            self._forget(tensor.spec.name)
        for tensor in new:
            self._register(tensor, signed[tensor.spec.name])
            if not tensor.spec.zeros:
                self._initialisers[tensor.id] = None
        self._next_id += len(new)
        # Of a list: before Python 3.11 what a generator leaves empty is not the `()` that messages leave out.
        mine = tuple([number for number in created.initialise if self._claim(number, client, is_gone)])
        created = replace(created, initialise=mine)
        if self._created is None or self._created != created:
            self._created = created
        return self._created  # a state that is copied has it once, however many clients are remembered with it

    def ready(self, ids: Sequence[int]) -> None:
        for tensor_id in ids:
            self._initialisers.pop(tensor_id, None)

    def describe(self, names: Sequence[str] | None) -> Described:
        found = [name for name in (self._tensors if names is None else dict.fromkeys(names)) if name in self._tensors]
        return Described(names=tuple(found), tensors=tuple(self._signed[name] for name in found))

    def names(self) -> Described:
        return Described(names=tuple(self._tensors))

    def drop(self, names: Sequence[str]) -> Dropped:
        for name in names:
            if name not in self._tensors:
                raise UnknownTensor(f"no tensor is named {name!r}")
        ids = tuple(self._forget(name) for name in dict.fromkeys(names))
        return Dropped(facts=(self._signer.sign(DropFact(ids=ids)),) if ids else ())

    @property
    def tensors(self) -> Sequence[Tensor]:
        """All there are, by id."""
        return sorted(self._tensors.values(), key=lambda tensor: tensor.id)

    @property
    def next_id(self) -> int:
        """That of the next tensor."""
        return self._next_id

    def restore(self, tensors: Sequence[Tensor], *, next_id: int, without_value: Collection[int]) -> None:
        """Begins with these tensors, of which some still want their first value. REQUIRES: there are none. Raises
        BadArgument for one that can't be trained as it is defined."""
        for tensor in tensors:
            tensor.spec.check_trains(self._consistency)
            self._register(tensor, self._signer.sign(tensor))
        self._initialisers = dict.fromkeys(without_value)
        self._next_id = next_id

    # ---- how ----

    def _check_shapes(self, specs: Sequence[TensorSpec]) -> None:
        """Raises ShapeMismatch that names all that differ: of another model that tells more than the first does."""
        differ = [
            f"tensor {spec.name!r} has shape {there.spec.shape} in the store, not {spec.shape}"
            for spec in specs
            if (there := self._tensors.get(spec.name)) is not None and there.spec.shape != spec.shape
        ]
        if differ:
            more = f", and {len(differ) - MOST_SAID} more differ" if len(differ) > MOST_SAID else ""
            raise ShapeMismatch(f"{', '.join(differ[:MOST_SAID])}{more}; {ADVICE}")

    def _check(self, spec: TensorSpec, request: Create, groups: dict[int, str]) -> None:
        """`groups`: the rule of each group so far, this request's earlier tensors included."""
        spec.check()
        spec.check_trains(self._consistency)
        slice_elems(spec)
        if applies_by_decision(spec.rule) and groups.setdefault(spec.group, spec.rule) != spec.rule:
            raise RuleMismatch(
                f"tensor {spec.name!r} has rule {spec.rule!r}, but parameter group {spec.group} has rule"
                f" {groups[spec.group]!r}; use another group"
            )
        there = self._tensors.get(spec.name)
        if there is None or request.exist == "overwrite":
            return
        if request.exist == "error":
            raise TensorExists(f"tensor {spec.name!r} exists already; use exist='match' or exist='overwrite'")
        if there.spec.dtype != spec.dtype:
            raise DTypeMismatch(
                f"tensor {spec.name!r} has dtype {there.spec.dtype} in the store, not {spec.dtype}; {ADVICE}"
            )
        if (there.spec.rule, there.spec.group) != (spec.rule, spec.group):
            raise RuleMismatch(
                f"tensor {spec.name!r} has rule {there.spec.rule!r} and group {there.spec.group} in the store,"
                f" not {spec.rule!r} and {spec.group}; {ADVICE}"
            )
        if (there.spec.reduction, there.spec.trim) != (spec.reduction, spec.trim):
            raise RuleMismatch(
                f"tensor {spec.name!r} has reduction {there.spec.reduction!r} with trim {there.spec.trim} in the store,"
                f" not {spec.reduction!r} with {spec.trim}; {ADVICE}"
            )
        if there.spec.compensation != spec.compensation:
            raise RuleMismatch(
                f"tensor {spec.name!r} has compensation {there.spec.compensation:g} in the store, not"
                f" {spec.compensation:g}; {ADVICE}"
            )
        if there.spec.rows != spec.rows:
            raise BadArgument(f"table {spec.name!r} has {there.spec.rows} in the store, not {spec.rows}; {ADVICE}")

    def _check_room(self, request: Create) -> None:
        """What can't fit is told before it is cut into slices: of a terabyte there are millions."""
        if self._max_bytes is None:
            return
        there = [self._tensors[spec.name].spec for spec in request.specs if spec.name in self._tensors]
        asked = sum(map(_num_bytes, request.specs))
        new = asked - sum(map(_num_bytes, there)) if request.exist == "match" else asked
        replaced = sum(map(_num_bytes, there)) if request.exist == "overwrite" else 0
        left = self._max_bytes - sum(self._loads_bytes) + replaced
        if new > left:
            raise OutOfMemory(
                f"the new tensors are {new} bytes, and the store may use {self._max_bytes}, of which {max(left, 0)} are"
                " left; raise --max-memory (of a LocalStore: max_memory), or use more shards on more machines"
            )

    def _placed(self, specs: Sequence[TensorSpec], replaced: Sequence[Tensor]) -> list[Tensor]:
        """New tensors, beside all that are there but those."""
        loads_bytes = list(self._loads_bytes)
        for tensor in replaced:
            _count(loads_bytes, tensor, -1)
        unplaced = [Unplaced(number, spec, slice_elems(spec)) for number, spec in enumerate(specs, self._next_id)]
        return place_tensors(unplaced, loads_bytes)

    def _register(self, tensor: Tensor, signed: Signed) -> None:
        spec = tensor.spec
        self._tensors[spec.name] = tensor
        if applies_by_decision(spec.rule):
            computed = spec.dtype if spec.rows is None else "float32"
            so_far = self._groups.get(spec.group, Group(spec.rule, computed))
            narrowest = min(so_far.dtype, computed, key=ITEM_BYTES.__getitem__)
            self._groups[spec.group] = Group(spec.rule, narrowest)
            self._group_sizes[spec.group] += 1
        self._signed[spec.name] = signed
        _count(self._loads_bytes, tensor, +1)

    def _forget(self, name: str) -> int:
        tensor = self._tensors.pop(name)
        del self._signed[name]
        self._initialisers.pop(tensor.id, None)
        _count(self._loads_bytes, tensor, -1)
        if applies_by_decision(tensor.spec.rule):
            self._group_sizes[tensor.spec.group] -= 1
            if not self._group_sizes[tensor.spec.group]:
                del self._groups[tensor.spec.group], self._group_sizes[tensor.spec.group]
        return tensor.id

    def _claim(self, tensor_id: int, client: str, is_gone: Callable[[str], bool]) -> bool:
        """True if this client is to send the first value: nobody else is at it, or whoever was is gone."""
        if tensor_id not in self._initialisers:
            return False
        at_it = self._initialisers[tensor_id]
        if at_it is None or at_it == client or is_gone(at_it):
            self._initialisers[tensor_id] = client
            return True
        return False


def _check_size(created: Created) -> None:
    """Raises BadArgument for what no reply holds."""
    if sum(len(one.blob) for one in created.tensors) < _core.MAX_BODY_BYTES // 2:
        return
    num_bytes = len(encode_body(created))
    if num_bytes > _core.MAX_BODY_BYTES:
        raise BadArgument(
            f"the reply would be {num_bytes} bytes, and one holds {_core.MAX_BODY_BYTES}; create fewer tensors at a"
            " time"
        )


def _count(loads_bytes: list[int], tensor: Tensor, sign: int) -> None:
    if tensor.spec.rows is not None:
        return  # its rows take memory as they come
    item = ITEM_BYTES[tensor.spec.dtype]
    for index, shard in enumerate(tensor.shards):
        begin, end = tensor.bounds(index)
        loads_bytes[shard] += sign * (end - begin) * item


def _num_bytes(spec: TensorSpec) -> int:
    return spec.num_elems * ITEM_BYTES[spec.dtype] if spec.rows is None else 0
