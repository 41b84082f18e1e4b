"""Detects what was changed outside this package: gradients after they were sent, and weights outside step().

torch counts the changes of a tensor, in its version. In the first rounds bytes are compared as well, because a program
that changes tensors in a way that torch does not count, as .data does, does so from the start.

There may be thousands of gradients in a step. What is kept of them is in a few containers, therefore, and not in one
for each: these would have the garbage collector look through all that the program has, in the middle of a training.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import torch

from psstore import _core
from psstore.client.rule_state import Restored
from psstore.errors import UsageError
from psstore.torch.parameters import Trained
from psstore.torch.training import Training
from psstore.torch.warnings import dtype_name, quoted, warn

CHECKED_ROUNDS = 8
"""Number of first rounds in which bytes are compared, too."""

Checksum = int | torch.Tensor
"""Compared by !=, which waits for the device that a tensor is on."""

BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by the bytes of an element."""


def checksum(tensor: torch.Tensor) -> Checksum:
    """CRC-32C of a tensor's elements in their order, wherever they lie. On a CUDA device the sum of their bits, 0-d,
    which is made there in the order of the stream: nothing waits for it."""
    if tensor.is_cuda:
        bits = tensor.detach().contiguous().view(BITS[tensor.element_size()])
        return bits.sum(dtype=torch.int64)
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return _core.crc32c(memoryview(flat.view(torch.uint8).numpy())) if flat.numel() else 0


# ---- gradients ----


def version_of(gradient: torch.Tensor) -> int:
    """How often a gradient was changed. -1 for one that was made under inference_mode: torch does not count its
    changes, and does not let it change outside."""
    return -1 if gradient.is_inference() else gradient._version


def versions_of(gradients: Iterable[torch.Tensor]) -> list[int]:
    """`version_of` each."""
    seen = list(gradients)
    try:
        return [gradient._version for gradient in seen]
    except RuntimeError:  # one of them was made under inference_mode
        return [version_of(gradient) for gradient in seen]


class GradientSnapshot(NamedTuple):
    """What tells whether one gradient was changed since some moment of a round."""

    round: int
    gradient: torch.Tensor
    version: int

    @staticmethod
    def of(gradient: torch.Tensor, *, round: int) -> GradientSnapshot:
        return GradientSnapshot(round, gradient, version_of(gradient))

    def is_unchanged(self, gradient: torch.Tensor) -> bool:
        return self.gradient is gradient and self.version == version_of(gradient)


class GradientSnapshots:
    """What tells which of many gradients were changed since one moment, by the names of their tensors in the store."""

    def __init__(self, gradients: Mapping[str, torch.Tensor]) -> None:
        self.gradients = gradients
        self._versions = versions_of(gradients.values())
        self._version_of: dict[str, int] = {}
        """Versions by name, once somebody asks: of gradients that were all sent in one step nobody does."""

    def is_unchanged(self, name: str, gradient: torch.Tensor) -> bool:
        if not self._version_of:
            self._version_of = dict(zip(self.gradients, self._versions, strict=True))
        return self.gradients.get(name) is gradient and self._version_of[name] == version_of(gradient)

    def match(self, gradients: Mapping[str, torch.Tensor]) -> bool:
        """Whether these are all gradients that there were, and unchanged."""
        return gradients.keys() == self.gradients.keys() and all(
            self.is_unchanged(name, gradient) for name, gradient in gradients.items()
        )


class SentGradients:
    """Gradients that were sent together in a round."""

    def __init__(
        self,
        snapshots: GradientSnapshots,
        *,
        round: int,
        done: Future[None] | None,
        checksums: Mapping[str, Checksum],
    ) -> None:
        """`done`: None for a push that has ended well. `checksums`: empty in rounds in which bytes do not matter."""
        self.snapshots = snapshots
        self.round = round
        self.checksums = checksums
        self._done = done

    @property
    def has_failed(self) -> bool:
        """Whether the push has ended and the store does not have the gradients."""
        done = self._done
        return done is not None and done.done() and (done.cancelled() or done.exception() is not None)


# ---- weights ----


