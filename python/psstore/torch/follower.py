"""A model that follows a store: its parameters become those of the newest version, by what has changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import nn

from psstore.client.changes import Version
from psstore.client.connect import connect
from psstore.client.follow import FollowingReader, await_tensors
from psstore.client.store import Store
from psstore.errors import DeadlineExceeded, ShapeMismatch
from psstore.torch.parameters import STORED_AS, uncompiled
from psstore.torch.warnings import dtype_name


class Follower:
    """A model whose parameters, and those of its buffers that the store has, are always of one version.

    >>> follower = psstore.torch.Follower(model, "ps://127.0.0.1:5700")
    >>> follower.update()  # the newest version, at once; then whenever there is a newer one
    """

    def __init__(self, model: nn.Module, url: str | None = None, *, name: str = "", **options: Any) -> None:
        """Connects, waits until whoever trains has created the parameters, for `wait_s` at most, and compares shapes;
        `update` brings values. Blocks.

        `model`: its parameters have the names that the trainer's have. Those in half precision are brought in that.
        `name`: before each name, as that of the trainer's DistributedOptimizer. `url`, `options`: those of
        `psstore.connect`, without `role`.

        Raises UnknownTensor that names the parameters that the store does not have although its first step was taken,
        DeadlineExceeded; ShapeMismatch that names all tensors of other shapes; what `psstore.connect` raises. The model
        is as it was.
        """
        prefix = f"{name}/" if name else ""
        parameters = {prefix + uncompiled(one): parameter for one, parameter in model.named_parameters()}
        buffers = {prefix + uncompiled(one): buffer for one, buffer in model.named_buffers()}
        store = connect(url, role="client", **options)
        try:
            self._tensors = _of_store(store, parameters, buffers)
        except BaseException:
            store.close()
            raise
        dtypes = {one: dtype_name(t.dtype) for one, t in self._tensors.items() if t.dtype in STORED_AS}
        self._reader = FollowingReader(store, list(self._tensors), dtypes)
        self._is_taken = True
        """False from before the reader goes on until the model has its values: Ctrl-C may come in between."""

    @property
    def version(self) -> int | None:
        """The decision after which the model is; None: it is as it was made."""
        return self._reader.version

    def update(self, *, timeout_s: float | None = None) -> Version:
        """Makes the model what the newest version is: at once the first time, and then as soon as there is one after
        `version`. Tensors that have not changed are not touched; the others are written in place.

        Raises what `FollowingReader.next` raises, and ShapeMismatch that names all tensors that are there anew in other
        shapes; the model is as it was then. After Ctrl-C some of it may be new, and
        the next call first brings the rest.
        """
        return self._take(lambda: self._reader.next(timeout_s=timeout_s))

    def verify(self, *, timeout_s: float | None = None) -> Version:
        """`FollowingReader.verify`; the model is of the version that was looked at."""
        return self._take(lambda: self._reader.verify(timeout_s=timeout_s))

    def close(self) -> None:
        """Disconnects. The model stays what it is."""
        self._reader.close()

    def _take(self, read: Callable[[], Version]) -> Version:
        if not self._is_taken:
            with suppress(ShapeMismatch):  # the next version may fit again
                self._copy(self._reader.values)
                self._is_taken = True
        had_all, self._is_taken = self._is_taken, False
        try:
            version = read()
        except DeadlineExceeded:
            self._is_taken = had_all
            raise
        self._copy({name: version.values[name] for name in (version.changed if had_all else version.values)})
        self._is_taken = True
        return version

    @torch.no_grad()
    def _copy(self, values: Mapping[str, np.ndarray[Any, Any]]) -> None:
        _check_shapes(self._tensors, {name: value.shape for name, value in values.items()})
        for name, value in values.items():
            self._tensors[name].copy_(as_tensor(value))

    def __enter__(self) -> Follower:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def as_tensor(value: np.ndarray[Any, Any]) -> torch.Tensor:
    """A value that a reader has as a tensor of that memory: int16 is how numpy sees bfloat16."""
    tensor = torch.from_numpy(value)
    return tensor.view(torch.bfloat16) if tensor.dtype is torch.int16 else tensor


def _of_store(
    store: Store, parameters: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Returns the model's tensors that the store has. Raises UnknownTensor, DeadlineExceeded, ShapeMismatch."""
    await_tensors(store, list(parameters))
    there = set(store.keys())  # a trainer creates its buffers before its parameters
    found = {**parameters, **{name: buffer for name, buffer in buffers.items() if name in there}}
    _check_shapes(found, {name: store.describe(name).spec.shape for name in found})
    return found


def _check_shapes(tensors: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises ShapeMismatch that names all of the model's that are of another shape in the store."""
    differences = [
        f"{name} is {shape} in the store and {tuple(tensors[name].shape)} in the model"
        for name, shape in shapes.items()
        if shape != tuple(tensors[name].shape)
    ]
    if differences:
        raise ShapeMismatch(f"the store holds another model: {'; '.join(differences)}")
