"""DistributedOptimizer: the face of a torch optimizer, for a step that is taken with a store.

What torch.optim promises is here: groups, state dicts, closures, hooks. How a step is taken is up to a step strategy
(training.py). A gradient's way is hook (gradients.py), step strategy, store, parameters.
"""

from __future__ import annotations

import gc
import math
import weakref
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, Literal, NoReturn, get_args, overload

import torch

from psstore.client.arguments import number, scale, text
from psstore.client.store import Store
from psstore.codec.compression import Compression
from psstore.errors import NotAWorker, RolledBack, UsageError
from psstore.torch.averaging import select_averaging
from psstore.torch.buffers import Buffers
from psstore.torch.eager_step import EagerStep
from psstore.torch.graphs import outside_of_graphs
from psstore.torch.local_step import LocalStep
from psstore.torch.optimizer_state import PROGRESS_KEY, RESIDUALS_KEY, is_initial_state_wanted
from psstore.torch.param_groups import check_distributable, has_rule, may_compress
from psstore.torch.parameters import Names, named_tensors
from psstore.torch.part_tensors import check_trains_parts, take_gradients
from psstore.torch.store_step import StoreStep
from psstore.torch.table_gradients import TableGradients
from psstore.torch.table_module import TableModule
from psstore.torch.torch_clipping import stand_in_for
from psstore.torch.training import FrozenCheck, Overflow, Overlap, StepStrategy, Training
from psstore.torch.warnings import warn
from psstore.torch.worker_step import WorkerStep
from psstore.wire.messages import Exist

Mode = Literal["gradients", "average"]
"""What the workers share in a round: gradients, or parameters after training alone."""

OPTIONS = {"overlap": Overlap, "mode": Mode, "exist": Exist}


