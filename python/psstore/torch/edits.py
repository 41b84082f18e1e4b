"""Weights that were edited outside step(): noticed, and made everybody's.

The store has the weights; the parameters are copies of them. Whoever edits a copy (model.load_state_dict, a clamp, an
exchange for averaged weights) is noticed before the next commit: rank 0's edit is published, any other gives way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from psstore import _core
from psstore.client.rule_state import Restored
from psstore.errors import UsageError
from psstore.torch.parameters import Trained
from psstore.torch.training import Training
from psstore.torch.warnings import dtype_name, quoted, warn

CHECKED_ROUNDS = 8
"""Rounds in which the bytes are looked at too. Who edits in a way that torch does not count does so from the start."""


class Edits:
    """Of the parameters that the store trains. `note` when they hold what the store has, `settle` before a commit."""

    def __init__(self, training: Training, *, codecs: Mapping[str, str]) -> None:
        """`codecs`: what the parameters are pulled in, by name."""
        self._training = training
        self._codecs = codecs
        self._kinds: dict[str, tuple[torch.dtype, torch.device, torch.Size]] = {}
        self._checksums: dict[str, Checksum] = {}
        self._parameters: list[torch.Tensor] = []
        """All, in their order; so are the three that tell cheaply whether one may have been changed."""
        self._versions: list[int] = []
        self._pointers: list[int] = []
        self._shapes: list[torch.Size] = []
        self._rounds = 0
        self._told = False

    def begin(self, trained: Sequence[Trained]) -> None:
        """These, too, are now as the store has them, from the first time on."""
        for name, parameter, _ in trained:
            self._kinds[name] = (parameter.dtype, parameter.device, parameter.shape)
            self._parameters.append(parameter)
        self.note([*self._training.trained, *trained])

    def note(self, trained: Sequence[Trained]) -> None:
        """All parameters are now as the store has them, wherever they lie."""
        self._pointers = [parameter.data_ptr() for parameter in self._parameters]
        self._shapes = [parameter.shape for parameter in self._parameters]
        self.note_written(trained)

    def note_written(self, trained: Sequence[Trained]) -> None:
        """All parameters are now as the store has them, where they were in `settle`."""
        self._versions = [parameter._version for parameter in self._parameters]
        if self._rounds < CHECKED_ROUNDS:
            self._checksums = {name: checksum(parameter) for name, parameter, _ in trained}

    def settle(self) -> None:
        """Makes parameters and store agree again, if an edit came between. Raises UsageError for a parameter of
        another shape, dtype or device, and for edits that torch does not count."""
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
        versions = [parameter._version for parameter in parameters]
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
        """A suspect may hold what it held, as when averaged weights were exchanged for it and back."""
        edited = self._differing(suspects)
        if edited:
            self._tell([one.name for one, _ in edited])
        if self._training.is_first:
            self._training.store.restore({one.name: Restored(one.parameter.detach()) for one, _ in edited})
        else:
            for one, held in edited:
                one.parameter.detach().copy_(held)

    def _differing(self, suspects: Sequence[Trained]) -> list[tuple[Trained, torch.Tensor]]:
        """With what the store holds. Where others have changed that meanwhile, a suspect can't be cleared."""
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

    def _tell(self, names: Sequence[str]) -> None:
        if self._told:
            return
        self._told = True
        what = "are published, and everybody's from this step on" if self._training.is_first else "give way to rank 0's"
        warn(
            f"parameters were edited since the last step(): {quoted(names)}; these edits {what}. Call publish() on"
            " every worker after editing to have them everywhere at once. This is said once"
        )


def publish(training: Training, trained: Sequence[Trained]) -> None:
    """Rank 0's parameters, as they are now, become the store's. The caller's to pull, after a barrier."""
    if training.is_first:
        training.store.restore({one.name: Restored(one.parameter.detach()) for one in trained})


Checksum = int | torch.Tensor
"""Compared by !=, which waits for a device that a tensor is on."""

BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by the bytes of an element."""


def checksum(tensor: torch.Tensor) -> Checksum:
    """CRC-32C of its elements in their order, wherever they lie. On a CUDA device the sum of their bits, 0-d, which is
    made there in the order of the stream: nothing waits for it."""
    if tensor.is_cuda:
        bits = tensor.detach().contiguous().view(BITS[tensor.element_size()])
        return bits.sum(dtype=torch.int64)
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return _core.crc32c(memoryview(flat.view(torch.uint8).numpy())) if flat.numel() else 0


def _described(dtype: torch.dtype, device: torch.device, shape: torch.Size) -> str:
    return f"{dtype_name(dtype)} {tuple(shape)} on {device}"
