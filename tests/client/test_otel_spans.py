"""A worker's steps as spans of OpenTelemetry."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import psstore
from psstore.client.otel_spans import StepSpans
from psstore.client.store import Store
from psstore.client.traced import CallSpan
from tests.support.server_process import StoreProcess

ONES = np.ones(100, "f4")


@pytest.fixture(scope="module")
def provider() -> InMemorySpanExporter:
    """What a program sets up, once for all of it."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return exporter


@pytest.fixture
def exporter(provider: InMemorySpanExporter) -> Iterator[InMemorySpanExporter]:
    yield provider
    provider.clear()


def steps_of(exporter: InMemorySpanExporter) -> dict[int, ReadableSpan]:
    """Spans of steps by number, in the order of their begins."""
    steps = sorted((one for one in exporter.get_finished_spans() if one.name == "psstore.step"), key=begin)
    return {int(str(attributes(one)["psstore.step"])): one for one in steps}


def children_of(exporter: InMemorySpanExporter, step: ReadableSpan) -> list[ReadableSpan]:
    found = [one for one in exporter.get_finished_spans() if one.parent == step.context]
    return sorted(found, key=begin)


def attributes(span: ReadableSpan) -> dict[str, object]:
    return dict(span.attributes or {})


def begin(span: ReadableSpan) -> int:
    assert span.start_time is not None
    return span.start_time


def end(span: ReadableSpan) -> int:
    assert span.end_time is not None
    return span.end_time


def call(name: str, step: int, begin: int, end: int, *, waits: bool = True) -> CallSpan:
    return CallSpan(call=name, step=step, begin=begin, end=end, waits=waits)


def test_a_step_lasts_from_the_end_of_the_one_before_to_its_last_call(exporter: InMemorySpanExporter) -> None:
    spans = StepSpans(rank=3)
    for step, at in ((7, 1000), (8, 2000)):
        spans.note(call("push", step, at, at + 10))
        spans.note(call("commit", step, at + 20, at + 70))
        spans.note(call("pull_many", step, at + 80, at + 90))
    assert list(steps_of(exporter)) == [7], "nobody knows yet that the second one is over"
    spans.note(call("push_many", 8, 1500, 2500, waits=False))
    spans.end()
    first, second = steps_of(exporter).values()
    assert (begin(first), end(first)) == (1000, 1090)
    assert (begin(second), end(second)) == (1090, 2090)
    assert attributes(second) == {"psstore.step": 8, "psstore.rank": 3}
    told = [(one.name, begin(one), end(one), attributes(one)["psstore.call"]) for one in children_of(exporter, second)]
    assert told == [
        ("psstore.push", 1500, 2500, "push_many"),
        ("psstore.push", 2000, 2010, "push"),
        ("psstore.commit", 2020, 2070, "commit"),
        ("psstore.pull", 2080, 2090, "pull_many"),
    ]


def test_a_step_ends_by_the_clock_that_it_began_by(exporter: InMemorySpanExporter) -> None:
    """Somebody has set it back, as by NTP."""
    spans = StepSpans(rank=0)
    for step, at in ((7, 9000), (8, 1000), (9, 2000)):
        spans.note(call("commit", step, at, at + 10))
    spans.end()
    found = {step: (begin(one), end(one)) for step, one in steps_of(exporter).items()}
    assert found == {7: (9000, 9010), 8: (1000, 1010), 9: (1010, 2010)}


def test_a_call_that_ends_in_the_next_step_is_of_its_own(exporter: InMemorySpanExporter) -> None:
    spans = StepSpans(rank=0)
    spans.note(call("commit", 7, 1000, 1010))
    spans.note(call("push", 8, 1020, 1030))
    spans.note(call("pull_many", 7, 1010, 1040, waits=False))
    spans.end()
    former, latter = steps_of(exporter).values()
    assert [one.name for one in children_of(exporter, former)] == ["psstore.commit", "psstore.pull"]
    assert [one.name for one in children_of(exporter, latter)] == ["psstore.push"]
    assert end(former) == 1010, "nobody has waited for the pull"


def test_a_store_that_is_connected_anew_may_take_a_step_again(exporter: InMemorySpanExporter) -> None:
    spans = StepSpans(rank=0)
    for at in (1000, 2000):
        spans.note(call("commit", 7, at, at + 10))
        spans.end()
    assert [(begin(one), end(one)) for one in exporter.get_finished_spans() if one.name == "psstore.step"] == [
        (1000, 1010),
        (2000, 2010),
    ]


@pytest.mark.sockets
@pytest.mark.one_loop
def test_steps_of_a_store_are_children_of_what_the_program_has_current(
    exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PSSTORE_OTEL", "1")
    with StoreProcess() as process:
        with trace.get_tracer("train").start_as_current_span("epoch") as epoch, psstore.connect(process.url) as store:
            store.create("w", ONES, rule="sgd")
            for _ in range(2):
                started = store.start_push_many({"w": ONES})
                started.result()
                store.commit({"lr": 0.1})
                store.pull("w")
        with psstore.connect(process.url, role="client") as reader:
            assert type(reader) is Store, "only workers take steps"
    steps = steps_of(exporter)
    assert list(steps) == [1, 2]
    for step in steps.values():
        assert step.parent == epoch.get_span_context()
        calls = children_of(exporter, step)
        assert [one.name for one in calls] == ["psstore.push", "psstore.commit", "psstore.pull"]
        assert [attributes(one)["psstore.waits"] for one in calls] == [False, True, True]
        assert begin(step) <= begin(calls[0])
        assert end(step) == end(calls[-1])


def test_without_the_variable_nothing_of_it_is_imported() -> None:
    program = (
        "import sys, psstore\n"
        "with psstore.connect('local://') as store: print(type(store).__name__)\n"
        "print([name for name in sys.modules if 'opentelemetry' in name or name.startswith('psstore.client.traced')])"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert run.stdout == "Store\n[]\n", run.stderr


def test_without_opentelemetry_the_extra_is_named_before_a_rank_is_taken() -> None:
    program = (
        "import os, sys, psstore\n"
        "sys.modules['opentelemetry'] = None\n"
        "os.environ['PSSTORE_OTEL'] = '1'\n"
        "psstore.connect('ps://127.0.0.1:1', rank=0)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert "PSSTORE_OTEL needs OpenTelemetry: pip install 'psstore[otel]'" in run.stderr
