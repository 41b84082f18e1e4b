"""Measures the fused reduce + update pass, and the pass that makes norms, beside torch and the memory's own speed.

    OPENBLAS_NUM_THREADS=1 python -m bench.kernels [--elems 1048576] [--slots 24] [--repeats 7]

Axes: rule, number of contributions W. One thread. Each repeat walks over `slots` slices, together larger
than the caches. The bytes that a step must move are 4W+8 per parameter for SGD, 4W+16 with momentum,
4W+24 for Adam (fp32); the limit is that many bytes at the rate of the same machine's copy (read + write)
in the same run. The peer is torch.optim with fused=True on gradients that are summed already (W=1), and
at W=4 the same after torch has summed them into one. The last column is a step with a scale other than 1
in units of the step without.

The pass of the norms reads 4W bytes per parameter and writes nothing; its limit is the rate of torch's sum of
one array, its peers are torch.linalg.vector_norm and numpy's vdot after torch has summed them into one. Those
add the squares in fp32 where ours are added in fp64; torch's norm in fp64 is the last column.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from bench.parity import Array, Case, state_names
from psstore import _core

CASES = (
    Case("sgd", {}),
    Case("sgd", {"momentum": 0.9}),
    Case("adam", {}),
)


WORKERS = (1, 4)

Work = Callable[[int], None]
"""Does one step on the slice of that number."""


def seconds_per_slice(*works: Work, num_slots: int, repeats: int) -> list[float]:
    """Median of each. The works take turns, so that what else the machine does slows all of them alike."""
    times: list[list[float]] = [[] for _ in works]
    for repeat in range(repeats + 1):
        for work, found in zip(works, times, strict=True):
            begin = time.perf_counter()
            for slot in range(num_slots):
                work(slot)
            if repeat > 0:  # the first one warms up
                found.append((time.perf_counter() - begin) / num_slots)
    return [statistics.median(found) for found in times]


def arrays(num_slots: int, num_elems: int) -> list[Array]:
    random = np.random.default_rng(0)
    template = random.standard_normal(num_elems).astype(np.float32)
    return [template + np.float32(slot) for slot in range(num_slots)]


def core_work(case: Case, num_slots: int, num_elems: int, num_workers: int, *, scale: float = 1.0) -> Work:
    values = arrays(num_slots, num_elems)
    grads = [arrays(num_slots, num_elems) for _ in range(num_workers)]
    states = [{name: np.zeros_like(values[0]).data for name in state_names(case)} for _ in range(num_slots)]
    dtype = _core.DTYPES["float32"]

    def work(slot: int) -> None:
        _core.reduce_update(
            _core.RULES[case.rule],
            case.hyper,
            step=2,
            value=values[slot].data,
            state=states[slot],
            contributions=[(worker[slot].data, dtype, 1.0) for worker in grads],
            divisor=float(num_workers),
            dtype=dtype,
            scale=scale,
        )

    return work


def core_squares(num_slots: int, num_elems: int, num_workers: int) -> Work:
    grads = [arrays(num_slots, num_elems) for _ in range(num_workers)]
    dtype = _core.DTYPES["float32"]

    def work(slot: int) -> None:
        _core.reduced_squares(
            num_elems=num_elems,
            contributions=[(worker[slot].data, dtype, 1.0) for worker in grads],
            divisor=float(num_workers),
            dtype=dtype,
        )

    return work


def torch_work(case: Case, num_slots: int, num_elems: int, num_workers: int) -> Work:
    parameters = [torch.nn.Parameter(torch.from_numpy(value)) for value in arrays(num_slots, num_elems)]
    summed = torch_sum(num_slots, num_elems, num_workers)
    optimizers: list[torch.optim.Optimizer] = []
    for parameter in parameters:
        if case.rule == "sgd":
            optimizers.append(torch.optim.SGD([parameter], fused=True, momentum=case.hyper["momentum"]))
        else:
            optimizers.append(torch.optim.Adam([parameter], fused=True))

    def work(slot: int) -> None:
        parameters[slot].grad = summed(slot)
        optimizers[slot].step()

    return work


def torch_norm(num_slots: int, num_elems: int, num_workers: int, dtype: torch.dtype) -> Work:
    summed = torch_sum(num_slots, num_elems, num_workers)

    def work(slot: int) -> None:
        torch.linalg.vector_norm(summed(slot), dtype=dtype)

    return work


def numpy_squares(num_slots: int, num_elems: int, num_workers: int) -> Work:
    summed = torch_sum(num_slots, num_elems, num_workers)

    def work(slot: int) -> None:
        total = summed(slot).numpy()
        np.vdot(total, total)

    return work


def torch_sum(num_slots: int, num_elems: int, num_workers: int) -> Callable[[int], torch.Tensor]:
    """The mean of the workers' gradients for a slice; the gradient itself if there is one."""
    grads = [[torch.from_numpy(grad) for grad in arrays(num_slots, num_elems)] for _ in range(num_workers)]

    def summed(slot: int) -> torch.Tensor:
        total = grads[0][slot]
        if num_workers > 1:
            total = torch.add(total, grads[1][slot])
            for worker in grads[2:]:
                total.add_(worker[slot])
            total.div_(num_workers)
        return total

    return summed


