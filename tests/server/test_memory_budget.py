"""How much memory a server takes, as it is told or as it finds on its machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from psstore import _core
from psstore.errors import BadArgument
from psstore.memory import parse_size, usable_bytes
from psstore.server.settings import ServerSettings


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("8GiB", 8 << 30), ("8G", 8 << 30), ("1.5gb", 3 << 29), ("500 M", 500 << 20), ("4k", 4096), ("123", 123)],
)
def test_size_is_read_in_powers_of_two(text: str, num_bytes: int) -> None:
    assert parse_size("max_memory", text) == num_bytes


@pytest.mark.parametrize("text", ["", "8X", "much", "0", "-1G", "inf", "nan", "G", "1GG"])
def test_size_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(BadArgument, match=r"max_memory is .*expected a size as 8GiB"):
        ServerSettings(max_memory=text).check()


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_least_limit_of_the_groups_around_counts(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/outer/inner\n")
    write(tmp_path, "sys/fs/cgroup/outer/inner/memory.max", "max\n")
    write(tmp_path, "sys/fs/cgroup/outer/memory.max", f"{1 << 20}\n")
    assert usable_bytes(tmp_path) == 1 << 20


def test_limit_of_a_container_is_found_at_its_root(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/../../of/the/host\n")
    write(tmp_path, "sys/fs/cgroup/memory.max", f"{1 << 21}\n")
    assert usable_bytes(tmp_path) == 1 << 21


def test_limit_of_the_first_version_is_found(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "5:cpu,cpuacct:/job\n4:memory:/job\n")
    write(tmp_path, "sys/fs/cgroup/memory/job/memory.limit_in_bytes", f"{1 << 22}\n")
    write(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    assert usable_bytes(tmp_path) == 1 << 22


def test_without_groups_it_is_the_machine_s(tmp_path: Path) -> None:
    assert usable_bytes(tmp_path) == _core.machine_memory_bytes()
