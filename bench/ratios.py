"""What targets are about: ratios within one run, found in a subject's report. What was not measured has none."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from bench.comparison import BORROWED
from bench.harness import Series
from bench.report import Report

Ratios = Callable[[Report], Iterator[float]]
"""Of one subject."""


# ---- dense: titles are of cases, names of contestants ----

LARGE, SMALL = ("one tensor", "ResNet-50"), ("1,000 tensors",)


def medians(report: Report) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for figure in report.figures:
        found.setdefault(str(figure["title"]), {})[str(figure["name"])] = median(figure["times_s"])
    return found


def beside(begins: Sequence[str], transports: Sequence[str], limits: Mapping[str, str]) -> Ratios:
    """The faster of psstore's commits by the fastest of the limits over the same transport."""

    def ratios(report: Report) -> Iterator[float]:
        for title, names in medians(report).items():
            for transport in transports if title.startswith(tuple(begins)) else ():
                ours, limit = (_fastest(names, begin) for begin in (f"psstore, {transport}", limits[transport]))
                if ours and limit:
                    yield ours / limit

    return ratios


def faster_than(begins: Sequence[str], *peers: str, who: str = "psstore") -> Ratios:
    """How many times as fast `who` is as peers whose names match one of `peers`, over sockets of the same kind."""

    def ratios(report: Report) -> Iterator[float]:
        for title, names in medians(report).items():
            for name, took in names.items() if title.startswith(tuple(begins)) else ():
                transport = name.split(", ")[1]
                ours = _fastest(names, f"{who}, {transport}")
                if ours and transport in SOCKETS and any(re.match(peer, name) for peer in peers):
                    yield took / ours

    return ratios


def _fastest(names: Mapping[str, float], begin: str) -> float | None:
    """Of those who bring values to where they are wanted, as limits and peers do."""
    found = [took for name, took in names.items() if name.startswith(begin) and not name.endswith(BORROWED)]
    return min(found, default=None)


SOCKETS = ("tcp", "unix")
RAW = {transport: f"raw sockets, {transport}" for transport in SOCKETS}
MEMORY = {"shm": "memory, shm, copies + SGD"}


# ---- latency ----


Callers = Mapping[str, Mapping[str, Any]]
"""Figures by name."""

OfCallers = Callable[[Callers, str], Iterator[float]]
"""And a transport → ratios."""

BLOCKING, ONE_THREAD = "raw sockets, {}, blocking", "raw sockets, {}, blocking, one thread"


def latency(of: OfCallers) -> Ratios:

    def ratios(report: Report) -> Iterator[float]:
        callers = {str(figure["name"]): figure for figure in report.figures}
        for transport in SOCKETS:
            if f"psstore, {transport}" in callers:
                yield from of(callers, transport)

    return ratios


KINDS = ("push", "pull")


def beside_raw(cores: str) -> OfCallers:
    """`cores`: where both ends are, as names of callers end; "": where the kernel likes."""

    def ratios(callers: Callers, transport: str) -> Iterator[float]:
        ours, raw = (callers.get(who.format(transport) + cores) for who in ("psstore, {}", BLOCKING))
        if ours and raw:
            yield max(ours["typical_s"][kind] / raw["typical_s"][kind] for kind in KINDS)

    return ratios


def beside_redis(who: str = "psstore, {}") -> OfCallers:
    """`who`: its name, but for the transport."""

    def ratios(callers: Callers, transport: str) -> Iterator[float]:
        ours, redis = callers.get(who.format(transport)), callers.get(f"Redis, {transport}")
        if ours and redis:
            yield from (ours["typical_s"][kind] / redis["typical_s"][kind] for kind in KINDS)

    return ratios


def unix_beside_tcp(who: str = "psstore, {}") -> OfCallers:
    """On the same cores."""

    def ratios(callers: Callers, transport: str) -> Iterator[float]:
        for cores in (", one core", ", two cores") if transport == "unix" else ():
            unix, tcp = (callers.get(who.format(one) + cores) for one in ("unix", "tcp"))
            if unix and tcp:
                yield from (unix["typical_s"][kind] / tcp["typical_s"][kind] for kind in KINDS)

    return ratios


