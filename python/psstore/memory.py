"""How much main memory shards may take: what was asked for, else most of what this machine or its control group has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from psstore import _core
from psstore.errors import BadArgument

MOST = 0.8
"""What shards take by default. The rest is for Python, for tables of slices, for connections, and for the page cache of
whoever else works here."""

DEFAULT_SNAPSHOT_PART = 4
"""Snapshots may keep a quarter of the memory: all of a model and its rule state that fill a quarter of it, once, were
every byte of them to change."""

HANDED_PART = 4
"""What workers hand in may take a quarter of the coordinator's memory: what codecs keep back is as large as a model,
for each worker."""

UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_size(what: str, text: str) -> int:
    """Bytes: '8GiB', '8G', '500M' or a number, in powers of two. Raises BadArgument."""
    number = text.strip().lower().removesuffix("b").removesuffix("i")
    unit = number[-1:] if number[-1:].isalpha() else ""
    try:
        num_bytes = int(float(number.removesuffix(unit)) * UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        num_bytes = 0
    if num_bytes < 1:
        raise BadArgument(f"{what} is {text!r}; expected a size as 8GiB, 500M or a number of bytes")
    return num_bytes


def limit_bytes(max_memory: str | None) -> int:
    """What all shards of this host, or of this process, may take together: `max_memory`, a size as `parse_size` reads
    it, else the default. Raises BadArgument."""
    return int(usable_bytes() * MOST) if max_memory is None else parse_size("max_memory", max_memory)


def usable_bytes(root: Path = Path("/")) -> int:
    """Main memory that this process can have: the machine's, or less where a control group allows less. `root`: of the
    file systems in which Linux tells."""
    return min([_core.machine_memory_bytes(), *_group_limits(root)])


def _group_limits(root: Path) -> Iterator[int]:
    """Limits of the process's control group and of the groups around it, in versions 2 and 1 of control groups."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, file = "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            mount, file = "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        own = PurePosixPath(path.lstrip("/"))
        for group in (own, *own.parents):  # in a container its own group may be the root of what it sees
            limit = _text(root / mount / group / file).strip()
            if limit.isdecimal():  # else "max": there is none
                yield int(limit)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
