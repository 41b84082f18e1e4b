"""Builds the C++ tests with clang and runs them under a sanitizer.

clang rather than gcc, for -Wthread-safety: the lock annotations are checked by the same build.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

BUILD_TIMEOUT_S = 1800.0
RUN_TIMEOUT_S = 900.0

OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=1:strict_string_checks=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "second_deadlock_stack=1",
}
"""What the sanitizers report beyond their defaults; every finding ends the program."""

UNOPTIMISED = "-DCMAKE_CXX_FLAGS_RELEASE=-O0"
"""But for the kernels, a third of -O1's time to compile under the address sanitizer, and 10 s less under that of
threads: more than it takes longer to run."""


PROBE = "#include <gtest/gtest.h>\nTEST(Probe, Runs) {}\n"


def output_of(command: list[str | Path]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=RUN_TIMEOUT_S).stdout


def run_suite(sanitizers: str, repository: Path, scratch: Path, *options: str) -> None:
    build = build_suite(sanitizers, "psstore_tests", repository, scratch, *options)
    run([build / "csrc" / "tests" / "psstore_tests", "--gtest_brief=1"], RUN_TIMEOUT_S)


def build_suite(sanitizers: str, target: str, repository: Path, scratch: Path, *options: str) -> Path:
    """Returns the folder of the build, in which what is there already is not built again. `options`: of CMake."""
    compiler = need("clang++")
    cmake, ninja = need("cmake"), need("ninja")
    need_sanitized_googletest(compiler, sanitizers, scratch)

    build = repository / "build" / f"cpp-{sanitizers.replace(',', '-')}"
    configure: list[str | Path] = [cmake, "-S", repository, "-B", build, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    configure += [f"-DCMAKE_CXX_COMPILER={compiler}", f"-DPSSTORE_SANITIZE={sanitizers}", "-DPSSTORE_WERROR=ON"]
    configure += [UNOPTIMISED, "-DPSSTORE_TESTS=ON", "-DPSSTORE_PYTHON=OFF", "-DPSSTORE_CUDA=off"]
    configure += options
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
