"""The machine code of the main CUDA kernels, as nvcc makes it here: no GPU is needed to see what it costs.

Skipped where there is no nvcc, and for the accesses where there is nothing to read machine code with
(cuobjdump of the toolkit, or nvdisasm: pip install nvidia-cuda-nvdisasm).
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

BUILD_TIMEOUT_S = 280.0

FLAGS = ["-std=c++20", "-O3", "--fmad=false", "-gencode", "arch=compute_90,code=sm_90", "-Xptxas", "-v"]
"""The build's own (cmake/cuda.cmake), for one architecture."""

# (file, registers): two blocks of 256 threads fit on a multiprocessor, and most kernels leave room for three.
SOURCES = [("sgd_cuda.cu", 128), ("adam_cuda.cu", 128)]

# What a whole vector takes of a kernel with W float32 gradients: value and states in and out, and the gradients.
STATES = {"SgdStep": 0, "SgdMomentumStep": 1, "AdamStep": 2}

pytestmark = [
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc here"),
    pytest.mark.timeout(BUILD_TIMEOUT_S),
]


@pytest.fixture(scope="module", params=SOURCES, ids=lambda source: source[0].partition("_")[0])
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, int]:
    """The cubin of a file, what ptxas says of it, and the registers that a thread may have."""
    name, most_registers = request.param
    csrc = Path(__file__).parents[1] / "csrc"
    cubin = tmp_path_factory.mktemp("cuda") / name.replace(".cu", ".cubin")
    command = ["nvcc", *FLAGS, "-I", csrc, "-cubin", csrc / "kernels" / "gpu" / name, "-o", cubin]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    return cubin, done.stderr, most_registers


def test_cuda_kernels_spill_nothing_and_leave_registers_for_enough_threads(compiled: tuple[Path, str, int]) -> None:
    _, report, most_registers = compiled
    spilled = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report)
    registers = [int(number) for number in re.findall(r"Used (\d+) registers", report)]
    assert len(spilled) == len(registers) >= 9
    assert set(spilled) == {("0", "0", "0")}
    assert max(registers) <= most_registers


def test_cuda_kernels_take_sixteen_bytes_at_a_time(compiled: tuple[Path, str, int]) -> None:
    seen = 0
    for name, code in functions_of(compiled[0]):
        kernel = re.search(r"(\w+Step)<float>.*AlignedSources<float, (float), (\d)>", name)
        if kernel is None:
            continue
        streams = 1 + STATES[kernel[1]]
        assert code.count("LDG.E.128") == streams + int(kernel[3]), name
        assert code.count("STG.E.128") == streams, name
        seen += 1
    assert seen >= 4


def functions_of(cubin: Path) -> list[tuple[str, str]]:
    """Name as in C++ and machine code of each kernel."""
    listing = disassembled(cubin)
    parts = re.split(r"^(?:\s*Function : |//-+ \.text\.)(\w+).*$", listing, flags=re.MULTILINE)
    names = subprocess.run(["c++filt"], input="\n".join(parts[1::2]), capture_output=True, text=True, check=True)
    readable = names.stdout.replace("psstore::", "").replace("gpu::", "").splitlines()
    return list(zip(readable, parts[2::2], strict=True))


def disassembled(cubin: Path) -> str:
    for command in (["cuobjdump", "-sass"], ["nvdisasm", "-c"]):
        if shutil.which(command[0]):
            return subprocess.run([*command, cubin], capture_output=True, text=True, check=True).stdout
    pytest.skip("neither cuobjdump nor nvdisasm is here")
