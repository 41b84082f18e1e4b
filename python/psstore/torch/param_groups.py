"""What an optimizer and its parameter groups say to the store: the update rule, its hyper-parameters, how gradients are
reduced over the workers, and the codecs that they and values travel in."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from psstore import _core
from psstore.codec.compression import Compression
from psstore.errors import BadHyper, UsageError
from psstore.hyper import HYPER_DEFAULTS, ROW_HYPER_DEFAULTS
from psstore.torch.delayed_nesterov import DelayedNesterov
from psstore.torch.parameters import Trained
from psstore.torch.warnings import dtype_name
from psstore.types import TensorSpec, complete_hyper

RULES: Mapping[type[torch.optim.Optimizer], str] = {
    torch.optim.SGD: "sgd",
    torch.optim.Adam: "adam",
    torch.optim.AdamW: "adamw",
    torch.optim.Adagrad: "adagrad",
    torch.optim.RMSprop: "rmsprop",
    DelayedNesterov: "delayed_nesterov",
}
"""The store's rule by the optimizer's exact class: a subclass may step differently, and the store would not know."""

REFUSED: Mapping[type[torch.optim.Optimizer], str] = {
    torch.optim.LBFGS: "it evaluates the model several times in a step, and each time would need all workers: train"
    " with another optimizer, or with LBFGS in one process",
    torch.optim.SparseAdam: "the store trains dense gradients of parameters: make the embedding with sparse=False, and"
    " use Adam; or make it a psstore.torch.Embedding with rule='adam'",
}
"""Optimizers that can't be distributed, and why."""

NO_COMPRESSION = Compression()

ParamGroup = Mapping[str, Any]