def loaded(who: str = "psstore, {}") -> OfCallers:
    def ratios(callers: Callers, transport: str) -> Iterator[float]:
        times_s = callers.get(who.format(transport), {}).get("percentiles_s", {})
        if times_s.get("loaded"):
            yield times_s["loaded"]["99"] / times_s["push"]["99"]

    return ratios


# ---- kernels ----

NAMED_INPUTS = "(float32|bfloat16|float16|int8)"
"""Of gradients that have a target; others are measured, too."""


def kernels(pattern: str, other: str, *, who: str = "psstore") -> Ratios:
    """How many times as fast as `other`, of the cases whose titles match."""

    def ratios(report: Report) -> Iterator[float]:
        for title, names in medians(report).items():
            if re.search(pattern, title) and who in names and other in names:
                yield names[other] / names[who]

    return ratios


# ---- links ----


def scaling(who: str) -> Ratios:
    def ratios(report: Report) -> Iterator[float]:
        yield from (median(one["times_s"]) / one["limit_s"] for one in report.figures if one["who"] == who)

    return ratios


def beside_ring(who: str) -> Ratios:
    """With as many shards as workers."""

    def ratios(report: Report) -> Iterator[float]:
        took = {one["who"]: median(one["times_s"]) for one in report.figures if one["shards"] == 8}
        if {who, "gloo, ring all-reduce"} <= took.keys():
            yield took[who] / took["gloo, ring all-reduce"]

    return ratios


def of_the_ideal(*codecs: str) -> Ratios:
    def ratios(report: Report) -> Iterator[float]:
        for _, what, _, beside_limit, _ in report.summary:
            if isinstance(beside_limit, float) and str(what).rpartition(" ")[2] in codecs:
                yield 1 / beside_limit

    return ratios


def sign_beside_floats(report: Report) -> Iterator[float]:
    took = {one["codec"]: median(one["times_s"]) for one in report.figures}
    if {"none", "sign"} <= took.keys():
        yield took["none"] / took["sign"]


# ---- training ----


ONE_HOST = "one host"


def beside_ddp(who: str) -> Ratios:
    """On one host."""

    def ratios(report: Report) -> Iterator[float]:
        took = {(one["network"], one["model"], one["who"]): median(one["times_s"]) for one in report.figures}
        for (network, model, name), ours in took.items():
            if (network, name) == (ONE_HOST, who):
                yield took[network, model, "DDP, gloo"] / ours

    return ratios


def eager_on_links(report: Report) -> Iterator[float]:
    yield from (median(one["times_s"]) / one["limit_s"] for one in _eager_steps(report))


def chain_on_links(report: Report) -> Iterator[float]:
    """Of what an eager step can't do at once."""
    yield from (one["chain_s"] / one["limit_s"] for one in _eager_steps(report))


def _eager_steps(report: Report) -> Iterator[Mapping[str, Any]]:
    for one in report.figures:
        if one["network"] != ONE_HOST and one["who"] == "psstore, overlap='eager'":
            yield one


# ---- checkpoint: titles are of what is done ----


def speed_of(what: str) -> Ratios:
    """psstore's by that of plain calls of the system."""

    def ratios(report: Report) -> Iterator[float]:
        for title, names in medians(report).items():
            if title == what:
                yield names["plain calls"] / names["psstore"]

    return ratios


# ---- cuts: titles begin with the part ----


def times(begin: str, who: str, than: str) -> Ratios:
    """How many times as long `who` took as `than`, of the cases whose titles begin so."""

    def ratios(report: Report) -> Iterator[float]:
        for title, names in medians(report).items():
            if title.startswith(begin):
                yield names[who] / names[than]

    return ratios


def longest_steps(who: str) -> Ratios:
    """The 99th percentile of steps beside those who write, by the usual step alone."""

    def ratios(report: Report) -> Iterator[float]:
        usual = medians(report)
        for one in report.figures:
            if one["title"].startswith("writing") and one["name"] == who:
                yield Series(tuple(one["times_s"]), ()).percentile(99) / usual[one["title"]]["alone"]

    return ratios


def decisions_held(who: str) -> Ratios:
    """How much longer steps get when that one begins to write, in ms per GB."""

    def ratios(report: Report) -> Iterator[float]:
        what = f"{who}, held, ms/GB"
        yield from {one["title"]: one[what] for one in report.figures if what in one}.values()

    return ratios
