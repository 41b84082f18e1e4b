"""What holds of CUDA on any machine: the extension loads without a driver and says what there is."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

import psstore.cuda
from psstore import _core


def test_availability_is_an_answer_and_not_an_error() -> None:
    assert psstore.cuda.is_available() == (psstore.cuda.device_count() > 0)
    assert psstore.cuda.is_built() or not psstore.cuda.is_available()


@pytest.mark.skipif(shutil.which("ldd") is None, reason="needs ldd")
def test_the_extension_needs_no_library_of_cudas() -> None:
    needed = subprocess.run(["ldd", str(_core.__file__)], check=True, capture_output=True, text=True).stdout
    assert "libstdc++" in needed
    assert "cuda" not in needed


@pytest.mark.skipif(not os.environ.get("PSSTORE_CI"), reason="elsewhere a build may do without its nvcc")
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_the_kernels_are_built_where_nvcc_is() -> None:
    assert psstore.cuda.is_built()
