"""Who trains rows beside a store, in this process and on one core: a loop in C, torch, FBGEMM and TensorFlow."""

from __future__ import annotations

import ctypes as c
import os
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import import_module
from itertools import cycle
from typing import Any

import numpy as np
import torch

from bench.harness import Turn, timed
from bench.kernel_work import compiled
from bench.row_work import DIM, EPS, RATE, Floats, Ids

CORES = 1
"""That each of them may use."""


class RowLoop:
    """Rows with their sums in a hash map in C, which are gathered and stepped with prefetching."""

    def __init__(self, num_rows: int) -> None:
        self._loop = compiled("row_loop", DIM=DIM)
        self._capacity = 1 << (2 * num_rows - 1).bit_length()
        self._keys, self._places = np.zeros(self._capacity, np.uint64), np.zeros(self._capacity, np.uint32)
        self._rows = np.zeros((num_rows, 2 * DIM), np.float32)
        self._call(0, np.arange(num_rows, dtype=np.uint64), self._rows)

    def gather(self, ids: Ids, out: Floats) -> None:
        self._call(1, ids, out)

    def step(self, ids: Ids, gradients: Floats) -> None:
        self._call(2, ids, gradients)

    def _call(self, mode: int, ids: Ids, floats: Floats) -> None:
        given, keys, places, rows, values = (
            c.c_void_p(one.ctypes.data) for one in (ids, self._keys, self._places, self._rows, floats)
        )
        mask, rate, eps = c.c_uint64(self._capacity - 1), c.c_float(RATE), c.c_float(EPS)
        self._loop(c.c_int32(mode), given, c.c_int64(len(ids)), keys, places, mask, rows, values, rate, eps)


def loop_turn(sets: Sequence[Ids], gradients: Floats, *, num_rows: int) -> Turn:
    loop, values, turns = RowLoop(num_rows), np.zeros_like(gradients), cycle(sets)

    def step() -> None:
        ids = next(turns)
        loop.gather(ids, values)
        loop.step(ids, gradients)

    return partial(timed, step)


def torch_turn(sets: Sequence[Ids], gradients: Floats, *, num_rows: int) -> Turn:
    """embedding(), and torch's Adagrad of a sparse gradient."""
    weight = torch.nn.Parameter(torch.zeros(num_rows, DIM))
    optimizer = torch.optim.Adagrad([weight], lr=RATE, eps=EPS)
    given = torch.from_numpy(gradients)
    turns = cycle(_as_torch(sets))

    def step() -> None:
        ids = next(turns)
        torch.nn.functional.embedding(ids, weight.detach())
        weight.grad = torch.sparse_coo_tensor(ids[None], given, (num_rows, DIM), check_invariants=False)
        optimizer.step()

    return partial(timed, step)


def fbgemm_turn(sets: Sequence[Ids], gradients: Floats, *, num_rows: int) -> Turn:
    """A bag for each id; the backward pass steps the rows, by one sum for each. Raises ImportError."""
    tables = import_module("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    rules = import_module("fbgemm_gpu.split_embedding_configs").EmbOptimType
    table = tables.SplitTableBatchedEmbeddingBagsCodegen(
        [(num_rows, DIM, tables.EmbeddingLocation.HOST, tables.ComputeDevice.CPU)],
        optimizer=rules.EXACT_ROWWISE_ADAGRAD,
        learning_rate=RATE,
        eps=EPS,
    )
    given, bounds = torch.from_numpy(gradients), torch.arange(len(gradients) + 1)
    turns = cycle(_as_torch(sets))
    return partial(timed, lambda: table(next(turns), bounds).backward(given))


def tensorflow_turn(sets: Sequence[Ids], gradients: Floats, *, num_rows: int) -> Turn:
    """`gather`, and TensorFlow's Adagrad of rows. Raises ImportError."""
    return partial(timed, tensorflow_step(sets, gradients, num_rows=num_rows, device="/device:CPU:0"))


@cache
def tensorflow() -> Any:
    """The module, which may use as many cores as others, and keeps to itself what it has to say. Raises ImportError."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    tf = import_module("tensorflow")
    tf.config.threading.set_intra_op_parallelism_threads(CORES)
    tf.config.threading.set_inter_op_parallelism_threads(CORES)
    return tf


def tensorflow_step(sets: Sequence[Ids], gradients: Floats, *, num_rows: int, device: str) -> Callable[[], None]:
    """Pulls rows of a table on that device, steps them, and waits for both. Raises ImportError."""
    tf = tensorflow()
    with tf.device(device):
        rows, sums = (tf.Variable(tf.zeros((num_rows, DIM)), trainable=False) for _ in range(2))

    @tf.function  # type: ignore[untyped-decorator]
    def pull(ids: Any) -> Any:
        with tf.device(device):
            return tf.gather(rows, ids)

    @tf.function  # type: ignore[untyped-decorator]
    def push(ids: Any, given: Any) -> Any:
        with tf.device(device):
            tf.raw_ops.ResourceSparseApplyAdagradV2(
                var=rows.handle, accum=sums.handle, lr=RATE, epsilon=EPS, grad=given, indices=ids
            )
            return tf.constant(0)

    given = tf.constant(gradients)
    turns = cycle([tf.constant(ids.astype(np.int64)) for ids in sets])

    def step() -> None:
        ids = next(turns)
        pull(ids).numpy()
        push(ids, given).numpy()

    return step


def _as_torch(sets: Sequence[Ids]) -> list[torch.Tensor]:
    return [torch.from_numpy(ids.astype(np.int64)) for ids in sets]
