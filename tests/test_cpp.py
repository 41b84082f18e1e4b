"""Builds the C++ tests with clang and runs them under each sanitizer.

clang rather than gcc, for -Wthread-safety: the lock annotations are checked by the same build.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

BUILD_TIMEOUT_S = 540.0
RUN_TIMEOUT_S = 300.0

SANITIZERS = {"address-undefined": "address,undefined", "thread": "thread"}

OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=1:strict_string_checks=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "second_deadlock_stack=1",
}
"""What the sanitizers report beyond their defaults; every finding ends the program."""


PROBE = "#include <gtest/gtest.h>\nTEST(Probe, Runs) {}\n"


@pytest.mark.timeout(BUILD_TIMEOUT_S + RUN_TIMEOUT_S)
@pytest.mark.parametrize("sanitizers", SANITIZERS.values(), ids=SANITIZERS.keys())
def test_cpp_suite_passes_under_sanitizers(sanitizers: str, repository: Path, tmp_path: Path) -> None:
    build = build_suite(sanitizers, "psstore_tests", repository, tmp_path)
    run([build / "csrc" / "tests" / "psstore_tests", "--gtest_brief=1"], RUN_TIMEOUT_S)


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


def output_of(command: list[str | Path]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=RUN_TIMEOUT_S).stdout


def build_suite(sanitizers: str, target: str, repository: Path, scratch: Path) -> Path:
    """Returns the folder of the build, in which what is there already is not built again."""
    compiler = need("clang++")
    cmake, ninja = need("cmake"), need("ninja")
    need_sanitized_googletest(compiler, sanitizers, scratch)

    build = repository / "build" / f"cpp-{sanitizers.replace(',', '-')}"
    configure: list[str | Path] = [cmake, "-S", repository, "-B", build, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    configure += [f"-DCMAKE_CXX_COMPILER={compiler}", f"-DPSSTORE_SANITIZE={sanitizers}", "-DPSSTORE_WERROR=ON"]
    configure += ["-DPSSTORE_TESTS=ON", "-DPSSTORE_PYTHON=OFF", "-DPSSTORE_CUDA=off"]
    if sanitizers == "thread":  # kernels know no threads; each file alone, to show that it includes what it needs
        configure += ["-DPSSTORE_PORTABLE=ON", "-DPSSTORE_UNITY=OFF"]
    configure += ["-DCMAKE_CXX_FLAGS_RELEASE=-O1"]  # less than half of -O3's time to compile, and no longer to run
    run(configure, BUILD_TIMEOUT_S)
    run([cmake, "--build", build, "--target", target], BUILD_TIMEOUT_S)
    return build


def run(command: list[str | Path], timeout_s: float) -> None:
    """Fails the test with the command's output."""
    done = subprocess.run(
        command,
        env={**os.environ, **OPTIONS},
        timeout=timeout_s,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout[-20_000:]}"


def need_sanitized_googletest(compiler: str, sanitizers: str, directory: Path) -> None:
    """An empty test must compile, link and run: some kernels map memory where TSan can't have it."""
    source, program = directory / "probe.cc", directory / "probe"
    source.write_text(PROBE)
    build: list[str | Path] = [
        compiler,
        "-std=c++20",
        f"-fsanitize={sanitizers}",
        source,
        "-o",
        program,
        "-lgtest",
        "-lgtest_main",
    ]
    for command in ([*build, "-pthread"], [program]):
        done = subprocess.run(command, timeout=BUILD_TIMEOUT_S, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            skip(f"no GoogleTest with -fsanitize={sanitizers}: {done.stderr.strip().partition(chr(10))[0]}")


def need(program: str) -> str:
    """Path of a build tool; looks beside this Python first, where pip puts cmake and ninja."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    found = shutil.which(program, path=path)
    if found is None:
        skip(f"{program} is not installed")
    return found


def skip(reason: str) -> NoReturn:
    """Skips on a bare machine; fails where PSSTORE_CI says that everything is there."""
    if os.environ.get("PSSTORE_CI"):
        pytest.fail(reason)
    pytest.skip(reason)
