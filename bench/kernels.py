"""Measures the fused reduce + update pass beside torch's fused optimizers and the memory's own speed.

    python -m bench.kernels [--elems 1048576] [--slots 24] [--repeats 7]

Axes: rule, number of contributions W. One thread. Each repeat walks over `slots` slices, together larger
than the caches. The bytes that a step must move are 4W+8 per parameter for SGD, 4W+16 with momentum,
4W+24 for Adam (fp32); the limit is that many bytes at the rate of the same machine's copy (read + write)
in the same run. The peer is torch.optim with fused=True on gradients that are summed already (W=1), and
at W=4 the same after torch has summed them into one.
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


def core_work(case: Case, num_slots: int, num_elems: int, num_workers: int) -> Work:
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
        )

    return work


def torch_work(case: Case, num_slots: int, num_elems: int, num_workers: int) -> Work:
    parameters = [torch.nn.Parameter(torch.from_numpy(value)) for value in arrays(num_slots, num_elems)]
    grads = [[torch.from_numpy(grad) for grad in arrays(num_slots, num_elems)] for _ in range(num_workers)]
    optimizers: list[torch.optim.Optimizer] = []
    for parameter in parameters:
        if case.rule == "sgd":
            optimizers.append(torch.optim.SGD([parameter], fused=True, momentum=case.hyper["momentum"]))
        else:
            optimizers.append(torch.optim.Adam([parameter], fused=True))

    def work(slot: int) -> None:
        total = grads[0][slot]
        if num_workers > 1:
            total = torch.add(total, grads[1][slot])
            for worker in grads[2:]:
                total.add_(worker[slot])
            total.div_(num_workers)
        parameters[slot].grad = total
        optimizers[slot].step()

    return work


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--elems", type=int, default=1 << 20)
    parser.add_argument("--slots", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)

    sources, targets = arrays(args.slots, args.elems), arrays(args.slots, args.elems)

    def copy(slot: int) -> None:
        np.copyto(targets[slot], sources[slot])

    print(f"{_core.instruction_sets()[0]}, torch {torch.__version__}, {args.slots} slices of {args.elems} floats,")
    print("one thread; the copy's rate counts what it reads and what it writes\n")
    print("| rule | W | bytes per parameter | GB/s | a copy's GB/s | times torch's speed |")
    print("|---|---|---|---|---|---|")
    for case in CASES:
        for num_workers in (1, 4):
            copied, ours, theirs = seconds_per_slice(
                copy,
                core_work(case, args.slots, args.elems, num_workers),
                torch_work(case, args.slots, args.elems, num_workers),
                num_slots=args.slots,
                repeats=args.repeats,
            )
            num_bytes = 4 * num_workers + 8 + 8 * len(state_names(case))
            rate, limit = num_bytes * args.elems / ours, 8 * args.elems / copied
            figures = f"{rate / 1e9:.1f} | {limit / 1e9:.1f} | {theirs / ours:.2f}"
            print(f"| {case} | {num_workers} | {num_bytes} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
