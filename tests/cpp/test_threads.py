"""The C++ tests that have threads, under the thread sanitizer: it has nothing to say of the others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cpp.suite import BUILD_TIMEOUT_S, RUN_TIMEOUT_S, run_suite

WITH_THREADS = "/(buffer|session|heartbeat|poller|stress)_test[.]cc$"


@pytest.mark.timeout(BUILD_TIMEOUT_S + RUN_TIMEOUT_S)
def test_suite_passes_under_the_thread_sanitizer(repository: Path, tmp_path: Path) -> None:
    """Kernels know no threads."""
    options = ("-DPSSTORE_PORTABLE=ON", f"-DPSSTORE_TEST_FILES={WITH_THREADS}")
    run_suite("thread", repository, tmp_path, *options)


def test_every_file_of_tests_that_has_threads_is_among_them(repository: Path) -> None:
    sources = (repository / "csrc" / "tests").glob("*_test.cc")
    threaded = {path.name for path in sources if re.search(r"std::(thread|jthread|async)", path.read_text())}
    assert threaded
    assert all(re.search(WITH_THREADS, f"/{name}") for name in threaded)
