"""Times work that is queued on a device, from its first piece's beginning to its last one's end, by the device's own
clock where it has one.

"fake:0", the stand-in for a device, takes part as well: what is measured of it means nothing, but every line runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from bench.gpu_engine import Engine
from bench.harness import Turn

Launch = Callable[[], object]
"""Queues the work, on the bench's queue or on torch's current stream, and may return before it is done."""

AHEAD_CYCLES = 4_000_000
"""For which the device is kept busy first, where the host is to be ahead of it: 2 ms, and no launch takes as long."""

FLUSH_BYTES = 256 << 20
"""More than any GPU's second-level cache: 50 MB on an H100, 60 MB on an H200, 126 MB on a B200."""


@dataclass(frozen=True)
class Bench(Engine):
    """Whose queue contestants take turns on."""

    @cached_property
    def stream(self) -> Any:
        """The queue's, as torch knows streams: torch's contestants run on it, too."""
        return torch.cuda.ExternalStream(self.queue.stream, device=self.torch_device)  # type: ignore[no-untyped-call]

    def empty(self, num_elems: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(num_elems, dtype=dtype, device=self.torch_device)

    def zeros(self, num_elems: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(num_elems, dtype=dtype, device=self.torch_device)

    def random(self, num_elems: int, dtype: torch.dtype = torch.float32, *, seed: int) -> torch.Tensor:
        """Normal: what is zero everywhere draws less power, and hides what was not written."""
        generator = torch.Generator(self.torch_device).manual_seed(seed)
        return torch.randn(num_elems, generator=generator, device=self.torch_device).to(dtype)

    def turn(self, launch: Launch, *, flush: bool = False, host_counts: bool = True) -> Turn:
        """`flush`: something else is written over the cache first, which is not timed. `host_counts`: the device is
        idle when the launch begins, so that what the host does for it is timed too; else the host is ahead."""
        filler = self.zeros(FLUSH_BYTES if self.is_gpu else 1, torch.uint8) if flush else None
        timed = self._timed if self.is_gpu else self._timed_by_the_host
        return lambda: timed(launch, filler, host_counts)

    def _timed(self, launch: Launch, filler: torch.Tensor | None, host_counts: bool) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self.stream):
            if filler is not None:
                filler.fill_(1)
            self.finish()
            if not host_counts:
                torch.cuda._sleep(AHEAD_CYCLES)  # type: ignore[no-untyped-call]
            begin.record()
            launch()
            end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def _timed_by_the_host(self, launch: Launch, filler: torch.Tensor | None, host_counts: bool) -> float:
        begin = time.perf_counter()
        launch()
        self.finish()
        return time.perf_counter() - begin

    def finish(self) -> None:
        """Waits for all that was queued."""
        super().finish()
        self.finish_torch()
