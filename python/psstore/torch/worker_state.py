"""What a worker hands in for its next life: random states, hyper-parameters, what its codecs kept back of gradients,
named buffers, which the store may have as of a later step, and whatever has a state_dict().

Tensors are marked, so that they come back as tensors; numpy's arrays come back as such.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch

from psstore.checkpoint.nested import Plain, PlainArray, flat_bytes
from psstore.errors import BadArgument
from psstore.torch.optimizer import DistributedOptimizer
from psstore.torch.warnings import dtype_name, warn

TENSOR, COUNTER = "torch.Tensor", "collections.Counter"
"""Keys of dicts of one entry, which stand for what plain data can't say."""


class Stateful(Protocol):
    """Schedulers, samplers, scalers, data loaders."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> object: ...


def checked_parts(parts: Mapping[str, Stateful]) -> dict[str, Stateful]:
    """The parts. Raises BadArgument for what has no state that could be handed in."""
    if not isinstance(parts, Mapping):
        raise BadArgument(
            f"state is a {type(parts).__qualname__}; expected by name what has a state_dict(), as in a dict"
        )
    for name, part in parts.items():
        if not callable(getattr(part, "state_dict", None)) or not callable(getattr(part, "load_state_dict", None)):
            raise BadArgument(
                f"state: {name!r} is a {type(part).__qualname__}, which has no state_dict() and load_state_dict();"
                " plain data goes into optimizer.checkpoint_state"
            )
    return dict(parts)


def collect(
    optimizer: DistributedOptimizer, parts: Mapping[str, Stateful], *, residuals: bool = True
) -> Mapping[str, Plain]:
    """All of it, as it is now."""
    return {
        "random": {
            **_plain(host_random()),
            "cuda": [_plain(one) for one in torch.cuda.get_rng_state_all()] if torch.cuda.is_available() else [],
        },
        "groups": [
            {key: _plain(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
        ],
        "buffers": _plain(dict(optimizer.shared_buffers)),
        "parts": {name: _plain(part.state_dict()) for name, part in parts.items()},
        "own": _plain(optimizer.checkpoint_state),
        "residuals": _plain(optimizer.residuals()) if residuals else {},
    }


def host_random() -> dict[str, Any]:
    """States of what Python, numpy and torch draw on the host: that of devices asks them, and waits."""
    return {"python": random.getstate(), "numpy": np.random.get_state(legacy=True), "torch": torch.get_rng_state()}


def put_back_host_random(states: Mapping[str, Any]) -> None:
    """Makes them what `host_random` found."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])


def part(handed: Plain, name: str) -> Any:
    """What the part of that name had handed in; None: nothing."""
    return _whole(handed["parts"].get(name))


def put_back(handed: Plain, optimizer: DistributedOptimizer, parts: Mapping[str, Stateful]) -> None:
    """Makes it what was collected. Warns of what is there on one side only."""
    found = handed["random"]
    put_back_host_random(_whole(found))
    if torch.cuda.is_available() and len(found["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([_whole(one) for one in found["cuda"]])
    for group, values in zip(optimizer.param_groups, handed["groups"], strict=False):
        group.update(_whole(values))
    buffers = optimizer.shared_buffers
    for name, value in _whole(handed.get("buffers", {})).items():
        if name in buffers:
            buffers[name].copy_(value)
    states = handed["parts"]
    for name in sorted(states.keys() ^ parts.keys()):
        there = "it is not in the checkpoint" if name in parts else "it is in the checkpoint, and state= has it not"
        warn(f"state {name!r} begins anew: {there}")
    for name in states.keys() & parts.keys():
        parts[name].load_state_dict(_whole(states[name]))
    optimizer.checkpoint_state = _whole(handed["own"])
    optimizer.set_residuals(_whole(handed["residuals"]))


def _plain(value: Any) -> Plain:
    """Tensors and counters marked, all else as it is. What can't be held is refused where it is packed."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous()
        data = memoryview(flat.reshape(-1).view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")
        return {TENSOR: PlainArray(dtype_name(flat.dtype), tuple(flat.shape), flat_bytes(data))}
    if isinstance(value, Counter):
        return {COUNTER: dict(value)}
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if type(value) is tuple:
        return tuple(_plain(one) for one in value)
    return value


def _whole(value: Plain) -> Any:
    """What `_plain` was given."""
    if isinstance(value, PlainArray):
        return _array(value)
    if isinstance(value, dict):
        if value.keys() == {TENSOR}:
            return _tensor(value[TENSOR])
        if value.keys() == {COUNTER}:
            return Counter(value[COUNTER])
        return {key: _whole(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_whole(one) for one in value]
    if isinstance(value, tuple):
        return tuple(_whole(one) for one in value)
    return value


def _array(array: PlainArray) -> np.ndarray[Any, Any]:
    return np.frombuffer(bytearray(array.data), dtype=array.dtype).reshape(array.shape)


def _tensor(array: PlainArray) -> torch.Tensor:
    dtype = getattr(torch, array.dtype)
    if not array.data.nbytes:
        return torch.empty(array.shape, dtype=dtype, device="cpu")
    return torch.frombuffer(bytearray(array.data), dtype=torch.uint8).view(dtype).reshape(array.shape)
