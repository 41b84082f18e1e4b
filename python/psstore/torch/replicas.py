"""In-graph replication: one process trains one model on several devices.

Each forward gives every device its part of the batch and a replica of the model whose parameters are functions of
the one leaf parameter; backward therefore ends at the leaf, once, with the sum over the replicas. A replica is a
shallow copy of the modules and lives for one forward, as in torch.nn.DataParallel; unlike there, any device will do,
the parameters are where `self.parameters()` finds them in a replica, too, and the names are the model's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from functools import partial, reduce
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from psstore.errors import UsageError


class Replicas(nn.Module):
    """Stands in for a model, and runs each batch on several devices at once.

    >>> model = psstore.torch.Replicas(model.to("cuda:0"), devices=["cuda:0", "cuda:1"])

    A call splits every tensor in its arguments (tuples, lists and dicts are searched) along dim 0 into one part per
    device, as even as can be; what is no tensor goes to each. A batch smaller than the number of devices uses fewer.
    Outputs are joined along dim 0 on the first device, 0-d tensors into a vector with one element per replica, so
    that a mean over it weights replicas and not samples. With a single device the call is the model's own.

    Parameters, buffers and `state_dict` are the model's, under the model's names: a checkpoint and a store do not
    know how many replicas there were. The replicas' gradients are summed in the order of the devices, whichever is
    first, so that the same run gives the same bits; a parameter's hooks run once. To one device alone the sums are
    equal up to rounding: a sum over the batch becomes one per part.

    As in DataParallel, replica 0 updates the model's own buffers (batch-norm statistics are of its part of the
    batch), other attributes set in `forward` are lost, module hooks run in every replica, and parameters are copied
    to the other devices in every call. Replicas on one device share its random numbers in the order of their threads;
    and on CPUs backward is one thread's work, so replicas there are for tests.

    Args:
        model: has all parameters and buffers on `devices[0]`, and stays there.
        devices: one per replica; the same may stand there several times.

    Raises UsageError for devices that can't be used, a model that is elsewhere, and, when called, for a batch that
    can't be split; what a replica raises is raised again, with the replica named in its message.
    """

    def __init__(self, model: nn.Module, devices: Sequence[torch.device | str | int]) -> None:
        super().__init__()
        if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
            raise UsageError("a scripted module can't be replicated; give Replicas the module that it was made from")
        self.devices = [_usable(device) for device in devices]
        if not self.devices:
            raise UsageError("Replicas needs a device per replica, and was given none: devices=['cuda:0', 'cuda:1']")
        self.module = model
        self._check_place()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._check_place()
        parts = split((args, kwargs), self.devices)
        if len(self.devices) == 1:
            ((args, kwargs),) = parts
            return self.module(*args, **kwargs)
        devices = self.devices[: len(parts)]
        replicas = replicate(self.module, devices)
        calls = [partial(replica, *args, **kwargs) for replica, (args, kwargs) in zip(replicas, parts, strict=True)]
        return join(run_on(devices, calls), self.devices[0])

    def _check_place(self) -> None:
        home = self.devices[0]
        for kind, named in (("parameter", self.module.named_parameters()), ("buffer", self.module.named_buffers())):
            for name, tensor in named:
                if tensor.device != home:
                    raise UsageError(
                        f"{kind} {name!r} is on {tensor.device}, and the first of devices is {home}: move the model"
                        f" there, with model.to({str(home)!r})"
                    )

    # ---- the model's names ----

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yields this module and the model under one name, of which named_parameters and named_buffers make theirs."""
        memo = set() if memo is None else memo
        if self not in memo:
            if remove_duplicate:
                memo.add(self)
            yield prefix, self
            yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        return self.module.load_state_dict(state_dict, strict, assign)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Renames entries where this module is a part of a larger model: torch descends into `module` by that name."""
        for key in [key for key in state_dict if key.startswith(prefix)]:
            state_dict[f"{prefix}module.{key.removeprefix(prefix)}"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _usable(device: torch.device | str | int) -> torch.device:
    """The device with its index, as tensors name it."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:  # the latter from a torch without CUDA
        reason = str(error).partition("\n")[0]
        raise UsageError(f"can't use device {str(device)!r} for a replica: {reason}") from error


# ---- arguments and outputs ----


def split(arguments: Any, devices: Sequence[torch.device]) -> list[Any]:
    """The arguments of each replica that gets any, on its device."""
    leaves, structure = pytree.tree_flatten(arguments)
    num_parts = max(1, min(len(devices), _batch_size(leaves)))
    parts = [
        [_moved(part, device) for part, device in zip(leaf.tensor_split(num_parts), devices[:num_parts], strict=True)]
        if isinstance(leaf, torch.Tensor)
        else [leaf] * num_parts
        for leaf in leaves
    ]
    return [pytree.tree_unflatten([part[index] for part in parts], structure) for index in range(num_parts)]


