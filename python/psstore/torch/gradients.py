"""What this worker contributes to a round: its gradients, pushed while backward is still at the layers before them.

A hook on each parameter takes its gradient when backward is done with it; small ones travel together. What counts is
the gradient as it is at `complete()`: one that was changed after its push is pushed again, which replaces the first.
On a GPU backward is only queued by then: the hook puts a fence behind it, in the stream that it runs on, for which the
gradient's copy waits, and neither this thread nor that stream (client/staging.py).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress

import torch
from torch.utils.hooks import RemovableHandle

from psstore.client.device_arrays import OnDevice, seen
from psstore.client.store import Store
from psstore.errors import StoreClosed, UsageError
from psstore.torch.edits import checksum
from psstore.torch.parameters import refuse_dtensor
from psstore.torch.sights import Sent, Sight, Sights
from psstore.torch.warnings import quoted, warn

BUCKET_BYTES = 1 << 19
"""Gradients are gathered up to this size before they are sent: two slices'. To send 200 layers of 4 kB one by one took
7 times as long as to send them together."""

PLAIN: frozenset[type] = frozenset([torch.Tensor, torch.nn.Parameter])
"""Kinds of gradients that are what they seem to be."""

CHECKED_ROUNDS = 8
"""Rounds in which the bytes are looked at too. Who changes gradients in a way that torch does not count does so from
the start."""


class Gradients:
    """The gradients of some parameters, under the names of their tensors in the store.

    Hooks do not keep it alive, and end with it. They may run in several threads, as backward does on several devices;
    the rest is for the thread that trains.
    """

    def __init__(self, store: Store, *, overlap: str) -> None:
        """`overlap`: 'backward' pushes while it runs, 'none' all in `complete()`, 'auto' what is best for each."""
        self._store = store
        self._overlap = overlap
        self._parameters: dict[str, torch.Tensor] = {}
        self._hooks: list[RemovableHandle] = []
        self._noting: list[RemovableHandle] = []
        """Of those that are sent by `complete`: in the first rounds these, too, are looked at for changes."""
        weakref.finalize(self, _remove, self._hooks, self._noting)
        self._lock = threading.Lock()
        """Orders the hooks; guards the four below."""
        self._arrived: dict[str, Sight] = {}
        """As its last hook saw it."""
        self._sent: dict[str, Sent] = {}
        """What it was last sent with."""
        self._bucket: dict[str, Sight] = {}
        self._on_device: dict[str, OnDevice] = {}
        """What of it is on a device, as its hook saw it."""
        self._bucket_bytes = 0
        self._counted = Sights({})
        """As the last `complete` or `withhold` saw them."""
        self._muted = 0
        """Depth of no_sync()."""
        self._codecs: dict[str, str] = {}
        """Of those that are not sent as they are."""
        self._loss_scale = 1.0
        """How many times the real ones gradients are, as far as is known before `complete`."""
        self._rounds = 0
        self._densified = False

    def watch(self, parameters: Mapping[str, torch.Tensor], *, codecs: Mapping[str, str]) -> None:
        """These contribute, too, by name in the store, each in its codec ('none': as it is)."""
        self._parameters.update(parameters)
        self._codecs.update({name: codec for name, codec in codecs.items() if codec != "none"})
        notes = self._is_several and self._rounds < CHECKED_ROUNDS
        for name, parameter in parameters.items():
            if self._is_early(parameter):
                self._hooks.append(_hook(weakref.WeakMethod(self._take), name, parameter))
            elif notes:
                self._noting.append(_hook(weakref.WeakMethod(self._note), name, parameter))

    def retire(self) -> None:
        """From now on, nothing is sent while backward runs."""
        with self._lock:
            self._stop()

    def expect_loss_scale(self, loss_scale: float) -> None:
        """The gradients to come are so many times the real ones, as far as is known."""
        self._loss_scale = loss_scale

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside it only accumulate; what they leave is pushed with the next one's."""
        self._muted += 1
        try:
            yield
        finally:
            self._muted -= 1

    def complete(self, *, rewritten: bool = False, loss_scale: float = 1.0) -> list[str]:
        """Pushes what the store does not have as it is here; returns the names of those that have a gradient. Blocks
        until all pushes to the store are acknowledged.

        `rewritten`: none is as it was pushed, though it may look so. `loss_scale`: they are so many times the real
        ones; what codecs kept back was brought to another scale if this was not expected. Raises UsageError for
        gradients that were changed behind torch's back, and what pushing raises; it may be called again.
        """
        gradients = self._present()
        self._counted = Sights(gradients)
        with self._lock:
            self._bucket.clear()
            self._on_device.clear()
            self._bucket_bytes = 0
            if rewritten:
                self._stop()
            if rewritten or (self._codecs and loss_scale != self._loss_scale):
                self._sent.clear()
            self._loss_scale = loss_scale
            self._look_for_changes(gradients)
            rest = self._outdated(gradients)
        self._send_rest(rest)
        self._store.settle()
        with self._lock:
            again = self._failed(gradients)
        if again:
            self._store.push_many(self._dense(again), codec=self._codecs or None, loss_scale=loss_scale)
        return list(gradients)

    def withhold(self) -> list[str]:
        """In place of `complete`, for gradients that are not to count: returns no names."""
        self._store.settle()
        self._counted = Sights(self._present())
        return []

    def unchanged(self) -> bool:
        """Whether the gradients are those of the last `complete` or `withhold` still."""
        return self._counted.hold(self._present())

    def forget(self) -> None:
        """The round is over: lets go of its gradients."""
        with self._lock:
            self._arrived.clear()
            self._sent.clear()
            self._counted = Sights({})
            self._rounds += 1
            if self._rounds == CHECKED_ROUNDS:
                _remove(self._noting)

    def residuals(self) -> dict[torch.Tensor, torch.Tensor]:
        """By parameter: what this worker's codecs have kept back so far."""
        held = self._store.residuals(list(self._codecs)) if self._codecs else {}
        return {self._parameters[name]: torch.from_numpy(value) for name, value in held.items()}

    def set_residuals(self, residuals: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Takes them over. Nothing was kept back of the parameters that are not named."""
        if self._codecs:
            self._store.set_residuals({name: residuals.get(self._parameters[name]) for name in self._codecs})

    # ---- while backward runs ----

    def _is_early(self, parameter: torch.Tensor) -> bool:
        """Whether its gradient is pushed while backward runs. A push into shared memory is a copy, by a processor that
        backward could use: with two workers on two cores, hooks and hand-overs between threads were a seventh of a
        step (docs/performance.md, Training). On one device it is a copy of a microsecond for a megabyte, and hooks are
        four fifths of what Python does for a step."""
        if self._overlap == "auto" and parameter.is_cuda:
            return not self._store.shares_device(parameter.detach())
        if self._overlap == "auto":
            return not (parameter.is_cpu and self._store.shares_memory)
        return self._overlap == "backward"

    def _take(self, name: str, parameter: torch.Tensor) -> None:
        """Called by the hooks. A transport error is not backward's: `complete` pushes again, and raises it."""
        gradient = parameter.grad
        if gradient is None:
            return  # another hook has used it up
        with self._lock:
            sight = self._arrived[name] = Sight.now(self._store.round, gradient)
            if self._muted or self._is_sent(name, sight):
                return
            if name not in self._bucket:
                self._bucket_bytes += parameter.nbytes
            self._bucket[name] = sight
            self._note_place(name, gradient)
            if self._bucket_bytes >= BUCKET_BYTES:
                gradients, on_device = self._emptied(sight.round)
                with suppress(StoreClosed):
                    self._send(gradients, on_device)

    def _note(self, name: str, parameter: torch.Tensor) -> None:
        """Called by the hooks of those that `complete` sends."""
        if parameter.grad is not None:
            with self._lock:
                self._arrived[name] = Sight.now(self._store.round, parameter.grad)

    def _note_place(self, name: str, gradient: torch.Tensor) -> None:
        (place,) = seen([gradient])
        if isinstance(place, OnDevice):
            self._on_device[name] = place

    def _is_sent(self, name: str, sight: Sight) -> bool:
        """It accumulates then: to send it again each time would be in vain."""
        sent = self._sent.get(name)
        return sent is not None and sent.round == sight.round and sent.sights.gradients[name] is sight.gradient

    def _emptied(self, round: int) -> tuple[dict[str, torch.Tensor], dict[str, OnDevice]]:
        """What was in the bucket, but for what another optimizer's step has left there from an earlier round."""
        bucket, self._bucket, self._bucket_bytes = self._bucket, {}, 0
        on_device, self._on_device = self._on_device, {}
        gradients = {name: sight.gradient for name, sight in bucket.items() if sight.round == round}
        return gradients, {name: place for name, place in on_device.items() if name in gradients}

    # ---- how ----

    def _present(self) -> dict[str, torch.Tensor]:
        """Every gradient that is there."""
        return {
            name: gradient for name, parameter in self._parameters.items() if (gradient := parameter.grad) is not None
        }

    def _send(self, gradients: Mapping[str, torch.Tensor], on_device: Mapping[str, OnDevice] | None = None) -> None:
        """Starts pushing them. `on_device`: those that a hook has seen there, on its stream."""
        if not gradients:
            return
        dense = self._dense(gradients)
        pushed = {**dense, **on_device} if on_device else dense
        done = self._store.start_push_many(pushed, codec=self._codecs or None, loss_scale=self._loss_scale)
        self._note_sent(Sights(gradients), dense, done)

    def _send_rest(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Pushes what `complete` found to be missing, and waits for it."""
        if not gradients:
            return
        dense = self._dense(gradients)
        self._store.push_many(dense, codec=self._codecs or None, loss_scale=self._loss_scale)
        known = self._counted
        self._note_sent(known if gradients is known.gradients else Sights(gradients), dense, None)

    def _note_sent(self, sights: Sights, dense: Mapping[str, torch.Tensor], done: Future[None] | None) -> None:
        checked = self._rounds < CHECKED_ROUNDS
        checksums = {name: checksum(gradient) for name, gradient in dense.items()} if checked else {}
        sent = Sent(sights, round=self._store.round, done=done, checksums=checksums)
        self._sent.update(dict.fromkeys(sights.gradients, sent))

    def _outdated(self, gradients: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Those that the store does not have, or not as they are here."""
        if not self._sent:
            return gradients
        round = self._store.round
        self._sent = {
            name: sent
            for name, sent in self._sent.items()
            if name in gradients and sent.round == round and sent.sights.holds(name, gradients[name])
        }
        return {name: gradient for name, gradient in gradients.items() if name not in self._sent}

    def _failed(self, gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Those whose push has ended without the store's having them. Many were sent together."""
        failed = {sent for sent in set(self._sent.values()) if sent.has_failed}
        return {name: gradients[name] for name, sent in self._sent.items() if sent in failed} if failed else {}

    def _look_for_changes(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Between the push and now."""
        if not self._arrived:
            return
        round = self._store.round
        edited: list[str] = []
        accumulated: list[str] = []
        for name, gradient in gradients.items():
            arrived, sent = self._arrived.get(name), self._sent.get(name)
            if arrived is None or arrived.round != round:
                continue
            if not arrived.is_still(gradient):
                edited.append(name)
            elif sent is not None and sent.round == round:
                if sent.sights.holds(name, gradient):
                    self._check_bytes(name, sent, gradient)
                else:
                    accumulated.append(name)
        if edited or accumulated:
            self._object(edited, accumulated)

    def _object(self, edited: list[str], accumulated: list[str]) -> None:
        """Some changed after their last hook, some between two: to push them early is in vain."""
        if edited and self._is_several:
            self._tell(edited)
        self._stop()

    def _check_bytes(self, name: str, sent: Sent, gradient: torch.Tensor) -> None:
        if name in sent.checksums and checksum(gradient.to_dense()) != sent.checksums[name]:
            raise UsageError(
                f"the gradient of {name!r} was changed behind torch's back, as .data does, after it was sent: change it"
                " under torch.no_grad() in place of .data, or pass overlap='none', so that step() sends what is there"
            )

    @property
    def _is_several(self) -> bool:
        """Whether a step is of all of several workers' gradients. Elsewhere, to clip one's own is right."""
        consistency = self._store.consistency
        return consistency.mode == "sync" and consistency.num_workers > 1

    def _tell(self, names: list[str]) -> None:
        sent = ", and from here on step() sends them, no longer backward" if self._hooks else ""
        warn(
            f"gradients were changed after backward: {quoted(names)}. They count as they are now{sent}. If this clips,"
            " here or in a framework: torch's clip_grad_norm_ clips this worker's gradient, not the average of all, as"
            " under DDP it would, and training goes another way; write optimizer.clip_grad_norm_(max_norm), of this"
            " optimizer, in its place (docs/pytorch.md, Clipping). This is said once"
        )

    def _stop(self) -> None:
        """From now on, all is sent by `complete`."""
        self._overlap = "none"
        _remove(self._hooks, self._noting)

    def _dense(self, gradients: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        for kind in set(map(type, gradients.values())) - PLAIN:
            first = next(name for name, gradient in gradients.items() if type(gradient) is kind)
            refuse_dtensor(f"the gradient of {first!r}", kind)
        sparse = [name for name, gradient in gradients.items() if gradient.layout is not torch.strided]
        if not sparse:
            return gradients
        if not self._densified:
            self._densified = True
            warn(
                f"the gradient of {quoted(sparse)} is sparse, and is sent as a dense one: the store trains dense"
                " tensors. sparse=False at the embedding makes it dense from the start. This is said once"
            )
        return {name: gradient.to_dense() for name, gradient in gradients.items()}


def _hook(
    taking: weakref.WeakMethod[Callable[[str, torch.Tensor], None]], name: str, parameter: torch.Tensor
) -> RemovableHandle:
    """Called when backward is done with this parameter's gradient."""

    def arrived(parameter: torch.Tensor) -> None:
        take = taking()
        if take is not None:
            take(name, parameter)

    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]
    return handle


def _remove(*kinds: list[RemovableHandle]) -> None:
    for hooks in kinds:
        for hook in hooks:
            hook.remove()
        hooks.clear()
