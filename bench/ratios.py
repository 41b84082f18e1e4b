"""What targets are about: ratios within one run, found in a subject's report. What was not measured has none."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from bench.comparison import BORROWED
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


def faster_than(begins: Sequence[str], *peers: str) -> Ratios:
    """How many times as fast as peers whose names match one of `peers`, over sockets of the same kind."""

    def ratios(report: Report) -> Iterator[float]:
        for title, names in medians(report).items():
            for name, took in names.items() if title.startswith(tuple(begins)) else ():
                transport = name.split(", ")[1]
                ours = _fastest(names, f"psstore, {transport}")
                if ours and transport in SOCKETS and any(re.match(peer, name) for peer in peers):
                    yield took / ours

    return ratios


def _fastest(names: Mapping[str, float], begin: str) -> float | None:
    """Of those who bring values to where they are wanted, as limits and peers do."""
    found = [took for name, took in names.items() if name.startswith(begin) and not name.endswith(BORROWED)]
    return min(found, default=None)


SOCKETS = ("tcp", "unix")
RAW = {transport: f"raw sockets, {transport}" for transport in SOCKETS}
MEMORY = {"shm": "memory, shm, copy + SGD + copy"}


# ---- latency ----


def latency(of: Callable[[Mapping[str, Mapping[str, Any]], str], Iterator[float]]) -> Ratios:
    """`of`: figures by caller, and a transport → ratios."""

    def ratios(report: Report) -> Iterator[float]:
        callers = {str(figure["name"]): figure for figure in report.figures}
        for transport in SOCKETS:
            if f"psstore, {transport}" in callers:
                yield from of(callers, transport)

    return ratios


KINDS = ("push", "pull")


def beside_raw(cores: str) -> Callable[[Mapping[str, Mapping[str, Any]], str], Iterator[float]]:
    """`cores`: where both ends are, as names of callers end; "": where the kernel likes."""

    def ratios(callers: Mapping[str, Mapping[str, Any]], transport: str) -> Iterator[float]:
        ours, raw = (
            callers.get(f"{who}{cores}") for who in (f"psstore, {transport}", f"raw sockets, {transport}, blocking")
        )
        if ours and raw:
            yield max(ours["typical_s"][kind] / raw["typical_s"][kind] for kind in KINDS)

    return ratios


def beside_redis(callers: Mapping[str, Mapping[str, Any]], transport: str) -> Iterator[float]:
    redis = callers.get(f"Redis, {transport}")
    if redis:
        ours = callers[f"psstore, {transport}"]
        yield from (ours["typical_s"][kind] / redis["typical_s"][kind] for kind in KINDS)


def unix_beside_tcp(callers: Mapping[str, Mapping[str, Any]], transport: str) -> Iterator[float]:
    if transport == "unix":
        unix, tcp = (callers[f"psstore, {one}"]["typical_s"] for one in ("unix", "tcp"))
        yield from (unix[kind] / tcp[kind] for kind in KINDS)


def loaded(callers: Mapping[str, Mapping[str, Any]], transport: str) -> Iterator[float]:
    ours = callers[f"psstore, {transport}"]["percentiles_s"]
    if ours.get("loaded"):
        yield ours["loaded"]["99"] / ours["push"]["99"]


# ---- kernels ----

NAMED_INPUTS = "(float32|bfloat16|float16|int8)"
"""Of gradients that have a target; others are measured, too."""


def kernels(pattern: str, other: str) -> Ratios:
    """How many times as fast as `other`, of the cases whose titles match."""

    def ratios(report: Report) -> Iterator[float]:
        for title, names in medians(report).items():
            if re.search(pattern, title) and "psstore" in names and other in names:
                yield names[other] / names["psstore"]

    return ratios


# ---- links ----


def scaling(who: str) -> Ratios:
    def ratios(report: Report) -> Iterator[float]:
        yield from (median(one["times_s"]) / one["limit_s"] for one in report.figures if one["who"] == who)

    return ratios


def early_beside_ring(report: Report) -> Iterator[float]:
    took = {one["who"]: median(one["times_s"]) for one in report.figures if one["shards"] == 8}
    if {"psstore, early commit", "gloo, ring all-reduce"} <= took.keys():
        yield took["psstore, early commit"] / took["gloo, ring all-reduce"]


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


def beside_ddp(report: Report) -> Iterator[float]:
    took = {(one["network"], one["model"], one["who"]): median(one["times_s"]) for one in report.figures}
    for (network, model, who), ours in took.items():
        if who == "psstore":  # on one host, as it is by default
            yield took[network, model, "DDP, gloo"] / ours


def eager_on_links(report: Report) -> Iterator[float]:
    for one in report.figures:
        if one["network"] != "one host" and one["who"] == "psstore, overlap='eager'":
            yield median(one["times_s"]) / one["limit_s"]
