"""What a training of the demo ends with: a file that rank 0 writes, and the hash by which two of them are compared."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


def save(model: nn.Module, optimizer: Optimizer, path: str) -> None:
    """Weights by their names, and the momentum of each."""
    arrays: dict[str, Any] = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    states = optimizer.state_dict()["state"]
    momentum = {f"momentum/{name}": states[place]["momentum_buffer"].numpy() for place, name in enumerate(arrays)}
    np.savez(path, **arrays, **momentum)


def sha256_of(path: Path) -> str:
    """Everything that was saved: bytes, shapes and names, in the order of names."""
    digest = hashlib.sha256()
    with np.load(path) as arrays:
        for name in sorted(arrays):
            digest.update(f"{name} {arrays[name].dtype} {arrays[name].shape}".encode())
            digest.update(arrays[name].tobytes())
    return digest.hexdigest()
