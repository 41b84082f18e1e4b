"""A checkpoint out of the formats of others."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from psstore.checkpoint.exchange.safetensors_file import read_safetensors
from psstore.checkpoint.exchange.whole_model import AnyArray, WholeModel, WholeTensor, as_stored
from psstore.checkpoint.state import HyperRecord
from psstore.errors import BadArgument
from psstore.hyper import HYPER_DEFAULTS
from psstore.types import TensorSpec, applies_by_decision, complete_hyper


def import_model(
    source: Path,
    *,
    optimizer: Path | None = None,
    rule: str | None = None,
    names: Sequence[str] | None = None,
    version: int = 0,
    allow_pickle: bool = False,
) -> WholeModel:
    """The model in a .safetensors file, a file of torch.save's, or a folder of torch.distributed.checkpoint's; with an
    optimizer's state, where there is one.

    `rule`: of what is trained, if no optimizer says it; without either, nothing is: all are tensors that are assigned.
    `names`: the trained parameters, in the optimizer's order; None: as the files say, or all that have fractions.
    Raises BadArgument, OSError.
    """
    if rule is not None and (rule not in HYPER_DEFAULTS or not applies_by_decision(rule) or rule == "reduce"):
        raise BadArgument(
            f"rule {rule!r} is none that trains: expected sgd, adam, adamw, adagrad, rmsprop or delayed_nesterov"
        )
    arrays, optimizers = _read(source, allow_pickle=allow_pickle)
    if not arrays:
        raise BadArgument(
            f"{source} holds no tensors: expected a .safetensors file, a file of torch.save's, or a folder of"
            " torch.distributed.checkpoint's"
        )
    if optimizer is not None:
        from psstore.checkpoint.exchange.torch_files import read_torch_file

        optimizers = {"": read_torch_file(optimizer)}
    model = _model(arrays, version)
    for its_rule, state_dict in optimizers.items():
        from psstore.checkpoint.exchange.torch_optimizer import take_over_state

        take_over_state(model, state_dict, names=names, rule=its_rule or rule)
    if not optimizers and rule is not None:
        _train(model, rule, _trained(arrays, names))
    return model


def _read(source: Path, *, allow_pickle: bool) -> tuple[dict[str, AnyArray], dict[str, Any]]:
    """The model, and the optimizers' state dicts by rule, of those there are; '' of one that names none."""
    if source.suffix == ".safetensors" and not source.is_dir():
        return read_safetensors(source), {}
    from psstore.checkpoint.exchange.torch_files import read_torch_file, tensors_in
    from psstore.checkpoint.exchange.torch_optimizer import to_numpy

    if source.is_dir():
        from psstore.checkpoint.exchange.dcp import optimizers_in, read_dcp

        content = read_dcp(source, allow_pickle=allow_pickle)
        found, optimizers = content["model"], optimizers_in(content)
    else:
        found, optimizers = read_torch_file(source), {}
    arrays = {}
    for name, one in tensors_in(source, found).items():
        try:
            arrays[name] = to_numpy(one)
        except (TypeError, RuntimeError) as error:  # NotImplementedError, too
            raise BadArgument(f"{source} has {name!r}, which is no array: {error}") from None
    return arrays, optimizers


def _model(arrays: Mapping[str, AnyArray], version: int) -> WholeModel:
    tensors = [
        WholeTensor(TensorSpec(name=name, shape=one.shape, dtype=str(one.dtype), rule="assign", zeros=False), one)
        for name, one in ((name, as_stored(array)) for name, array in arrays.items())
    ]
    return WholeModel(tensors, {}, version)


def _trained(arrays: Mapping[str, AnyArray], names: Sequence[str] | None) -> Collection[str]:
    if names is None:
        return [name for name, array in arrays.items() if array.dtype.kind == "f"]
    unknown = [name for name in names if name not in arrays]
    if unknown:
        raise BadArgument(f"{unknown[0]!r} is named as trained, and is not in the model")
    return names


def _train(model: WholeModel, rule: str, names: Collection[str]) -> None:
    chosen = frozenset(names)
    for tensor in model.tensors:
        if tensor.spec.name in chosen:
            tensor.spec = replace(tensor.spec, rule=rule)
    model.hypers = {0: HyperRecord(rule=rule, values=complete_hyper(rule, {}))}
