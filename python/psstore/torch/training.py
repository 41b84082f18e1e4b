"""What is trained: the parameters of one optimizer, which the store has, and whose gradients a step strategy sends.

A step strategy turns a round's gradients into new parameters:

StoreStep    the store reduces and applies                       (store_step.py; optimizers that it has a rule for)
EagerStep    the store does so while backward still runs         (eager_step.py; overlap='eager')
WorkerStep   the store reduces, the workers apply                (worker_step.py; every other optimizer)
Averaging    the workers train alone, and the store averages their parameters now and then  (averaging.py)
LearnerStep  so they do, and the store steps with what they have done, one fragment at a time  (learner_step.py); with a
             quorum or compression it averages, too
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch

from psstore.client.rule_state import Restored
from psstore.client.store import Store
from psstore.codec.compression import Compression
from psstore.config import was_restarted
from psstore.errors import DTypeMismatch, NotInitialised, RuleMismatch, ShapeMismatch, UsageError
from psstore.torch.param_groups import GradientOptions, compression_for
from psstore.torch.parameters import Names, Trained, gradient_name, mark_written, trainable
from psstore.torch.parts import is_first_of_copies
from psstore.torch.warnings import quoted, warn, with_hint
from psstore.types import TensorSpec
from psstore.wire.messages import Exist

if TYPE_CHECKING:
    from psstore.torch.table_gradients import TableGradients

Overlap = Literal["auto", "backward", "eager", "none"]
"""When gradients are sent. 'backward': while backward runs. 'eager': while backward runs, and new parameters come back
meanwhile. 'none': in step(). 'auto': 'backward' unless that takes processor time from it, see gradients.py."""


@dataclass(frozen=True)
class Overflow:
    """What a GradScaler found out about this worker's gradients."""

    loss_scale: float = 1.0
    """Factor by which the gradients are larger than the real ones."""
    found: bool = False
    """The gradients hold NaN or infinity: all workers are to skip the round."""
    rewritten: bool = False
    """unscale_ divided the gradients in place, which leaves no trace in their version counters."""


