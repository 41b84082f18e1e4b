"""The parameters that a store trains: their names, their groups, and what can't be trained."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch.autograd.graph import increment_version

from psstore.client.arrays import has_overlaps
from psstore.errors import UsageError
from psstore.torch.parts import TensorPart, box_of, is_dtensor, local_of
from psstore.torch.warnings import dtype_name
from psstore.types import REDUCED_GROUP, TensorSpec

STORED_AS: Mapping[torch.dtype, str] = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.bfloat16: "float32",
    torch.float16: "float32",
}
"""The store keeps fp32 masters of half-precision parameters, which travel in their own precision."""

T = TypeVar("T")

COMPILED = "_orig_mod"
"""What torch.compile puts before the names of the module that it wraps."""


class Trained(NamedTuple):
    """One parameter that the store trains."""

    name: str
    """The tensor's name in the store."""
    parameter: torch.Tensor
    """What the store's values are pulled into, and whose `grad` is pushed: of a DTensor, the part that is here."""
    group: int
    """Index of its parameter group."""
    dtensor: torch.Tensor | None = None
    """What `parameter` is a part of."""

    @property
    def owner(self) -> torch.Tensor:
        """The parameter as the model and the wrapped optimizer have it."""
        return self.parameter if self.dtensor is None else self.dtensor

    def spec(self, rule: str, *, group: int = 0) -> TensorSpec:
        """Spec of the tensor that keeps the parameter's values in the store."""
        return TensorSpec(
            name=self.name,
            shape=tuple(self.parameter.shape),
            dtype=STORED_AS[self.parameter.dtype],
            rule=rule,
            group=group,
            zeros=False,
        )

    def gradient_spec(self) -> TensorSpec:
        """Spec of the tensor that reduces the parameter's gradients, where the workers take the step."""
        return TensorSpec(
            name=gradient_name(self.name),
            shape=tuple(self.parameter.shape),
            dtype=STORED_AS[self.parameter.dtype],
            rule="reduce",
            group=REDUCED_GROUP,
        )


FSDP_WRAPPER, DDP_WRAPPER = "_fsdp_wrapped_module", "module"
"""What FullyShardedDataParallel and DistributedDataParallel put before the names of the module that they wrap."""


def named_tensors(what: str, named: Iterable[tuple[str, T]]) -> list[tuple[str, T]]:
    """What a model names: its parameters or buffers. Raises UsageError for what is not that."""
    pairs: list[Any] = list(named) if isinstance(named, Iterable) else [named]
    for one in pairs:
        is_pair = isinstance(one, tuple) and len(one) == 2 and isinstance(one[0], str)
        if not is_pair or not isinstance(one[1], torch.Tensor | TensorPart):
            raise UsageError(
                f"named_{what} must yield pairs of a name and a tensor: pass model.named_{what}(), not model.{what}()"
            )
    return pairs


