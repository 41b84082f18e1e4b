"""This machine's first GPU, as the driver tells: asked without torch, CuPy and psstore, any of which may be missing.

    python bench/gpu_device.py    # name, slug and architecture, or why there is none

bench/on_gpu.sh asks first of all; results are named by the slug.
"""

from __future__ import annotations

import ctypes
import re
import sys
from dataclasses import dataclass

COMPUTE_CAPABILITY = (75, 76)
"""cuda.h: CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR."""


class NoGpu(Exception):
    """There is none that can be used, and why."""


@dataclass(frozen=True)
class Gpu:
    name: str
    """As the driver has it: 'NVIDIA H200'."""
    capability: tuple[int, int]
    memory_bytes: int
    driver: str
    """Newest CUDA version that it can run: '13.0'."""

    @property
    def slug(self) -> str:
        """Of result files: 'nvidia-h200'."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")

    @property
    def architecture(self) -> str:
        """As CMake and nvcc name it: '90'."""
        return "".join(str(part) for part in self.capability)


def first_gpu() -> Gpu:
    """Raises NoGpu."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise NoGpu(f"no NVIDIA driver: {error}") from error
    _checked(driver.cuInit(0), "cuInit")
    device = ctypes.c_int()
    _checked(driver.cuDeviceGet(ctypes.byref(device), 0), "cuDeviceGet")
    name = ctypes.create_string_buffer(256)
    _checked(driver.cuDeviceGetName(name, len(name), device), "cuDeviceGetName")
    memory_bytes = ctypes.c_size_t()
    _checked(driver.cuDeviceTotalMem_v2(ctypes.byref(memory_bytes), device), "cuDeviceTotalMem")
    version = ctypes.c_int()
    _checked(driver.cuDriverGetVersion(ctypes.byref(version)), "cuDriverGetVersion")
    major, minor = (_attribute(driver, device, number) for number in COMPUTE_CAPABILITY)
    return Gpu(
        name=name.value.decode(),
        capability=(major, minor),
        memory_bytes=memory_bytes.value,
        driver=f"{version.value // 1000}.{version.value % 1000 // 10}",
    )


def _attribute(driver: ctypes.CDLL, device: ctypes.c_int, number: int) -> int:
    value = ctypes.c_int()
    _checked(driver.cuDeviceGetAttribute(ctypes.byref(value), number, device), "cuDeviceGetAttribute")
    return value.value


def _checked(status: int, call: str) -> None:
    if status != 0:
        raise NoGpu(f"{call}: CUDA error {status}; does nvidia-smi list a GPU?")


def main() -> None:
    try:
        gpu = first_gpu()
    except NoGpu as error:
        sys.exit(str(error))
    print(f"{gpu.name}\t{gpu.slug}\t{gpu.architecture}")


if __name__ == "__main__":
    main()
