"""The contestants of `gpu`'s pushes in a codec: gradients in device memory → payloads in pinned memory."""

from __future__ import annotations

from dataclasses import dataclass

from bench.gpu_pipeline import chunks
from bench.gpu_timing import Bench, Launch
from psstore import _core
from psstore.client.device.batches import BATCH_BYTES
from psstore.codec.codecs import Codec
from psstore.partition.slicing import SLICE_BYTES

SLICE_ELEMS = SLICE_BYTES // 4
"""As a store cuts float32."""


@dataclass(frozen=True)
class Upload:
    """So many float32 on the device, and the codec that they are sent in."""

    bench: Bench
    codec: Codec
    num_elems: int

    @property
    def payload_bytes(self) -> int:
        return sum(self.codec.num_bytes(count) for _, count in self.slices())

    def slices(self) -> list[tuple[int, int]]:
        """(first element, their number) of each."""
        return chunks(self.num_elems, SLICE_ELEMS)


def encoded(upload: Upload) -> Launch:
    """Ours: a batch of slices is encoded, its payloads are copied, and the next one follows. What the codec leaves out
    is kept for the next round."""
    bench, codec = upload.bench, upload.codec
    gradient, lacking = bench.random(upload.num_elems, seed=0), bench.zeros(upload.num_elems)

    def encoding(begin: int, count: int) -> tuple[int, int, int, int, int, int, float, int]:
        kept = lacking.data_ptr() + 4 * begin
        source = gradient.data_ptr() + 4 * begin
        return (
            _core.DTYPES[codec.dtype],
            count,
            codec.num_kept(count),
            source,
            _core.DTYPES["float32"],
            kept,
            1.0,
            kept,
        )

    slices_of_batch = max(1, BATCH_BYTES // codec.num_bytes(SLICE_ELEMS))
    slices = [encoding(begin, count) for begin, count in upload.slices()]
    batches = [slices[first : first + slices_of_batch] for first in range(0, len(slices), slices_of_batch)]
    result = bench.pinned(BATCH_BYTES)

    def launch() -> object:
        for batch in batches:
            bench.queue.encode_out(result, batch)
        return gradient, lacking  # which batches know by their addresses alone

    return launch


def copied(bench: Bench, num_bytes: int) -> Launch:
    """So many bytes from the device to pinned memory, a batch at a time."""
    result = bench.pinned(BATCH_BYTES)
    source = bench.zeros(-(-num_bytes // 4))
    batches = chunks(num_bytes, BATCH_BYTES)

    def launch() -> None:
        for begin, size in batches:
            bench.queue.copy_out(result, [(0, source.data_ptr() + begin, size)])

    return launch
