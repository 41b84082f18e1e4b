"""Plain values shared by every layer: tensors, placements, rules' hyper-parameters. No behaviour but checks."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from typing import Literal, SupportsFloat

import msgspec

from psstore import _core
from psstore.errors import BadArgument, BadHyper
from psstore.hyper import HYPER_DEFAULTS, ROW_HYPER_DEFAULTS

ITEM_BYTES: Mapping[str, int] = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}
"""Bytes per element of each dtype."""

MASTER_DTYPES = ("float32", "float64")
"""What a tensor may be stored as; the half precisions are for contributions and pulls."""

ROW_DTYPES = ("float32", "bfloat16")
"""What rows of a table may be stored as; their state is float32."""

MAX_NAME_BYTES = 1024
"""Longest tensor name in UTF-8. torch's longest parameter names are about 150."""

MAX_DIMS = 64
"""Most dimensions of a shape: numpy 2's NPY_MAXDIMS."""

MAX_TENSOR_ELEMS = 1 << 40
"""More than 24 bits of slice index can address is refused earlier; this guards the multiplication."""


PARTITION_BITS = 6
"""Partitions of a table, as a power of two: whatever the number of shards, so that a partition is the same everywhere.
64 on 8 shards are 8 each, on 7 at most 10 % more than the mean; and an entry of 32 bytes for each is 0.2 % of a push of
4,096 rows of 64."""


ID_BYTES = 8
"""Size of a row's id, on the wire and in its record."""

MAX_TABLE_ROWS = 1 << 31 + PARTITION_BITS
"""What the numbers of rows of its partitions can say."""


LARGEST: Mapping[str, float] = {"float32": (2 - 2**-23) * 2.0**127, "float64": sys.float_info.max}
"""The largest number of the dtypes that are computed in."""

LARGEST_FIRST_VALUE = (2 - 2**-7) * 2.0**127
"""bfloat16's largest number, which float32 has, too: what rows are kept in makes no difference to what is taken."""

FARTHEST_NORMAL = 7.0
"""Standard deviations from the mean beyond which no first value lies: 32 random bits bring it to 6.4."""


class RowsSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What the rows of a table are, beside its update rule."""

    dim: int
    init: str
    """Kind of the first values, of `_core.FIRST_VALUES`."""
    a: float = 0.0
    """constant: the value; uniform: the lower bound; normal: the mean."""
    b: float = 0.0
    """uniform: the upper bound; normal: the standard deviation."""
    seed: int = 0
    """64 bits, of the table's name and the seed that its creator gave."""
    max_rows: int = 0
    """Most rows of the table, of which each partition may have its even part; 0: as many as come."""
    evict: str = ""
    """Which rows go when others need their place, or after a while, of `_core.EVICTIONS`; '': none."""
    ttl: int = 0
    """evict 'ttl': decisions for which a row stays though none changes it."""
    admit_after: int = 0
    """Contributions to an id from which on it has a row; 0 or 1: the first."""
    admit_probability: float = 1.0
    """That a decision with contributions to an id without a row makes one."""

    @property
    def partition_rows(self) -> int:
        """Most rows of a partition; 0: as many as come."""
        return self.max_rows >> PARTITION_BITS

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of a tensor that is a table: its partitions, of which each is a slice, and the elements of a row."""
        return 1 << PARTITION_BITS, self.dim

    def check(self, name: str) -> None:
        """Raises BadArgument."""
        if not 1 <= self.dim <= _core.MAX_ROW_DIM:
            raise BadArgument(f"table {name!r}: dim is {self.dim}; rows have 1 to {_core.MAX_ROW_DIM} elements")
        if self.init not in _core.FIRST_VALUES:
            raise BadArgument(f"table {name!r}: init {self.init!r} is not one of {', '.join(_core.FIRST_VALUES)}")
        a, b = abs(self.a), abs(self.b)
        farthest = [a + FARTHEST_NORMAL * b] if self.init == "normal" else [a, b]
        if not all(one <= LARGEST_FIRST_VALUE for one in farthest):
            raise BadArgument(
                f"table {name!r}: init has {self.a} and {self.b}; expected numbers by which first values are finite in"
                " bfloat16 and float32"
            )
        if not 0 <= self.seed < 1 << 64:
            raise BadArgument(f"table {name!r}: seed {self.seed} is not in [0, 2^64)")
        self._check_bounds(name)

    def _check_bounds(self, name: str) -> None:
        partitions = 1 << PARTITION_BITS
        if self.max_rows and not partitions <= self.max_rows <= MAX_TABLE_ROWS:
            raise BadArgument(
                f"table {name!r}: max_rows is {self.max_rows}; expected {partitions}, one for each partition, to"
                f" {MAX_TABLE_ROWS}"
            )
        if self.evict and self.evict not in _core.EVICTIONS:
            raise BadArgument(f"table {name!r}: evict {self.evict!r} is not one of {', '.join(_core.EVICTIONS)}")
        if (self.evict == "ttl") != (self.ttl != 0) or not 0 <= self.ttl <= _core.MAX_TTL:
            raise BadArgument(
                f"table {name!r}: evict {self.evict!r} with ttl {self.ttl}; expected 'ttl' with 1 to {_core.MAX_TTL}"
                " decisions, or another one with 0"
            )
        if self.evict in ("lru", "lfu") and not self.max_rows:
            raise BadArgument(f"table {name!r}: evict {self.evict!r} needs a bound; give max_rows or max_bytes")
        if not 0 <= self.admit_after <= _core.MAX_ADMIT_AFTER:
            raise BadArgument(
                f"table {name!r}: rows are to be admitted after {self.admit_after} contributions; expected at most"
                f" {_core.MAX_ADMIT_AFTER}"
            )
        if not 0 < self.admit_probability <= 1:
            raise BadArgument(
                f"table {name!r}: rows are to be admitted with probability {self.admit_probability}; expected more"
                " than 0, and at most 1"
            )
        if self.admit_after > 1 and self.admit_probability < 1:
            raise BadArgument(f"table {name!r}: rows are admitted after some contributions or by lot, not by both")


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a caller asks for when it creates a tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    rule: str = "assign"
    group: int = 0
    zeros: bool = True
    """True: zero from the start. False: whoever created it will send the value."""
    rows: RowsSpec | None = None
    """What its rows are, if it is a table; then it has a rule of rows."""
    reduction: str = "mean"
    """What becomes of a round's gradients before the rule sees them: 'mean', or of each element the 'median' or the
    'trimmed_mean' over the workers."""
    trim: int = 0
    """'trimmed_mean': how many of the lowest are dropped, and of the highest."""
    compensation: float = 0.0
    """How far a worker's gradient is made up for the steps that others took since it was sent the value; 0: not at
    all."""

    @property
    def num_elems(self) -> int:
        return math.prod(self.shape)

    def check(self) -> None:
        """Raises BadArgument naming the field, what was expected and what came."""
        check_name(self.name)
        encoded = self.name.encode("utf-8", "surrogatepass")
        if not 0 < len(encoded) <= MAX_NAME_BYTES or not self.name.isprintable():
            raise BadArgument(f"tensor name {self.name[:80]!r}: expected 1 to {MAX_NAME_BYTES} bytes of printable text")
        if self.name == "__metadata__":
            raise BadArgument(f"tensor name {self.name!r}: files of safetensors have it for what is no tensor")
        if self.rows is None and self.dtype not in MASTER_DTYPES:
            raise BadArgument(
                f"tensor {self.name!r}: dtype {self.dtype!r} can't be stored; use one of {', '.join(MASTER_DTYPES)}"
                " (half precision is for pushes and pulls)"
            )
        rules = _core.RULES if self.rows is None else _core.ROW_RULES
        if self.rule not in rules:
            what = "tensor" if self.rows is None else "table"
            raise BadArgument(f"{what} {self.name!r}: rule {self.rule!r} is not one of {', '.join(rules)}")
        if self.rows is not None:
            self.rows.check(self.name)
            if self.dtype not in ROW_DTYPES:
                raise BadArgument(
                    f"table {self.name!r}: dtype {self.dtype!r} is not one of {', '.join(ROW_DTYPES)}, in which rows"
                    " are stored"
                )
            if (self.shape, self.zeros) != (self.rows.shape, True):
                raise BadArgument(
                    f"table {self.name!r}: shape {self.shape}, zeros {self.zeros}; expected {self.rows.shape}, True"
                )
        if len(self.shape) > MAX_DIMS or any(dim < 0 for dim in self.shape):
            raise BadArgument(f"tensor {self.name!r}: shape {self.shape} needs at most {MAX_DIMS} dims, none negative")
        if self.num_elems > MAX_TENSOR_ELEMS:
            raise BadArgument(f"tensor {self.name!r}: {self.num_elems} elements, at most {MAX_TENSOR_ELEMS}")
        if not 0 <= self.group < 1 << 32:
            raise BadArgument(f"tensor {self.name!r}: group {self.group} is not in [0, 4294967296)")
        self._check_reduction()
        self._check_compensation()

    def _check_reduction(self) -> None:
        if self.reduction not in _core.REDUCTIONS:
            known = ", ".join(_core.REDUCTIONS)
            raise BadArgument(f"tensor {self.name!r}: reduction {self.reduction!r} is not one of {known}")
        if (self.reduction == "trimmed_mean") != (self.trim != 0) or not 0 <= self.trim <= _core.MAX_SORTED:
            raise BadArgument(
                f"tensor {self.name!r}: reduction {self.reduction!r} with trim {self.trim}; expected 'trimmed_mean'"
                f" with 1 to {_core.MAX_SORTED}, the workers that are dropped at either end, or another one with 0"
            )
        if self.reduction != "mean" and (self.rows is not None or not applies_by_decision(self.rule)):
            what = "a table's rows are" if self.rows is not None else f"what rule {self.rule!r} takes is"
            raise BadArgument(
                f"tensor {self.name!r}: reduction {self.reduction!r} is over the workers' gradients of a round, and"
                f" {what} not sorted: leave it out, or give the tensor a rule of training"
            )

    def _check_compensation(self) -> None:
        if not 0 <= self.compensation <= LARGEST.get(self.dtype, math.inf):
            raise BadArgument(
                f"tensor {self.name!r}: compensation {self.compensation}; expected a finite number from 0 on, which is"
                f" none, also in {self.dtype}"
            )
        if self.compensation and not self._has_gradients:
            what = "a table's rows" if self.rows is not None else f"what rule {self.rule!r} takes"
            raise BadArgument(
                f"tensor {self.name!r}: compensation {self.compensation:g} is of the gradients of a tensor that takes"
                f" steps by them, and not of {what}: leave it out, or give the tensor a rule of training"
            )

    @property
    def _has_gradients(self) -> bool:
        return self.rows is None and applies_by_decision(self.rule) and self.rule != "reduce"

    def check_trains(self, consistency: Consistency) -> None:
        """Raises BadArgument if its reduction or compensation has no meaning among these workers."""
        self._check_sorts(consistency)
        if self.compensation and consistency.lockstep:
            raise BadArgument(
                f"tensor {self.name!r}: compensation {self.compensation:g} makes a gradient up for the steps that"
                f" others took meanwhile, and in mode {consistency.mode!r} there are none: start the store with --mode"
                " async or ssp, or leave compensation out"
            )

    def _check_sorts(self, consistency: Consistency) -> None:
        """What one worker sends would count as if the reduction were a mean."""
        if self.reduction == "mean":
            return
        asked = f"tensor {self.name!r}: reduction {self.reduction!r} is over the workers of a round, and"
        workers = consistency.num_workers
        if not consistency.lockstep:
            raise BadArgument(
                f"{asked} in mode {consistency.mode!r} each worker's gradient is a step of its own: start the store"
                " with --mode sync or backup, or use reduction 'mean'"
            )
        if workers > _core.MAX_SORTED:
            raise BadArgument(f"{asked} sorts at most {_core.MAX_SORTED} of them, not {workers}; use reduction 'mean'")
        if workers <= 2 * self.trim:
            raise BadArgument(
                f"{asked} trim {self.trim} drops {2 * self.trim} of {workers}: use a trim of at most"
                f" {(workers - 1) // 2}, reduction 'median', or at least {2 * self.trim + 1} workers"
            )


def record_bytes(spec: TensorSpec) -> int:
    """Bytes of a row of a table as a partition keeps it: id, value, state, and 4 where rows are evicted."""
    assert spec.rows is not None, "it is a table"
    dtype = _core.DTYPES[spec.dtype]
    return _core.row_record_bytes(rule_number(spec.rule), spec.rows.dim, dtype, bool(spec.rows.evict))


class Tensor(msgspec.Struct, frozen=True, kw_only=True, tag="tensor"):
    """A tensor that exists: its spec, its id and where each of its slices lives. On the wire it is signed."""

    id: int
    spec: TensorSpec
    slice_elems: int
    """Elements per slice; the last slice holds the rest. Depends on the tensor alone, never on shards."""
    shards: tuple[int, ...]
    """Shard that owns slice i."""

    def key(self, index: int) -> int:
        return self.id << _core.SLICE_INDEX_BITS | index

    def bounds(self, index: int) -> tuple[int, int]:
        """[begin, end) in elements of the flattened tensor."""
        begin = index * self.slice_elems
        return begin, min(begin + self.slice_elems, self.spec.num_elems)


def check_name(name: object) -> None:
    """Raises BadArgument for what can't be a tensor's name."""
    if not isinstance(name, str):
        advice = "; push_many and pull_many take several" if isinstance(name, (list, tuple)) else ""
        raise BadArgument(f"tensor name {name!r}: expected a string, got {type(name).__name__}{advice}")
    if not is_text(name):
        raise BadArgument(f"tensor name {name!r}: expected text that UTF-8 can say")


def is_text(value: str) -> bool:
    """Whether UTF-8 can say it, as it travels: it has no half of a surrogate pair."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def slice_index(key: int) -> int:
    """Index of a slice in its tensor."""
    return key & (1 << _core.SLICE_INDEX_BITS) - 1


