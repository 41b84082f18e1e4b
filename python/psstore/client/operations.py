"""Every call of a store: coroutines on the store's loop. Store waits for them, AsyncStore awaits them.

Here is what they mean; how they are carried out is in writing.py, reading.py and rounds.py. What can be checked
against the tensors' definitions is checked before anything is sent. Calls that take arrays are plain functions that
make a coroutine: they look at the arrays on the caller's thread, as device/arrays.py needs it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar, get_args

from psstore.checkpoint.handed import Handed, pack_handed, unpack_handed
from psstore.checkpoint.nested import Plain
from psstore.client.arguments import by_name, number, one_of, scale, several, text, version, whole
from psstore.client.arrays import Array, Floats
from psstore.client.compression.rows import KeptBack
from psstore.client.context import Context
from psstore.client.device.arrays import seen
from psstore.client.flow_control import Pace
from psstore.client.layout import Pull, Push
from psstore.client.norms import Norm
from psstore.client.one_version import OneVersionReading
from psstore.client.reading import Reading
from psstore.client.rounds import CommitResult, Committing
from psstore.client.row_bounds import Bounds
from psstore.client.row_cache import RowCacheUse
from psstore.client.rule_state import Restored, RuleState, restoring
from psstore.client.schema import Hypers, as_source
from psstore.client.tables import Ids, Tables
from psstore.client.writing import Creating, Writing
from psstore.client.zero_copy import Borrowing
from psstore.codec.codecs import Codecs
from psstore.errors import BadArgument, NonFinite
from psstore.protocol.client import Client
from psstore.types import Tensor, TensorSpec, check_name
from psstore.wire.messages import Exist

T = TypeVar("T")

GATHER_S = 30.0
"""How long a checkpoint waits for what workers hand in: a few long steps."""


class Operations:
    """The calls of one store. Runs on the loop of `client`'s driver, and nowhere else."""

    def __init__(self, client: Client, *, wait_s: float, pace: Pace | None = None, over_sockets: bool = False) -> None:
        """`pace`: of pushes over links that workers share."""
        self.client = client
        self.context = context = Context(client, wait_s=wait_s, pace=pace, over_sockets=over_sockets)
        self._norm = norm = Norm(context)
        self.writing = Writing(context, norm)
        self.reading = Reading(context, norm)
        self.borrowing = Borrowing(context, self.reading)
        self.one_version = OneVersionReading(context, norm, self.reading, self.borrowing)
        self._creating = Creating(context, self.writing)
        self._rounds = Committing(context, norm, self.writing)
        self.tables = Tables(context, norm, self.writing, self.reading)

    # ---- tensors ----

    def create(
        self,
        name: str,
        value: Array | None = None,
        *,
        shape: Sequence[int] | None = None,
        dtype: str | None = None,
        rule: str = "assign",
        group: int = 0,
        reduction: str = "mean",
        trim: int = 0,
        compensation: float = 0.0,
        exist: Exist = "match",
    ) -> Coroutine[Any, Any, None]:
        """Creates a tensor with this first value, or of this shape with zeros.

        `dtype`: what it is stored as, 'float32' or 'float64' (default: the value's, float32 for half precision).
        `rule`: 'assign' or 'add' for plain storage, an update rule ('sgd', 'adam', …) for training.
        `group`: parameter group, whose hyper-parameters a commit names.
        `reduction`: what becomes of a round's gradients before the rule sees them: 'mean', or of each element the
        'median' or the 'trimmed_mean' over the workers, without the `trim` lowest and highest, so that a few of them
        can't move it far; in modes 'sync' and 'backup'.
        `compensation`: how far a worker's gradient is made up for the steps that others took since it last pulled the
        tensor: DC-ASGD's lambda; in modes 'async' and 'ssp'.
        `exist`: for a tensor of that name that is there already: 'match' keeps it and its value if shape, dtype,
        rule, group, reduction and compensation are the same; 'error' raises TensorExists; 'overwrite' replaces it.

        Raises ShapeMismatch, DTypeMismatch, RuleMismatch, TensorExists, BadArgument; nothing is created then.
        """
        given = None if value is None else seen([value])[0]
        one_of("exist", exist, get_args(Exist))
        return self._creating.create(
            name,
            given,
            shape=shape,
            dtype=dtype,
            rule=rule,
            group=whole("group", group),
            reduction=text("reduction", reduction),
            trim=whole("trim", trim),
            compensation=number("compensation", compensation),
            exist=exist,
        )

    def create_many(
        self,
        specs: Sequence[TensorSpec],
        values: Sequence[Array | None] | None = None,
        *,
        exist: Exist = "match",
        offer: bool = True,
    ) -> Coroutine[Any, Any, None]:
        """Creates many tensors in one round trip; all or, if one can't be, none.

        `values`: the first value of each spec; None: zeros, as its `zeros` must say then.
        `offer`: False: the values are somebody else's to send. Later pulls and pushes wait for them.
        """
        one_of("exist", exist, get_args(Exist))
        specs = several("create_many: specs", specs, "psstore.types.TensorSpec")
        given: Sequence[Array | None] = [None] * len(specs)
        if values is not None:
            given = seen(list(several("create_many: values", values, "arrays")))
        return self._creating.create_many(specs, given, exist=exist, offer=offer)

    async def describe(self, name: str) -> Tensor:
        """The tensor's shape, dtype, rule and group (`.spec`) and where its slices live. Raises UnknownTensor."""
        return await self.context.schema.refresh(name)

    async def keys(self, table: str | None = None, *, wait_s: float | None = None) -> list[str] | Ids:
        """Names of all tensors; or the ids of the rows that a table has, as of one decision, which every step that
        anybody was told of before is in: uint64, ascending. Ids that nobody has trained or assigned are not among them.

        `wait_s`: how long to wait for the rows' shards (default: the store's).

        Raises UnknownTensor, RuleMismatch for a tensor that is no table; DeadlineExceeded, VersionGone.
        """
        if table is None:
            return await self.client.tensors.keys()
        name = text("keys: table", table)
        async with self.one_version.held(wait_s) as hold:
            return await self.tables.keys(name, wait_s=wait_s, hold=hold)

    async def drop(self, name: str) -> None:
        """Forgets a tensor, on every shard. Raises UnknownTensor."""
        tensors = await self.context.schema.find_any([name])
        await self.client.tensors.drop([name])
        self.context.schema.forget(name)
        self.context.forget(tensors)

    # ---- tables of rows ----

    async def create_table(
        self,
        name: str,
        *,
        dim: int,
        rule: str,
        dtype: str = "float32",
        init: str = "zeros",
        seed: int = 0,
        group: int = 0,
        max_rows: int | None = None,
        max_bytes: int | None = None,
        evict: str | None = None,
        admit: str | None = None,
        exist: Exist = "match",
    ) -> None:
        """Creates a table of rows of `dim` elements, by any 64-bit id; docs/rows.md says how it lives.

        `rule`: 'sgd', 'momentum', 'adagrad', 'rowwise_adagrad', 'adam' or 'ftrl' (docs/rows.md, 'Update rules').
        `dtype`: what rows are kept in: 'float32', or 'bfloat16', to which a step that is computed in float32 is rounded
        up or down by lot, with what was computed as its mean (docs/rows.md, 'Rows in bfloat16').
        `init`: a row's first value: 'zeros', 'constant(c)', 'uniform(a, b)' or 'normal(mean, std)', of the name, the
        `seed` and the row's id.
        `group`: parameter group, whose hyper-parameters a commit names; of tables of this rule alone.
        `max_rows`, or `max_bytes`: the most rows that the table may have on all shards, or memory for them with their
        state and their part of the index; evenly divided over its 64 partitions.
        `evict`: which rows go when others need their place: 'lru', 'lfu', or 'ttl:N', those that no decision has
        changed for N, also while there is room. None: pushes of new rows to a full table raise TableFull.
        `admit`: 'after:K' makes a row at its K-th contribution, 'probability:P' by lot. None: at the first.
        `exist`: see `create`.

        Raises BadArgument, ShapeMismatch, RuleMismatch, TensorExists; nothing is created then.
        """
        one_of("exist", exist, get_args(Exist))
        await self.tables.create(
            text("create_table: name", name),
            dim=whole("dim", dim),
            dtype=text("dtype", dtype),
            rule=text("rule", rule),
            init=text("init", init),
            seed=whole("seed", seed),
            group=whole("group", group),
            bounds=Bounds(
                max_rows=None if max_rows is None else whole("max_rows", max_rows),
                max_bytes=None if max_bytes is None else whole("max_bytes", max_bytes),
                evict=None if evict is None else text("evict", evict),
                admit=None if admit is None else text("admit", admit),
            ),
            exist=exist,
        )

    async def push_rows(
        self,
        name: str,
        ids: Array,
        gradients: Array,
        *,
        codec: str | None = None,
        loss_scale: float | None = None,
    ) -> None:
        """Sends gradients of rows as this worker's contribution to the table in the current round. It counts when the
        round is committed; pushing the table again before that replaces all of it.

        `ids`: integers of any shape and order, none negative; gradients of one that comes twice are summed in order.
        `gradients`: float32 of the ids' shape and then (dim,). Both must stay as they are until the call returns.
        `codec`: send fewer bytes: 'bf16', 'fp16' or 'int8'. What it loses of a row is kept here, and added to the row's
        next gradient that is pushed in a codec (docs/rows.md, 'Fewer bytes').
        `loss_scale`: of the gradients, if it is not that of the round before: what was kept back is brought to it.

        Raises UnknownTensor, RuleMismatch, DTypeMismatch, ShapeMismatch, BadArgument before anything is sent;
        TableFull, and NonFinite where the store refuses such values (docs/consistency.md): then neither it nor an
        earlier push to the table counts in this round's commit.
        """
        factor = None if loss_scale is None else scale("loss_scale", loss_scale)
        await self.tables.push(name, ids, gradients, codec=codec, loss_scale=factor)

    async def pull_rows(
        self,
        name: str,
        ids: Array,
        *,
        out: Array | None = None,
        codec: str | None = None,
        wait_s: float | None = None,
    ) -> Array:
        """The rows of these ids, with every step in them that anybody was told of before the call: float32 of the ids'
        shape and then (dim,). Those that nobody has trained have their first values, and stay as little there as
        before.

        `out`: a numpy array or torch tensor of that shape to receive into, and to return (default: a new numpy array).
        A torch tensor may be bfloat16: it gets the nearest of rows that are kept in float32.
        `codec`: receive fewer bytes: 'bf16', 'fp16' or 'int8', each row rounded by itself; the store keeps what it has.
        Rows that are kept in bfloat16 travel in it anyway, and lose nothing.
        `wait_s`: how long to wait (default: the store's).

        Raises UnknownTensor, RuleMismatch, DTypeMismatch, ShapeMismatch, BadArgument before anything is sent;
        DeadlineExceeded, which leaves `out` undefined.
        """
        return await self.tables.pull(name, ids, out, wait_s=wait_s, codec=codec)

    async def cache_rows(self, name: str, max_bytes: int, *, codec: str | None = None) -> None:
        """Keeps rows of the table that this store pulls from now on, in this process and in at most so many bytes: of
        rows that are pulled again those travel alone that may have changed since. `pull_rows` gives the same bits with
        it and without.

        Where there is no room those go that were pulled longest ago. `max_bytes`: 0 for no cache any more; another
        number, or codec, than before begins anew, and after `reconnect()` there is none (docs/rows.md, 'A cache of hot
        rows').
        `codec`: that of the pulls that use it.

        Raises UnknownTensor, RuleMismatch, BadArgument.
        """
        await self.tables.cache(name, whole("max_bytes", max_bytes), codec=codec)

    async def row_cache(self, name: str) -> RowCacheUse:
        """How many rows of the table `cache_rows` keeps in this process, and what it has saved since it began: rows
        that were asked for, those of them that did not travel, and their bytes; `hit_rate` is the one by the other.

        Raises UnknownTensor, RuleMismatch; BadArgument where no rows of the table are kept.
        """
        return await self.tables.cache_use(name)

    async def assign_rows(self, name: str, ids: Array, rows: Array, *, codec: str | None = None) -> None:
        """Sets rows of a table, at once and exactly once, whether they were there or not. The state that the update
        rule keeps of them starts anew with their next step. Not a step: contributions that wait go on waiting.

        `ids`: integers of any shape and order, none negative and none twice.
        `rows`: float32 of the ids' shape and then (dim,). Both must stay as they are until the call returns.
        `codec`: send fewer bytes: 'bf16', 'fp16' or 'int8'. The rows are set to what that makes of them, and in a table
        of bfloat16 to the nearest of it: nothing is kept back.

        A reader that holds the last decision is told VersionGone if its rows change so.

        Raises UnknownTensor, RuleMismatch, DTypeMismatch, ShapeMismatch, BadArgument before anything is sent;
        DeadlineExceeded if the last decision still waits for contributions, OutOfMemory, TableFull, and NonFinite where
        the store refuses such values: then some of the rows may have been set, and setting them again is right.
        """
        await self.tables.assign(name, ids, rows, codec=codec)

    async def export_table(self, name: str, path: str | PathLike[str], *, wait_s: float | None = None) -> None:
        """Writes a table as of one decision to a safetensors file on this machine, from which `torch` or numpy read it:
        'ids/NAME', ascending, 'rows/NAME', and the update rule's state, as 'sum/NAME'. All of it is in memory
        meanwhile. docs/rows.md says more.

        Raises UnknownTensor, RuleMismatch for a tensor that is no table; DeadlineExceeded, VersionGone, OSError.
        """
        async with self.one_version.held(wait_s) as hold:
            await self.tables.export(name, Path(path), wait_s=wait_s, hold=hold)

    # ---- writing ----

    def push(
        self,
        name: str,
        value: Array,
        *,
        op: str | None = None,
        codec: str | None = None,
        loss_scale: float | None = None,
    ) -> Coroutine[Any, Any, None]:
        """Sends `value` to the tensor; returns when the store has it.

        A tensor with a training rule takes it as this worker's gradient for the current round: it counts when the
        round is committed, and pushing again before that replaces it. A plain tensor changes at once and exactly
        once: 'assign' tensors are set, 'add' tensors are added to; `op='add'` adds to an 'assign' tensor.

        `value`: an array of the tensor's shape, of its dtype or, for float32 tensors, of half precision; numbers and
        lists are converted. It must stay as it is until the call returns. One that is contiguous and in main memory
        is not copied. One on a CUDA device (a torch tensor, a CuPy array, whatever has `__dlpack__` or
        `__cuda_array_interface__`) is sent as it will be when what is queued on its stream now is done.
        `codec`: send fewer bytes: 'bf16', 'fp16', 'int8', 'sign', 'topk:0.01' (docs/compression.md), of gradients and
        of what is added, to float32 tensors. What the codec loses is kept here, and added to the tensor's next push in
        a codec, once per round: see `residuals`.
        `loss_scale`: of a gradient, if it is not that of the round before: what was kept back is brought to it.

        Raises UnknownTensor, ShapeMismatch, DTypeMismatch, RuleMismatch before anything is sent. The first push of a
        tensor waits for its first value; raises NotInitialised if whoever created it does not send one within the
        store's `wait_s`.
        """
        factor = None if loss_scale is None else scale("loss_scale", loss_scale)
        return self.writing.push(Push((name,), seen([value]), op, codec, factor))

    def push_many(
        self,
        items: Mapping[str, Array] | Iterable[tuple[str, Array]],
        *,
        op: str | None = None,
        codec: Codecs | None = None,
        loss_scale: float | None = None,
    ) -> Coroutine[Any, Any, None]:
        """`push` for many tensors, packed into few frames. All are checked before anything is sent. `codec`: of all,
        or a mapping that names it for some."""
        chosen, values = _columns(items)
        factor = None if loss_scale is None else scale("loss_scale", loss_scale)
        return self.writing.push(Push(chosen, seen(values), op, codec, factor))

    def publish(
        self, items: Mapping[str, Array] | Iterable[tuple[str, Array]], *, wait_s: float | None = None
    ) -> Coroutine[Any, Any, int]:
        """Publishes these tensors as one version of the store, and returns its number: whoever reads or follows the
        store has all of them as they were, or all as they are now. For weights that are made elsewhere, where no
        optimizer's step is taken in the store.

        A round of the workers: each of them calls it, with the tensors that it alone has, or none. Tensors that are
        new are created, with these as first values: who names them, or follows all there is, may read those before the
        version is there. The others may be left out, and stay what they are.
        Who comes too late for a round, where the quorum is below all, publishes in the next one. Once training is
        `stopped` nothing is published any more, and the last version's number is returned.
        `wait_s`: how long to wait for other workers (default: the store's).

        Raises NotAWorker; ShapeMismatch, DTypeMismatch, and RuleMismatch for a tensor that is
        trained or plainly written; BadArgument for values that the store refuses by their norm; NonFinite if another
        worker's gradients were not, so that all of the round is skipped: nothing is published then. What `commit`
        raises; committing again waits on.
        """
        names, values = _columns(items)
        return self._publish(names, seen(values), wait_s)

    async def _publish(self, names: Sequence[str], values: Sequence[Array], wait_s: float | None) -> int:
        self.client.worker.need_joined("publish")
        if self.client.worker.is_sealed:
            await self.commit(wait_s=wait_s)
        await self._creating.create_published(names, values)
        is_late = True
        while is_late:
            await self.writing.push(Push(tuple(names), values, None, None, None))
            result = await self.commit(present=names, average=False, wait_s=wait_s)
            is_late = result.late and not self.client.worker.stopped
        if result.refused is not None:
            raise BadArgument(f"nothing is published: {result.refused.describe()}")
        if result.skipped:
            raise NonFinite(f"nothing is published: another worker's gradients in round {result.round} are not finite")
        return result.decision

    async def settle(self) -> None:
        """Returns when no push is under way, whoever started it. The futures of those that were started tell how they
        ended."""
        await self.writing.settle()

    async def rehearse(self, name: str) -> None:
        """Reads a tensor, and writes what was read as its first value, which shards take in as they take a push, and
        leave out, since there is one: both have come through, and nothing has changed.

        Raises what `pull` raises; NotAllowed with a token of role `read`; OutOfMemory.
        """
        (tensor,) = await self.context.schema.find([name])  # before it is read: what is written goes to no later one
        value = await self.pull(name)
        with suppress(NonFinite):  # steps may overflow where writes may not; it was looked at when all of it had come
            await self._creating.send_first([tensor], [as_source("rehearse", tensor.spec, value)])

    def commit(
        self,
        hypers: Hypers | None = None,
        *,
        weight: float = 1.0,
        loss_scale: float = 1.0,
        non_finite: bool = False,
        present: Iterable[str] | None = None,
        average: bool = True,
        early: bool = False,
        max_norm: float | None = None,
        wait_s: float | None = None,
    ) -> Coroutine[Any, Any, CommitResult]:
        """Ends this worker's round; returns when the store has decided it and its staleness lets this worker go on.

        `hypers`: hyper-parameters, {'lr': 0.1} for all parameter groups or {group: {'lr': 0.1}}. What is not named
        keeps its last value, or torch's default. In a round of several workers the lowest rank's count.
        `weight`: this worker's share, such as its number of samples. `average`: divide by the sum of the weights.
        `loss_scale`: the pushed gradients are so many times the real ones, as in mixed precision; the store divides.
        `non_finite`: the gradients hold NaN or infinity: the round is skipped for all.
        `present`: the tensors whose contributions count (default: all that were pushed in this round). The others
        count as zero; one that nobody has stays as it is.
        `early`: the commit goes before the pushes of `present`, which is a promise then, and `finish` ends the round.
        Each slice takes the step when its last contribution arrives, and a pull of it that was started before the push
        brings it back at once. The price: should a worker be lost before its
        `finish`, the round can be neither done nor undone, and everybody gets TornRound. Needs mode 'sync'.
        `max_norm`: clip the global norm of the reduced gradient to this: the step is taken once `global_norm` was
        called, which a pull does if need be. Needs mode 'sync'.
        `wait_s`: how long to wait for other workers (default: the store's).

        Raises WorkerLost, naming who, or DeadlineExceeded: the commit stands, and committing again waits on, for a
        lost worker's replacement, too; WorkerLost is raised again when none has come within `wait_s`. Until it was
        answered nothing can be pushed (`Store.is_sealed`).
        Raises BadHyper, BadArgument, also where an early commit promises a table of which a push was refused in this
        round and none taken since; nothing is committed then.
        """
        return self._rounds.commit(
            hypers,
            weight=weight,
            loss_scale=loss_scale,
            non_finite=non_finite,
            present=None if present is None else several("present", present),
            average=average,
            early=early,
            max_norm=max_norm,
            wait_s=wait_s,
        )

    async def finish(self, *, wait_s: float | None = None) -> None:
        """Ends a round that was committed early, after its pushes; returns when every worker has pushed all that it
        promised. Raises TornRound if one can't any more, DeadlineExceeded: calling it again waits on."""
        await self._rounds.finish(wait_s=wait_s)

    async def global_norm(self, *, wait_s: float | None = None) -> float:
        """After a commit with `max_norm`: the 2-norm of the reduced gradient over all its tensors, before it is
        clipped. One round trip to the shards. If it is not finite, the round is skipped.

        Each slice's sum of squares is float64, and they are added in the order of their keys: every worker gets the
        same bits, whatever the number of shards."""
        return await self._norm.ask(wait_s=wait_s)

    # ---- what codecs kept back ----

    async def residuals(self, names: Sequence[str]) -> dict[str, Floats]:
        """What the codecs of this worker's pushes lost so far, of the tensors that have any: for a checkpoint. Copies,
        as of the last round that is over, in units of gradients without a loss scale."""
        return await self.context.coded.residuals(await self.context.schema.find(several("names", names)))

    async def set_residuals(self, values: Mapping[str, Array | None]) -> None:
        """Takes them over, as from a checkpoint, between rounds; None: the tensor has lost nothing. Raises
        ShapeMismatch, DTypeMismatch; then nothing has changed."""
        tensors = await self.context.schema.find(list(by_name("set_residuals", values)))
        given = [
            None if value is None else as_source("set_residuals", tensor.spec, value)
            for tensor, value in zip(tensors, values.values(), strict=True)
        ]
        self.context.coded.set_residuals(tensors, given)

    async def row_residuals(self, name: str) -> KeptBack | None:
        """What the codecs of this worker's pushes lost so far of a table's rows, by id: for a checkpoint. A copy, as of
        the last round that is over, in units of gradients without a loss scale; None: nothing.

        Raises UnknownTensor, RuleMismatch.
        """
        return await self.tables.residuals(name)

    async def set_row_residuals(self, name: str, kept_back: KeptBack | None) -> None:
        """Takes over what `row_residuals` gave, as from a checkpoint, between rounds, in place of what is kept of that
        table; None: nothing is. Raises UnknownTensor, RuleMismatch, ShapeMismatch, DTypeMismatch, BadArgument for an id
        that comes twice; then nothing has changed."""
        await self.tables.set_residuals(name, kept_back)

    # ---- reading ----

    def pull(
        self,
        name: str,
        *,
        out: Array | None = None,
        if_newer_than: int | None = None,
        dtype: str | None = None,
        codec: str | None = None,
        wait_s: float | None = None,
        consistent: bool | None = None,
    ) -> Coroutine[Any, Any, Array]:
        """The tensor's value, with every step in it that anybody was told of before the call; waits for a first value
        if there is none.

        `out`: a numpy array or torch tensor of the tensor's shape to receive into, and to return. Contiguous memory
        is written straight from the socket. Else the result is a new numpy array. Into one on a CUDA device the value
        is copied in the order of its stream, as of the call: what is queued there afterwards finds it, and the host
        may be ahead of that (an array that does not say its stream holds the value on return).
        `dtype`: a float32 tensor may travel as 'float16' or 'bfloat16' (default: what `out` is, or as stored).
        `codec`: have a float32 tensor in fewer bytes. 'bf16', 'fp16': it travels so, whatever `out` is. 'int8', 'sign',
        for training rules: the difference to what this client had by its last such pull, so that the value is near the
        store's own, and all who pull so have the same (docs/compression.md). Keeps a copy of the value here.
        `if_newer_than`: a version, as `version_of(name)` gave it: None is returned if the value is no newer, and
        none of its bytes are sent.
        `wait_s`: how long to wait (default: the store's).
        `consistent`: see `pull_many`.

        Raises UnknownTensor, ShapeMismatch, DTypeMismatch before anything is sent; NotInitialised, DeadlineExceeded,
        which leave `out` undefined.
        """
        places = None if out is None else seen([out], writable=True)
        newer_than = None if if_newer_than is None else version("if_newer_than", if_newer_than)
        asked = Pull((name,), places, newer_than, dtype, codec, wait_s)

        async def work() -> Array:
            return (await self.one_version.pull(asked, consistent))[0]

        return work()

    def pull_many(
        self,
        names: Sequence[str],
        *,
        out: Sequence[Array] | None = None,
        if_newer_than: int | None = None,
        dtype: str | None = None,
        codec: Codecs | None = None,
        wait_s: float | None = None,
        consistent: bool | None = None,
    ) -> Coroutine[Any, Any, list[Array]]:
        """`pull` for many tensors, in few frames. The results are in the order of `names`. `codec`: of all, or a
        mapping that names it for some.

        `consistent`: all of one version, however many shards they are on (default: for stores with `role="client"`).
        That costs nothing where the shards' answers are of one; else they are read again as by a `snapshot` of its own,
        in two more round trips. Not with `codec` or `if_newer_than`. Raises VersionGone if shards can't keep a version
        for as long as it is read."""
        places = None if out is None else seen(list(out), writable=True)
        newer_than = None if if_newer_than is None else version("if_newer_than", if_newer_than)
        asked = Pull(several("names", names), places, newer_than, dtype, codec, wait_s)
        return self.one_version.pull(asked, consistent)

    async def newer(self, version: int, *, wait_s: float | None = None) -> None:
        """Returns when there is a decision after that one. Raises DeadlineExceeded."""
        await self.client.carrier.reach(version + 1, wait_s=self.context.patience(wait_s))

    async def hand_in(self, state: Plain) -> None:
        """Gives the store what this rank's next life is to have again, as of this worker's last step: it is in the next
        checkpoint of that version. A worker that has handed in once is asked again, by `hand_in_wanted`, whenever a
        checkpoint is written.

        `state`: None, bools, numbers, texts, bytes, arrays, and lists, tuples and dicts of these. The coordinator keeps
        the last of each rank in memory. Raises BadArgument that says where in it what can't be held is; OutOfMemory.
        """
        await self.client.worker.hand_in(pack_handed(state))

    async def handed_in(self) -> Handed | None:
        """What this rank has handed in last, in this life or one before, through restarts of the store from
        checkpoints; None: nothing."""
        back = await self.client.worker.handed_in()
        if back is None:
            return None
        version, packed = back
        return Handed(version, unpack_handed(packed))

    async def stop(self, version: int | None = None, *, finish: bool = False, everyone: bool = False) -> None:
        """This worker's commits count up to that version and no further: later ones end as late ones do, and `stopped`
        says so. None: from now on nobody's count who is a worker now, or takes the place of one, so that all come to an
        end at the same version; with `finish`, in modes 'sync' and 'backup', the round that is open still counts, and
        all end after it.

        `everyone`: nobody's commits count beyond that version. What was said for everyone no worker puts off by a later
        version of its own.
        """
        number = None if version is None else whole("version", version)
        await self.client.worker.stop(number, finish=bool(finish), everyone=bool(everyone))

    async def checkpoint(
        self,
        url: str | None = None,
        *,
        gather_s: float | None = None,
        wait_s: float | None = None,
        whole: bool = False,
    ) -> int:
        """Writes a checkpoint of the whole store, and returns its version: every decision that anybody was told of
        before the call is in it. Shards write it beside training.

        `url`: a folder, or what fsspec opens, as the shards see it (default: that of `psstore-server --checkpoint`).
        `gather_s`: how long workers that hand in may take to end their round and do so (default: 30 s; 0 for a worker,
        since its own round is one that would be waited for). What comes later is not in it, and the store says so.
        `whole`: rather none than one without it: raises DeadlineExceeded then.
        `wait_s`: how long it may take (default: the store's).

        Raises StorageError: it is not written, and the ones before are as they were. Raises VersionGone if more changed
        meanwhile than `--snapshot-memory` holds, DeadlineExceeded, BadArgument.
        """
        await self._norm.settle(wait_s)
        patience_s = self.context.patience(wait_s)
        if gather_s is None:
            gather_s = 0.0 if self.client.worker.joined else GATHER_S
        return await self.client.checkpoints.write(
            url,
            gather_s=number("gather_s", gather_s),
            pause=asyncio.sleep,
            wait_s=patience_s,
            whole=bool(whole),
        )

    def version_of(self, name: str) -> int:
        """The version of the tensor as it was last pulled here; 0 if it was not. For training rules the number of
        the decision that changed it last, else a count of its changes. Of a tensor in several slices that came at
        different versions, the oldest."""
        check_name(name)
        return self.reading.version_of(name)

    # ---- rule state ----

    async def pull_state(self, names: Sequence[str], *, wait_s: float | None = None) -> list[RuleState]:
        """What the update rules keep for these tensors: momenta and the like, and the number of steps taken."""
        return await self.reading.pull_state(several("names", names), wait_s=wait_s)

    async def restore(self, items: Mapping[str, Restored]) -> None:
        """Sets values and rule state of tensors that are trained, at once and exactly once, as from a checkpoint.

        `items`: by name a `psstore.client.rule_state.Restored`: with a value, with what `pull_state` gave, or both.

        Not a step: in a round, contributions that wait go on waiting. Raises ShapeMismatch, DTypeMismatch,
        RuleMismatch, BadArgument before anything is sent.
        """
        tensors = await self.context.schema.find(list(by_name("restore", items)))
        transfers = list(restoring(tensors, list(items.values()), self.client.ways))
        with self.context.forgetting_unknown(tensors):
            await self.client.write("RESTORE", transfers, trained=True)
        self.writing.num_bytes += sum(transfer.table.payload_bytes for transfer in transfers)

    # ---- the group ----

    async def barrier(self, name: str = "", *, wait_s: float | None = None, once: bool = False) -> None:
        """Returns when every worker has called it with this name. Raises WorkerLost, DeadlineExceeded; calling it again
        waits again, for a lost worker's replacement, too.

        `once`: of a place that a program passes once, as the end of its set-up. The replacement of a worker that was
        lost begins there anew, and does not wait if others are past it; without, it would wait for their next call."""
        await self.client.worker.barrier(text("barrier: name", name), wait_s=self.context.patience(wait_s), once=once)

    async def leave(self) -> None:
        """This worker is done: the others no longer wait for it. Reading and plain writing still work."""
        await self.client.worker.leave()

    async def stats(self) -> list[dict[str, int | float | str]]:
        """Counters of each shard, in their order."""
        return await self.client.stats()


def _columns(items: Mapping[str, Array] | Iterable[tuple[str, Array]]) -> tuple[tuple[str, ...], list[Array]]:
    """Names and arrays. Raises BadArgument for what are no such pairs."""
    if isinstance(items, Mapping):
        return tuple(items), list(items.values())
    try:
        pairs = [(name, value) for name, value in items]
    except (TypeError, ValueError):
        raise BadArgument(
            f"a {type(items).__name__} is given; expected tensors by name: a dict, or (name, array) pairs"
        ) from None
    return tuple([name for name, _ in pairs]), [value for _, value in pairs]
