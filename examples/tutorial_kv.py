"""The classic parameter-server loop, spelled out with the key-value calls: pull, compute, push, commit.

    psstore run --shards 2 --workers 2 examples/tutorial_kv.py

Softmax regression on scikit-learn's handwritten digits, in numpy. Each worker has its own part of the data; the
store holds the weights, adds up what the workers push, and takes the step. There is no torch here: any array will
do.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from sklearn.datasets import load_digits  # type: ignore[import-untyped]

import psstore

Array = npt.NDArray[np.float32]

ROUNDS = 200

NUM_TRAINED = 1437
"""Images that are trained on; the 360 after them are for the test."""


def gradients(weights: Array, bias: Array, images: Array, labels: npt.NDArray[np.int64]) -> tuple[Array, Array]:
    """Of the mean cross-entropy of softmax(images @ weights + bias)."""
    scores = images @ weights + bias
    likely = np.exp(scores - scores.max(axis=1, keepdims=True))
    likely /= likely.sum(axis=1, keepdims=True)
    likely[np.arange(len(labels)), labels] -= 1.0
    likely /= len(labels)
    return images.T @ likely, likely.sum(axis=0)


def main() -> None:
    with psstore.connect() as store:
        # This worker's part of the data: every num_workers-th image.
        everything, digits = load_digits(return_X_y=True)
        images = (everything / 16).astype(np.float32)
        mine = slice(store.rank, NUM_TRAINED, store.num_workers)

        # Both parameters exist once, in the store. Whoever comes first creates them; the others find them there.
        store.create("weights", shape=(64, 10), rule="sgd")
        store.create("bias", shape=(10,), rule="sgd")

        # Our own memory for them, which every pull fills straight from the socket.
        weights = np.empty((64, 10), dtype=np.float32)
        bias = np.empty(10, dtype=np.float32)

        for _ in range(ROUNDS):
            # Pull the weights: at least as new as the last round that this worker ended.
            store.pull("weights", out=weights)
            store.pull("bias", out=bias)

            # Push gradients. The store keeps them aside until the round is decided.
            of_weights, of_bias = gradients(weights, bias, images[mine], digits[mine])
            store.push("weights", of_weights)
            store.push("bias", of_bias)

            # End the round. When all workers have, the store aggregates their gradients (the mean, added up in the
            # order of their ranks) and updates each parameter by its rule, with these hyper-parameters.
            store.commit({"lr": 0.5, "momentum": 0.9})

        store.pull("weights", out=weights)
        store.pull("bias", out=bias)
        right = (images[NUM_TRAINED:] @ weights + bias).argmax(axis=1) == digits[NUM_TRAINED:]
        print(f"version {store.version} of the weights recognises {right.mean():.1%} of the test images")


if __name__ == "__main__":
    main()