def copy_work(num_slots: int, num_elems: int) -> Work:
    sources, targets = arrays(num_slots, num_elems), arrays(num_slots, num_elems)

    def work(slot: int) -> None:
        np.copyto(targets[slot], sources[slot])

    return work


def read_work(num_slots: int, num_elems: int) -> Work:
    sources = [torch.from_numpy(source) for source in arrays(num_slots, num_elems)]

    def work(slot: int) -> None:
        sources[slot].sum()

    return work


def print_steps(num_slots: int, num_elems: int, repeats: int) -> None:
    print("| rule | W | bytes per parameter | GB/s | a copy's GB/s | times torch's speed | scaled |")
    print("|---|---|---|---|---|---|---|")
    for case in CASES:
        for num_workers in WORKERS:
            copied, ours, scaled, theirs = seconds_per_slice(
                copy_work(num_slots, num_elems),
                core_work(case, num_slots, num_elems, num_workers),
                core_work(case, num_slots, num_elems, num_workers, scale=0.5),
                torch_work(case, num_slots, num_elems, num_workers),
                num_slots=num_slots,
                repeats=repeats,
            )
            num_bytes = 4 * num_workers + 8 + 8 * len(state_names(case))
            rate, limit = num_bytes * num_elems / ours, 8 * num_elems / copied
            figures = f"{rate / 1e9:.1f} | {limit / 1e9:.1f} | {theirs / ours:.2f} | {scaled / ours:.2f}"
            print(f"| {case} | {num_workers} | {num_bytes} | {figures} |", flush=True)


def print_norms(num_slots: int, num_elems: int, repeats: int) -> None:
    print("| pass | W | bytes per parameter | GB/s | a sum's GB/s | times torch's speed | numpy's | torch's in fp64 |")
    print("|---|---|---|---|---|---|---|---|")
    for num_workers in WORKERS:
        read, ours, *theirs = seconds_per_slice(
            read_work(num_slots, num_elems),
            core_squares(num_slots, num_elems, num_workers),
            torch_norm(num_slots, num_elems, num_workers, torch.float32),
            numpy_squares(num_slots, num_elems, num_workers),
            torch_norm(num_slots, num_elems, num_workers, torch.float64),
            num_slots=num_slots,
            repeats=repeats,
        )
        rate, limit = 4 * num_workers * num_elems / ours, 4 * num_elems / read
        speeds = " | ".join(f"{peer / ours:.2f}" for peer in theirs)
        figures = f"{rate / 1e9:.1f} | {limit / 1e9:.1f} | {speeds}"
        print(f"| squares | {num_workers} | {4 * num_workers} | {figures} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--elems", type=int, default=1 << 20)
    parser.add_argument("--slots", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)

    print(f"{_core.instruction_sets()[0]}, torch {torch.__version__}, {args.slots} slices of {args.elems} floats,")
    print("one thread; the copy's rate counts what it reads and what it writes\n")
    print_steps(args.slots, args.elems, args.repeats)
    print()
    print_norms(args.slots, args.elems, args.repeats)


if __name__ == "__main__":
    main()
