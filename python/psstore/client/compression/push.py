"""Encoders of pushes, and residuals: what codecs lost of a push, which is added to the next one.

Error feedback: Seide et al. 2014 (1-bit SGD); Karimireddy et al. 2019 (arXiv:1901.09847) for why it converges. What a
round lost is its tensor's *residual*, here, on the worker that encodes. It changes once in a round:

    settled ──push──► pending ──push again──► pending, made anew from settled
       ▲                 │
       └── counted ──────┴── not counted (late, skipped, not named in the commit): dropped

So a round that does not count leaves no trace: its gradients are lost as without a codec, and the residual is what it
was before. It is kept where it was encoded last, in main memory or on a device.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from psstore import _core
from psstore.client.arrays import Bytes, Floats, Source, converted
from psstore.client.device.arrays import DeviceFloats, Kept, OnDevice, place_of
from psstore.codec.codecs import Codec
from psstore.types import ITEM_BYTES, Tensor


class Residual:
    """The residual of one tensor, in two buffers: what is settled stays until a round is known to count."""

    def __init__(self) -> None:
        self.settled: Kept | None = None
        """None: zeros."""
        self.pending: Kept | None = None
        self.loss_scale = 1.0
        """Factor of `settled`: the loss scale of the gradients that left it."""
        self._spare: Kept | None = None

    def room(self, place: _core.Device | None) -> Kept | None:
        """Returns floats on that device that a push may make pending; None: there are none yet."""
        for one in (self.pending, self._spare):
            if one is not None and place_of(one) is place:
                return one
        return None

    def begin(self, room: Kept, loss_scale: float | None) -> np.float32:
        """Begins a push, which makes `room` pending. `loss_scale`: of its gradients; None: that of the last. Returns
        the factor for what is settled."""
        self.pending, self._spare = room, None
        return np.float32(1.0 if loss_scale is None else loss_scale / self.loss_scale)

    def settle(self, *, counted: bool, loss_scale: float) -> None:
        """Ends a round. `loss_scale`: of the gradients that were encoded."""
        if counted and self.pending is not None:
            self.settled, self.pending = self.pending, self.settled
            self.loss_scale = loss_scale
        if self.pending is not None:
            self._spare, self.pending = self.pending, None


class Encoder:
    """Makes the codec's bytes for one push of one tensor, from values and residual: slice by slice, each once."""

    def __init__(
        self, tensor: Tensor, values: Floats, codec: Codec, settled: Floats | None, factor: np.float32, pending: Floats
    ) -> None:
        """The payloads say values + factor * settled; `pending` becomes what they lack."""
        bounds = map(tensor.bounds, range(len(tensor.shards)))
        self.payload: Bytes = np.empty(sum(codec.num_bytes(end - begin) for begin, end in bounds), np.uint8)
        """Slice after slice; undefined where none was encoded yet."""
        self._tensor = tensor
        self._values = values
        self._codec = codec
        self._settled = settled
        self._factor = factor
        self._pending = pending

    def encode(self, index: int, out: Bytes) -> None:
        """Slice `index`, into its part of the payload."""
        begin, end = self._tensor.bounds(index)
        residual = self._pending[begin:end]
        if self._settled is None:
            residual.fill(0.0)
        else:
            np.multiply(self._settled[begin:end], self._factor, out=residual)
        kept = self._codec.num_kept(end - begin)
        _core.encode_slice(_core.DTYPES[self._codec.dtype], self._values[begin:end], residual, out, kept)


class DeviceEncoder:
    """Tells a device how to encode one push of one tensor whose values it holds."""

    def __init__(
        self,
        tensor: Tensor,
        values: OnDevice,
        codec: Codec,
        settled: DeviceFloats | None,
        factor: np.float32,
        pending: DeviceFloats,
    ) -> None:
        self._tensor = tensor
        self._values = values
        self._codec = codec
        self._settled = settled
        self._factor = float(factor)
        self._pending = pending

    def slice(self, index: int) -> tuple[int, int, int, int, int, int, float, int]:
        """Slice `index`, as `Queue.encode_out` takes it."""
        begin, end = self._tensor.bounds(index)
        return (
            _core.DTYPES[self._codec.dtype],
            end - begin,
            self._codec.num_kept(end - begin),
            self._values.pointer + ITEM_BYTES[self._values.dtype] * begin,
            _core.DTYPES[self._values.dtype],
            0 if self._settled is None else self._settled.pointer + 4 * begin,
            self._factor,
            self._pending.pointer + 4 * begin,
        )


