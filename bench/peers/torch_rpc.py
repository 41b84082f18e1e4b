"""A parameter server over torch.distributed.rpc, as PyTorch's tutorial on batched RPC processing has it: a call per
worker and round brings all gradients and returns all parameters, when the last worker's gradients are in.

"tcp": TensorPipe's own transport over it; "shm": what TensorPipe chooses by itself on one machine.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from itertools import cycle
from pathlib import Path

import torch
from torch.distributed import rpc

from bench.comparison import Role
from bench.processes import child
from bench.work import LEARNING_RATE, Work, tensors

NAME = "torch.distributed.rpc"
ROLE: Role = "peer"
IN_ONE_PROCESS = False

SPINS = True
"""TensorPipe's shared memory does: an idle worker and its server kept two cores busy."""

SERVER = "server"


def why_not(work: Work, transport: str) -> str | None:
    return None if transport in ("tcp", "shm") else f"TensorPipe does not use {transport} sockets"


@contextlib.contextmanager
def serve(work: Work, transport: str) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        where = f"{transport} {Path(folder) / 'group'}"
        with child(_serve, work, where):
            yield where


def join(work: Work, rank: int, where: str) -> RpcWorker:
    start(f"worker{rank}", rank + 1, work, where)
    return RpcWorker(work, rank)


class RpcWorker:
    def __init__(self, work: Work, rank: int) -> None:
        self._gradients = cycle(
            [[torch.from_numpy(gradient) for gradient in one.gradients.values()] for one in tensors(work, rank).sets]
        )
        self._parameters: list[torch.Tensor] = []
        self.variants: Mapping[str, Callable[[], None]] = {"one call": self._one_call}

    @property
    def last(self) -> float:
        return float(self._parameters[-1].flatten()[-1])

    def close(self) -> None:
        rpc.shutdown()

    def _one_call(self) -> None:
        """The parameters are where they were received, without another copy."""
        self._parameters = rpc.rpc_sync(SERVER, update_and_fetch, (next(self._gradients),))


class _Server:
    """The parameters, and the gradients that wait for the other workers'."""

    def __init__(self, work: Work) -> None:
        self._num_workers = work.num_workers
        self._parameters = [torch.zeros(shape) for shape in work.shapes.values()]
        self._optimizer = torch.optim.SGD(self._parameters, lr=LEARNING_RATE / work.num_workers, fused=True)
        self._lock = threading.Lock()
        self._waiting: list[list[torch.Tensor]] = []
        self._stepped: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()

    def update(self, gradients: list[torch.Tensor]) -> torch.futures.Future[list[torch.Tensor]]:
        with self._lock:
            self._waiting.append(gradients)
            stepped = self._stepped
            if len(self._waiting) == self._num_workers:
                self._step()
                self._stepped, self._waiting = torch.futures.Future(), []
                stepped.set_result(self._parameters)
        return stepped

    def _step(self) -> None:
        summed, *others = self._waiting
        for other in others:
            torch._foreach_add_(summed, other)
        for parameter, gradient in zip(self._parameters, summed, strict=True):
            parameter.grad = gradient
        self._optimizer.step()


_kept: list[torch.Tensor] = []
"""In the server's process: what `keep` brought last."""


def keep(value: torch.Tensor) -> None:
    _kept[:] = [value]


def kept() -> torch.Tensor:
    return _kept[0]


_servers: list[_Server] = []
"""In the server's process: the one that is there. Calls find it here, as they can't carry it."""


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def update_and_fetch(gradients: list[torch.Tensor]) -> torch.futures.Future[list[torch.Tensor]]:
    return _servers[0].update(gradients)


def _serve(work: Work, where: str) -> None:
    _servers.append(_Server(work))
    start(SERVER, 0, work, where)
    rpc.shutdown()  # waits for the workers to be done


def start(name: str, rank: int, work: Work, where: str) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="You are using a Backend")  # torch's own use of it
    transport, path = where.split()
    only_tcp = transport == "tcp"
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{path}",
        _transports=["uv"] if only_tcp else None,
        _channels=["basic"] if only_tcp else None,
    )
    rpc.init_rpc(  # type: ignore[no-untyped-call]
        name, rank=rank, world_size=work.num_workers + 1, rpc_backend_options=options
    )
