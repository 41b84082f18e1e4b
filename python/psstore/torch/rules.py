"""Which update rule a torch optimizer stands for, and its hyper-parameters as the store wants them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from psstore.errors import UsageError
from psstore.types import HYPER_DEFAULTS

RULES: Mapping[type[torch.optim.Optimizer], str] = {
    torch.optim.SGD: "sgd",
    torch.optim.Adam: "adam",
    torch.optim.AdamW: "adamw",
    torch.optim.Adagrad: "adagrad",
    torch.optim.RMSprop: "rmsprop",
}
"""By exact class: a subclass may step differently, and the store would not know."""

ParamGroup = Mapping[str, Any]


def rule_of(optimizer: torch.optim.Optimizer, group: ParamGroup) -> str:
    """The store's rule for this parameter group. Raises UsageError if it has none."""
    kind = type(optimizer)
    if kind not in RULES:
        names = ", ".join(known.__name__ for known in RULES)
        raise UsageError(
            f"the store has no update rule for {kind.__module__}.{kind.__qualname__}; wrap one of torch.optim's"
            f" {names} (the class itself, not a subclass)"
        )
    if group.get("differentiable"):
        raise UsageError("differentiable=True can't work: the store takes the step, outside autograd; leave it out")
    if kind is torch.optim.Adam and group.get("decoupled_weight_decay"):
        return "adamw"
    return RULES[kind]


def hyper_of(rule: str, group: ParamGroup) -> dict[str, float]:
    """All hyper-parameters of a rule, as they stand in a parameter group now.

    lr and betas may be tensors; flags become 0.0 or 1.0. What else stands there chooses an implementation
    (foreach, fused, capturable), or is somebody's own note (initial_lr), and does not change the result.
    """
    named = dict(group)
    if "betas" in named:
        named["beta1"], named["beta2"] = named["betas"]
    return {name: float(named[name]) for name in HYPER_DEFAULTS[rule]}
