"""What calls a store, and so is no part of the graphs that torch.compile makes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def outside_of_graphs(function: Callable[P, T]) -> Callable[P, T]:
    """The function, which runs as it is wherever it is called from: a graph ends before it, and another begins."""
    outside: Callable[..., T] | None = None
    """Made when it is wanted, since that imports the compiler; once, since what calls another one is compiled anew."""

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        nonlocal outside
        if torch.compiler.is_compiling():
            outside = outside or torch.compiler.disable(function)  # type: ignore[no-untyped-call]
            return outside(*args, **kwargs)
        return function(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_name=function.__name__)  # its own: what is compiled is kept by it
    return functools.wraps(function)(call)