class Residuals:
    """The residuals of one client, by tensor. Used on its loop only."""

    def __init__(self) -> None:
        self._residuals: dict[int, Residual] = {}
        self.has_pending = False
        """Something was encoded in the round that is going on."""

    def elsewhere(self, tensors: Sequence[Tensor], place: _core.Device | None) -> list[Residual]:
        """Returns the residuals of these tensors that are settled, but not there."""
        held = (self._residuals.get(tensor.id) for tensor in tensors)
        return [
            one for one in held if one is not None and one.settled is not None and place_of(one.settled) is not place
        ]

    # A push REQUIRES that the tensors are stored as float32, and that none of their residuals is elsewhere.

    def encoder(self, tensor: Tensor, given: Source, codec: Codec, *, loss_scale: float | None) -> Encoder:
        """Returns the encoder of a push from main memory."""
        residual = self._residuals.setdefault(tensor.id, Residual())
        room, settled = residual.room(None), residual.settled
        pending = np.empty(tensor.spec.num_elems, np.float32) if room is None else room
        assert not isinstance(settled, DeviceFloats), "it was brought here"
        assert not isinstance(pending, DeviceFloats), "there is room here"
        self.has_pending = True
        return Encoder(tensor, _as_floats(given), codec, settled, residual.begin(pending, loss_scale), pending)

    def device_encoders(
        self, tensors: Sequence[Tensor], given: Sequence[OnDevice], codecs: Sequence[Codec], *, loss_scale: float | None
    ) -> list[DeviceEncoder]:
        """Returns the encoders of a push from one device. Raises OutOfMemory; nothing has changed then."""
        device = given[0].device
        residuals = [self._residuals.get(tensor.id, Residual()) for tensor in tensors]
        rooms = [residual.room(device) for residual in residuals]
        new = iter(
            DeviceFloats.together(
                device, [t.spec.num_elems for t, room in zip(tensors, rooms, strict=True) if room is None]
            )
        )
        encoders = []
        for tensor, values, codec, residual, room in zip(tensors, given, codecs, residuals, rooms, strict=True):
            pending = next(new) if room is None else room
            settled = residual.settled
            assert not isinstance(settled, np.ndarray), "it was brought there"
            assert not isinstance(pending, np.ndarray), "there is room there"
            factor = residual.begin(pending, loss_scale)
            self._residuals[tensor.id] = residual
            encoders.append(DeviceEncoder(tensor, values, codec, settled, factor, pending))
        self.has_pending = True
        return encoders

    def settle(self, counted: Collection[int], *, loss_scale: float = 1.0) -> None:
        """Ends a round in which contributions to these tensors counted. `loss_scale`: as it was committed."""
        for tensor_id, residual in self._residuals.items():
            residual.settle(counted=tensor_id in counted, loss_scale=loss_scale)
        self.has_pending = False

    def drop_pending(self, tensor: Tensor) -> None:
        """Drops what was encoded of the tensor in this round."""
        residual = self._residuals.get(tensor.id)
        if residual is not None:
            residual.settle(counted=False, loss_scale=1.0)

    def settle_at_once(self, tensor: Tensor) -> None:
        """Settles what was encoded last of the tensor, which is no round's: it counts when it arrives, and is sent
        until it does. Nothing is kept of one that was dropped or overwritten meanwhile."""
        if (residual := self._residuals.get(tensor.id)) is not None:
            residual.settle(counted=True, loss_scale=1.0)

    def settled(self, tensors: Sequence[Tensor]) -> list[tuple[Tensor, Kept, float]]:
        """Returns the settled residuals of these tensors, and their loss scales."""
        held = ((tensor, self._residuals.get(tensor.id)) for tensor in tensors)
        return [
            (tensor, residual.settled, residual.loss_scale)
            for tensor, residual in held
            if residual is not None and residual.settled is not None
        ]

    def write(self, tensors: Sequence[Tensor], values: Sequence[Source | None]) -> None:
        """Makes these the settled residuals; None: zeros."""
        for tensor, given in zip(tensors, values, strict=True):
            self._residuals.pop(tensor.id, None)
            if given is not None:
                residual = self._residuals[tensor.id] = Residual()
                residual.settled = _as_floats(given).copy()

    def forget(self, tensors: Sequence[Tensor]) -> None:
        """Drops the residuals of tensors that are gone, or were made anew."""
        for tensor in tensors:
            self._residuals.pop(tensor.id, None)


def _as_floats(given: Source) -> Floats:
    if given.dtype == "float32":
        return given.data.view(np.float32)
    return converted(given.data, given.dtype, "float32").view(np.float32)
