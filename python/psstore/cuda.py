"""Whether this build and this machine can compute on a GPU."""

from __future__ import annotations

from psstore import _core


def is_available() -> bool:
    """True if the core was built with CUDA and a device can be used now. Never raises; loads the driver."""
    return device_count() > 0


def device_count() -> int:
    """How many devices the core can use: 0 without a device, without a driver or without CUDA in the build."""
    return _core.cuda_device_count()


def is_built() -> bool:
    """True if the core was built with CUDA, whether or not there is a device."""
    return version() is not None


def version() -> str | None:
    """The version of CUDA that the core was built with, as "13.0"; None without."""
    return _core.CUDA_VERSION
