"""Parameters that are frozen on this worker alone, and would stay behind without a word while others train them."""

from __future__ import annotations

from psstore.errors import UsageError
from psstore.torch.claims import claimed
from psstore.torch.parameters import some
from psstore.torch.stepping import Training
from psstore.torch.telling import warn
from psstore.torch.worker_step import gradient_name


class Frozen:
    """What an optimizer was told the names of, and nobody in this process trains."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._since = training.store.version
        self._num_steps = 0
        self._has_warned = False

    def check(self) -> None:
        """After a step that was a round; in the first, second, fourth, eighth, …, it looks. Raises UsageError in mode
        sync; in the others, where a worker may be steps ahead and have unfrozen a layer in time, it warns once.

        That the store has such a tensor proves nothing: it may have been trained before. A value newer than this
        optimizer does.
        """
        self._num_steps += 1
        is_power_of_two = self._num_steps & (self._num_steps - 1) == 0
        store = self._training.store
        if store.num_workers == 1 or not is_power_of_two or self._has_warned:
            return
        idle = self._training.names.all() - claimed(store)
        if not idle:
            return
        parameter_of = {stored: name for name in sorted(idle) for stored in (name, gradient_name(name))}
        known = [stored for stored in store.keys() if stored in parameter_of]
        values = store.pull_many(known, if_newer_than=self._since)
        trained = [parameter_of[stored] for stored, value in zip(known, values, strict=True) if value is not None]
        if not trained:
            return
        message = (
            f"parameter {some(trained)} is frozen on this worker (rank {store.rank}), and another worker trains it, so"
            " that this one's values are not the store's: what is trained and what is frozen must be alike on every"
            " worker"
        )
        if store.consistency.mode == "sync":
            raise UsageError(message)
        self._has_warned = True
        warn(f"{message}. If it is about to be unfrozen here, all is well")
