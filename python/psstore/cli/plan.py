"""`psstore plan`: how a model's tensors would lie on N shards. Nothing is started."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from psstore.cli.choices import fail
from psstore.cli.model_shapes import MODELS, Shape
from psstore.errors import PsstoreError

if TYPE_CHECKING:
    from psstore.types import TensorSpec


class ShardPlan(msgspec.Struct, frozen=True, kw_only=True):
    bytes: int
    """Values."""
    state_bytes: int
    """State that the rule keeps beside them."""
    base_bytes: int
    """What it keeps at most of what workers were sent, to compensate their gradients."""
    contribution_bytes: int
    """Workers' gradients that wait for their decision, at most. Workers that share memory with the shard keep them
    themselves."""
    memory_bytes: int
    """All of these together."""
    slices: int
    tensors: int
    """That have at least one slice here."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints."""

    tensors: int
    parameters: int
    bytes: int
    state_bytes: int
    base_bytes: int
    standby_bytes: int
    """That standbys hold of values, state and bases."""
    contribution_bytes: int
    slices: int
    largest_over_mean: float
    """Bytes of the largest shard over the mean: how much longer it takes than with perfect balance."""
    shards: tuple[ShardPlan, ...]


def plan_of(
    specs: Sequence[TensorSpec],
    num_shards: int,
    *,
    num_state_buffers: int = 0,
    num_workers: int = 1,
    num_standbys: int = 0,
) -> Plan:
    """What a store of so many shards does with these tensors, created in one call. `num_state_buffers`: of the rule,
    each as large as the values. `num_workers`: of whom each has a contribution that waits, and a base of a tensor that
    is compensated. `num_standbys`: of each shard. Raises BadArgument."""
    from psstore.partition.placement import place
    from psstore.partition.slicing import num_slices, slice_elems
    from psstore.types import ITEM_BYTES

    sizes: list[int] = []
    base_sizes: list[int] = []
    tensor_of: list[int] = []
    for index, spec in enumerate(specs):
        spec.check()
        elems = slice_elems(spec)
        for begin in range(0, num_slices(spec.num_elems, elems) * elems, elems):
            sizes.append(min(elems, spec.num_elems - begin) * ITEM_BYTES[spec.dtype])
            base_sizes.append(num_workers * sizes[-1] if spec.compensation else 0)
            tensor_of.append(index)
    owners = place(sizes, [0] * num_shards)
    loads, base_loads = (
        [sum(size for size, owner in zip(of, owners, strict=True) if owner == n) for n in range(num_shards)]
        for of in (sizes, base_sizes)
    )
    return Plan(
        tensors=len(specs),
        parameters=sum(spec.num_elems for spec in specs),
        bytes=sum(sizes),
        state_bytes=num_state_buffers * sum(sizes),
        base_bytes=sum(base_sizes),
        standby_bytes=num_standbys * ((1 + num_state_buffers) * sum(sizes) + sum(base_sizes)),
        contribution_bytes=num_workers * sum(sizes),
        slices=len(sizes),
        largest_over_mean=max(loads) * num_shards / sum(loads) if sum(loads) else 1.0,
        shards=tuple(
            ShardPlan(
                bytes=loads[n],
                state_bytes=num_state_buffers * loads[n],
                base_bytes=base_loads[n],
                contribution_bytes=num_workers * loads[n],
                memory_bytes=(1 + num_state_buffers + num_workers) * loads[n] + base_loads[n],
                slices=owners.count(n),
                tensors=len({tensor for tensor, owner in zip(tensor_of, owners, strict=True) if owner == n}),
            )
            for n in range(num_shards)
        ),
    )


EXPECTED = 'expected an object of shapes by name: {"fc.weight": [10, 128], "fc.bias": [10]}'


def shapes_in(content: Any) -> dict[str, Shape]:
    """From {"name": [2, 3], ...}. Raises ValueError with what is wrong."""
    if not isinstance(content, dict) or not content:
        raise ValueError(EXPECTED)
    for name, shape in content.items():
        if not isinstance(shape, list) or not all(type(dim) is int for dim in shape):
            raise ValueError(f"shape of {name!r} is {shape!r}; expected a list of integers")
    return {name: tuple(shape) for name, shape in content.items()}