# ---- hyper-parameters -----------------------------------------------------------------------------


def applies_by_decision(rule: str) -> bool:
    """True for rules of training; 'assign' and 'add' apply on arrival."""
    return rule not in ("assign", "add")


REDUCED_GROUP = 0xFFFF_FF00
"""Parameter group of tensors that are only reduced, without an update. They need a group of
their own, since a group has one rule."""


def rule_number(rule: str) -> int:
    """Number of a rule, of tensors or of rows, on the wire."""
    return _core.RULES[rule] if rule in _core.RULES else _core.ROW_RULES[rule]


def complete_hyper(rule: str, given: Mapping[str, float]) -> dict[str, float]:
    """`given` with the rule's defaults filled in. Raises BadHyper for an unknown name or a value that
    is not a finite number."""
    known = (HYPER_DEFAULTS if rule in HYPER_DEFAULTS else ROW_HYPER_DEFAULTS)[rule]
    for name, value in given.items():
        if name not in known:
            raise BadHyper(f"rule {rule!r} has no hyper-parameter {name!r}; it has {', '.join(known) or 'none'}")
        if not isinstance(value, SupportsFloat) or not math.isfinite(value):
            raise BadHyper(f"rule {rule!r}: {name} = {value!r} is not a finite number")
    return {**known, **{name: float(value) for name, value in given.items()}}