class StepStrategy(Protocol):
    """How a step is taken."""

    def add(self, trained: Sequence[Trained]) -> None:
        """Creates these parameters in the store, with rank 0's values. On return they hold what the store holds."""

    def retire(self) -> None:
        """Stops sending but by a call: another optimizer was made for some of these tensors, under the same names."""

    @property
    def shares_next(self) -> bool:
        """Whether the next step is a round, and not this worker's alone."""

    @property
    def combines_workers(self) -> bool:
        """Whether a step is made of several workers' gradients, whose sum is in the store alone."""

    @property
    def has_clipped(self) -> bool:
        """Whether `clip` has clipped what the next step is made of, in the store."""

    def step(self, overflow: Overflow) -> bool:
        """Ends this worker's round; the parameters hold the new values on return. False: all workers skipped it, since
        gradients of some were not finite."""

    def clip(self, max_norm: float, overflow: Overflow) -> torch.Tensor:
        """Clips the global norm of the reduced gradient in the step that follows; returns the norm before, 0-d."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside the context only accumulate."""

    def expect_loss_scale(self, loss_scale: float) -> None:
        """Announces the factor by which the next gradients are likely to be larger than the real ones."""

    def publish(self) -> None:
        """Gives rank 0's parameters, as they are now, to all workers; every worker calls it."""

    def synchronize(self) -> None:
        """Makes parameters that were trained apart the same on every worker; every worker calls it."""

    def state(self, *, whole: bool = False) -> Mapping[torch.Tensor, dict[str, Any]]:
        """The optimizer's state by parameter, as torch has it. `whole`: with the state before the first step for
        parameters that have not stepped."""

    def residuals(self) -> Mapping[torch.Tensor, torch.Tensor]:
        """What this worker's codecs kept back, by parameter."""

    def set_residuals(self, residuals: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Replaces what this worker's codecs kept back; nothing is kept back of parameters that are not named."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over groups and state of a state_dict() of the wrapped optimizer's class."""


@dataclass
class Training:
    """The parameters that one optimizer trains on one store."""

    optimizer: torch.optim.Optimizer
    """The wrapped optimizer: its class says the rule, its groups the hyper-parameters."""
    store: Store
    names: Names
    tables: TableGradients
    """Tables of rows that are trained beside the parameters."""
    average: bool = True
    """Divide the sum of the gradients by the number of workers."""
    weight: float = 1.0
    """This worker's share in that mean."""
    overlap: Overlap = "auto"
    first_group: int = 0
    """Number in the store of parameter group 0; the others follow."""
    exist: Exist = "match"
    compression: Compression = field(default_factory=Compression)
    """For groups that do not choose their own."""
    trained: list[Trained] = field(default_factory=list)
    trained_names: list[str] = field(default_factory=list)
    trained_parameters: list[torch.Tensor] = field(default_factory=list)
    trained_owners: list[torch.Tensor] = field(default_factory=list)
    trained_groups: set[int] = field(default_factory=set)
    """What `trained` says, by kind: each step asks for it, and there may be thousands."""
    has_parts: bool = False
    """Whether what is trained are parts of tensors, of which each worker has its own."""
    has_whole_names: bool = False
    """Whether parts go by the names of the whole tensors, which somebody puts together before the store has them."""
    gradient_options: dict[int, GradientOptions] = field(default_factory=dict)
    """By group, since the first of its parameters came to be trained."""
    taken: dict[str, torch.Tensor] = field(default_factory=dict)
    """Gradients of DTensors whose parts the parameters have, by name."""
    _known: set[int] = field(default_factory=set)
    """The id() of each parameter that is trained, which `trained` keeps alive."""

    @property
    def is_first(self) -> bool:
        """Whether this worker is rank 0, or where workers come and go the one of the lowest rank, whose values count
        where there can be only one."""
        return self.store.is_first

    def counts(self, one: Trained) -> bool:
        """Whether this worker's value of a parameter counts, where there can be only one, and its gradient."""
        return self.is_first if one.dtensor is None else is_first_of_copies(one.dtensor)

    def compression_of(self, one: Trained) -> Compression:
        return compression_for(one, self.optimizer.param_groups, self.compression)

    def newcomers(self) -> list[Trained]:
        """Parameters of the groups that require a gradient and are not trained yet: unfrozen since, or of a new group.
        Raises UsageError for those that can't be trained."""
        groups = self.optimizer.param_groups
        if all(self._known.issuperset(map(id, group["params"])) for group in groups):
            return []
        new = trainable(groups, self.names, known=self._known)
        parts = [one for one in new if one.dtensor is not None]
        if (parts and len(parts) < len(new)) or (self.trained and new and self.has_parts != bool(parts)):
            raise UsageError(
                f"some parameters are DTensors, as {quoted([one.name for one in parts])}, and others are whole on each"
                " worker: make all of them DTensors, by fully_shard(model) around the whole model, or by"
                " distribute_module(model, mesh)"
            )
        self.has_parts = bool(parts) or self.has_parts
        if self.has_whole_names:
            new = [one._replace(name=self.names.of(one.owner, one.name)) for one in new]
        return new

    def goes_on(self, newcomers: Sequence[Trained]) -> bool:
        """Whether the store has all of these, as for a worker in another one's place, and they go on from there."""
        return self.exist == "match" and {one.name for one in newcomers} <= set(self.store.keys())

    def add_newcomers(self, strategy: StepStrategy) -> None:
        """Trains the newcomers, too, if there are any. Every worker must do so in the same round. Raises UsageError
        also where a group has changed what the store's tensors have for good."""
        groups = self.optimizer.param_groups
        if len(groups) <= max(self.trained_groups, default=0):
            raise UsageError(
                f"the optimizer has {len(groups)} parameter groups, and had {1 + max(self.trained_groups)}: the store"
                " knows hyper-parameters by the numbers of groups, so that all stay; to train the parameters of one no"
                " longer, freeze them, by requires_grad_(False), and drop their gradients"
            )
        for index, options in self.gradient_options.items():
            options.check_stays(groups[index], f"parameter group {index}")
        new = self.newcomers()
        if new:
            try:
                strategy.add(new)
            except NotInitialised as error:
                raise with_hint(
                    error, "it is rank 0's to send: what is trained and what is frozen must be alike on every worker"
                ) from None
            self.trained += new
            self.trained_names += [one.name for one in new]
            self.trained_parameters += [one.parameter for one in new]
            self.trained_owners += [one.owner for one in new]
            self.trained_groups.update(one.group for one in new)
            for index in self.trained_groups - self.gradient_options.keys():
                self.gradient_options[index] = GradientOptions.of(groups[index])
            self._known.update(id(one.owner) for one in new)
            register(self.store, strategy, new)

    def pull(self, trained: Sequence[Trained]) -> None:
        """Pulls these parameters' values, uncompressed, into their own memory."""
        parameters = [one.parameter for one in trained]
        self.store.pull_many([one.name for one in trained], out=[one.detach() for one in parameters])
        mark_written(one.owner for one in trained)

    def publish(self) -> None:
        """Makes rank 0's parameters, as they are now, the store's, and of parts each worker's; returns when they are.
        Every worker calls it."""
        ours = {one.name: Restored(one.parameter.detach()) for one in self.trained if self.counts(one)}
        if ours:
            self.store.restore(ours)
        self.store.barrier("published")


# ---- tensors in the store ----


def create_tensors(training: Training, specs: Sequence[TensorSpec], values: Sequence[torch.Tensor | None]) -> None:
    """Creates tensors with rank 0's values. `training.exist` says what becomes of tensors that the store has already.

    With 'error' and 'overwrite', which only rank 0 can carry out, all workers wait for each other. Raises TensorExists,
    ShapeMismatch, DTypeMismatch, RuleMismatch.
    """
    store = training.store
    try:
        if training.exist != "match" and training.is_first:
            store.create_many(specs, values, exist=training.exist)
            store.barrier("created")
            return
        if training.exist != "match":
            store.barrier("created")
        store.create_many(specs, values if training.is_first else None, offer=training.is_first)
    except (ShapeMismatch, DTypeMismatch, RuleMismatch) as error:
        raise with_hint(
            error,
            "models must be alike on every worker; if another optimizer trains it, each needs a name of its own: pass"
            " name= to DistributedOptimizer",
        ) from None


def split_trained(training: Training, pulled: Sequence[Trained]) -> tuple[list[Trained], list[Trained]]:
    """(parameters that begin here, parameters that the store has trained before). Warns rank 0 of the latter, whose
    values here are not used, unless the store was restored, or this process takes another one's place: then that is
    what is wanted. Of a store that was restored it warns of the former that an optimizer begins with: that is not."""
    store = training.store
    versions = {one.name: store.version_of(one.name) for one in pulled}
    before = [one for one in pulled if versions[one.name] > 0]
    goes_on = store.restored is not None or was_restarted() or store.consistency.elastic
    if before and training.is_first and not goes_on:
        warn(
            f"the store has trained {quoted([one.name for one in before])} before, up to version"
            f" {max(versions.values())}: training goes on from the weights and the optimizer state there, and those"
            " given here are not used. To start anew, pass exist='overwrite', or exist='error' to be sure; to train"
            " another model there, pass name="
        )
    begun = [one for one in pulled if versions[one.name] == 0]
    if begun and training.is_first and store.restored and not training.trained and not training.has_parts:
        warn(
            f"the checkpoint of version {store.restored} that the store began with has not trained"
            f" {quoted([one.name for one in begun])}: they begin with the values given here. What it has is in"
            " store.keys(): if the model has other names now, give it those, and for an optimizer that had a name, pass"
            " name=. What nobody trains any more stays in the store and its checkpoints until store.drop(NAME)"
        )
    return begun, before


# ---- what this process trains ----


class TrainedTensors:
    """Tensors of one store that this process trains, by name; an entry ends with its parameter or its strategy."""

    def __init__(self) -> None:
        self.parameters: WeakValueDictionary[str, torch.Tensor] = WeakValueDictionary()
        self.strategies: WeakValueDictionary[str, StepStrategy] = WeakValueDictionary()


_registry: WeakKeyDictionary[Store, TrainedTensors] = WeakKeyDictionary()


def register(store: Store, strategy: StepStrategy, trained: Sequence[Trained]) -> None:
    """Notes that `strategy` trains these parameters, and retires strategies that did so before.

    Warns of tensors that another parameter trains: a model of before that is still alive, or another model.
    """
    entries = _registry.setdefault(store, TrainedTensors())
    twice = [one.name for one in trained if entries.parameters.get(one.name, one.owner) is not one.owner]
    if twice:
        warn(
            f"{quoted(twice)} of this store: other parameters of this process are trained under the same names. If"
            " these are different models, each optimizer needs a name of its own: pass name=. If it is the same model"
            " made anew, as by a notebook's cell that ran again, it has the store's weights now, and not those that it"
            " was made with: to take the new ones, pass exist='overwrite'"
        )
    before = {id(older): older for one in trained if (older := entries.strategies.get(one.name)) is not None}
    for older in before.values():
        if older is not strategy:
            older.retire()
    for one in trained:
        entries.parameters[one.name] = one.owner
        entries.strategies[one.name] = strategy


class FrozenCheck:
    """Looks for parameters that are frozen in this process alone, and would stay behind unnoticed while other workers
    train them."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._since = training.store.version
        self._num_steps = 0
        self._has_warned = False

    def check(self) -> None:
        """Looks in the first, second, fourth, eighth, … call; to be called after a step that was a round. Raises
        UsageError in mode sync; warns once in the others, where a worker may be steps ahead and have unfrozen a layer
        in time.

        That the store has such a tensor proves nothing, since it may have been trained before. A value newer than this
        optimizer does.
        """
        self._num_steps += 1
        is_power_of_two = self._num_steps & (self._num_steps - 1) == 0
        store = self._training.store
        if store.num_workers == 1 or not is_power_of_two or self._has_warned:
            return
        here = _registry.get(store)
        idle = self._training.names.all() - set(here.parameters if here else ())
        if not idle:
            return
        parameter_of = {stored: name for name in sorted(idle) for stored in (name, gradient_name(name))}
        known = [stored for stored in store.keys() if stored in parameter_of]
        values = store.pull_many(known, if_newer_than=self._since)
        trained = [parameter_of[stored] for stored, value in zip(known, values, strict=True) if value is not None]
        if not trained:
            return
        message = (
            f"parameter {quoted(trained)} is frozen on this worker (rank {store.rank}), and another worker trains it,"
            " so that this one's values are not the store's: what is trained and what is frozen must be alike on every"
            " worker"
        )
        if store.consistency.mode == "sync":
            raise UsageError(message)
        self._has_warned = True
        warn(f"{message}. If it is about to be unfrozen here, all is well")
