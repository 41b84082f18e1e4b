"""The machine code of the main CUDA kernels, as nvcc makes it here: no GPU is needed to see what it costs.

Skipped where there is no nvcc, and for the accesses where there is nothing to read machine code with
(cuobjdump of the toolkit, or nvdisasm: pip install nvidia-cuda-nvdisasm).
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

BUILD_TIMEOUT_S = 280.0

FLAGS = ["-std=c++20", "-O3", "--fmad=false", "-gencode", "arch=compute_90,code=sm_90", "-Xptxas", "-v"]
"""The build's own (cmake/cuda.cmake), for one architecture."""

# (file, kernels, registers): two blocks of 256 threads fit on a multiprocessor, and most kernels leave room for three.
SOURCES = [("sgd_cuda.cu", 18, 128), ("adam_cuda.cu", 10, 128), ("rules_cuda.cu", 10, 80), ("codec_cuda.cu", 26, 64)]

# What a whole vector takes of a kernel with W float32 gradients: value and states in and out, and the gradients.
STATES = {"SgdStep": 0, "SgdMomentumStep": 1, "AdamStep": 2}

VECTORS = (1, 1 + 2)
"""One by itself, and those that a thread takes at once."""

SPILLED_BYTES = 16
"""Four registers of a thread's, which are stored for a slice, and loaded for two vectors of it at most."""

pytestmark = [
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc here"),
    pytest.mark.timeout(BUILD_TIMEOUT_S),
]


class Compiled(NamedTuple):
    cubin: Path
    report: str
    """ptxas's."""
    num_kernels: int
    most_registers: int
    """That a thread may have."""


@pytest.fixture(scope="module", params=SOURCES, ids=lambda source: source[0].partition("_")[0])
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    name, num_kernels, most_registers = request.param
    csrc = Path(__file__).parents[2] / "csrc"
    cubin = tmp_path_factory.mktemp("cuda") / name.replace(".cu", ".cubin")
    command = ["nvcc", *FLAGS, "-I", csrc, "-cubin", csrc / "kernels" / "gpu" / name, "-o", cubin]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    return Compiled(cubin, done.stderr, num_kernels, most_registers)


def test_cuda_kernels_spill_next_to_nothing_and_leave_registers_for_enough_threads(compiled: Compiled) -> None:
    report = compiled.report
    spilled = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report)
    registers = [int(number) for number in re.findall(r"Used (\d+) registers", report)]
    assert len(spilled) == len(registers) == compiled.num_kernels
    assert all(int(stores) <= SPILLED_BYTES for _, stores, _ in spilled)
    assert max(registers) <= compiled.most_registers


def test_cuda_kernels_take_sixteen_bytes_at_a_time(compiled: Compiled) -> None:
    seen = 0
    for name, code in functions_of(compiled.cubin):
        if "AnySources<float>" in name:  # four contributions' loads are under way at once
            assert code.count("LDG.E.128") >= 4, name
            seen += 1
        if "EncodeBody" in name:  # half precision: eight elements of each thread, and what they lacked
            assert code.count("LDG.E.128") >= 6, name
            seen += 4
        kernel = re.search(r"(\w+Step)<float>.*AlignedSources<float, (float), (\d)>", name)
        if kernel is None:
            continue
        streams = 1 + STATES[kernel[1]]
        vectors, rest = divmod(code.count("STG.E.128"), streams)
        assert (vectors in VECTORS, rest) == (True, 0), name
        assert code.count("LDG.E.128") >= vectors * (streams + int(kernel[3])), name
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