# ---- consistency ----------------------------------------------------------------------------------

UNBOUNDED = -1
"""Staleness without a bound."""

ADAPTIVE = -1.0
"""A grace that lasts as long as it pays."""

GivenGrace = float | Literal["auto"]
"""A grace as it is given: seconds, or as long as it pays."""


def grace_seconds(given: GivenGrace) -> float:
    """The grace as `Consistency` has it."""
    return ADAPTIVE if given == "auto" else given


def grace_text(grace_s: float) -> str:
    """The other way round."""
    return "auto" if grace_s == ADAPTIVE else f"{grace_s:g}"


def parse_workers(what: str, given: int | str) -> tuple[int | None, int]:
    """The fewest and the most workers of '2:8'; of a number, None and that. Raises BadArgument."""
    if isinstance(given, int):
        return None, given
    try:
        numbers = [int(one) for one in given.split(":")]
    except ValueError:
        numbers = []
    if len(numbers) == 1:
        return None, numbers[0]
    if len(numbers) != 2 or not 1 <= numbers[0] <= numbers[1]:
        raise BadArgument(f"{what} is {given!r}; expected a number, or FEWEST:MOST as in 2:8")
    return numbers[0], numbers[1]


def workers_text(consistency: Consistency) -> str:
    """What `parse_workers` reads."""
    most = str(consistency.num_workers)
    return most if consistency.fewest is None else f"{consistency.fewest}:{most}"


_DEVICE = re.compile(r"cpu|cuda:[0-9]+|fake:[0-9]+([?].*)?")


def place_shards(device: str, num_shards: int) -> tuple[str, ...]:
    """The device of each shard: those that `device` names, separated by commas, in turn. Raises BadArgument."""
    names = device.split(",")
    for name in names:
        if _DEVICE.fullmatch(name) is None:
            raise BadArgument(f"device is {device!r}; expected cpu, cuda:0, or several, as in cuda:0,cuda:1")
    return tuple(names[index % len(names)] for index in range(num_shards))


