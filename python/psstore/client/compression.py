"""What is pushed, in the bytes of a codec; and what the codecs lost, which is added to what is pushed next.

Error feedback: Seide et al. 2014 (1-bit SGD); Karimireddy et al. 2019 (arXiv:1901.09847) for why it converges. What a
round lost is its tensor's *residual*, here, on the worker that encodes. It changes once in a round:

    settled ──push──► pending ──push again──► pending, made anew from settled
       ▲                 │
       └── counted ──────┴── not counted (late, skipped, not named in the commit): dropped

So a round that does not count leaves no trace: its gradients are lost as without a codec, and the residual is what it
was before.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from psstore import _core
from psstore.client.arrays import Bytes, Source
from psstore.client.halves import converted
from psstore.codec.codecs import Codec
from psstore.types import Tensor

Floats = np.ndarray[Any, np.dtype[np.float32]]


class Residual:
    """Of one tensor. Two buffers: what is settled has to be there until a round is known to count."""

    def __init__(self) -> None:
        self.settled: Floats | None = None
        """None: zeros."""
        self.pending: Floats | None = None
        self.loss_scale = 1.0
        """`settled` is so many times the real one, as the gradients were that left it."""
        self._spare: Floats | None = None
        self._factor = np.float32(1.0)
        """From the settled one's loss scale to that of the push that is under way."""

    def begin(self, num_elems: int, loss_scale: float | None) -> None:
        """A push begins, of gradients of that loss scale; None: of the same."""
        pending = self.pending if self.pending is not None else self._spare
        self.pending, self._spare = pending if pending is not None else np.empty(num_elems, np.float32), None
        self._factor = np.float32(1.0 if loss_scale is None else loss_scale / self.loss_scale)

    def continued(self, begin: int, end: int) -> Floats:
        """That part of `pending`, as it was settled: to be encoded with."""
        assert self.pending is not None, "a push has begun"
        part = self.pending[begin:end]
        if self.settled is None:
            part.fill(0.0)
        else:
            np.multiply(self.settled[begin:end], self._factor, out=part)
        return part

    def settle(self, *, counted: bool, loss_scale: float) -> None:
        """`loss_scale`: of the gradients that were encoded."""
        if counted and self.pending is not None:
            self.settled, self.pending = self.pending, self.settled
            self.loss_scale = loss_scale
        if self.pending is not None:
            self._spare, self.pending = self.pending, None


class Encoder:
    """Of one push of one tensor: makes the codec's bytes of values and residual, slice by slice, each once."""

    def __init__(self, tensor: Tensor, values: Floats, codec: Codec, residual: Residual) -> None:
        bounds = map(tensor.bounds, range(len(tensor.shards)))
        self.payload: Bytes = np.empty(sum(codec.num_bytes(end - begin) for begin, end in bounds), np.uint8)
        """Slice after slice; undefined where none was encoded yet."""
        self._tensor = tensor
        self._values = values
        self._codec = codec
        self._residual = residual

    def encode(self, index: int, out: Bytes) -> None:
        """Slice `index`, into its part of the payload. What that lacks is pending then."""
        begin, end = self._tensor.bounds(index)
        _encode(self._codec, self._values[begin:end], self._residual.continued(begin, end), out)


class Compression:
    """The residuals of one client, by tensor. Used on its loop only."""

    def __init__(self) -> None:
        self._residuals: dict[int, Residual] = {}
        self.has_pending = False
        """Something was encoded in the round that is going on."""

    def encoder(self, tensor: Tensor, given: Source, codec: Codec, *, loss_scale: float | None) -> Encoder:
        """For a push of these values. REQUIRES: the tensor is stored as float32."""
        residual = self._residuals.setdefault(tensor.id, Residual())
        residual.begin(tensor.spec.num_elems, loss_scale)
        self.has_pending = True
        return Encoder(tensor, _as_floats(given), codec, residual)

    def settle(self, counted: Collection[int], *, loss_scale: float = 1.0) -> None:
        """A round is over, in which these tensors' contributions counted. `loss_scale`: as it was committed."""
        for tensor_id, residual in self._residuals.items():
            residual.settle(counted=tensor_id in counted, loss_scale=loss_scale)
        self.has_pending = False

    def drop_pending(self, tensor: Tensor) -> None:
        """What was encoded of the tensor in this round does not count."""
        residual = self._residuals.get(tensor.id)
        if residual is not None:
            residual.settle(counted=False, loss_scale=1.0)

    def settle_at_once(self, tensor: Tensor) -> None:
        """What was encoded last of the tensor is no round's: it counts when it arrives, and is sent until it does."""
        self._residuals[tensor.id].settle(counted=True, loss_scale=1.0)

    def read(self, tensors: Sequence[Tensor]) -> dict[str, Floats]:
        """Copies of what is settled, by name, of the tensors that have any; in units of real gradients."""
        held = ((tensor, self._residuals.get(tensor.id)) for tensor in tensors)
        return {
            tensor.spec.name: (residual.settled / np.float32(residual.loss_scale)).reshape(tensor.spec.shape)
            for tensor, residual in held
            if residual is not None and residual.settled is not None
        }

    def write(self, tensors: Sequence[Tensor], values: Sequence[Source | None]) -> None:
        """Makes these the settled residuals; None: zeros."""
        for tensor, given in zip(tensors, values, strict=True):
            self._residuals.pop(tensor.id, None)
            if given is not None:
                residual = self._residuals[tensor.id] = Residual()
                residual.settled = _as_floats(given).copy()

    def forget(self, tensors: Sequence[Tensor]) -> None:
        """They are gone, or others by now."""
        for tensor in tensors:
            self._residuals.pop(tensor.id, None)


def _as_floats(given: Source) -> Floats:
    if given.dtype == "float32":
        return given.data.view(np.float32)
    return converted(given.data, given.dtype, "float32").view(np.float32)


def _encode(codec: Codec, values: Floats, residual: Floats, out: Bytes) -> None:
    """One slice. `residual` becomes what the payload lacks."""
    dtype = _core.DTYPES[codec.dtype]
    if not codec.is_half:
        _core.encode_slice(dtype, values, residual, out, codec.num_kept(values.size))
        return
    wanted = values + residual
    _core.convert(wanted, _core.DTYPES["float32"], out, dtype)
    said = converted(out, codec.dtype, "float32").view(np.float32)
    np.subtract(wanted, said, out=residual, where=np.isfinite(said))
