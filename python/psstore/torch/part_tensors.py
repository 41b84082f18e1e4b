"""Training parts of tensors on a store: each worker's part is a tensor of its own there (parts.py).

The workers are the processes of one mesh. What torch makes of their gradients, by a reduce-scatter, is the average, of
which each worker has a part and pushes it; so a round has one contribution to each part, and the store adds up nothing.
Update rules are elementwise, so that parts step as the whole would; a norm is that of all parts of a round.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch
import torch.distributed

from psstore.client.rule_state import Restored, RuleState
from psstore.errors import UnknownTensor, UsageError
from psstore.torch.param_groups import has_rule, may_compensate, may_compress, may_sort
from psstore.torch.parameters import Trained
from psstore.torch.parts import (
    Box,
    assemble,
    box_of,
    by_range,
    local_gradient,
    local_of,
    overlapping,
    stored_parts,
)
from psstore.torch.training import Training
from psstore.types import TensorSpec


def check_trains_parts(training: Training) -> None:
    """Raises UsageError for what can't be with parts."""
    store, optimizer = training.store, training.optimizer
    if training.overlap == "eager" or training.exist != "match":
        raise UsageError("parts of tensors are trained with overlap='auto' and exist='match': leave these out")
    if may_compress(optimizer.param_groups, training.compression):
        raise UsageError("parts of tensors travel as they are: leave compression out")
    if may_sort(optimizer.param_groups):
        raise UsageError(
            "parts of tensors have one contribution each, and no workers to take a median of: leave reduction out of"
            " the parameter groups"
        )
    if may_compensate(optimizer.param_groups):
        raise UsageError(
            "parts of tensors are trained in mode 'sync', where nobody steps meanwhile: leave compensation out of the"
            " parameter groups"
        )
    if not has_rule(optimizer):
        raise UsageError(
            f"the store has no rule for {type(optimizer).__qualname__}, and parts are stepped by the store alone: step"
            " it without a DistributedOptimizer, and give the weights to psstore.torch.publish"
        )
    if store.consistency.mode != "sync" or store.consistency.elastic:
        raise UsageError("parts of tensors need mode 'sync' and a fixed number of workers: all parts step together")
    num_processes = torch.distributed.get_world_size()
    if num_processes != store.num_workers:
        raise UsageError(
            f"torch.distributed has {num_processes} processes, and the store waits for {store.num_workers} workers:"
            " each process that has a part must be a worker of its store, and the store has one mesh"
        )


def take_gradients(training: Training) -> None:
    """Has each part's `grad` be that part of its DTensor's gradient, if it counts. Every worker calls it before a
    step: it may be collective. Raises UsageError for a parameter that lies elsewhere since."""
    if not training.has_parts:
        return
    for one in training.trained:
        dtensor = one.owner
        if local_of(dtensor).data_ptr() != one.parameter.data_ptr():
            raise UsageError(
                f"{one.name!r} lies elsewhere than when the store took it: move, convert or load with assign=True"
                " before the optimizer is made"
            )
        if dtensor.grad is None:
            one.parameter.grad = None
            training.taken.pop(one.name, None)
        elif training.taken.get(one.name) is not dtensor.grad:  # else a step that failed has taken it
            local = local_gradient(dtensor, dtensor.grad)
            training.taken[one.name] = dtensor.grad
            one.parameter.grad = local if training.counts(one) else None


# ---- tensors in the store ----


def create_parts(training: Training, trained: Sequence[Trained], specs: Sequence[TensorSpec]) -> None:
    """Creates this worker's parts, with its values; those of which the store has the elements already, cut otherwise,
    with value and state from there. Such other parts are gone on return. Every worker calls it."""
    store = training.store
    ours = [training.counts(one) for one in trained]
    moved = _from_other_parts(training, trained)
    store.barrier("parts read", once=True)
    for offer in (True, False):
        chosen = [(one, spec) for one, spec, is_ours in zip(trained, specs, ours, strict=True) if is_ours == offer]
        values = [moved[one.name].value if one.name in moved else one.parameter.detach() for one, _ in chosen]
        store.create_many([spec for _, spec in chosen], values if offer else None, offer=offer)
    if moved:
        store.restore(moved)
    for name in _stale(training, trained):
        with suppress(UnknownTensor):  # another worker has dropped it
            store.drop(name)
    store.barrier("parts created", once=True)


def with_state(training: Training, trained: Sequence[Trained]) -> list[str]:
    """The tensors in the store whose rule state tells these parameters': their own, and of a part without elements
    another part, since torch has state of such parts, too."""
    empty = [one for one in trained if one.dtensor is not None and not one.parameter.numel()]
    others: dict[str, str] = {}
    if empty:
        there = stored_parts(training.store.keys(), _boxes(empty, training))
        for one, parts in zip(empty, there.values(), strict=True):
            full = [name for name, box in parts.items() if box is None or box.num_elems]
            others[one.name] = min(full, default=one.name)
    return [others.get(one.name, one.name) for one in trained]


def _boxes(trained: Sequence[Trained], training: Training) -> dict[str, Box]:
    """By the whole tensor's name in the store."""
    return {training.names.of(one.owner, one.name): box_of(one.owner) for one in trained}


def _stale(training: Training, trained: Sequence[Trained]) -> set[str]:
    boxes = _boxes(trained, training)
    there = stored_parts(training.store.keys(), boxes)
    return {name for whole, box in boxes.items() for name in overlapping(there[whole], box) if name != box.name(whole)}


def _from_other_parts(training: Training, trained: Sequence[Trained]) -> dict[str, Restored]:
    """Value and state of parts that the store does not have, and has the elements of, by the parts' names."""
    store = training.store
    keys = store.keys()
    known = set(keys)
    new = [one for one in trained if one.name not in known and one.parameter.numel() and training.counts(one)]
    boxes = _boxes(new, training)
    boxes = {whole: box for whole, box in boxes.items() if overlapping(stored_parts(keys, [whole])[whole], box)}
    values = by_range(boxes, keys, store.pull_many)
    states = by_range(boxes, keys, store.pull_state)
    return {
        box.name(whole): Restored(
            _assembled(whole, box, [(one, torch.as_tensor(value, device="cpu")) for one, value in values[whole]]),
            _assembled_state(whole, box, states[whole]),
        )
        for whole, box in boxes.items()
    }


def _assembled(whole: str, box: Box, parts: Sequence[tuple[Box, torch.Tensor]]) -> torch.Tensor:
    out = torch.empty(box.size, dtype=parts[0][1].dtype, device="cpu")
    assemble(whole, box, parts, out)
    return out


def _assembled_state(whole: str, box: Box, parts: Sequence[tuple[Box, RuleState]]) -> RuleState:
    states = [state for _, state in parts]
    buffers = {
        name: _assembled(
            whole, box, [(one, torch.as_tensor(state.buffers[name], device="cpu")) for one, state in parts]
        )
        for name in states[0].buffers
    }
    return RuleState(states[0].steps, buffers)
