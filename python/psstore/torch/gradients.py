"""What this worker contributes to a round: its gradients, pushed while backward is still at the layers before them.

A hook on each parameter takes its gradient when backward is done with it; small gradients are sent together. What
counts is the gradient as it is at `complete()`: one that was changed after its push is pushed again, which replaces the
first. On a GPU backward is only queued by then: the hook puts a fence behind it, in the stream that it runs on, for
which the gradient's copy waits, and neither this thread nor that stream (client/device/pinned_transfer.py).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from operator import attrgetter

import torch
from torch.utils.hooks import RemovableHandle

from psstore.client.device.arrays import OnDevice, seen
from psstore.client.store import Store
from psstore.errors import StoreClosed, UsageError
from psstore.torch.change_detection import CHECKED_ROUNDS, GradientSnapshot, GradientSnapshots, SentGradients, checksum
from psstore.torch.early_pushes import EarlyPushes, hook, pushes_during_backward, remove
from psstore.torch.parameters import by_ddp
from psstore.torch.parts import is_dtensor
from psstore.torch.warnings import quoted, warn

BUCKET_BYTES = 1 << 19
"""Size up to which gradients are gathered before they are sent: two slices'. To send 200 layers of 4 kB one by one took
7 times as long as to send them together."""

PLAIN: frozenset[type] = frozenset([torch.Tensor, torch.nn.Parameter])
"""Classes of gradients that need no check for DTensor."""

STRIDED = frozenset([torch.strided])
"""Layouts of gradients that are sent as they are."""

GRADIENT, LAYOUT = attrgetter("grad"), attrgetter("layout")
"""For thousands of tensors at once: a line of Python for each takes half as long again."""


class Gradients(EarlyPushes):
    """The gradients of some parameters, under the names of their tensors in the store.

    Hooks do not keep it alive, and end with it. They may run in several threads, as backward does on several devices;
    the rest is for the thread that trains.
    """

    def __init__(self, store: Store, *, overlap: str) -> None:
        """`overlap`: 'backward' pushes while it runs, 'none' all in `complete()`, as they are then; 'auto' does what is
        best for each."""
        super().__init__()
        self._store = store
        self._overlap = overlap
        self._takes_edits = overlap == "none"
        self._parameters: dict[str, torch.Tensor] = {}
        self._hooks: list[RemovableHandle] = []
        self._snapshot_hooks: list[RemovableHandle] = []
        """Hooks of the first rounds on parameters whose gradients `complete` sends, to find changes of these, too."""
        weakref.finalize(self, remove, self._hooks, self._snapshot_hooks)
        self._lock = threading.Lock()
        """Orders the hooks; guards the five below."""
        self._arrived: dict[str, GradientSnapshot] = {}
        """Each gradient as its last hook saw it."""
        self._sent: dict[str, SentGradients] = {}
        """Each gradient's last push."""
        self._bucket: dict[str, GradientSnapshot] = {}
        """Gradients that are to be sent together."""
        self._bucket_on_device: dict[str, OnDevice] = {}
        """Gradients of the bucket that are on a device, with the fence of their hook."""
        self._bucket_bytes = 0
        self._completed = GradientSnapshots({})
        """Gradients as the last `complete` or `withhold` saw them."""
        self._codecs: dict[str, str] = {}
        """Codecs other than 'none', by name."""
        self._rounds = 0
        self._densified = False

    def watch(self, parameters: Mapping[str, torch.Tensor], *, codecs: Mapping[str, str]) -> None:
        """Sends the gradients of these parameters, too, by name in the store, each in its codec ('none': as it is)."""
        self._parameters.update(parameters)
        self._codecs.update({name: codec for name, codec in codecs.items() if codec != "none"})
        takes_snapshots = self._refuses_edits and self._rounds < CHECKED_ROUNDS
        for name, parameter in parameters.items():
            if self._is_early(parameter):
                self._hooks.append(hook(weakref.WeakMethod(self._on_gradient), name, parameter))
            elif takes_snapshots and parameter.requires_grad:
                self._snapshot_hooks.append(hook(weakref.WeakMethod(self._take_snapshot), name, parameter))

    def retire(self) -> None:
        """Stops sending while backward runs."""
        with self._lock:
            self._stop()

    def complete(self, *, rewritten: bool = False, loss_scale: float = 1.0) -> list[str]:
        """Pushes every gradient that the store does not have as it is here, and blocks until all pushes are
        acknowledged. Returns the names of the parameters that have a gradient.

        `rewritten`: no gradient is as it was pushed, though it may look so. `loss_scale`: the factor by which gradients
        are larger than the real ones; if another was expected, what codecs encoded under it is pushed again. Raises
        UsageError for gradients that were changed in a way that can't count, and what pushing raises; it may be called
        again.
        """
        gradients = self._present()
        self._completed = GradientSnapshots(gradients)
        with self._lock:
            self._bucket.clear()
            self._bucket_on_device.clear()
            self._bucket_bytes = 0
            if rewritten:
                self._stop()
            if rewritten or (self._codecs and loss_scale != self._loss_scale):
                self._sent.clear()
            self._loss_scale = loss_scale
            self._find_changes(gradients)
            rest = self._outdated(gradients)
        self._send_rest(rest)
        self._store.settle()
        with self._lock:
            again = self._failed(gradients)
        if again:
            self._store.push_many(self._dense(again), codec=self._codecs or None, loss_scale=loss_scale)
        return list(gradients)

    def withhold(self) -> list[str]:
        """Takes the place of `complete` for gradients that are not to count: returns no names."""
        self._store.settle()
        self._completed = GradientSnapshots(self._present())
        return []

    def unchanged(self) -> bool:
        """Whether the gradients are still those of the last `complete` or `withhold`."""
        return self._completed.match(self._present())

    def forget(self) -> None:
        """Ends a round: lets go of its gradients."""
        with self._lock:
            self._arrived.clear()
            self._sent.clear()
            self._completed = GradientSnapshots({})
            self._rounds += 1
            if self._rounds == CHECKED_ROUNDS:
                remove(self._snapshot_hooks)

    def residuals(self) -> dict[torch.Tensor, torch.Tensor]:
        """What this worker's codecs have kept back so far, by parameter."""
        held = self._store.residuals(list(self._codecs)) if self._codecs else {}
        return {self._parameters[name]: torch.from_numpy(value) for name, value in held.items()}

    def set_residuals(self, residuals: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Replaces what codecs have kept back; nothing is kept back of parameters that are not named."""
        if self._codecs:
            self._store.set_residuals({name: residuals.get(self._parameters[name]) for name in self._codecs})

    # ---- while backward runs ----

    def _is_early(self, parameter: torch.Tensor) -> bool:
        """Whether this parameter's gradient is pushed while backward runs. On a device that shards share a push is a
        copy of a microsecond for a megabyte, and hooks are four fifths of what Python does for a step."""
        if not parameter.requires_grad:  # a part: its DTensor has the gradient
            return False
        if self._overlap == "auto" and parameter.is_cuda:
            return not self._store.shares_device(parameter.detach())
        return pushes_during_backward(self._overlap, self._store, from_memory=parameter.is_cpu)

    def _on_gradient(self, name: str, parameter: torch.Tensor) -> None:
        """Called by the hooks. Does not raise a transport error in backward: `complete` pushes again, and raises it."""
        gradient = parameter.grad
        if gradient is None:
            return  # another hook has used it up
        with self._lock:
            snapshot = self._arrived[name] = GradientSnapshot.of(gradient, round=self._store.round)
            if self._no_sync_depth or self._is_sent(name, snapshot):
                return
            if name not in self._bucket:
                self._bucket_bytes += parameter.nbytes
            self._bucket[name] = snapshot
            (place,) = seen([gradient])
            if isinstance(place, OnDevice):
                self._bucket_on_device[name] = place
            if self._bucket_bytes >= BUCKET_BYTES:
                gradients, on_device = self._empty_bucket(snapshot.round)
                with suppress(StoreClosed):
                    self._send(gradients, on_device)

    def _take_snapshot(self, name: str, parameter: torch.Tensor) -> None:
        """Called by the hooks of parameters whose gradients `complete` sends."""
        if parameter.grad is not None:
            with self._lock:
                self._arrived[name] = GradientSnapshot.of(parameter.grad, round=self._store.round)

    def _is_sent(self, name: str, snapshot: GradientSnapshot) -> bool:
        """Whether this gradient was sent in this round, and accumulates: to send it again each time would be in
        vain."""
        sent = self._sent.get(name)
        if sent is None or sent.round != snapshot.round:
            return False
        return sent.snapshots.gradients[name] is snapshot.gradient

    def _empty_bucket(self, round: int) -> tuple[dict[str, torch.Tensor], dict[str, OnDevice]]:
        """Takes everything out of the bucket. Returns the round's gradients and where they are on devices, without what
        another optimizer's step has left there from an earlier round."""
        bucket, self._bucket, self._bucket_bytes = self._bucket, {}, 0
        on_device, self._bucket_on_device = self._bucket_on_device, {}
        gradients = {name: snapshot.gradient for name, snapshot in bucket.items() if snapshot.round == round}
        return gradients, {name: place for name, place in on_device.items() if name in gradients}

    # ---- how ----

    def _present(self) -> dict[str, torch.Tensor]:
        """Every gradient that there is, by name."""
        found = list(map(GRADIENT, self._parameters.values()))
        if type(None) not in set(map(type, found)):
            return dict(zip(self._parameters, found, strict=True))
        return {name: gradient for name, gradient in zip(self._parameters, found, strict=True) if gradient is not None}

    def _send(self, gradients: Mapping[str, torch.Tensor], on_device: Mapping[str, OnDevice] | None = None) -> None:
        """Starts to push. `on_device`: gradients that a hook has seen on a device, with their fences."""
        if not gradients:
            return
        dense = self._dense(gradients)
        pushed = {**dense, **on_device} if on_device else dense
        done = self._store.start_push_many(pushed, codec=self._codecs or None, loss_scale=self._loss_scale)
        self._record_sent(GradientSnapshots(gradients), dense, done)

    def _send_rest(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Pushes gradients that `complete` found to be missing, and waits for it."""
        if not gradients:
            return
        dense = self._dense(gradients)
        self._store.push_many(dense, codec=self._codecs or None, loss_scale=self._loss_scale)
        known = self._completed
        self._record_sent(known if gradients is known.gradients else GradientSnapshots(gradients), dense, None)

    def _record_sent(
        self, snapshots: GradientSnapshots, dense: Mapping[str, torch.Tensor], done: Future[None] | None
    ) -> None:
        checked = self._rounds < CHECKED_ROUNDS
        checksums = {name: checksum(gradient) for name, gradient in dense.items()} if checked else {}
        sent = SentGradients(snapshots, round=self._store.round, done=done, checksums=checksums)
        self._sent.update(dict.fromkeys(snapshots.gradients, sent))

    def _outdated(self, gradients: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Gradients that the store does not have, or not as they are here."""
        if not self._sent:
            return gradients
        round = self._store.round
        self._sent = {
            name: sent
            for name, sent in self._sent.items()
            if name in gradients and sent.round == round and sent.snapshots.is_unchanged(name, gradients[name])
        }
        return {name: gradient for name, gradient in gradients.items() if name not in self._sent}

    def _failed(self, gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Gradients whose push has ended and that the store does not have."""
        failed = {sent for sent in set(self._sent.values()) if sent.has_failed}
        return {name: gradients[name] for name, sent in self._sent.items() if sent in failed} if failed else {}

    def _find_changes(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Finds gradients that were changed by hand after their last hook, or by a backward pass after they were
        sent."""
        if not self._arrived:
            return
        round = self._store.round
        edited: list[str] = []
        accumulated: list[str] = []
        for name, gradient in gradients.items():
            arrived, sent = self._arrived.get(name), self._sent.get(name)
            if arrived is None or arrived.round != round:
                continue
            if not arrived.is_unchanged(gradient):
                edited.append(name)
            elif sent is not None and sent.round == round:
                if sent.snapshots.is_unchanged(name, gradient):
                    self._check_bytes(name, sent, gradient)
                else:
                    accumulated.append(name)
        if edited or accumulated:
            self._on_changed(edited, accumulated)

    def _on_changed(self, edited: list[str], accumulated: list[str]) -> None:
        """Stops pushing early, which is in vain for gradients that change after it. Raises UsageError for edits that
        other workers' gradients would take no part in."""
        if edited and self._refuses_edits:
            raise UsageError(
                f"gradients were changed after backward: {quoted(edited)}.{by_ddp(edited)} The workers' gradients are"
                " averaged in the store, after step() has sent them, so that this changes one worker's alone, where"
                " under DDP it would change the average. To clip the norm, call torch.nn.utils.clip_grad_norm_ with all"
                " parameters, or pass max_norm= to DistributedOptimizer. To change each worker's own gradients before"
                " they are averaged, register a hook on the parameters, or pass overlap='none': they count as step()"
                " finds them then (docs/pytorch.md, Clipping)"
            )
        self._stop()

    def _check_bytes(self, name: str, sent: SentGradients, gradient: torch.Tensor) -> None:
        if name in sent.checksums and checksum(gradient.to_dense()) != sent.checksums[name]:
            raise UsageError(
                f"the gradient of {name!r} was changed behind torch's back, as .data does, after it was sent: change it"
                " under torch.no_grad() in place of .data, or pass overlap='none', so that step() sends what is there"
            )

    @property
    def _refuses_edits(self) -> bool:
        """Whether gradients must be as backward left them. Where a step is one worker's, it may do with them what it
        likes, and with overlap='none' the program has said that it does."""
        return self._store.consistency.combines_workers and not self._takes_edits

    def _stop(self) -> None:
        """Leaves all sending to `complete`."""
        self._overlap = "none"
        remove(self._hooks, self._snapshot_hooks)

    def _dense(self, gradients: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        for kind in set(map(type, gradients.values())) - PLAIN:
            first = next(name for name, gradient in gradients.items() if type(gradient) is kind)
            if is_dtensor(kind):
                raise UsageError(f"the gradient of {first!r} is a DTensor, and the parameter is none")
        if not set(map(LAYOUT, gradients.values())) - STRIDED:
            return gradients
        sparse = [name for name, gradient in gradients.items() if gradient.layout is not torch.strided]
        if not self._densified:
            self._densified = True
            warn(
                f"the gradient of {quoted(sparse)} is sparse, and is sent as a dense one: the store trains dense"
                " tensors. sparse=False at the embedding makes it dense from the start. This is said once"
            )
        return {name: gradient.to_dense() for name, gradient in gradients.items()}
