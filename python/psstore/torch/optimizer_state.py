"""Optimizer state in torch's format, read from the store and written to it, so that checkpoints are exchangeable.

A tensor's rule state is what the class of the same name keeps in torch: buffers of the same names, and a step count
where that class has one. The state comes and goes in the store's precision, which for half-precision parameters is
float32. What this worker's codecs kept back of gradients, the residuals, is a part of a state dict of its own.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from types import CodeType
from typing import Any

import numpy as np
import torch

from psstore import _core
from psstore.client.rule_state import Restored, RuleState
from psstore.errors import UsageError
from psstore.hyper import COUNTED
from psstore.torch.param_groups import ParamGroup, rule_of
from psstore.torch.parameters import STORED_AS, Trained
from psstore.torch.part_tensors import with_state
from psstore.torch.parts import like, local_of
from psstore.torch.training import Training

State = Mapping[torch.Tensor, Mapping[str, Any]]
"""Optimizer state by parameter, as `torch.optim.Optimizer.state` has it."""

RESIDUALS_KEY, PROGRESS_KEY = "residuals", "progress"
"""Entries of a state dict beside torch's 'state' and 'param_groups', which torch's optimizers do not look at."""

OPTIONAL = {"momentum_buffer": "momentum", "max_exp_avg_sq": "amsgrad", "grad_avg": "centered"}
"""Buffers that a rule has only with some hyper-parameter."""


def read_state(training: Training, *, whole: bool = False) -> dict[torch.Tensor, dict[str, Any]]:
    """The state that plain torch's optimizer would hold now; what comes from the store is on the CPU. `whole`: with
    zeros for parameters that have not stepped."""
    trained = training.trained
    held = training.store.pull_state(with_state(training, trained))
    groups = training.optimizer.param_groups
    found = {
        one.owner: _as_torch(training, one, groups[one.group], state, whole=whole)
        for one, state in zip(trained, held, strict=True)
    }
    return {**training.optimizer.state, **{parameter: state for parameter, state in found.items() if state}}


def load_state(training: Training, state_dict: Mapping[str, Any]) -> None:
    """Takes over the groups of a state_dict(), here, and its state, which is rank 0's to restore. A parameter that it
    has no state for has none then; a frozen one's stays here until it is trained. Raises ValueError, as torch does, if
    its groups are not the optimizer's; UsageError for what is no state_dict() of an optimizer."""
    _check(state_dict)
    optimizer = training.optimizer
    optimizer.load_state_dict({**state_dict, "state": {}})
    numbers = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    held = state_dict["state"]
    loaded = {parameter: held[number] for number, parameter in zip(numbers, parameters, strict=True) if number in held}
    _write(training, training.trained, loaded)
    optimizer.state.update(loaded)
    drop_local_state(training, training.trained)


def _check(state_dict: Mapping[str, Any]) -> None:
    state, groups = state_dict.get("state"), state_dict.get("param_groups")
    has_state = isinstance(state, Mapping) and all(isinstance(one, Mapping) for one in state.values())
    if not has_state or not isinstance(groups, list) or not all(isinstance(one, Mapping) for one in groups):
        raise UsageError(
            "load_state_dict takes a state_dict() of an optimizer: a dict with 'state', by parameter, and a list of"
            f" 'param_groups'; got one with {', '.join(map(repr, list(state_dict)[:4])) or 'nothing'}"
        )


def adopt_state(training: Training, trained: Sequence[Trained]) -> None:
    """Moves state to the store that the wrapped optimizer holds itself, because a checkpoint was loaded into it."""
    held, groups = training.optimizer.state, training.optimizer.param_groups
    own = {one.owner: held.pop(one.owner) for one in trained if one.owner in held}
    _write(training, [one for one in trained if _has_begun(own.get(one.owner, {}), groups[one.group])], own)


def drop_local_state(training: Training, trained: Sequence[Trained]) -> None:
    """Drops state that the wrapped optimizer holds itself, where the store's counts."""
    for one in trained:
        training.optimizer.state.pop(one.owner, None)