def has_rule(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the store can take this optimizer's step; the worker takes it otherwise."""
    return type(optimizer) in RULES


def check_distributable(optimizer: torch.optim.Optimizer) -> None:
    """Raises UsageError for an optimizer whose step can be taken neither by the store nor by every worker."""
    kind = type(optimizer)
    for refused, reason in REFUSED.items():
        if isinstance(optimizer, refused):
            raise UsageError(f"{kind.__module__}.{kind.__qualname__} can't be distributed: {reason}")
    several = _needs_more_gradients(kind)
    if several is not None:
        raise UsageError(f"{kind.__module__}.{kind.__qualname__} can't be distributed: {several}")
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise UsageError("differentiable=True can't work: the step is taken outside autograd; leave it out")


def _needs_more_gradients(kind: type[torch.optim.Optimizer]) -> str | None:
    """Why an optimizer of this class needs more than one gradient for a step, where a round brings one; None: it does
    not. SAM is known by the two halves of its step, which its implementations name alike: no class is everybody's."""
    if callable(getattr(kind, "first_step", None)) and callable(getattr(kind, "second_step", None)):
        return (
            "first_step() and second_step() are those of SAM, which takes two gradients for a step: distribute the"
            " optimizer that it wraps, and move the weights yourself between two backward passes, the first of them in"
            " no_sync() (docs/pytorch.md, 'What can't work')"
        )
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        return "its step() can't do without a closure, which it may call several times: train in one process with it"
    return None


def rule_of(optimizer: torch.optim.Optimizer, group: ParamGroup) -> str:
    """The store's rule for this parameter group, of an optimizer that has one. Where Adam and AdamW have a flag for it,
    it is the flag that counts, of AdamW's groups, too."""
    usual = optimizer.defaults.get("decoupled_weight_decay")
    if usual is None:
        return RULES[type(optimizer)]
    return "adamw" if group.get("decoupled_weight_decay", usual) else "adam"


def check_rule_stays(rule: str, optimizer: torch.optim.Optimizer, group: ParamGroup, what: str) -> None:
    """Raises UsageError if the optimizer would take another step by now than by the rule that the store has for good
    of the group's tensors, which `what` names: Adam's and AdamW's are alike as long as nothing decays."""
    now = rule_of(optimizer, group)
    if now != rule and group.get("weight_decay"):
        raise UsageError(
            f"{what} has decoupled_weight_decay={now == 'adamw'}, and had {rule == 'adamw'} when its parameters came to"
            f" be trained, whose rule in the store is {rule!r} for good: set it back, or make the optimizer anew with"
            " exist='overwrite', which begins without the rule's state"
        )


def check_hyper(rule: str, hyper: Mapping[str, float], *, group: int, dtypes: Collection[torch.dtype]) -> None:
    """Raises BadHyper for what the store would refuse of a parameter group, whose parameters have these dtypes."""
    narrowest = "float64" if set(dtypes) == {torch.float64} else "float32"
    try:
        _core.check_hyper(_core.RULES[rule], hyper, _core.DTYPES[narrowest])
    except BadHyper as error:
        raise BadHyper(f"parameter group {group}: {error.message}") from None


def row_group(rule: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The hyper-parameters of a rule of rows as a parameter group has them: all of them, under torch's names. Raises
    BadHyper for one that the rule has not."""
    named = dict(given)
    if "betas" in named and "beta1" in ROW_HYPER_DEFAULTS[rule]:
        try:
            named["beta1"], named["beta2"] = named.pop("betas")
        except (TypeError, ValueError):
            raise BadHyper(f"betas is {given['betas']!r}; expected two numbers, as (0.9, 0.999)") from None
    group: dict[str, Any] = complete_hyper(rule, named)
    if "beta1" in group:
        group["betas"] = (group.pop("beta1"), group.pop("beta2"))
    return group


def hyper_of(rule: str, group: ParamGroup) -> dict[str, float]:
    """All hyper-parameters of a rule, of tensors or of rows, as they stand in a parameter group now.

    lr and betas may be tensors; flags become 0.0 or 1.0. What else stands there chooses an implementation
    (foreach, fused, capturable), or is a note of a scheduler's (initial_lr), and does not change the result.
    Raises UsageError if one is missing.
    """
    named = dict(group)
    if "betas" in named:
        named["beta1"], named["beta2"] = named["betas"]
    known = (HYPER_DEFAULTS if rule in HYPER_DEFAULTS else ROW_HYPER_DEFAULTS)[rule]
    for name, usual in known.items():
        if name not in named:
            key = "betas" if name in ("beta1", "beta2") else name
            raise UsageError(
                f"a parameter group of {len(group['params'])} parameters has no {key!r}, which rule {rule!r} needs: set"
                f" it in optimizer.param_groups (torch's default of {name!r} is {usual:g})"
            )
    return {name: float(named[name]) for name in known}


class GradientOptions(NamedTuple):
    """How a parameter group has its gradients reduced over the workers, and compensated: what the store is told when it
    makes the tensors."""

    reduction: str = "mean"
    trim: int = 0
    compensation: float = 0.0

    @classmethod
    def of(cls, group: ParamGroup) -> GradientOptions:
        """Raises UsageError."""
        reduction, trim = group.get("reduction", "mean"), group.get("trim", 0)
        if not isinstance(reduction, str) or not isinstance(trim, int):
            raise UsageError(
                f"a parameter group has reduction {reduction!r} and trim {trim!r}; expected 'mean', 'median' or"
                " 'trimmed_mean', and of the last how many workers are dropped at either end"
            )
        compensation = group.get("compensation", 0.0)
        if isinstance(compensation, bool) or not isinstance(compensation, (int, float)):
            raise UsageError(
                f"a parameter group has compensation {compensation!r}; expected a number from 0 on, which is none: the"
                " lambda of DC-ASGD"
            )
        return cls(reduction, trim, float(compensation))

    def check_stays(self, group: ParamGroup, what: str) -> None:
        """Raises UsageError if the group, which `what` names, says something else by now. What it does not say, as
        after a state dict of plain torch's was loaded, stays as it was."""
        for name, begun in self._asdict().items():
            if (now := group.get(name, begun)) != begun:
                raise UsageError(
                    f"{what} has {name} {now!r}, and had {begun!r} when its parameters came to be trained, as the store"
                    " has their tensors for good: set it back, or make the optimizer anew with exist='overwrite', which"
                    " begins without the rule's state"
                )


def with_gradient_options(spec: TensorSpec, group: ParamGroup) -> TensorSpec:
    """The tensor as that parameter group has its gradients. Raises UsageError."""
    return msgspec.structs.replace(spec, **GradientOptions.of(group)._asdict())


def may_sort(groups: Sequence[ParamGroup]) -> bool:
    """Whether any parameter is reduced by more than a mean."""
    return any(group.get("reduction", "mean") != "mean" for group in groups)


def may_compensate(groups: Sequence[ParamGroup]) -> bool:
    """Whether any parameter's gradients are made up for the steps of others."""
    return any(group.get("compensation", 0.0) for group in groups)


def compression_for(one: Trained, groups: Sequence[ParamGroup], default: Compression) -> Compression:
    """The compression of one parameter: its group's, or else the optimizer's; none if the parameter is small.

    Raises UsageError for float64, which no codec takes.
    """
    chosen = Compression.of(groups[one.group].get("compression", default))
    if chosen == NO_COMPRESSION or one.parameter.numel() < chosen.min_elems:
        return NO_COMPRESSION
    if one.parameter.dtype is torch.float64:
        raise UsageError(
            f"parameter {one.name!r} is {dtype_name(one.parameter.dtype)}, and compression is for float32 and below:"
            " put it into a parameter group with compression=None"
        )
    return chosen


def may_compress(groups: Sequence[ParamGroup], default: Compression) -> bool:
    """Whether any parameter may be compressed."""
    return any(Compression.of(group.get("compression", default)) != NO_COMPRESSION for group in groups)
