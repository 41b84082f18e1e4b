"""Rule state as a torch optimizer's state dict, and back: psstore.torch.optimizer_state says the same of a live one.

    {"state": {0: {"step": …, "exp_avg": …}, …}, "param_groups": [{"lr": …, "params": [0, …]}], "names": ["fc.w", …]}

torch numbers parameters group by group; 'names' has theirs in that order, and torch does not look at it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, groupby
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from psstore import _core
from psstore.checkpoint.exchange.whole_model import AnyArray, WholeModel, WholeTensor
from psstore.checkpoint.state import HyperRecord
from psstore.errors import BadArgument
from psstore.hyper import COUNTED, HYPER_DEFAULTS
from psstore.types import TensorSpec, complete_hyper

NAMES = "names"

CLASSES: Mapping[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
}
"""Rule -> the class of torch's that steps alike."""

RULES = (*CLASSES, "delayed_nesterov")
"""The last one's class is psstore.torch.DelayedNesterov, which is above this folder: its groups have hyper-parameters
alone."""

ONLY_OF = {"dampening": "sgd", "lr_decay": "adagrad", "alpha": "rmsprop", "activation": "delayed_nesterov"}
"""Hyper-parameter that one class has -> its rule."""

FLAGS = frozenset({"nesterov", "maximize", "amsgrad", "centered"})
"""Hyper-parameters that are bools to torch."""

MAX_STEPS = 1 << 53
"""Steps of a slot that a store takes: a rule counts them in float64."""

StateDict = dict[str, Any]


def optimizer_state_dicts(model: WholeModel) -> dict[str, StateDict]:
    """A state dict for each rule that the store applies, by its name: an optimizer has one."""
    trained = [tensor for tensor in model.tensors if tensor.spec.rule in RULES]
    trained.sort(key=lambda tensor: (tensor.spec.rule, tensor.spec.group))
    return {
        rule: _state_dict(rule, list(tensors), model.hypers)
        for rule, tensors in groupby(trained, lambda tensor: tensor.spec.rule)
    }


def _state_dict(rule: str, tensors: Sequence[WholeTensor], hypers: Mapping[int, HyperRecord]) -> StateDict:
    groups = []
    number = 0
    for group, members in groupby(tensors, lambda tensor: tensor.spec.group):
        size = len(list(members))
        groups.append(_group(rule, hypers.get(group), range(number, number + size)))
        number += size
    state = {number: held for number, tensor in enumerate(tensors) if (held := _state(rule, tensor))}
    return {"state": state, "param_groups": groups, NAMES: [tensor.spec.name for tensor in tensors]}


def _group(rule: str, hyper: HyperRecord | None, numbers: Iterable[int]) -> dict[str, Any]:
    """All that torch keeps of a group, as the installed version does: what only chooses an implementation included."""
    values = complete_hyper(rule, hyper.values if hyper is not None else {})
    group: dict[str, Any] = {}
    if rule in CLASSES:
        example = CLASSES[rule]([torch.nn.Parameter(torch.zeros(1))])  # type: ignore[call-arg]
        (group,) = example.state_dict()["param_groups"]
    for name, value in values.items():
        if not name.startswith("beta"):
            group[name] = bool(value) if name in FLAGS else value
    if "betas" in group:
        group["betas"] = (values["beta1"], values["beta2"])
    return {**group, "params": list(numbers)}


def _state(rule: str, tensor: WholeTensor) -> dict[str, Any]:
    buffers: dict[str, Any] = {name: torch.from_numpy(array) for name, array in tensor.state.items()}
    if rule not in COUNTED or not buffers:
        return buffers
    return {"step": torch.tensor(float(tensor.steps)), **buffers}


# ---- the other way ----


def take_over_state(
    model: WholeModel, state_dict: Mapping[str, Any], *, names: Sequence[str] | None, rule: str | None
) -> None:
    """Gives the model's tensors the rules, groups, steps and state of a torch optimizer's state dict; its groups are
    numbered behind those that there are. `names`: of its parameters, in its order, if it does not say them; `rule`: if
    it can't be told. Raises BadArgument."""
    try:
        _take_over(model, state_dict, names, rule)
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError, RuntimeError) as error:
        raise BadArgument(
            f"the optimizer's file is no state_dict() of an optimizer that the store has a rule for: {error!r}"
        ) from error


