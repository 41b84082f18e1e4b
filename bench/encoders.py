"""A gradient on its way out: each encoder beside a loop that only copies as many bytes, and torch."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from bench.comparison import rates
from bench.harness import Series, alternate
from bench.kernel_inputs import BLOCK, ELEMS_PER_KEPT, READS, Floats, encode, is_encoding, payload_bytes
from bench.kernel_work import Work, compiled
from bench.report import Cell

HEADERS = (
    "encoder",
    "error feedback",
    "bytes per element",
    "GB/s: median (min–max)",
    "copy loop's GB/s",
    "of the limit",
    "× torch",
    "CPU s per GB",
)

OURS, LIMIT, TORCH = "psstore", "copy loop", "torch"


@dataclass(frozen=True)
class EncoderTask:
    encoding: str
    num_slots: int
    num_elems: int

    def __str__(self) -> str:
        return f"encode {self.encoding}"

    @property
    def has_residual(self) -> bool:
        """What is lost is sent later, as clients do with encodings."""
        return is_encoding(self.encoding)

    @property
    def bytes_per_element(self) -> float:
        """The source read, the residual read and written, the payload written."""
        return 4 + 8 * self.has_residual + payload_bytes(self.encoding, self.num_elems) / self.num_elems

    def sources(self) -> list[Floats]:
        """One for each slice."""
        random = np.random.default_rng(0).standard_normal(self.num_elems, dtype=np.float32)
        return [np.roll(random, slot) for slot in range(self.num_slots)]

    def residuals(self) -> list[Floats]:
        """Of each slice, before anything was lost."""
        return [np.zeros(self.num_elems, np.float32) for _ in range(self.num_slots)] if self.has_residual else []


def tasks(num_slots: int, num_elems: int) -> list[EncoderTask]:
    return [EncoderTask(encoding, num_slots, num_elems) for encoding in READS if encoding != "float32"]


def measure(task: EncoderTask, *, rounds: int) -> dict[str, Series]:
    torch.set_num_threads(1)
    sources = task.sources()
    works = {OURS: core_work(task, sources, task.residuals()), TORCH: torch_work(task, sources, task.residuals())}
    if shutil.which("cc"):
        works[LIMIT] = copy_work(task, sources, task.residuals())
    # Nobody begins where another has just been.
    turns = {
        name: _walk(work, first_slot=number * task.num_slots // len(works), num_slots=task.num_slots)
        for number, (name, work) in enumerate(works.items())
    }
    return alternate(turns, warm_up=task.num_slots, rounds=rounds, progress=str(task))


def _walk(work: Work, *, first_slot: int, num_slots: int) -> Callable[[], None]:
    slot = first_slot

    def turn() -> None:
        nonlocal slot
        work(slot % num_slots)
        slot += 1

    return turn


def row(task: EncoderTask, found: dict[str, Series]) -> list[Cell]:
    num_bytes = task.bytes_per_element * task.num_elems
    limit = found[LIMIT].median if LIMIT in found else None
    return [
        task.encoding,
        "yes" if task.has_residual else "–",
        f"{task.bytes_per_element:.4g}",
        rates(found[OURS], num_bytes),
        limit and num_bytes / limit / 1e9,
        limit and limit / found[OURS].median,
        found[TORCH].median / found[OURS].median,
        found[OURS].cpu_s_per_gb(num_bytes),
    ]


# ---- contestants ----


def core_work(task: EncoderTask, sources: Sequence[Floats], residuals: Sequence[Floats]) -> Work:
    payload = np.empty((task.num_slots, payload_bytes(task.encoding, task.num_elems)), np.uint8)
    return lambda slot: encode(task.encoding, sources[slot], payload[slot], residuals[slot] if residuals else None)


def copy_work(task: EncoderTask, sources: Sequence[Floats], residuals: Sequence[Floats]) -> Work:
    read = READS[task.encoding]
    loop = compiled("copy_loop", WRITE=read.c_type, ELEMS=read.elems, RESIDUAL=int(task.has_residual))
    payload = np.empty((task.num_slots, payload_bytes(task.encoding, task.num_elems)), np.uint8)

    def work(slot: int) -> None:
        arrays = (sources, residuals or sources, payload)
        pointers = [ctypes.c_void_p(array[slot].ctypes.data) for array in arrays]
        loop(*pointers, ctypes.c_int64(task.num_elems))

    return work


def torch_work(task: EncoderTask, sources: Sequence[Floats], residuals: Sequence[Floats]) -> Work:
    """1-bit codes are left as bytes: torch has nothing that packs them."""
    tensors = [torch.from_numpy(source) for source in sources]
    if not task.has_residual:
        outs = [torch.empty(task.num_elems, dtype=getattr(torch, task.encoding)) for _ in tensors]
        return lambda slot: outs[slot].copy_(tensors[slot])
    lost = [torch.from_numpy(residual) for residual in residuals]
    work = {"int8": _int8, "sign": _sign, "topk": _topk}[task.encoding]
    return lambda slot: work(lost[slot].add_(tensors[slot]))


Payload = tuple[torch.Tensor, torch.Tensor]


def _int8(x: torch.Tensor) -> Payload:
    """The payload; x becomes what it lost."""
    blocks = x.view(-1, BLOCK)
    scales = blocks.abs().amax(1, keepdim=True).div_(127)
    codes = torch.div(blocks, scales).round_().to(torch.int8)
    blocks.sub_(torch.mul(codes, scales))
    return scales, codes


def _sign(x: torch.Tensor) -> Payload:
    blocks = x.view(-1, BLOCK)
    scales = blocks.abs().mean(1, keepdim=True)
    negative = blocks.signbit()
    blocks.sub_(torch.where(negative, -scales, scales))
    return scales, negative


def _topk(x: torch.Tensor) -> Payload:
    indices = x.abs().topk(x.numel() // ELEMS_PER_KEPT, sorted=False).indices
    values = x[indices]
    x[indices] = 0
    return indices, values
