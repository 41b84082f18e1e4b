"""How values come from the store: pulls of every kind, and rule state."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Sequence, Set
from contextlib import nullcontext
from typing import Any

from psstore.client.arrays import Array, Target, fresh
from psstore.client.context import Context
from psstore.client.device.arrays import OnDevice, by_place
from psstore.client.device.transfers import Download, FollowedDownload
from psstore.client.layout import Layout, OneVersion, Pull, Reply
from psstore.client.norms import Norm
from psstore.client.rule_state import RuleState, parts, state_name
from psstore.client.schema import as_target, check_decodes
from psstore.codec.codecs import Codec, codecs_for
from psstore.errors import BadArgument
from psstore.protocol.client import Transfer
from psstore.protocol.holds import Hold
from psstore.protocol.requests import Answer
from psstore.types import Tensor

_UNPACED = nullcontext()


class Reading:
    """The pulls of one store. Used on the store's loop only."""

    def __init__(self, context: Context, norm: Norm) -> None:
        self.num_bytes = 0
        """Payload bytes received so far."""
        self._context = context
        self._norm = norm
        self._pulled: dict[str, Layout] = {}
        """Layout of each tensor's last pull, by name."""
        self._latest: Layout | None = None
        """Layout of the last pull of all."""
        context.on_gone.append(self._forget)

    async def pull(self, asked: Pull) -> list[Array]:
        plan = self._context.layouts.plan(asked.cache_key)
        if plan is None:
            return await self._pull_one_by_one(asked)
        layout = plan.layout
        results = layout.fresh() if asked.out is None else list(asked.out)
        transfers = layout.transfers_of(results, newer_than=asked.if_newer_than)
        if transfers is None:
            return await self._pull_one_by_one(asked)
        answers = await self.receive(layout, transfers, asked.wait_s, asked.hold)
        if asked.if_newer_than is None:
            return results
        unchanged, torn = layout.unchanged(answers)
        if torn:
            await self.pull_again(layout, torn, results, wait_s=asked.wait_s)
        return _but(results, unchanged)

    def takes_a_frame_each(self, asked: Pull) -> bool:
        """Whether such a pull takes no more than one frame from each shard, as far as is known."""
        plan = self._context.layouts.plan(asked.cache_key)
        return plan is None or plan.layout.is_a_frame_each

    def version_of(self, name: str) -> int:
        """Returns the version of a tensor as it was last pulled here; 0 if it was not."""
        if name not in self._pulled:
            return 0
        layout = self._pulled[name]
        return layout.version(layout.answers, name)

    def received(self, layout: Layout, answers: Sequence[Reply]) -> None:
        """Notes a pull that brought all of a layout's tensors."""
        self.num_bytes += layout.num_bytes
        self._note(layout, answers)

    def received_newer(
        self, layout: Layout, answers: Sequence[Reply], arrays: Sequence[Array]
    ) -> tuple[list[Array], Sequence[int]]:
        """Notes a pull of what is newer. Returns its results; and the positions of those of which only some slices
        came, which are to be pulled again first."""
        self.num_bytes += sum(answer.table.payload_bytes for answer in answers)
        self._note(layout, answers)
        unchanged, torn = layout.unchanged(answers)
        return _but(arrays, unchanged), torn

    async def pull_again(
        self, layout: Layout, torn: Sequence[int], arrays: Sequence[Array], *, wait_s: float | None
    ) -> None:
        """Pulls these of a layout's tensors, whatever their version."""
        names = tuple(layout.names[i] for i in torn)
        await self.pull(Pull(names, [arrays[i] for i in torn], wait_s=wait_s))

    async def pull_state(
        self, names: Sequence[str], *, wait_s: float | None, hold: Hold | OneVersion | None = None
    ) -> list[RuleState]:
        tensors = await self._context.schema.find(names)
        found: list[RuleState] = [RuleState(0, {}) for _ in tensors]
        for part, positions in parts(tensors):
            chosen = [tensors[i] for i in positions]
            targets = [fresh(tensor.spec.shape, tensor.spec.dtype) for tensor in chosen]
            layout = Layout(
                chosen,
                [tensor.spec.dtype for tensor in chosen],
                ways=self._context.client.ways,
                pull=True,
                part=part,
            )
            await self._norm.settle(wait_s)
            answers = await self._read(layout, layout.transfers([one.data for one in targets]), wait_s, hold)
            missing = layout.absent(answers)
            for position, i in enumerate(positions):
                name = state_name(tensors[i], part)
                held = {} if position in missing else {name: targets[position].result}
                steps = layout.version(answers, tensors[i].spec.name)
                found[i] = RuleState(max(steps, found[i].steps), {**found[i].buffers, **held})
        return found

    # ---- arrays of any kind ----

    async def _pull_one_by_one(self, asked: Pull) -> list[Array]:
        """Pulls into arrays of any kind: each is looked at, and named if it does not fit."""
        names, out, context = asked.names, asked.out, self._context
        tensors = await context.schema.find(names)
        if out is not None and len(out) != len(names):
            raise BadArgument(f"pull_many: {len(names)} names and {len(out)} arrays in out=; give one for each")
        targets = [as_target(t.spec, None if out is None else out[i], asked.dtype) for i, t in enumerate(tensors)]
        if asked.codec is not None:
            return await self._pull_coded(tensors, targets, codecs_for(asked.codec, names), asked)
        results: dict[int, Array] = {}
        for place, positions in by_place(targets).items():
            chosen, dtypes = [tensors[i] for i in positions], [targets[i].dtype for i in positions]
            layout = await context.layout(chosen, dtypes, pull=True, place=place)
            if place is None and len(positions) == len(targets):
                context.layouts.note(asked.cache_key, "PULL", layout)
            chosen_targets = [targets[i] for i in positions]
            pulled = await self.pull_into(layout, chosen_targets, asked.if_newer_than, asked.wait_s, asked.hold)
            results.update(zip(positions, pulled, strict=True))
        context.first_values.note(tensor.id for tensor in tensors)
        return [results[i] for i in range(len(targets))]

    async def _pull_coded(
        self,
        tensors: Sequence[Tensor],
        targets: Sequence[Target | OnDevice],
        codecs: Sequence[Codec | None],
        asked: Pull,
    ) -> list[Array]:
        """Pulls in codecs, which are decoded where the arrays are."""
        for tensor, codec in zip(tensors, codecs, strict=True):
            check_decodes(tensor.spec, codec)
        results: dict[int, Array] = {}
        for place, positions in by_place(targets).items():
            pulled = await self._context.coded.pull(
                self,
                [tensors[i] for i in positions],
                [targets[i] for i in positions],
                [codecs[i] for i in positions],
                asked.if_newer_than,
                asked.wait_s,
                place=place,
            )
            results.update(zip(positions, pulled, strict=True))
        return [results[i] for i in range(len(targets))]

    async def pull_into(
        self,
        layout: Layout,
        targets: Sequence[Target | OnDevice],
        newer_than: int | None,
        wait_s: float | None,
        hold: Hold | OneVersion | None = None,
    ) -> list[Array]:
        """Pulls into targets that are all in main memory, or all on one device."""
        answers = await self._pull(layout, targets, newer_than, wait_s, hold)

        def again(torn: Sequence[int]) -> Coroutine[Any, Any, object]:
            tensors, dtypes = [layout.tensors[i] for i in torn], [layout.dtypes[i] for i in torn]
            whole = self._context.layouts.of(tensors, dtypes, pull=True)
            return self._pull(whole, [targets[i] for i in torn], None, wait_s)

        unchanged = set() if newer_than is None else await _unchanged(layout, answers, again)
        _finish([receiver for i, receiver in enumerate(targets) if i not in unchanged])
        return [None if i in unchanged else receiver.result for i, receiver in enumerate(targets)]

    async def _pull(
        self,
        layout: Layout,
        targets: Sequence[Any],
        newer_than: int | None,
        wait_s: float | None,
        hold: Hold | OneVersion | None = None,
    ) -> list[Answer]:
        if targets and isinstance(targets[0], OnDevice):
            pinned = self._context.transfers.into(targets[0].device)
            return await self.receive(layout, Download(pinned, layout, targets, newer_than), wait_s, hold)
        transfers = layout.transfers([receiver.data for receiver in targets], newer_than=newer_than)
        return await self.receive(layout, transfers, wait_s, hold)

    # ---- how ----

    async def receive(
        self,
        layout: Layout,
        transfers: Sequence[Transfer] | Download | FollowedDownload,
        wait_s: float | None,
        hold: Hold | OneVersion | None = None,
        *,
        timeout_s: float = 0.0,
    ) -> list[Answer]:
        """Carries out the transfers of a pull. `timeout_s`: how long its answers may take, if that is more than is
        waited for them."""
        await self._norm.settle(wait_s)
        pace = self._context.turns
        with (
            self._context.forgetting_unknown(layout.tensors),
            _UNPACED if pace is None else pace.reading(layout.ids) as turn,
        ):
            if turn is not None:
                await turn
            if isinstance(transfers, Download | FollowedDownload):
                answers = await transfers.received(lambda some: self._read(layout, some, wait_s, hold, timeout_s))
            else:
                answers = await self._read(layout, transfers, wait_s, hold, timeout_s)
        self._note(layout, answers)
        return answers

    async def _read(
        self,
        layout: Layout,
        transfers: Sequence[Transfer],
        wait_s: float | None,
        hold: Hold | OneVersion | None = None,
        timeout_s: float = 0.0,
    ) -> list[Answer]:
        wait, client = self._context.patience(wait_s), self._context.client
        if isinstance(hold, Hold):
            answers = await client.pull_held(hold, transfers, wait_s=wait, timeout_s=timeout_s)
        else:
            answers = await client.pull(transfers, trained=layout.is_trained, wait_s=wait, timeout_s=timeout_s)
        if isinstance(hold, OneVersion) and layout.is_trained:
            hold.heard(answers)
        self.num_bytes += sum(answer.table.payload_bytes for answer in answers)
        return answers

    def _forget(self, tensors: Sequence[Tensor]) -> None:
        """Drops the pulls of tensors that are gone."""
        for tensor in tensors:
            layout = self._pulled.get(tensor.spec.name)
            if layout is not None and tensor.id in layout.ids:
                del self._pulled[tensor.spec.name]

    def _note(self, layout: Layout, answers: Sequence[Reply]) -> None:
        layout.answers = answers
        if layout is not self._latest:
            self._pulled.update(dict.fromkeys(layout.names, layout))
            self._latest = layout


def _but(results: Sequence[Array], unchanged: Set[int]) -> list[Array]:
    """Returns the results, with None for those that are unchanged."""
    if len(unchanged) == len(results):
        return [None] * len(results)
    return [None if i in unchanged else result for i, result in enumerate(results)]


async def _unchanged(
    layout: Layout, answers: Sequence[Reply], again: Callable[[Sequence[int]], Coroutine[Any, Any, object]]
) -> set[int]:
    """Returns the positions of the tensors of which nothing is newer. `again`: pulls tensors of which only some slices
    are newer, whatever their version."""
    unchanged, torn = layout.unchanged(answers)
    if torn:
        await again(torn)
    return unchanged


def _finish(targets: Iterable[Target | OnDevice]) -> None:
    for receiver in targets:
        if receiver.finish is not None:
            receiver.finish()