def _take_over(model: WholeModel, state_dict: Mapping[str, Any], names: Sequence[str] | None, rule: str | None) -> None:
    groups = _field(state_dict, "param_groups")
    numbers = list(chain.from_iterable(group["params"] for group in groups))
    named = _names(model, state_dict, numbers, names)
    tensors = {tensor.spec.name: tensor for tensor in model.tensors}
    hypers = dict(model.hypers)
    for index, group in enumerate(groups, len(hypers)):
        chosen = rule or _rule_of(group)
        hypers[index] = HyperRecord(rule=chosen, values=_hyper(chosen, group))
        for number in group["params"]:
            tensor = tensors[named[number]]
            tensor.spec = _trained(tensor, chosen, index)
            _take_state(tensor, state_dict["state"].get(number, {}))
    model.hypers = hypers


def _field(state_dict: Mapping[str, Any], name: str) -> Any:
    if not isinstance(state_dict, Mapping) or "state" not in state_dict or name not in state_dict:
        raise BadArgument("the optimizer's file has no 'state' and 'param_groups': expected what state_dict() returns")
    return state_dict[name]


def _names(
    model: WholeModel, state_dict: Mapping[str, Any], numbers: Sequence[Any], names: Sequence[str] | None
) -> dict[Any, str]:
    if numbers and all(isinstance(number, str) for number in numbers):
        said: Sequence[str] = numbers  # torch.distributed.checkpoint's way
    elif names is not None:
        said = names
    elif NAMES in state_dict:
        said = state_dict[NAMES]
    elif all("param_names" in group for group in state_dict["param_groups"]):
        said = list(chain.from_iterable(group["param_names"] for group in state_dict["param_groups"]))
    else:
        said = [tensor.spec.name for tensor in model.tensors]
    known = {tensor.spec.name for tensor in model.tensors}
    unknown = [name for name in said if name not in known]
    twice = [name for name, count in Counter(said).items() if count > 1]
    if len(said) != len(numbers) or unknown or twice:
        also = f", of which {unknown[0]!r} is not in the model" if unknown else ""
        also += f", of which {twice[0]!r} comes twice" if twice else ""
        raise BadArgument(
            f"the optimizer has {len(numbers)} parameters, and {len(said)} names are known for them{also}: say their"
            " names, one a line, in the order of the optimizer's parameters (--names FILE)"
        )
    return dict(zip(numbers, said, strict=True))


def _rule_of(group: Mapping[str, Any]) -> str:
    """The rule of a group, by the hyper-parameters that only its class has."""
    for name, rule in ONLY_OF.items():
        if name in group:
            return rule
    if "decoupled_weight_decay" in group:
        return "adamw" if group["decoupled_weight_decay"] else "adam"
    raise BadArgument(
        f"the optimizer's class can't be told from its groups, which have {', '.join(sorted(map(str, group)))}: name"
        f" the rule (--rule, one of {', '.join(RULES)})"
    )


def _hyper(rule: str, group: Mapping[str, Any]) -> dict[str, float]:
    if rule not in RULES:
        raise BadArgument(f"rule {rule!r} is not one of {', '.join(RULES)}")
    said = dict(group)
    if "betas" in said:
        said["beta1"], said["beta2"] = said["betas"]
    return complete_hyper(rule, {name: float(said[name]) for name in HYPER_DEFAULTS[rule] if name in said})


def _trained(tensor: WholeTensor, rule: str, group: int) -> TensorSpec:
    return replace(tensor.spec, rule=rule, group=group)


def _take_state(tensor: WholeTensor, state: Mapping[str, Any]) -> None:
    buffers = {name: value for name, value in state.items() if name != "step" and value is not None}
    known = {name for name in _core.STATES[tensor.spec.rule] if name is not None}
    for name, value in buffers.items():
        if name not in known or tuple(value.shape) != tensor.spec.shape:
            raise BadArgument(
                f"the optimizer's state of {tensor.spec.name!r} has {name!r} of shape {tuple(value.shape)}; rule"
                f" {tensor.spec.rule} has {', '.join(sorted(known)) or 'none'}, of shape {tensor.spec.shape}: are the"
                " names of its parameters in its order (--names FILE)?"
            )
        tensor.state[name] = np.ascontiguousarray(to_numpy(value), dtype=tensor.spec.dtype)
    tensor.steps = int(state["step"]) if "step" in state else int(bool(buffers))
    if not 0 <= tensor.steps <= MAX_STEPS:
        raise BadArgument(f"the optimizer's state of {tensor.spec.name!r} is that of {tensor.steps} steps")


def to_numpy(value: torch.Tensor) -> AnyArray:
    """The tensor as numpy has it: bfloat16, and what is shorter, which that lacks, as float32. Copies no more than it
    must. Raises TypeError, RuntimeError for what is none, as quantized and sparse ones are."""
    plain = value.detach().to("cpu")
    is_short = plain.is_floating_point() and plain.dtype not in (torch.float16, torch.float32, torch.float64)
    array: AnyArray = (plain.to(torch.float32) if is_short else plain).contiguous().numpy()
    return array