class DistributedOptimizer(torch.optim.Optimizer):
    """Trains the parameters of a torch optimizer on a store.

    >>> opt = torch.optim.AdamW(model.parameters(), lr=3e-4)
    >>> opt = psstore.torch.DistributedOptimizer(opt, store, named_parameters=model.named_parameters())

    The object stands in for the optimizer that it wraps, and shares its `param_groups`: schedulers made for either
    work, and hyper-parameters are read at every step. For SGD, Adam, AdamW, Adagrad and RMSprop of torch.optim, and
    for `DelayedNesterov`, the store takes the step and keeps momenta and other state, so that `state` stays empty here;
    `state_dict()` reads it from there. Any other steps on every worker, with the gradients that the store has reduced;
    LBFGS and SparseAdam can't.

    Construction creates the tensors in the store, which rank 0's values initialise; on return the parameters
    hold what the store holds, on every worker. It blocks until rank 0 has been there. `step()` blocks until the
    round is decided, as the store's mode has it. A parameter that is frozen stays local to each worker until it
    requires a gradient: it joins in the next step then.

    Args:
        optimizer: whose class says the update rule, and whose groups say the hyper-parameters. A group's 'reduction',
            if it has one, says what becomes of the workers' gradients: 'mean', or of each element the 'median' or the
            'trimmed_mean', without the lowest and the highest as many as its 'trim' says, so that a few workers that
            send anything don't spoil the step. It is read when a parameter is first trained, stays, and must be alike
            on every worker. With either no `weight` counts. Modes 'sync' and 'backup' have it. Its 'compensation' says,
            in modes 'async' and 'ssp', how far a gradient is made up for the steps that others took since this worker
            was sent the parameters: the lambda of DC-ASGD.
        store: a connected worker's `psstore.Store`. Several optimizers may share it: each step is a round.
        named_parameters: `model.named_parameters()`; must cover every parameter that requires a gradient. They may be
            DTensors, as fully_shard and parallelize_module make them, if all are: each worker trains its part then.
        name: of this optimizer, to tell it from others on the same store that train other models of like names.
        named_buffers: `model.named_buffers()`, to have rank 0's buffers (batch-norm statistics) on every worker after
            each step; without it each worker has its own.
        overlap: 'backward' sends each gradient while backward runs; 'none' sends all in step(). 'auto' is 'backward',
            but 'none' where every shard shares the memory with this worker that gradients are in, the machine's or one
            GPU's: to send one is to copy it then, and that is work for the processors that backward runs on. 'eager'
            commits the round with its first gradient, so that new parameters are on their way back while backward runs.
            It needs mode 'sync', memory for a second copy of the parameters, and to be the only optimizer whose hooks
            run in a backward pass; rules out clipping and GradScaler; and counts a parameter without gradient as having
            zeros, and one that was unfrozen only from the step after on. The price: a worker that is lost between
            backward and the end of its step tears the round, and all get TornRound: training has to start anew from a
            checkpoint.
        mode: 'gradients' exchanges gradients in every step. 'average' lets each worker train alone with the wrapped
            optimizer, and averages the parameters after `every` steps and in `synchronize()`. With compression, or in
            a store with a quorum (mode 'backup'), differences to the last average travel in their place: a worker that
            is late takes what was decided, and its steps count in the round that is open when it comes. Not in modes
            'ssp' and 'async'.
        every: see there.
        average: divide the sum of the gradients by the number of workers in the round; False: don't.
        max_norm: clip the norm of the reduced gradient to this in every step, as `clip_grad_norm_` does; `norm` has it
            then. Of this and `clip_grad_norm_`, the smaller bound counts.
        compression: send fewer bytes, with some loss: 'bf16', 'fp16', 'int8' or 'sign' both ways, 'topk:0.01' for
            gradients, 'push=sign,pull=int8', or a `psstore.torch.Compression`. A parameter group may have its own,
            under 'compression'. It is read when a parameter is first trained, and must be alike on every worker. What
            codecs lose of gradients, or differences, is kept on each worker, and is part of its `state_dict()`.
        tables: `psstore.torch.Embedding` and `EmbeddingBag` modules of the same store, whose rows are trained in the
            same rounds: what backward leaves of them is pushed as `overlap` says, and clipped with the rest. Each has a
            parameter group of its own, the last ones, which has its hyper-parameters and no parameters. Not with
            overlap='eager', mode='average', or parameters that are DTensors.
        exist: what to do with tensors of these names that the store has already: 'match' goes on training them, and
            says so; 'error' raises TensorExists; 'overwrite' replaces them. All but 'match' wait for all workers.

    Raises UsageError for what can't be trained, NotAWorker for a client's store, before anything is created; the
    store's own errors otherwise.
    """

    _step_supports_amp_scaling = True
    """Tells a GradScaler to call step() in any case, with what it found: every round has all its workers."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        store: Store,
        named_parameters: Iterable[tuple[str, torch.Tensor]],
        *,
        name: str = "",
        named_buffers: Iterable[tuple[str, torch.Tensor]] = (),
        overlap: Overlap = "auto",
        mode: Mode = "gradients",
        every: int = 1,
        average: bool = True,
        max_norm: float | None = None,
        compression: Compression | str | None = None,
        tables: Iterable[TableModule] = (),
        exist: Exist = "match",
    ) -> None:
        if isinstance(optimizer, DistributedOptimizer):
            raise UsageError("this optimizer is distributed already; wrap the torch.optim optimizer itself, once")
        check_arguments(optimizer, store, overlap=overlap, mode=mode, exist=exist)
        if max_norm is not None and not number("max_norm", max_norm) >= 0.0:
            raise UsageError(f"max_norm is {max_norm}; it must be a number that is not negative, or None")
        name = text("name", name)
        self.optimizer = optimizer
        """The wrapped optimizer."""
        self.checkpoint_state: dict[str, Any] = {}
        """Whatever else of this worker checkpoints are to have: plain data and tensors. A `psstore.torch.session` hands
        it in, and puts it back when training goes on from a checkpoint."""
        self.max_norm = max_norm
        """The bound of the gradient's norm; None: it is only clipped where `clip_grad_norm_` is called."""
        self.norm: torch.Tensor | None = None
        """Norm of the last gradient that was clipped, before it was; 0-d, the same on every worker."""
        self.skipped = False
        """Whether the last step changed nothing, because gradients of some worker were not finite."""
        self.overflow = Overflow()
        """What a GradScaler found out about the gradients of the next step; each step resets it."""
        self._made = False
        """Whether construction is over, so that groups that are added are new ones."""
        super().__init__(optimizer.param_groups, optimizer.defaults)
        prefix = f"{name}/" if name else ""
        self._make_training = partial(
            Training,
            optimizer,
            store,
            Names(named_parameters, prefix=prefix),
            TableGradients(tables, store, bearing=partial(_bearing, weakref.ref(self))),
            average=average,
            overlap=overlap,
            compression=Compression.of(compression),
            first_group=zlib.crc32(name.encode()) & ~0xFF if name else 0,
        )
        self._mode, self._every = mode, every
        self._make_buffers = partial(Buffers, named=named_tensors("buffers", named_buffers), prefix=prefix)
        self._has_stepped = False
        """Whether a step was asked for."""
        self._attach(exist=exist)
        self._training.tables.join_groups(optimizer)
        self.num_reattached = 0
        """How often it has gone on with a store that began again."""
        self.bears_rollbacks = False
        """Whether RolledBack is kept in `rolled_back`, for whoever takes up from there, and not raised by `step` and
        `clip_grad_norm_`, which do nothing until `reattach`."""
        self.rolled_back: RolledBack | None = None
        optimizer.register_step_pre_hook(_refusal(weakref.ref(self)))
        self._stepping = False
        self._whole_state: defaultdict[torch.Tensor, Any] | None = None
        """A copy of all state, from torch's checkpoint tools' asking for it until the next step."""
        self._has_warned = False
        self._made = True
        stand_in_for(self)
        if isinstance(self._strategy, WorkerStep):
            self._strategy.tell_whose_state()

    # ---- torch.optim.Optimizer ----

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's groups."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if self._made:  # before, the base class's constructor begins with none
            self.optimizer.param_groups = groups

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """The wrapped optimizer's state: empty where the store keeps it, and `state_dict()` has it in any case. After
        torch's checkpoint tools have asked for state, a copy of all of it, until the next step."""
        return self.optimizer.state if self._whole_state is None else self._whole_state

    @state.setter
    def state(self, state: defaultdict[torch.Tensor, Any]) -> None:
        if self._made:
            self.optimizer.state = state
        self._whole_state = None

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Ends this worker's round: the parameters hold the store's new values on return.

        A parameter whose gradient is None counts as zero in the round's average; if no worker has a gradient
        for it, it stays as it is. A worker that is too late for its round (mode 'backup') only catches up.
        Returns the closure's loss. Raises UsageError for gradients that can't be sent, and the store's errors
        (WorkerLost, DeadlineExceeded, StoreClosed, ...), which leave the parameters as they were; with mode='average'
        the step is taken then, and called again this goes on with its round alone.
        """
        return self._step(closure)

    @outside_of_graphs
    def _step(self, closure: Callable[[], float] | None) -> float | None:
        if self.rolled_back is None:
            with self._bearing_rollbacks():
                return self._take_step(closure)
        return None

    def _take_step(self, closure: Callable[[], float] | None) -> float | None:
        if is_initial_state_wanted():
            with self._stepping_wrapped():
                self._whole_state = defaultdict(dict, self._strategy.state(whole=True))
            return None
        self._whole_state = None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._refuse_stock_scaler()
        self._warn_without_gradients()
        self._has_stepped = True
        self._training.add_newcomers(self._strategy)
        take_gradients(self._training)
        if self.max_norm is not None and not self._strategy.has_clipped:
            self._clip(self.max_norm)
        is_round = self._strategy.shares_next
        with self._with_buffers() if is_round else nullcontext(), self._stepping_wrapped():
            self.skipped = not self._strategy.step(self.overflow)
        self.overflow = Overflow()
        if is_round:
            self._check_frozen()
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers of the wrapped one ask
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients that there are, of parameters and of rows of tables."""
        super().zero_grad(set_to_none)
        self._training.tables.zero()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters to train from the next step on, on every worker. Their names are those of `named_parameters`,
        or are given in (name, parameter) pairs. Before this optimizer's first step, those that the store has
        have its values on return."""
        if not self._made:
            return  # the base class's constructor adds the groups that are there
        names = self._training.names
        self.optimizer.add_param_group(names.without(param_group, self.param_groups))
        try:
            new = self._training.newcomers()
        except UsageError:
            del self.param_groups[-1]
            raise
        if new and not self._has_stepped and self._training.goes_on(new):
            self._training.add_newcomers(self._strategy)  # or its first gradients would be of other values

    def state_dict(self) -> dict[str, Any]:
        """Groups and state as the wrapped optimizer's own state_dict() has them: either's can be loaded by the other.

        Reads the store, at this worker's last step or later; the other workers have nothing to do. Tensors are on the
        CPU. A checkpoint is the model's state_dict() and this one.

        Half-precision parameters are rounded copies of float32 weights, which only the store has; their state is
        float32 too, and saved as such. Training that goes on from a checkpoint begins with the rounded weights.

        Where workers step by themselves (see the class), state is this worker's own, and nothing is read; where it is
        between two rounds is in it, a round that is under way is not. Residuals of compression are this worker's own,
        too: to go on exactly, save each worker's own state_dict().
        """
        found = self._state_dict()
        if isinstance(self._strategy, LocalStep):
            found = {**found, PROGRESS_KEY: self._strategy.progress()}
        kept = self.residuals()
        return {**found, RESIDUALS_KEY: {"rank": self._training.store.rank, "of": kept}} if kept else found

    def _state_dict(self) -> dict[str, Any]:
        """Without residuals."""
        whole = self._whole_state
        if whole is None and self.keeps_state_here and _has_own_state_dict(self.optimizer):
            return self.optimizer.state_dict()  # of a wrapper, as Lookahead: that of the optimizer in it is there, too
        if whole is None:
            self._whole_state = defaultdict(dict, self._strategy.state())
        try:
            return super().state_dict()
        finally:
            self._whole_state = whole

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over a `state_dict()` of this class or of the wrapped optimizer's: the groups on each worker that calls
        it, the state from rank 0, into the store. Call it on every worker before the next step.

        Weights are no part of it: load them into the model, before this optimizer is made or after. Where workers step
        by themselves, each keeps the state that it has loaded, and goes on from where it was between two rounds, if the
        model's weights are loaded after this optimizer is made; else from the store's values. The residuals of
        compression are taken over by the rank that has saved them; the others begin with none.
        """
        if not isinstance(state_dict, Mapping):
            raise UsageError(f"load_state_dict takes a state_dict() of an optimizer, not {type(state_dict).__name__}")
        self._whole_state = None
        loaded = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            loaded = before(self, loaded) or loaded
        kept, progress = loaded.pop(RESIDUALS_KEY, None), loaded.pop(PROGRESS_KEY, None)
        self._strategy.load_state_dict(loaded)
        is_own = kept is not None and kept["rank"] == self._training.store.rank
        self.set_residuals(kept["of"] if is_own else {})  # this worker has not seen another's gradients
        if progress is not None and isinstance(self._strategy, LocalStep):
            self._strategy.set_progress(progress)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __getattr__(self, name: str) -> Any:
        """The wrapped optimizer's attribute, of a public name that is not found here."""
        if name.startswith("_") or "optimizer" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        """torch's text, the wrapped class and the store."""
        wrapped = type(self.optimizer).__name__
        return f"{super().__repr__()} of {wrapped} on {self._training.store!r}"

    def __getstate__(self) -> NoReturn:
        raise UsageError(
            "a DistributedOptimizer is a connection to a store and can't be copied or pickled: save its state_dict(),"
            " or connect and make one in each process"
        )

    # ---- what a store adds ----

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clips the 2-norm of the reduced gradient, over all parameters and workers, in the step that follows: what
        torch.nn.utils.clip_grad_norm_ does under DDP, and does here, too: called with all parameters that this
        optimizer trains together with other workers, it is this function. Call it on every worker, right before
        `step()`.

        Sends the gradients and ends the round, for one round trip more than `step()` alone; `step()` then fetches the
        parameters. `.grad` stays this worker's own, unclipped. With a GradScaler, call `scaler.unscale_(opt)` before.
        In modes 'ssp' and 'async', where each round is one worker's, it clips this worker's gradients.

        Returns the norm before, a 0-d tensor, the same on every worker. If it is not finite, the step is skipped by
        all, whether `step()` is called or not; with `error_if_nonfinite`, RuntimeError is raised after that step. An
        infinite `max_norm` clips nothing. Raises UsageError for another norm, in mode 'backup', and when called twice.
        """
        if norm_type != 2:
            raise UsageError(f"norm_type is {norm_type}; the store can clip the 2-norm")
        norm = torch.zeros(())
        if self.rolled_back is not None:
            return norm
        with self._bearing_rollbacks():
            self._training.add_newcomers(self._strategy)
            take_gradients(self._training)
            norm = self._clip(min(number("max_norm", max_norm), math.inf if self.max_norm is None else self.max_norm))
        if error_if_nonfinite and not norm.isfinite():
            self.step()
            raise RuntimeError(f"the norm of the gradients is {norm.item()}; the step was skipped, by all workers")
        return norm

    @property
    def combines_workers(self) -> bool:
        """Whether its steps are made of several workers' gradients, whose sum is in the store alone."""
        return self._strategy.combines_workers

    @property
    def compresses(self) -> bool:
        """Whether gradients or values may travel in codecs."""
        tables = self._training.tables.tables
        coded = any(one.pushes_in_a_codec for one in tables)
        return coded or may_compress(self.param_groups, self._training.compression)

    @property
    def overlap(self) -> Overlap:
        """As it was given."""
        return self._training.overlap

    @property
    def weight(self) -> float:
        """This worker's share in the mean of the next rounds' gradients, or of parameters with mode='average', such as
        its number of samples where workers have different ones: what it sends is multiplied by it, and divided by the
        sum of all. 1 at first."""
        return self._training.weight

    @weight.setter
    def weight(self, weight: float) -> None:
        if self._training.has_parts and weight != 1.0:
            raise UsageError(f"weight is {weight}, and of parts of tensors there is one gradient, and no mean")
        self._training.weight = number("weight", weight)

    @property
    def store(self) -> Store:
        """The store that it trains on."""
        return self._training.store

    @property
    def keeps_state_here(self) -> bool:
        """Whether this worker has optimizer state, which the store's checkpoints have not."""
        return not isinstance(self._strategy, StoreStep)

    @property
    def shared_buffers(self) -> Mapping[str, torch.Tensor]:
        """The buffers that were named, by their names in the store."""
        return self._buffers.by_name

    def residuals(self) -> dict[int | str, Any]:
        """What this worker's codecs have kept back, by the parameters' numbers in a state dict, and of rows by their
        tables' names, in units of gradients without a loss scale: tensors, and dicts of them."""
        kept = self._strategy.residuals()
        found: dict[int | str, Any] = {number: kept[one] for number, one in enumerate(self._in_order()) if one in kept}
        found.update(self._training.tables.residuals())
        return found

    def set_residuals(self, residuals: Mapping[int | str, Any]) -> None:
        """Makes them what they were when `residuals` gave these; nothing is kept back of other parameters or tables.
        Raises UsageError for those of no parameter."""
        parameters = dict(enumerate(self._in_order()))
        if not isinstance(residuals, Mapping):
            raise UsageError(f"set_residuals takes what residuals() gave, a dict, not {type(residuals).__name__}")
        if unknown := [key for key in residuals if not isinstance(key, str) and key not in parameters]:
            raise UsageError(f"residuals are of parameter {unknown[0]!r}; there are {len(parameters)}, numbered from 0")
        self._strategy.set_residuals(
            {parameters[key]: value for key, value in residuals.items() if not isinstance(key, str)}
        )
        self._training.tables.set_residuals({key: value for key, value in residuals.items() if isinstance(key, str)})

    def _in_order(self) -> Iterator[torch.Tensor]:
        """Parameters as torch numbers them in a state dict."""
        return chain.from_iterable(group["params"] for group in self.param_groups)

    def expect_loss_scale(self, loss_scale: float) -> None:
        """The gradients of the next backward pass will be so many times the real ones: a GradScaler's `update()` tells,
        so that what codecs kept back is brought to that scale."""
        self._strategy.expect_loss_scale(scale("loss_scale", loss_scale))

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside it only accumulate gradients; nothing is sent."""
        return self._strategy.no_sync()

    def publish(self) -> None:
        """Gives rank 0's parameters, as they are now, to all workers, after weights were edited by hand. Every worker
        calls it, between steps, and has them on return; optimizer state stays as it is."""
        if self.rolled_back is None:
            with self._bearing_rollbacks():
                self._strategy.publish()

    def synchronize(self) -> None:
        """Averages the parameters now, with mode='average', as at the end of training. Every worker calls it. It is one
        more round: with a quorum, who is too late for it has the next one, which waits for a quorum of those who have
        not left. With mode='gradients' nothing is to do: the parameters are the same on all workers after each step."""
        if self.rolled_back is None:
            with self._bearing_rollbacks(), self._with_buffers():
                self._strategy.synchronize()

    def reattach(self) -> None:
        """Goes on with the store as it is now, after `store.reconnect()`: parameters, buffers and state in the store
        are what it was restored with. Every worker calls it. Blocks until rank 0 has. What codecs had kept back is
        forgotten; a parameter that had joined later begins with rank 0's value of now. Hyper-parameters and `weight`
        are left as they are here."""
        self._strategy.retire()
        self._training.tables.zero()  # gradients of parameters are the program's to forget; these may not be seen again
        weight = self._training.weight
        self._attach(exist="match")
        self._training.weight = weight
        self._training.tables.begin_prefetch()  # what came before is not the store's any more
        self.num_reattached += 1
        self.rolled_back = None
        gc.collect()  # as `store.reconnect()` does: until now calls of a round begun early held the store's old client

    # ---- how ----

    def _attach(self, *, exist: Exist) -> None:
        """Begins with what the store has, which is what is here if it had nothing."""
        self._training = self._make_training(exist=exist)
        if not self._training.newcomers():
            raise UsageError("no parameter of this optimizer requires a gradient, so there is nothing to train")
        self._strategy = self._select_step(self._training)
        self._buffers = self._make_buffers(self._training)  # first: a reader that finds all parameters has these, too
        self._training.add_newcomers(self._strategy)
        self._frozen_check = FrozenCheck(self._training)

    def _select_step(self, training: Training) -> StepStrategy:
        return select_step(training, mode=self._mode, every=self._every, clips=self.max_norm is not None)

    def _check_frozen(self) -> None:
        self._frozen_check.check()

    @contextmanager
    def _bearing_rollbacks(self) -> Iterator[None]:
        """The block is left when the store was rolled back, if somebody takes up from there."""
        try:
            yield
        except RolledBack as error:
            if not self.bears_rollbacks:
                raise
            self.rolled_back = error

    def _clip(self, max_norm: float) -> torch.Tensor:
        """Clips what the next step is made of. Returns the norm before."""
        self._buffers.push()
        self.norm = norm = self._strategy.clip(max_norm, self.overflow)
        if not norm.isfinite() and not self._strategy.has_clipped:
            self.overflow = replace(self.overflow, found=True)
        return norm

    @contextmanager
    def _with_buffers(self) -> Iterator[None]:
        """Pushes buffers before a round and pulls them after it."""
        self._buffers.push()
        yield
        self._buffers.pull()

    @contextmanager
    def _stepping_wrapped(self) -> Iterator[None]:
        """Lets the wrapped optimizer step."""
        self._stepping = True
        try:
            yield
        finally:
            self._stepping = False

    def _refuse_stock_scaler(self) -> None:
        """Raises UsageError after torch.amp.GradScaler, which is known by the attributes that it sets because of
        `_step_supports_amp_scaling`; psstore.torch.GradScaler does not set them."""
        if vars(self).pop("found_inf", None) is not None:
            vars(self).pop("grad_scale", None)
            raise UsageError(
                "torch.amp.GradScaler knows of this worker's overflow only, so that workers would part: use"
                " psstore.torch.GradScaler in its place, which is made and called in the same way"
            )

    def _warn_without_gradients(self) -> None:
        rows = any(one.left for one in self._training.tables.tables)
        if self._has_warned or rows or any(p.grad is not None for group in self.param_groups for p in group["params"]):
            return
        self._has_warned = True
        warn(
            "step() without any gradient on this worker: it counts as zero in this round, and if no worker has one,"
            " nothing changes. Was backward() forgotten, or were the model's parameters replaced after its optimizer"
            " was made (by moving it to another device)? This is said once"
        )


def _bearing(optimizer: weakref.ref[DistributedOptimizer]) -> AbstractContextManager[None]:
    """What the optimizer bears, as long as there is one: a model may outlive it."""
    there = optimizer()
    return nullcontext() if there is None else there._bearing_rollbacks()


def _refusal(owner: weakref.ref[DistributedOptimizer]) -> Callable[..., None]:
    """A hook for the wrapped optimizer that raises UsageError where a script steps it, which would train alone."""

    def refuse(*_: object) -> None:
        stands_in = owner()
        if stands_in is not None and not stands_in._stepping:
            raise UsageError(
                "step() was called on the optimizer that a DistributedOptimizer has wrapped, and would train this"
                " worker alone: call step() of the DistributedOptimizer, which stands in for it"
            )

    return refuse


def _has_own_state_dict(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).state_dict is not torch.optim.Optimizer.state_dict


def check_arguments(optimizer: torch.optim.Optimizer, store: Store, **options: str) -> None:
    """Raises UsageError, NotAWorker for what can't work together."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"a {type(optimizer).__qualname__} is no optimizer: wrap the torch.optim optimizer itself")
    if not isinstance(store, Store):
        raise UsageError(f"a {type(store).__qualname__} is no store that blocks: pass what psstore.connect() returned")
    if store.rank is None:
        raise NotAWorker("only a worker's store can train: connect with role='worker' (the default), before leave()")
    for option, value in options.items():
        allowed = get_args(OPTIONS[option])
        if value not in allowed:
            raise UsageError(f"{option} is {value!r}; it must be one of {', '.join(map(repr, allowed))}")
    check_distributable(optimizer)


