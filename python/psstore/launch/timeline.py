"""A timeline of steps, made of what workers have noted of their calls, as Perfetto and chrome://tracing open it.

    step          ├───────────────────── 17 ─────────────────────┤
    compute …     ├─ compute ─┤─ push ─┤───── commit ─────┤─ pull ─┤
                                       ├ waits for rank 1 ┤
    under way           ├── push ──┤                                   calls that nobody waits for

The format is the Trace Event Format's JSON object form: complete events (`"ph": "X"`), times in microseconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from psstore.client.traced import PHASES, CallSpan, path_of

STEPS, CALLS, UNDER_WAY = range(3)
"""Rows of a worker."""

ROWS = ("steps", "compute, push, commit, pull", "under way")

Steps = Mapping[int, Sequence[CallSpan]]
"""A worker's calls, by step, in the order of their begins."""

Event = dict[str, Any]


def read_spans(folder: Path, rank: int) -> Steps:
    """What the worker has noted so far. Raises OSError; a last line that is not whole is left out."""
    steps: defaultdict[int, list[CallSpan]] = defaultdict(list)
    path = path_of(folder, rank)
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    for line in lines:
        span = msgspec.json.decode(line, type=CallSpan)
        steps[span.step].append(span)
    return {step: sorted(spans, key=lambda one: one.begin) for step, spans in steps.items()}


def whole_steps(workers: Mapping[int, Steps], *, apart: bool = False) -> dict[int, list[int]]:
    """By rank, the steps that are noted from begin to end: each begins with the end of the one before, and another has
    begun. Those of all workers, or `apart` each one's own."""
    whole = {rank: {step for step in steps if _is_whole(step, steps)} for rank, steps in workers.items()}
    common = set.intersection(*whole.values()) if whole else set()
    return {rank: sorted(steps if apart else common) for rank, steps in whole.items()}


def _is_whole(step: int, steps: Steps) -> bool:
    return all(any(PHASES[span.call] == "commit" for span in steps.get(one, ())) for one in (step - 1, step, step + 1))


def timeline(workers: Mapping[int, Steps], steps: Mapping[int, Sequence[int]], *, apart: bool) -> dict[str, Any]:
    """These steps of each worker, as a JSON object. `apart`: nobody waits for anybody. REQUIRES: they are whole."""
    events: list[Event] = []
    for rank, of in workers.items():
        events.append(_named("process_name", rank, 0, f"rank {rank}"))
        events += [_named("thread_name", rank, row, name) for row, name in enumerate(ROWS)]
        for step in steps[rank]:
            events += _step(rank, step, of[step], _end(of[step - 1]))
            if not apart:
                events += _wait(rank, step, {other: _meeting(spans[step]) for other, spans in workers.items()})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _step(rank: int, step: int, spans: Sequence[CallSpan], begin: int) -> Iterator[Event]:
    """`begin`: the end of the step before."""
    yield _complete(f"step {step}", rank, STEPS, begin, _end(spans), {"step": step})
    at = begin
    for span in spans:
        row = CALLS if span.waits else UNDER_WAY
        if span.waits and span.begin > at:
            yield _complete("compute", rank, CALLS, at, span.begin, {"step": step})
        yield _complete(PHASES[span.call], rank, row, span.begin, span.end, {"step": step, "call": span.call})
        if span.waits:
            at = max(at, span.end)


def _wait(rank: int, step: int, meetings: Mapping[int, CallSpan]) -> Iterator[Event]:
    """Inside the call in which it meets the others: until the last of them has come to its own."""
    own = meetings[rank]
    last = max(meetings, key=lambda other: meetings[other].begin)
    until = min(meetings[last].begin, own.end)
    if until > own.begin:
        row = CALLS if own.waits else UNDER_WAY
        yield _complete(f"waits for rank {last}", rank, row, own.begin, until, {"step": step, "rank": last})


def _meeting(spans: Sequence[CallSpan]) -> CallSpan:
    """The end of a round that was committed early, else the commit."""
    ends = {span.call: span for span in reversed(spans) if PHASES[span.call] == "commit"}
    return next(ends[call] for call in ("finish", "commit", "publish") if call in ends)


def _end(spans: Sequence[CallSpan]) -> int:
    return max(span.end for span in spans if span.waits or PHASES[span.call] == "commit")


def _complete(name: str, rank: int, row: int, begin: int, end: int, args: Mapping[str, object]) -> Event:
    times = {"ts": begin / 1000, "dur": (end - begin) / 1000}
    return {"name": name, "cat": "psstore", "ph": "X", "pid": rank, "tid": row, **times, "args": args}


def _named(what: str, rank: int, row: int, name: str) -> Event:
    return {"name": what, "ph": "M", "pid": rank, "tid": row, "args": {"name": name}}
