"""torch.distributed.checkpoint's folders: its safetensors files by default; its own files, which need pickle, if asked.

model.NAME                  values
optimizer.state.NAME.STATE  rule state and steps, as torch.distributed.checkpoint.state_dict names them
optimizer.param_groups…     in its own files alone: safetensors hold arrays only

Where a store applies several rules there is 'optimizer-RULE' of each.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from psstore.checkpoint.exchange.table_file import TABLES_FILE
from psstore.checkpoint.exchange.torch_files import model_state_dict, read_torch_file
from psstore.checkpoint.exchange.torch_optimizer import NAMES, RULES, optimizer_state_dicts
from psstore.checkpoint.exchange.whole_model import WholeModel
from psstore.errors import BadArgument

PICKLED = ".metadata"
"""The file that only torch.distributed.checkpoint's own format has. It is a pickle."""

WRITTEN_BY_TORCH = "DCP_VERSION"
"""An entry of the metadata of each file that torch.distributed.checkpoint writes by safetensors."""

MODEL, OPTIMIZER = "model", "optimizer"


def _part_of(rule: str) -> str:
    """Its name where there are several rules."""
    return f"{OPTIMIZER}-{rule}"


_PARTS = {OPTIMIZER: "", **{_part_of(rule): rule for rule in RULES}}
"""Parts that are an optimizer's state -> its rule."""


def write_dcp(folder: Path, model: WholeModel, *, allow_pickle: bool) -> list[Path]:
    """Writes a folder that `torch.distributed.checkpoint.load` reads: with HuggingFaceStorageReader, or, if pickle is
    allowed, without any. Returns its files. Raises BadArgument where torch can't, ModuleNotFoundError, OSError."""
    content: dict[str, Any] = {MODEL: model_state_dict(model)}
    dicts = optimizer_state_dicts(model)
    for rule, state_dict in dicts.items():
        key = OPTIMIZER if len(dicts) == 1 else _part_of(rule)
        content[key] = _by_name(state_dict, with_groups=allow_pickle)
    writer = FileSystemWriter(folder) if allow_pickle else _hugging_face("Writer", folder)
    with _one_process():
        try:
            save(content, storage_writer=writer, no_dist=True)
        except CheckpointException as error:
            raise next(iter(error.failures.values()))[0] from None  # what this one process has met
    return sorted(path for path in folder.iterdir() if path.is_file())


def read_dcp(folder: Path, *, allow_pickle: bool) -> dict[str, Any]:
    """{"model": tensors by name, "optimizer" or "optimizer-RULE": state dicts by name, of those there are}. Raises
    BadArgument for a folder that needs pickle which is not allowed, and for one that is no such folder."""
    if (folder / PICKLED).exists():
        if not allow_pickle:
            raise BadArgument(
                f"{folder / PICKLED} is a pickle, which can run any program as you: if you trust whoever wrote it,"
                " allow it (--allow-pickle)"
            )
        return _checked(folder, _read_own(folder))
    tensors = _read_safetensors(folder)
    return _checked(folder, _nested(tensors, is_by_torch=_is_by_torch(folder)))


def _hugging_face(what: str, folder: Path) -> Any:
    if find_spec("safetensors") is None:  # which torch looks for once it has begun to write
        raise ModuleNotFoundError(
            "torch.distributed.checkpoint writes and reads these with safetensors", name="safetensors"
        )
    try:
        from torch.distributed.checkpoint import hf_storage

        return getattr(hf_storage, f"HuggingFaceStorage{what}")(str(folder))
    except (ImportError, AttributeError) as error:
        raise BadArgument(
            f"torch.distributed.checkpoint's safetensors files need torch 2.9 or later: {error}"
        ) from None


@contextmanager
def _one_process() -> Iterator[None]:
    """torch warns that it has no process group, also where it is told that there is none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def _by_name(state_dict: Mapping[str, Any], *, with_groups: bool) -> dict[str, Any]:
    names = state_dict[NAMES]
    state = {names[number]: held for number, held in state_dict["state"].items()}
    if not with_groups:
        return {"state": state}
    groups = [
        {**group, "params": [names[number] for number in group["params"]]} for group in state_dict["param_groups"]
    ]
    return {"state": state, "param_groups": groups}


def _read_own(folder: Path) -> Any:
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        path = Path(scratch) / "content.pt"
        dcp_to_torch_save(folder, path)
        return read_torch_file(path)


def _read_safetensors(folder: Path) -> dict[str, torch.Tensor]:
    reader = _hugging_face("Reader", folder)
    try:
        metadata = reader.read_metadata()
        of_tables = {
            index.fqn for index, one in metadata.storage_data.items() if Path(one.relative_path).name == TABLES_FILE
        }
        known = {name: one for name, one in metadata.state_dict_metadata.items() if name not in of_tables}
        tensors = {name: torch.empty(one.size, dtype=one.properties.dtype) for name, one in known.items()}
        with _one_process():
            load(tensors, storage_reader=reader, no_dist=True)
    except Exception as error:  # torch has no class of its own for what it can't read
        raise BadArgument(f"{folder} is no folder of torch.distributed.checkpoint's: {error}") from error
    return tensors


def _is_by_torch(folder: Path) -> bool:
    """Whether its files say that torch.distributed.checkpoint has written them."""
    from safetensors import safe_open

    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            if WRITTEN_BY_TORCH in (file.metadata() or {}):
                return True
    return False


def _nested(tensors: Mapping[str, torch.Tensor], *, is_by_torch: bool) -> dict[str, Any]:
    """From names with dots to a model and its optimizers' state; what else a training has saved beside both is left
    out. Where one of them is missing, and a name has another prefix or somebody else has written the folder, all of it
    is a model on its own."""
    model: dict[str, torch.Tensor] = {}
    states: dict[str, dict[str, dict[str, torch.Tensor]]] = {}
    has_others = False
    for name, one in tensors.items():
        part, _, rest = name.partition(".")
        if part == MODEL and rest:
            model[rest] = one
        elif part in _PARTS and rest.startswith("state."):
            parameter, _, buffer = rest.removeprefix("state.").rpartition(".")
            states.setdefault(part, {}).setdefault(parameter, {})[buffer] = one
        else:
            has_others = True
    if (has_others or not is_by_torch) and not (model and states):
        return {MODEL: dict(tensors)}
    optimizers = {part: {"state": state, "param_groups": [{"params": list(state)}]} for part, state in states.items()}
    return {MODEL: model, **optimizers}


def optimizers_in(content: Mapping[str, Any]) -> dict[str, Any]:
    """The optimizers' state dicts of what `read_dcp` has returned, by rule; '' of the one whose rule is not named."""
    return {_PARTS[part]: one for part, one in content.items() if part in _PARTS}


def _checked(folder: Path, content: Any) -> dict[str, Any]:
    if not isinstance(content, dict) or not content:
        raise BadArgument(f"{folder} holds no tensors")
    return content if MODEL in content else {MODEL: content}
