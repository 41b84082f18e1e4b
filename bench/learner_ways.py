"""How learners share what they have learned: through psstore, and as torchft and hivemind have it, if they are there.

All share the model every EVERY steps, whole unless psstore is to in fragments, and take the same outer step, so that
what differs is who carries it, in how many bytes, and who waits for whom.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import nn

import psstore
import psstore.torch
from bench.learner_gpt import MAX_NORM
from bench.processes import store_server

LEARNERS = 4

EVERY = 50
"""Steps after which all of the model was shared."""

OUTER: Mapping[str, Any] = {"lr": 0.9, "momentum": 0.8, "nesterov": True}
"""SGD's. With 8 windows in a step and 6e-3 the loss after 40 rounds was 1.77 with these and 1.76 with 1.0 and 0.6, and
1.88 with 0.7 and 0.9, which are usual for more rounds; after 120 rounds it was 1.535 with these, and 1.548 with 1.0
and 0.6."""

PATIENCE_S = 120.0
"""For a round, on a busy machine with a learner that is slow."""


class Member(Protocol):
    """A learner's part."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Whose learning rate is scheduled."""

    def step(self) -> None:
        """Takes a step with the gradient that is there, and a round if one is due."""

    def finish(self) -> None:
        """The model becomes the one that all have made."""

    def leave(self) -> None: ...


class Way(Protocol):
    """How learners share. Goes to their processes."""

    @property
    def name(self) -> str: ...

    def why_not(self) -> str | None:
        """Why it can't be tried here; None: it can."""

    def serve(self) -> AbstractContextManager[str]:
        """What they share through; yields where they find it."""

    def join(self, where: str, rank: int, model: nn.Module, inner: torch.optim.Optimizer) -> Member:
        """Called in the learner's process."""


def outer(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), **OUTER)


# ---- psstore ----


@dataclass(frozen=True)
class Psstore:
    """A store, over TCP as the others."""

    name: str
    options: Sequence[str] = ()
    """psstore-server's."""
    compression: str | None = "int8"
    fragments: int = 1
    """Which take turns; 1: the whole model is shared at once."""
    shares_gradients: bool = False
    """In each step, as data parallel training does; else learners are DiLoCo's."""

    def why_not(self) -> None: ...

    def serve(self) -> AbstractContextManager[str]:
        return store_server("tcp", 1, workers=LEARNERS, options=self.options)

    def join(self, where: str, rank: int, model: nn.Module, inner: torch.optim.Optimizer) -> Member:
        store = psstore.connect(where, rank=rank, transport="tcp", wait_s=PATIENCE_S)
        if self.shares_gradients:
            return StoreMember(
                store,
                psstore.torch.DistributedOptimizer(
                    inner, store, model.named_parameters(), max_norm=MAX_NORM, compression=self.compression
                ),
            )
        return StoreMember(
            store,
            psstore.torch.DiLoCo(
                model,
                inner,
                store,
                every=EVERY,
                fragments=self.fragments,
                outer=outer(model),
                compression=self.compression,
                max_norm=MAX_NORM,
            ),
        )


@dataclass
class StoreMember:
    store: psstore.Store
    optimizer: psstore.torch.DistributedOptimizer

    def step(self) -> None:
        self.optimizer.step()

    def finish(self) -> None:
        self.optimizer.synchronize()

    def leave(self) -> None:
        self.store.close()


DATA_PARALLEL = Psstore("data parallel", compression=None, shares_gradients=True)
DILOCO = Psstore("psstore, int8")
DILOCO_FLOAT32 = Psstore("psstore, float32", compression=None)
QUORUM = Psstore(
    f"psstore, int8, quorum of {LEARNERS - 1}",
    options=("--quorum", str(LEARNERS - 1), "--grace-s", "0.05", "--lost", "drop"),
)

# ---- others ----