class ExternalUpdates:
    """Weights that were changed outside step() (model.load_state_dict, a clamp, an exchange for averaged weights).

    The store has the weights, and the parameters are copies of them. Call `remember` when they hold what the store
    has, and `reconcile` before a commit: rank 0's changes are published, the other workers' give way.
    """

    def __init__(self, training: Training, *, codecs: Mapping[str, str]) -> None:
        """`codecs`: what the parameters are pulled in, by name."""
        self._training = training
        self._codecs = codecs
        self._kinds: dict[str, tuple[torch.dtype, torch.device, torch.Size]] = {}
        self._checksums: dict[str, Checksum] = {}
        self._parameters: list[torch.Tensor] = []
        """All parameters, in the order that the next four have, too, which tell cheaply what may have changed."""
        self._counted: list[torch.Tensor] = []
        """What torch counts the changes of: of a part, the DTensor."""
        self._versions: list[int] = []
        self._pointers: list[int] = []
        self._shapes: list[torch.Size] = []
        self._rounds = 0
        self._has_warned = False

    def add(self, trained: Sequence[Trained]) -> None:
        """Watches these parameters, too, which hold what the store has now."""
        for one in trained:
            parameter = one.parameter
            self._kinds[one.name] = (parameter.dtype, parameter.device, parameter.shape)
            self._parameters.append(parameter)
            self._counted.append(one.owner)
        self.remember([*self._training.trained, *trained])

    def remember(self, trained: Sequence[Trained]) -> None:
        """Notes that all parameters hold what the store has, wherever they lie now."""
        self._pointers = [parameter.data_ptr() for parameter in self._parameters]
        self._shapes = [parameter.shape for parameter in self._parameters]
        self.remember_values(trained)

    def remember_values(self, trained: Sequence[Trained]) -> None:
        """Notes that all parameters hold what the store has, and lie where they lay in `reconcile`."""
        self._versions = [parameter._version for parameter in self._counted]
        if self._rounds < CHECKED_ROUNDS:
            self._checksums = {one.name: checksum(one.parameter) for one in trained}

    def reconcile(self) -> None:
        """Makes parameters and store agree again. Raises UsageError for a parameter of another shape, dtype or device,
        and for changes that torch does not count."""
        trained = self._training.trained
        suspects = self._suspects()
        for one in suspects:
            self._check_kind(one)
        if self._rounds < CHECKED_ROUNDS:
            names = {one.name for one in suspects}
            self._check_bytes([one for one in trained if one.name not in names])
            self._rounds += 1
        if suspects:
            self._reconcile(suspects)
            self._pointers = [parameter.data_ptr() for parameter in self._parameters]

    def _suspects(self) -> list[Trained]:
        parameters = self._parameters
        versions = [parameter._version for parameter in self._counted]
        pointers = [parameter.data_ptr() for parameter in parameters]
        same_shapes = all(parameter.shape == shape for parameter, shape in zip(parameters, self._shapes, strict=True))
        if versions == self._versions and pointers == self._pointers and same_shapes:
            return []
        looks = zip(
            self._training.trained, versions, self._versions, pointers, self._pointers, self._shapes, strict=True
        )
        return [
            one
            for one, version, old_version, pointer, old_pointer, shape in looks
            if version != old_version or pointer != old_pointer or one.parameter.shape != shape
        ]

    def _check_kind(self, one: Trained) -> None:
        dtype, device, shape = self._kinds[one.name]
        parameter = one.parameter
        was, now = (dtype, device, shape), (parameter.dtype, parameter.device, parameter.shape)
        if was != now:
            raise UsageError(
                f"parameter {one.name!r} was {_described(*was)} when the store took it, and is {_described(*now)} now:"
                " move, convert or reshape the model first, then make its optimizers"
            )

    def _check_bytes(self, trained: Sequence[Trained]) -> None:
        changed = [one.name for one in trained if checksum(one.parameter) != self._checksums[one.name]]
        if changed:
            raise UsageError(
                f"parameters were changed behind torch's back ({quoted(changed)}), as .data does, so that later changes"
                " would be missed: change them under torch.no_grad() in place of .data, or call publish() on every"
                " worker after it"
            )

    def _reconcile(self, suspects: Sequence[Trained]) -> None:
        edited = self._differing(suspects)
        if edited:
            self._warn([one.name for one, _ in edited])
        ours = {one.name: Restored(one.parameter.detach()) for one, _ in edited if self._training.counts(one)}
        if ours:
            self._training.store.restore(ours)
        for one, held in edited:
            if one.name not in ours:
                one.parameter.detach().copy_(held)

    def _differing(self, suspects: Sequence[Trained]) -> list[tuple[Trained, torch.Tensor]]:
        """Suspects that differ from what the store holds, and that. A suspect need not differ, as when averaged weights
        were exchanged for it and back; but it counts as different if others have changed the store meanwhile."""
        store = self._training.store
        names = [one.name for one in suspects]
        before = [store.version_of(name) for name in names]
        held = store.pull_many(
            names, out=[torch.empty_like(one.parameter) for one in suspects], codec=self._codecs or None
        )
        return [
            (one, value)
            for one, value, version in zip(suspects, held, before, strict=True)
            if store.version_of(one.name) != version or not torch.equal(one.parameter, value)
        ]

    def _warn(self, names: Sequence[str]) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        is_ours = self._training.is_first or self._training.has_parts
        what = "are published, and everybody's from this step on" if is_ours else "give way to rank 0's"
        warn(
            f"parameters were edited since the last step(): {quoted(names)}; these edits {what}. Call publish() on"
            " every worker after editing to have them everywhere at once. This is said once"
        )


def _described(dtype: torch.dtype, device: torch.device, shape: torch.Size) -> str:
    return f"{dtype_name(dtype)} {tuple(shape)} on {device}"
