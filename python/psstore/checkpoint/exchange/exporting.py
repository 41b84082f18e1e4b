"""A checkpoint in the formats of others."""

from __future__ import annotations

from pathlib import Path

from psstore.checkpoint.exchange.safetensors_file import write_safetensors
from psstore.checkpoint.exchange.table_file import TABLES_FILE, read_tables
from psstore.checkpoint.exchange.whole_model import WholeModel, read_whole_model
from psstore.checkpoint.reader import Checkpoint


def export_checkpoint(checkpoint: Checkpoint, folder: Path, *, form: str, allow_pickle: bool = False) -> list[Path]:
    """Writes into a folder, which is made, and returns the files. All is in memory meanwhile, rule state too.

    `form`: 'torch' is model.safetensors, model.pt and optimizer.pt; 'safetensors' the first of them, for which neither
    torch nor rule state is needed; 'dcp' a folder of torch.distributed.checkpoint's, by pickle only if that is allowed.
    Beside any of them tables of rows are tables.safetensors, as table_file.py has them.
    Raises BadArgument, OSError, and what reading raises.
    """
    model = read_whole_model(checkpoint, with_state=form != "safetensors")
    folder.mkdir(parents=True, exist_ok=True)
    written = _write_model(folder, model, form=form, allow_pickle=allow_pickle)
    tables = read_tables(checkpoint)
    if tables:
        written.append(folder / TABLES_FILE)
        write_safetensors(written[-1], tables)
    return written


def _write_model(folder: Path, model: WholeModel, *, form: str, allow_pickle: bool) -> list[Path]:
    if form == "dcp":
        from psstore.checkpoint.exchange.dcp import write_dcp

        return write_dcp(folder, model, allow_pickle=allow_pickle)
    path = folder / "model.safetensors"
    write_safetensors(path, {tensor.spec.name: tensor.value for tensor in model.tensors})
    if form == "safetensors":
        return [path]
    from psstore.checkpoint.exchange.torch_files import write_torch_files

    return [path, *write_torch_files(folder, model)]