def select_step(training: Training, *, mode: Mode, every: int, clips: bool) -> StepStrategy:
    """The step strategy for these options. Raises UsageError for what the store's mode or the optimizer's class rules
    out."""
    is_late_left_out = mode == "gradients" and training.store.consistency.mode == "backup"
    if clips and (training.overlap == "eager" or is_late_left_out):
        what = "overlap='eager'" if training.overlap == "eager" else "a store in mode 'backup'"
        raise UsageError(f"max_norm can't be had with {what}, where not every gradient is waited for: leave it out")
    if training.tables.tables and (training.overlap == "eager" or mode == "average" or training.has_parts):
        what = "DTensors" if training.has_parts else "mode='average'" if mode == "average" else "overlap='eager'"
        raise UsageError(f"tables= can't be had with {what} yet: rows are pushed before the commit, each worker's own")
    if mode == "average":
        return select_averaging(training, every=every)
    if every != 1:
        raise UsageError(f"every={every} is for mode='average'; gradients are exchanged in every step")
    by_store = has_rule(training.optimizer)
    if training.has_parts:
        check_trains_parts(training)
    if training.overlap == "eager":
        if not by_store:
            kind = type(training.optimizer).__qualname__
            raise UsageError(f"overlap='eager' needs the store to take the step, and it has no rule for {kind}")
        if training.store.consistency.refuse_norm is not None:
            raise UsageError(
                "overlap='eager' commits before the gradients are there, and this store refuses them by their norm:"
                " leave overlap= out, or start the store without --refuse-norm"
            )
        return EagerStep(training)
    return StoreStep(training) if by_store else WorkerStep(training)
