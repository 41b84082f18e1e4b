"""All C++ tests under the address and undefined-behaviour sanitizers, and what their objects may contain."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import pytest

from tests.cpp.suite import BUILD_TIMEOUT_S, RUN_TIMEOUT_S, build_suite, need, output_of, run_suite


@pytest.mark.timeout(BUILD_TIMEOUT_S + RUN_TIMEOUT_S)
def test_suite_passes_under_the_address_and_undefined_behaviour_sanitizers(repository: Path, tmp_path: Path) -> None:
    run_suite("address,undefined", repository, tmp_path)


@pytest.mark.timeout(BUILD_TIMEOUT_S)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="elsewhere there is one instruction set")
def test_no_code_of_an_instruction_set_can_stand_in_for_anothers(repository: Path, tmp_path: Path) -> None:
    """Of functions with one name the linker keeps one: those with vector instructions must not have their name from
    a header that files with other flags include as well. Sanitized code shows it best, where little is inlined."""
    build = build_suite("address,undefined", "psstore_core", repository, tmp_path)
    objects = list((build / "CMakeFiles" / "psstore_core.dir").rglob("*.o"))
    sets = [path for path in objects if path.name.startswith("avx")]
    assert sets
    for path in sets:
        elsewhere = set().union(*(weak_symbols(other) for other in objects if other != path))
        assert not weak_symbols(path) & functions_with_vectors(path) & elsewhere


def weak_symbols(path: Path) -> set[str]:
    """Names of which the linker keeps one."""
    lines = output_of([need("nm"), "--defined-only", path]).splitlines()
    return {fields[2] for fields in map(str.split, lines) if fields[1] in "WVu"}


def functions_with_vectors(path: Path) -> set[str]:
    """Names of the functions that have an instruction of AVX or later: all of these begin with a v."""
    found: set[str] = set()
    function = ""
    for line in output_of([need("objdump"), "-d", "--no-show-raw-insn", path]).splitlines():
        if named := re.match(r"[0-9a-f]+ <(\S+)>:", line):
            function = named[1]
        elif re.match(r"\s+[0-9a-f]+:\s+v", line):
            found.add(function)
    return found
