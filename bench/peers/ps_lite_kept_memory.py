"""ps-lite whose malloc keeps what is freed: by default glibc maps each message of more than 128 KiB anew and gives it
back, and the kernel clears its pages every time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from bench.comparison import Role
from bench.peers import ps_lite
from bench.work import Work

NAME = "ps-lite, malloc keeps memory"
ROLE: Role = "peer"
IN_ONE_PROCESS = ps_lite.IN_ONE_PROCESS
SPINS = ps_lite.SPINS

KEEPING = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_TOP_PAD_": str(64 << 20)}
"""mallopt(3): nothing is mapped by itself, the heap does not shrink, and grows by so much. A threshold for mappings
would not do, as glibc takes none above 32 MiB."""

why_not = ps_lite.why_not
join = ps_lite.join


@contextmanager
def serve(work: Work, transport: str) -> Iterator[str]:
    with ps_lite.serve(work, transport, more=KEEPING) as where:
        yield where