def _write(training: Training, trained: Sequence[Trained], state: State) -> None:
    ours = [one for one in trained if training.counts(one)]
    if ours:
        training.store.restore({one.name: Restored(state=_as_stored(one, state.get(one.owner, {}))) for one in ours})


def _has_begun(state: Mapping[str, Any], group: ParamGroup) -> bool:
    """Whether this state is another than the store would begin with. Adagrad has one before its first step, whose sums
    are what its constructor was given for all groups, whatever one of them says."""
    if not state or float(state.get("step", 1)) > 0:
        return bool(state)
    sums, usual = state.get("sum"), group.get("initial_accumulator_value")
    return sums is not None and usual is not None and bool((local_of(sums) != usual).any())


def _as_torch(training: Training, one: Trained, group: ParamGroup, state: RuleState, *, whole: bool) -> dict[str, Any]:
    rule = rule_of(training.optimizer, group)
    if one.parameter.numel() == 0 and one.dtensor is None:
        state = RuleState()  # no slice, so its steps are not counted; nor does it matter
    elif one.parameter.numel() == 0:  # the state is another part's
        empty = np.empty(tuple(one.parameter.shape), STORED_AS[one.parameter.dtype])
        state = RuleState(state.steps, dict.fromkeys(state.buffers, empty))
    buffers = {name: torch.from_numpy(buffer) for name, buffer in state.buffers.items()}
    if not buffers and (whole or rule == "adagrad"):  # adagrad's torch makes with the optimizer, before the first step
        buffers = _initial(rule, one, group)
    if one.dtensor is not None:
        buffers = {name: like(one.dtensor, buffer) for name, buffer in buffers.items()}
    if rule not in COUNTED or not buffers:
        return buffers
    return {"step": torch.tensor(float(state.steps), device="cpu"), **buffers}


def _initial(rule: str, one: Trained, group: ParamGroup) -> dict[str, torch.Tensor]:
    """Buffers as they are before the first step."""
    dtype = getattr(torch, STORED_AS[one.parameter.dtype])
    begin = group["initial_accumulator_value"] if rule == "adagrad" else 0
    return {
        name: torch.full(one.parameter.shape, begin, dtype=dtype, device="cpu")
        for name in _core.STATES[rule]
        if name is not None and group.get(OPTIONAL.get(name, ""), True)
    }


def _as_stored(one: Trained, state: Mapping[str, Any]) -> RuleState:
    stored = getattr(torch, STORED_AS[one.parameter.dtype])
    buffers = {name: value for name, value in state.items() if name != "step" and value is not None}
    for name, value in buffers.items():
        if not isinstance(value, torch.Tensor):
            kind = type(value).__qualname__
            raise UsageError(f"the state of {one.name!r} has {name!r} of type {kind}; expected a tensor")
        buffers[name] = local_of(value)
    steps = int(state["step"]) if "step" in state else int(bool(buffers))
    return RuleState(steps, {name: value.detach().to("cpu", stored) for name, value in buffers.items()})


# ---- before the first step, for torch's checkpoint tools ----

ASKING_MODULE, ASKING_FUNCTION = "torch.distributed.checkpoint.state_dict", "_init_optim_state"
"""torch's checkpoint tools load into state that is there, and have no call to make it: wherever an optimizer has none,
this function steps it with gradients of zeros and a learning rate of 0. As a round that step would wait for the other
workers, and let momenta decay."""


def is_initial_state_wanted() -> bool:
    """Whether torch's checkpoint tools call, through whatever wraps the optimizer, to have state made."""
    asking: CodeType | None = getattr(getattr(sys.modules.get(ASKING_MODULE), ASKING_FUNCTION, None), "__code__", None)
    if asking is None:
        return False
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code is not asking:
        frame = frame.f_back
    return frame.f_code is asking


def local_initial_state(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, Any]:
    """The state of an optimizer that steps in the worker; if it has none, the state that a trial step makes. The
    optimizer's own state stays empty then, since in most optimizers that step would count."""
    own = optimizer.state
    if own:
        return dict(own)
    optimizer.state = defaultdict(dict)
    try:
        optimizer.step()
        return dict(optimizer.state)
    finally:
        optimizer.state = own