def plan(
    named: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help=f"Whose tensors: {', '.join(MODELS)}.", show_default=False)
    ] = None,
    shards: Annotated[int, typer.Option(min=1, max=1024, help="Shard processes.")] = 2,
    shapes: Annotated[Path | None, typer.Option(help='JSON file: {"name": [2, 3], ...}.')] = None,
    model: Annotated[str | None, typer.Option(help="The same as MODEL.")] = None,
    dtype: Annotated[str, typer.Option(help="float32 or float64.")] = "float32",
    state_buffers: Annotated[
        int,
        typer.Option(
            min=0, max=3, help="Count the optimizer's state: 1 buffer for SGD with momentum, 2 for Adam and AdamW."
        ),
    ] = 0,
    workers: Annotated[
        str,
        typer.Option(
            help="Whose gradients wait for their decision at the shards, at most; FEWEST:MOST where they come and go."
        ),
    ] = "1",
    compensated: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="WORKERS", help="Count what shards keep at most to compensate so many workers' gradients."
        ),
    ] = None,
    standbys: Annotated[
        int, typer.Option(min=0, max=1, help="Count what standbys hold, and are sent: one of each shard.")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show how a model's tensors are cut into slices and placed on shards."""
    from psstore.types import Consistency, TensorSpec, parse_workers

    if named is not None and model is not None:
        fail(f"plan is for one model, and was given {named!r} and --model {model}")
    model = named if model is None else model
    chosen = _choose(shapes, model)
    try:
        fewest, most = parse_workers("--workers", workers)
        Consistency(num_workers=most, quorum=most, fewest=fewest).check()
        compensation = 0.0 if compensated is None else 1.0
        specs = [
            TensorSpec(name=name, shape=shape, dtype=dtype, rule="sgd", compensation=compensation)
            for name, shape in chosen.items()
        ]
        most = max(most, compensated or 1)
        planned = plan_of(specs, shards, num_state_buffers=state_buffers, num_workers=most, num_standbys=standbys)
    except PsstoreError as error:
        fail(error.message)
    if as_json:
        typer.echo(msgspec.json.encode(planned).decode())
    else:
        _show(planned, str(model or shapes), dtype)


def _choose(shapes: Path | None, model: str | None) -> Mapping[str, Shape]:
    if (shapes is None) == (model is None):
        fail(f"plan needs either a model, which is one of {', '.join(MODELS)}, or --shapes FILE")
    if model is not None:
        if model not in MODELS:
            fail(f"model {model!r} is not one of {', '.join(MODELS)}; give other models' shapes with --shapes FILE")
        return MODELS[model]()
    assert shapes is not None
    try:
        return shapes_in(json.loads(shapes.read_bytes()))
    except (OSError, ValueError) as error:
        fail(f"{shapes}: {error}")
    except RecursionError:
        fail(f"{shapes} is nested too deep: {EXPECTED}")


BAR_WIDTH = 30

BORDER = 3
"""What a table takes for each column beside its text: a line, and a space on each side."""


def _of_memory(planned: Plan) -> str:
    fullest = max(planned.shards, key=lambda shard: shard.memory_bytes)
    waits = f"{fullest.contribution_bytes / 1e6:,.1f} MB are gradients that wait for their decision"
    return (
        f"\nmemory: a shard takes {fullest.memory_bytes / 1e6:,.1f} MB at most, of which {waits} (none of workers that"
        " share memory with it)"
    )


def _of_standbys(planned: Plan) -> str:
    if not planned.standby_bytes:
        return ""
    *others, last = ["values", *["state"] * bool(planned.state_bytes), *["bases"] * bool(planned.base_bytes)]
    kinds = f"{', '.join(others)} and {last}" if others else last
    held = f"{planned.standby_bytes / 1e6:,.1f} MB of {kinds}"
    sent = f"each worker's {planned.bytes / 1e6:,.1f} MB of gradients is sent on in a step, and waits there, too"
    return f"\nstandbys: {held} more; on the shard's host they see what is pushed, on others {sent}"


def _show(planned: Plan, title: str, dtype: str) -> None:
    from rich.bar import Bar
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"{title}: {planned.parameters:,} {dtype} parameters in {planned.tensors} tensors and"
        f" {planned.slices} slices on {len(planned.shards)} shards",
        title_justify="left",
        caption=f"largest shard / mean: {planned.largest_over_mean:.4f}" + _of_memory(planned) + _of_standbys(planned),
        caption_justify="left",
    )
    optional = {
        "state, MB": [shard.state_bytes for shard in planned.shards],
        "bases, MB at most": [shard.base_bytes for shard in planned.shards],
    }
    columns = {
        "shard": [str(number) for number in range(len(planned.shards))],
        "bytes": [f"{shard.bytes:,}" for shard in planned.shards],
        "MB": [f"{shard.bytes / 1e6:,.1f}" for shard in planned.shards],
        **{heading: [f"{size / 1e6:,.1f}" for size in sizes] for heading, sizes in optional.items() if any(sizes)},
        "slices": [str(shard.slices) for shard in planned.shards],
        "tensors": [str(shard.tensors) for shard in planned.shards],
    }
    # Each column is as wide as its widest word, so that no figure is cut; the bar has what is left.
    widths = [max(map(len, (*heading.split(), *figures))) for heading, figures in columns.items()]
    taken = sum(width + BORDER for width in widths) + BORDER + 1
    console = Console()
    bar_width = min(BAR_WIDTH, max(console.width - taken, len("load")))
    console.width = max(console.width, taken + bar_width)
    for heading, width in zip(columns, widths, strict=True):
        table.add_column(heading, justify="right", width=width)
    table.add_column("load", width=bar_width)
    largest = max(shard.bytes for shard in planned.shards) or 1
    for shard, *figures in zip(planned.shards, *columns.values(), strict=True):
        table.add_row(*figures, Bar(largest, 0, shard.bytes, color="cyan"))
    console.print(table)