class Consistency(msgspec.Struct, frozen=True, kw_only=True):
    """The two integers that say every mode, the number of workers that they are about, and how patient a quorum is."""

    num_workers: int = 1
    quorum: int = 1
    """Commits that make a decision; num_workers means all that have not left."""
    staleness: int = 0
    """Rounds a worker may be ahead of the slowest; UNBOUNDED for asynchronous. With 0, nobody is ahead of anybody."""
    fewest: int | None = None
    """Workers come and go: num_workers are the most there may be, and no round is decided without so many. None: their
    number is fixed."""
    grace_s: float = 0.0
    """How long a round that has its quorum stays open for the other workers that are there, in seconds; ADAPTIVE: as
    long as that pays."""
    refuse_norm: float | None = None
    """A contribution is refused whose norm is more than so many times the median of the last ones that counted, or not
    finite. None: nobody looks."""

    @property
    def elastic(self) -> bool:
        return self.fewest is not None

    @property
    def lockstep(self) -> bool:
        """A decision closes a round for everybody; else every commit is a decision of its own."""
        return self.staleness == 0

    @property
    def combines_workers(self) -> bool:
        """One decision is of several workers' contributions, and none of them sees what these come to before it."""
        return self.lockstep and self.num_workers > 1

    @property
    def mode(self) -> str:
        """'sync', 'backup', 'ssp' or 'async'."""
        if self.lockstep:
            return "sync" if self.quorum == self.num_workers else "backup"
        return "async" if self.staleness == UNBOUNDED else "ssp"

    def check(self) -> None:
        """Raises BadArgument for a combination that has no meaning."""
        if self.num_workers < 1:
            raise BadArgument(f"num_workers is {self.num_workers}; a store needs at least 1 worker")
        if not 1 <= self.quorum <= self.num_workers:
            raise BadArgument(
                f"quorum is {self.quorum}; it must be between 1 and the number of workers, {self.num_workers}"
            )
        if self.staleness < UNBOUNDED:
            raise BadArgument(f"staleness is {self.staleness}; it must be at least 0, or -1 for unbounded")
        if self.fewest is not None and not 1 <= self.fewest <= self.num_workers:
            raise BadArgument(f"workers {self.fewest}:{self.num_workers}: expected FEWEST:MOST, and at least 1")
        if self.fewest is not None and (self.quorum, self.staleness) != (self.num_workers, 0):
            raise BadArgument(
                f"workers {self.fewest}:{self.num_workers} come and go in mode 'sync' alone, where a round waits for"
                " all who are there; in the other modes say how many there may be at most"
            )
        if self.quorum > 1 and self.staleness != 0:
            raise BadArgument(
                f"quorum {self.quorum} with staleness {self.staleness}: a round that needs several workers closes for"
                " all at once, so staleness must be 0; for bounded staleness use quorum 1"
            )
        self._check_grace()
        if self.refuse_norm is not None and not 1.0 < self.refuse_norm < math.inf:
            raise BadArgument(
                f"refuse_norm is {self.refuse_norm}; a contribution is refused whose norm is more than so many times"
                " the usual one: expected a number above 1, as 10"
            )

    def _check_grace(self) -> None:
        if self.grace_s != ADAPTIVE and not 0.0 <= self.grace_s < math.inf:
            raise BadArgument(f"grace_s is {self.grace_s}; it must be 'auto', or a number of seconds, at least 0")
        if self.grace_s and self.mode != "backup":
            raise BadArgument(
                f"grace_s is {grace_text(self.grace_s)}, and in mode {self.mode!r} no quorum waits for others: give a"
                f" quorum of fewer than all {self.num_workers} workers, and staleness 0"
            )

    @staticmethod
    def of_mode(
        mode: str,
        *,
        num_workers: int,
        fewest: int | None = None,
        backups: int = 1,
        staleness: int = 2,
        grace_s: float = 0.0,
        refuse_norm: float | None = None,
    ) -> Consistency:
        """`backups`: how many late workers a round does without; `staleness`: for ssp, at least 1. A worker alone is
        ahead of nobody, whatever the mode, and waited for by nobody."""
        chosen = {
            "sync": (num_workers, 0),
            "backup": (max(1, num_workers - backups), 0),
            "ssp": (1, staleness),
            "async": (1, UNBOUNDED),
        }
        if mode not in chosen:
            raise BadArgument(f"mode {mode!r} is not one of {', '.join(chosen)}")
        if mode == "ssp" and staleness == 0:
            raise BadArgument("mode 'ssp' with staleness 0: nobody may be ahead of anybody; that is mode 'sync'")
        quorum, bound = chosen[mode]
        bound = 0 if num_workers == 1 else bound
        grace_s = 0.0 if num_workers == 1 else grace_s
        result = Consistency(
            num_workers=num_workers,
            quorum=quorum,
            staleness=bound,
            fewest=fewest,
            grace_s=grace_s,
            refuse_norm=refuse_norm,
        )
        result.check()
        return result
