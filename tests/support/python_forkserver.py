"""The process of `multiprocessing` that forks others: it would outlive the tests, and serve under the loop and with the
modules that it began with."""

from __future__ import annotations

from multiprocessing import forkserver


def end_forkserver() -> None:
    """As CPython's own tests do. The next process that is wanted of it starts another one."""
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
