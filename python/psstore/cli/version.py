"""Which psstore this is: what --version says."""

from __future__ import annotations


def version_text() -> str:
    """As "0.1.0, CUDA 13.0", or "0.1.0, without CUDA"."""
    import psstore
    from psstore import cuda

    built = cuda.version()
    return f"{psstore.__version__}, {'without CUDA' if built is None else f'CUDA {built}'}"
