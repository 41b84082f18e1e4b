"""The contestants of `gpu`'s way from the host and back: gradients in pinned memory → device → step → pinned memory.

What a shard does with frames that its socket has written into pinned memory, without the sockets.

    ingest   copy in 1   copy in 2   copy in 3
    compute              step 1      step 2      step 3
    read                             copy out 1  copy out 2 …
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bench.gpu_steps import Task
from bench.gpu_timing import Bench, Launch
from bench.kernel_work import optimizer_of
from bench.rule_case import state_names
from psstore import _core


@dataclass(frozen=True)
class Pipe:
    """A gradient on the host, what it becomes there, and what is between."""

    bench: Bench
    task: Task
    chunk_elems: int
    """4 MiB: the store's frames hold as much."""

    @property
    def num_bytes(self) -> int:
        """In one direction."""
        return 4 * self.task.num_elems

    def pinned(self) -> _core.Buffer:
        memory = self.bench.pinned(self.num_bytes)
        torch.frombuffer(memory, dtype=torch.float32).normal_()
        return memory

    def chunks(self) -> list[tuple[int, int]]:
        return chunks(self.task.num_elems, self.chunk_elems)


def chunks(total: int, most: int) -> list[tuple[int, int]]:
    """(beginning, size) of each piece when `total` elements or bytes are cut into pieces of `most`."""
    return [(begin, min(most, total - begin)) for begin in range(0, total, most)]


def pipelined(pipe: Pipe) -> Launch:
    """Ours: three queues, each of which is one chunk behind the one before it."""
    bench, device = pipe.bench, pipe.bench.device
    ingest, compute, read = (device.make_queue() for _ in range(3))
    gradient, result = pipe.pinned(), pipe.pinned()
    staged, value = (bench.zeros(pipe.task.num_elems) for _ in range(2))
    states = {name: bench.zeros(pipe.task.num_elems) for name in state_names(pipe.task.case)}
    steps = [(4 * begin, 4 * num, _batch(pipe.task, begin, num, staged, value, states)) for begin, num in pipe.chunks()]

    def launch() -> object:
        start = bench.queue.record()  # after what is timed has begun
        ingest.wait_for(start)
        for offset, num_bytes, batch in steps:
            ingest.copy_in(gradient, [(offset, staged.data_ptr() + offset, num_bytes)])
            compute.wait_for(ingest.record())
            batch.queue_reduce_update(compute)
            read.wait_for(compute.record())
            read.copy_out(result, [(offset, value.data_ptr() + offset, num_bytes)])
        bench.queue.wait_for(read.record())
        return states  # which batches know by their addresses alone

    return launch


def plain_copies(pipe: Pipe) -> Launch:
    """The limit: as many bytes in both directions at once, and nothing between."""
    bench, device = pipe.bench, pipe.bench.device
    ingest, read = device.make_queue(), device.make_queue()
    source, destination = pipe.pinned(), pipe.pinned()
    inwards, outwards = (bench.zeros(pipe.task.num_elems) for _ in range(2))
    parts = [(4 * begin, 4 * num) for begin, num in pipe.chunks()]

    def launch() -> None:
        start = bench.queue.record()
        for queue in (ingest, read):
            queue.wait_for(start)
        for offset, num_bytes in parts:
            ingest.copy_in(source, [(offset, inwards.data_ptr() + offset, num_bytes)])
            read.copy_out(destination, [(offset, outwards.data_ptr() + offset, num_bytes)])
        for queue in (ingest, read):
            bench.queue.wait_for(queue.record())

    return launch


def one_after_the_other(pipe: Pipe) -> Launch:
    """A peer: torch's copy in, fused step, copy out, without overlap."""
    bench = pipe.bench
    gradient, result = (torch.zeros(pipe.task.num_elems, pin_memory=bench.is_gpu) for _ in range(2))
    parameter = torch.nn.Parameter(bench.zeros(pipe.task.num_elems))
    parameter.grad = bench.zeros(pipe.task.num_elems)
    optimizer = optimizer_of(pipe.task.case, [parameter], fused=True)

    def launch() -> None:
        assert parameter.grad is not None
        parameter.grad.copy_(gradient, non_blocking=True)
        optimizer.step()
        result.copy_(parameter.detach(), non_blocking=True)

    return launch


def _batch(
    task: Task, begin: int, num_elems: int, staged: torch.Tensor, value: torch.Tensor, states: dict[str, torch.Tensor]
) -> _core.SliceBatch:
    batch = _core.SliceBatch()
    for first, count in chunks(num_elems, task.slice_elems):
        here = 4 * (begin + first)
        batch.add(
            _core.RULES[task.case.rule],
            task.case.hyper,
            step=2,
            dtype=_core.DTYPES["float32"],
            num_elems=count,
            value=value.data_ptr() + here,
            state={name: state.data_ptr() + here for name, state in states.items()},
            contributions=[(staged.data_ptr() + here, _core.DTYPES["float32"], 1.0, 0)],
            divisor=1.0,
        )
    return batch