def _batch_size(leaves: Sequence[Any]) -> int:
    """That all tensors have in common; 1 if there is none."""
    shapes = [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if () in shapes:
        raise UsageError("a 0-d tensor can't be split over the replicas: pass its value, as a number")
    sizes = sorted({shape[0] for shape in shapes})
    if len(sizes) > 1:
        raise UsageError(
            f"tensors of {' and '.join(map(str, sizes))} samples (dim 0) can't be split alike over the replicas: all"
            " tensors that the model is called with need one batch size; keep others in buffers"
        )
    return sizes[0] if sizes else 1


def join(outputs: Sequence[Any], device: torch.device) -> Any:
    """The replicas' outputs as one, on `device`."""
    flat = [pytree.tree_flatten(output) for output in outputs]
    structure = flat[0][1]
    if any(other != structure for _, other in flat):
        raise UsageError("the replicas' outputs differ in structure, so they can't be joined")
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return pytree.tree_unflatten([_join_leaves(column, device) for column in columns], structure)


def _join_leaves(leaves: Sequence[Any], device: torch.device) -> torch.Tensor | None:
    if all(leaf is None for leaf in leaves):
        return None
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            raise UsageError(
                f"an output of type {type(leaf).__qualname__} can't be joined: a replicated model returns tensors,"
                " None, or tuples, lists and dicts of them"
            )
    return torch.cat([_moved(leaf.reshape(1) if leaf.dim() == 0 else leaf, device) for leaf in leaves])


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on that device; no copy if it is there. Only a GPU keeps a copy that is under way in order with what
    follows."""
    return tensor.to(device, non_blocking=device.type == "cuda")


# ---- the model on each device ----


def replicate(model: nn.Module, devices: Sequence[torch.device]) -> list[nn.Module]:
    """A shallow copy per device: hooks and attributes are shared, parameters and buffers are the device's.

    What is tied in the model is tied in each copy. The first copy has the model's own buffers.
    """
    broadcast: Callable[..., tuple[torch.Tensor, ...]] = _Broadcast.apply
    parameters = {parameter: broadcast(parameter, devices) for parameter in model.parameters()}
    buffers = {
        buffer: [buffer, *(buffer.to(device, copy=True) for device in devices[1:])] for buffer in model.buffers()
    }
    copies = {module: [_shallow_copy(module) for _ in devices] for module in model.modules()}
    for module, replicas in copies.items():
        for index, replica in enumerate(replicas):
            replica._modules = _exchanged(module._modules, copies, index)
            replica._parameters = _exchanged(module._parameters, parameters, index)
            # Replica 0 has the very dict, so that a buffer which `forward` sets anew stays set.
            replica._buffers = module._buffers if index == 0 else _exchanged(module._buffers, buffers, index)
    return copies[model]


def _shallow_copy(module: nn.Module) -> nn.Module:
    """A copy by the method that modules with caches of their parameters (recurrent ones, torch.fx's) override."""
    copy: nn.Module = module._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
    return copy


def _exchanged(members: Mapping[str, Any], copies: Mapping[Any, Sequence[Any]], index: int) -> dict[str, Any]:
    return {name: None if member is None else copies[member][index] for name, member in members.items()}


class _Broadcast(torch.autograd.Function):
    """A parameter on each device; backward sums what comes from there, in the devices' order.

    One per parameter, so that its hooks run when its gradients are there and not after all of backward.
    """

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, devices: Sequence[torch.device]) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)  # a replica that does not use the parameter has no gradient for it
        ctx.home = parameter.device
        return tuple(_moved(parameter.view_as(parameter), device) for device in devices)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        present = [_moved(gradient, ctx.home) for gradient in gradients if gradient is not None]
        return (reduce(torch.add, present) if present else None), None


# ---- in threads ----


def run_on(devices: Sequence[torch.device], calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Results of the calls, each in a thread of its own that works as this one does, on its device.

    Raises what the first of them in order raised, when all are done.
    """
    settings = [_thread_settings(device) for device in devices]
    with ThreadPoolExecutor(len(calls), thread_name_prefix="replica") as threads:
        running = [threads.submit(_run, enter, call) for enter, call in zip(settings, calls, strict=True)]
        wait(running)
    for index, (one, device) in enumerate(zip(running, devices, strict=True)):
        error = one.exception()
        if error is not None:
            error.args = (f"replica {index} on {device}: {error}", *error.args[1:])
            raise error
    return [one.result() for one in running]


def _run(enter: Callable[[ExitStack], None], call: Callable[[], Any]) -> Any:
    with ExitStack() as settings:
        enter(settings)
        return call()


def _thread_settings(device: torch.device) -> Callable[[ExitStack], None]:
    """Takes over into another thread what torch keeps per thread; the device is made that thread's current one."""
    kind = device.type
    inference, gradients = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    autocast = torch.autocast(
        kind,
        dtype=torch.get_autocast_dtype(kind),
        enabled=torch.is_autocast_enabled(kind),
        cache_enabled=torch.is_autocast_cache_enabled(),
    )
    stream = torch.cuda.current_stream(device) if kind == "cuda" else None

    def enter(settings: ExitStack) -> None:
        settings.enter_context(torch.inference_mode(inference))
        settings.enter_context(torch.set_grad_enabled(gradients))  # after it: leaving inference mode turns them on
        settings.enter_context(autocast)
        if stream is not None:
            settings.enter_context(torch.cuda.stream(stream))

    return enter