class Names:
    """What parameters are called in the store. One with several names (tied weights) goes by the first."""

    def __init__(self, named: Iterable[tuple[str, torch.Tensor]], *, prefix: str = "") -> None:
        self._prefix = prefix
        self._names: dict[torch.Tensor, str] = {}  # tensors hash by identity
        self._owners: dict[str, torch.Tensor] = {}
        self.learn(named)
        if not self._names:
            raise UsageError(
                "named_parameters yields nothing: it is empty, or an iterator that was used up before; pass"
                " model.named_parameters() anew"
            )

    def learn(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Raises UsageError for what are no (name, parameter) pairs, or two parameters of one name."""
        for given, parameter in named_tensors("parameters", named):
            name = uncompiled(given)
            check_tells_pieces(name)
            if self._owners.setdefault(name, parameter) is not parameter:
                raise UsageError(
                    f"two parameters are named {name!r}; names must be unique: to train several models together,"
                    " prefix their names, as model.named_parameters(prefix='generator') does"
                )
            self._names.setdefault(parameter, name)

    def all(self) -> set[str]:
        """Every name as the store would have it, whether or not the store has such a tensor."""
        return {self._prefix + name for name in self._names.values()}

    def stored(self, name: str) -> str:
        """What a tensor that goes with these parameters is called in the store."""
        return self._prefix + name

    def without(self, param_group: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The group for torch, which takes (name, parameter) pairs only if the other groups have names too."""
        params = param_group["params"]
        given = [params] if isinstance(params, torch.Tensor) else list(params)
        pairs = [one for one in given if isinstance(one, tuple)]
        self.learn(pairs)
        named = all("param_names" in group for group in others)
        if not named:
            given = [one[1] if isinstance(one, tuple) else one for one in given]
        return {**param_group, "params": given}

    def of(self, parameter: torch.Tensor, place: str) -> str:
        """The parameter's name in the store. Raises UsageError for one without a name, where `place` says which it is,
        and for one that the store can't train."""
        if parameter not in self._names:
            raise UsageError(
                f"{place}, of shape {tuple(parameter.shape)}, has no name, and the store knows parameters by name:"
                " pass named_parameters=model.named_parameters() of the model, or of all models, that the optimizer"
                " was given"
            )
        name = self._names[parameter]
        if parameter.layout is not torch.strided:
            raise UsageError(f"parameter {name!r} has layout {parameter.layout}; the store trains dense parameters")
        if parameter.dtype not in STORED_AS:
            known = ", ".join(dtype_name(dtype) for dtype in STORED_AS)
            raise UsageError(f"parameter {name!r} has dtype {dtype_name(parameter.dtype)}; the store trains {known}")
        if has_overlaps(parameter.shape, parameter.stride()):
            raise UsageError(
                f"parameter {name!r} has elements that share memory, as those of an expanded tensor, so that a step"
                " can't write them: make it a parameter of its clone()"
            )
        if parameter.is_inference():
            raise UsageError(
                f"parameter {name!r} was made under torch.inference_mode(), and autograd can't train it: make the model"
                " outside"
            )
        return self._prefix + name


def trainable(param_groups: Sequence[Mapping[str, Any]], names: Names, *, known: Collection[int] = ()) -> list[Trained]:
    """Every parameter of the groups that requires a gradient, but for those whose id() is known.

    Raises UsageError for what can't be trained.
    """
    return [
        _trained(names.of(parameter, f"parameter {position} of group {index}"), parameter, index)
        for index, group in enumerate(param_groups)
        for position, parameter in enumerate(group["params"])
        if id(parameter) not in known and parameter.requires_grad
    ]


def _trained(name: str, parameter: torch.Tensor, group: int) -> Trained:
    if not is_dtensor(type(parameter)):
        return Trained(name, parameter, group)
    return Trained(box_of(parameter).name(name), local_of(parameter), group, parameter)


def check_tells_pieces(name: str) -> None:
    """Raises UsageError for a name that each process has another piece of the model by."""
    if FSDP_WRAPPER in name:
        raise UsageError(
            f"{name!r} is of a FullyShardedDataParallel: each process has another piece of the model by that name, and"
            " workers would take each other's. Use torch.distributed.fsdp.fully_shard, whose pieces say what they are,"
            " or the model without it (docs/pytorch.md, 'Models of which each worker has a part')"
        )


def by_ddp(names: Iterable[str]) -> str:
    """For messages: who may have changed the gradients of these parameters; '': nobody that is known."""
    if not all(name.rpartition("/")[2].startswith(f"{DDP_WRAPPER}.") for name in names):
        return ""
    return (
        " The names begin with 'module.', as DistributedDataParallel has them, which averages gradients as the store"
        " does, after they were sent: make model and optimizer without it (docs/coming_from_ddp.md)."
    )


def check_storable(tensor: torch.Tensor, what: str) -> None:
    """Raises UsageError, which begins with `what` it is, for what the store can't keep."""
    if tensor.is_complex() or tensor.layout is not torch.strided:
        kind = f"{dtype_name(tensor.dtype)}, {tensor.layout}"
        raise UsageError(f"{what} is {kind}; the store keeps dense real numbers: leave it out")


def as_stored(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in a dtype that `STORED_AS` has: integers and bools in float64, which holds them exactly up to 2**53.
    No copy if its own will do."""
    return tensor.detach() if tensor.dtype in STORED_AS else tensor.detach().to(torch.float64)


def uncompiled(name: str) -> str:
    """The parameter's name in the model before torch.compile, so that compiled and plain workers share a store."""
    return ".".join(part for part in name.split(".") if part != COMPILED)


def mark_written(parameters: Iterable[torch.Tensor]) -> None:
    """Tells autograd that the parameters' memory was written to, as its own operations do."""
    if _marks_many():
        increment_version(parameters if isinstance(parameters, list) else list(parameters))
    else:
        for parameter in parameters:
            increment_version(parameter)


def gradient_name(parameter: str) -> str:
    """Name in the store of the tensor that reduces this parameter's gradients, where the workers take the step."""
    return f"{parameter}.grad"


@cache
def _marks_many() -> bool:
    """Whether torch's increment_version takes a list: that of torch 2.4 does not."""
    try:
        increment_version([])
    except RuntimeError:
        return False
    return True
