"""A worker's steps as spans of OpenTelemetry, to the program's own tracer provider: PSSTORE_OTEL.

    what the program has current, if anything
      psstore.step     ├──────────────── 17 ────────────────┤
        psstore.push       ├─ push ─┤
        psstore.commit              ├── commit ──┤
        psstore.pull                             ├─ pull ─┤

A step begins with the end of the one before. Calls under way that nobody waits for may end after it.
"""

from __future__ import annotations

import threading

from psstore.client.traced import PHASES, CallSpan
from psstore.errors import BadArgument
from psstore.release import __version__

try:
    from opentelemetry import trace
except ModuleNotFoundError:
    raise BadArgument("PSSTORE_OTEL needs OpenTelemetry: pip install 'psstore[otel]'") from None


class StepSpans:
    """What has been noted becomes spans at once; the step itself does when the next one begins, or the store ends."""

    is_on = True

    def __init__(self, rank: int) -> None:
        self._tracer = trace.get_tracer("psstore", __version__)
        self._rank = rank
        self._step = -1
        """The one that is open."""
        self._span: trace.Span | None = None
        """Its span; None: no step is open."""
        self._former: trace.Span | None = None
        """That of the step before, which has ended, but for calls that are under way."""
        self._last_end = 0
        """When the last call that was waited for did."""
        self._lock = threading.Lock()
        """For all of these: what is under way ends on a thread of the store's."""

    def look(self) -> None:
        """Does nothing: it is always on."""

    def note(self, span: CallSpan) -> None:
        with self._lock:
            if span.step > self._step or self._span is None:
                self._begin(span)
            assert self._span is not None, "_begin"
            parent = self._former if span.step < self._step and self._former is not None else self._span
            child = self._tracer.start_span(
                f"psstore.{PHASES[span.call]}",
                context=trace.set_span_in_context(parent),
                attributes={"psstore.step": span.step, "psstore.call": span.call, "psstore.waits": span.waits},
                start_time=span.begin,
            )
            child.end(span.end)
            if span.waits:
                self._last_end = max(self._last_end, span.end)

    def end(self) -> None:
        """The store ends, or is connected anew."""
        with self._lock:
            self._end_step()
            self._former = None
            self._last_end = 0

    def _begin(self, span: CallSpan) -> None:
        self._end_step()
        self._step = span.step
        begin = self._last_end = min(self._last_end or span.begin, span.begin)  # if the clock was set back, by now's
        self._span = self._tracer.start_span(
            "psstore.step", attributes={"psstore.step": span.step, "psstore.rank": self._rank}, start_time=begin
        )

    def _end_step(self) -> None:
        if self._span is not None:
            self._span.end(self._last_end or None)
        self._former, self._span = self._span, None
