"""torch's own files: model.pt and optimizer.pt, written by torch.save and read without arbitrary pickle."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from psstore.checkpoint.exchange.torch_optimizer import optimizer_state_dicts
from psstore.checkpoint.exchange.whole_model import WholeModel
from psstore.errors import BadArgument


def model_state_dict(model: WholeModel) -> dict[str, torch.Tensor]:
    """What `module.load_state_dict` takes. Tensors share the model's memory."""
    return {tensor.spec.name: torch.from_numpy(tensor.value) for tensor in model.tensors}


def write_torch_files(folder: Path, model: WholeModel) -> list[Path]:
    """Writes model.pt, and optimizer.pt for each optimizer that the store applies: optimizer-RULE.pt if they are
    several. Returns what was written. Raises OSError."""
    written = [folder / "model.pt"]
    torch.save(model_state_dict(model), written[0])
    dicts = optimizer_state_dicts(model)
    for rule, state_dict in dicts.items():
        path = folder / ("optimizer.pt" if len(dicts) == 1 else f"optimizer-{rule}.pt")
        torch.save(state_dict, path)
        written.append(path)
    return written


def read_torch_file(path: Path) -> Any:
    """What torch.save wrote, if that is tensors and plain data. Raises BadArgument for anything else, OSError."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError:
        raise
    except Exception as error:  # pickle's class, torch's several, and whatever damaged bytes lead to
        raise BadArgument(f"{path} is no file of tensors and plain data that torch.save wrote: {error}") from None


def tensors_in(path: Path, content: Any) -> Mapping[str, torch.Tensor]:
    """A model's state dict. Raises BadArgument for what is none."""
    if not isinstance(content, Mapping):
        raise BadArgument(f"{path} holds a {type(content).__name__}; expected a model's state_dict()")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            hint = (
                f": if that is the model's state_dict(), give a file of it alone: torch.save(torch.load({str(path)!r})"
                f"[{name!r}], 'model.pt'), and the optimizer's likewise"
            )
            raise BadArgument(
                f"{path} has {name!r} of type {type(value).__name__}; expected tensors by name"
                f"{hint if isinstance(value, Mapping) else ''}"
            )
    return content