@dataclass
class PeerMember:
    """What is ours around a peer: the same clipping, and its rounds where it does not count steps itself."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    share: Callable[[], None] | None
    """Takes a round; None: the optimizer's steps do when it is due."""
    leave: Callable[[], None]
    steps: int = 0

    def step(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        self.steps += 1
        if self.share and self.steps % EVERY == 0:
            self.share()

    def finish(self) -> None:
        """The last round has: it was after the last step."""


@dataclass(frozen=True)
class TorchFt:
    """torchft's DiLoCo over gloo, in float32: what it has for fewer bytes runs on a GPU only."""

    name: str = "torchft, gloo, float32"

    def why_not(self) -> str | None:
        return _missing("torchft")

    @contextlib.contextmanager
    def serve(self) -> Iterator[str]:
        lighthouse = import_module("torchft.coordination").LighthouseServer(
            bind="127.0.0.1:0", min_replicas=LEARNERS, join_timeout_ms=100
        )
        port = lighthouse.address().rpartition(":")[2]
        try:
            yield f"http://127.0.0.1:{port}"  # its own word names the host, which this network may not know
        finally:
            lighthouse.shutdown()

    def join(self, where: str, rank: int, model: nn.Module, inner: torch.optim.Optimizer) -> Member:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        patience = timedelta(seconds=PATIENCE_S)
        own = [import_module("torch.distributed").TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
        manager = import_module("torchft.manager").Manager(
            pg=import_module("torchft.process_group").ProcessGroupGloo(timeout=patience),
            load_state_dict=model.load_state_dict,
            state_dict=model.state_dict,
            min_replica_size=LEARNERS,
            use_async_quorum=False,
            timeout=patience,
            quorum_timeout=patience,
            rank=0,
            world_size=1,
            store_addr="127.0.0.1",
            store_port=own[0].port,
            lighthouse_addr=where,
            replica_id=str(rank),
            hostname="127.0.0.1",
        )
        shared = import_module("torchft.local_sgd").DiLoCo(manager, [model], inner, outer(model), sync_every=EVERY)
        shared.__enter__()

        def leave() -> None:
            shared.__exit__(None, None, None)
            manager.shutdown(wait=False)
            own.clear()  # the manager's servers need it until then

        return PeerMember(model, inner, None, leave)


@dataclass(frozen=True)
class Hivemind:
    """hivemind's averager of what learners' steps have taken from the values; each takes the outer step itself."""

    name: str = "hivemind, 8 bits"

    def why_not(self) -> str | None:
        return _missing("hivemind")

    @contextlib.contextmanager
    def serve(self) -> Iterator[str]:
        table = import_module("hivemind").DHT(host_maddrs=["/ip4/127.0.0.1/tcp/0"], start=True)
        try:
            yield str(table.get_visible_maddrs()[0])
        finally:
            table.shutdown()

    def join(self, where: str, rank: int, model: nn.Module, inner: torch.optim.Optimizer) -> Member:
        multiprocessing.set_start_method("fork", force=True)  # what it hands to processes of its own can't be pickled
        hivemind = import_module("hivemind")
        table = hivemind.DHT(initial_peers=[where], host_maddrs=["/ip4/127.0.0.1/tcp/0"], start=True)
        parameters = list(model.parameters())
        values = [one.detach().clone() for one in parameters]
        averager = hivemind.DecentralizedAverager(
            averaged_tensors=[torch.zeros_like(one) for one in values],
            dht=table,
            prefix="learners",
            target_group_size=LEARNERS,
            min_group_size=LEARNERS,
            compression=import_module("hivemind.compression").Uniform8BitQuantization(),
            start=True,
        )
        steps = outer(model)

        def share() -> None:
            with averager.get_tensors() as taken:
                for one, value, parameter in zip(taken, values, parameters, strict=True):
                    torch.sub(value, parameter.detach(), out=one)
            if averager.step(timeout=PATIENCE_S) is None:
                raise TimeoutError(f"hivemind found no {LEARNERS} learners within {PATIENCE_S:g} s")
            with averager.get_tensors() as mean:
                for one, value, parameter in zip(mean, values, parameters, strict=True):
                    parameter.detach().copy_(value)
                    parameter.grad = one.clone()
            steps.step()
            for value, parameter in zip(values, parameters, strict=True):
                value.copy_(parameter.detach())

        def leave() -> None:
            averager.shutdown()
            table.shutdown()

        return PeerMember(model, inner, share, leave)


def _missing(package: str) -> str | None:
    return None if find_spec(package) else f"{package} is not installed"
