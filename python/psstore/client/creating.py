"""How tensors come to be, with their first values."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from psstore.client.arrays import Array, Source, source
from psstore.client.context import Context
from psstore.client.schema import as_source, spec_for
from psstore.client.writing import Writing
from psstore.errors import BadArgument
from psstore.types import TensorSpec
from psstore.wire.messages import Exist


class Creating:
    """Lives on the store's loop. What the arguments mean is said in operations.py."""

    def __init__(self, context: Context, writing: Writing) -> None:
        self._context = context
        self._writing = writing

    async def create(
        self,
        name: str,
        value: Array | None,
        *,
        shape: Sequence[int] | None,
        dtype: str | None,
        rule: str,
        group: int,
        exist: Exist,
    ) -> None:
        (fetched,) = await self._writing.fetched([value])
        given = None if fetched is None else source(fetched, dtype=dtype or "float32")
        spec = spec_for(name, given, shape=shape, dtype=dtype, rule=rule, group=group)
        await self._create([spec], [given], exist=exist, offer=True)

    async def create_many(
        self, specs: Sequence[TensorSpec], values: Sequence[Array | None], *, exist: Exist, offer: bool
    ) -> None:
        if len(values) != len(specs):
            raise BadArgument(f"create_many: {len(specs)} specs and {len(values)} values; give one for each, or None")
        for spec in specs:
            if not isinstance(spec, TensorSpec):
                raise BadArgument(f"create_many: expected psstore.types.TensorSpec, got {spec!r}")
            spec.check()
        sources = [
            None if value is None else as_source("create", spec, value)
            for spec, value in zip(specs, await self._writing.fetched(values), strict=True)
        ]
        asked = [
            spec if value is None else msgspec.structs.replace(spec, zeros=False)
            for spec, value in zip(specs, sources, strict=True)
        ]
        if offer:
            for spec, given in zip(asked, sources, strict=True):
                if given is None and not spec.zeros:
                    raise BadArgument(
                        f"create {spec.name!r}: zeros=False needs a value (or offer=False, if others send it)"
                    )
        await self._create(asked, sources, exist=exist, offer=offer)

    async def _create(
        self, specs: Sequence[TensorSpec], sources: Sequence[Source | None], *, exist: Exist, offer: bool
    ) -> None:
        context = self._context
        tensors, ours = await context.client.create(specs, exist=exist, offer=offer)
        context.schema.learn(tensors)
        initial = [(tensor, value) for tensor, value in zip(tensors, sources, strict=True) if tensor.id in ours]
        if initial:
            given = [value for _, value in initial if value is not None]
            layout = context.layouts.of([tensor for tensor, _ in initial], [one.dtype for one in given], pull=False)
            await self._writing.send("INIT", layout, layout.transfers([one.data for one in given]))
            await context.client.ready([tensor.id for tensor, _ in initial])
            context.first_values.note(layout.ids)
