"""A model on a GPU trains as one on the CPU does, bit by bit, and nothing waits for the GPU while backward runs.

The GPU is a stand-in: tensors of the CPU that say they are on CUDA, with a stream of a fake device that does its work
as late as fences permit (csrc/device/fake_device.h). What backward makes is in a gradient's memory only when the stream
has come that far, and so is what a step puts into the parameters.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import psstore
from psstore import _core
from psstore.client.device import arrays as device_arrays
from psstore.client.device import pinned_transfer
from psstore.torch import change_detection, gradients


class StandIn:
    """A GPU's current stream."""

    def __init__(self, seed: int) -> None:
        self.device = _core.open_device(f"fake:0?seed={seed}")
        self.queue = self.device.make_queue()
        self.waits: list[str] = []
        """Threads that waited for the device, by name."""
        self._pool = _core.PinnedPool(self.device, max_idle_bytes=1 << 20)
        self._kept: list[object] = []

    def postpone(self, parameter: torch.Tensor) -> None:
        """A hook: takes its gradient's values away, and queues that they come back."""
        gradient = parameter.grad
        assert gradient is not None
        buffer = self._pool.allocate(gradient.nbytes)
        np.asarray(memoryview(buffer))[: gradient.nbytes] = gradient.reshape(-1).view(torch.uint8).numpy()
        gradient.fill_(torch.nan)
        self.queue.copy_in(buffer, [(0, gradient.data_ptr(), gradient.nbytes)])
        self._kept += [buffer, gradient]

    def synchronize(self) -> None:
        self.queue.record().wait()

    def stand_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """From now on all tensors say that they are on it."""
        stream = SimpleNamespace(cuda_stream=self.queue.stream)
        monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True), raising=False)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
        monkeypatch.setattr(device_arrays, "device_at", lambda index: self.device)
        for module in (change_detection, gradients):  # the CPU's checksums do not wait for the stream
            monkeypatch.setattr(module, "CHECKED_ROUNDS", 0)


@pytest.fixture(params=range(2))
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    gpu = StandIn(request.param)
    wait = pinned_transfer._wait

    def noting(fence: _core.Fence, kept: object) -> None:
        gpu.waits.append(threading.current_thread().name)
        wait(fence, kept)

    monkeypatch.setattr(pinned_transfer, "_wait", noting)
    return gpu


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(16, 700), nn.Tanh(), nn.Linear(700, 700), nn.Tanh(), nn.Linear(700, 4))


def train(
    *,
    gpu: StandIn | None = None,
    kind: type[torch.optim.Optimizer] = torch.optim.Adam,
    backward: Callable[[torch.Tensor], None] = torch.Tensor.backward,
    clip: bool = False,
    scale: float = 0.0,
    overflow: bool = False,
    compression: str | None = None,
    url: str = "local://?shards=2",
) -> list[torch.Tensor]:
    """The parameters after three steps. `scale`: of the losses, by a GradScaler; `overflow`: in the second of them."""
    model = net()
    optimizer = kind(model.parameters(), lr=0.01)  # type: ignore[call-arg]
    if gpu is not None:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(gpu.postpone)  # type: ignore[no-untyped-call]
        optimizer.register_step_pre_hook(lambda *_: gpu.synchronize())  # what torch computes there, it does on the CPU
    with psstore.connect(url) as store:
        opt = psstore.torch.DistributedOptimizer(
            optimizer, store, named_parameters=model.named_parameters(), compression=compression
        )
        scaler = psstore.torch.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale > 0)
        for step in range(3):
            if gpu is not None:
                gpu.synchronize()
            inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
            opt.zero_grad()
            loss = model(inputs).square().mean()
            backward(scaler.scale(loss * torch.inf if overflow and step == 1 else loss))
            if gpu is not None and scale:
                gpu.synchronize()  # the scaler looks at the gradients on the CPU
            if clip:
                scaler.unscale_(opt)
                opt.clip_grad_norm_(0.1)
            scaler.step(opt)
            scaler.update()
        if gpu is not None:
            gpu.synchronize()
    return [parameter.detach().clone() for parameter in model.parameters()]


CASES: list[dict[str, Any]] = [
    {},
    {"clip": True},
    {"scale": 1024.0},
    {"scale": 1024.0, "overflow": True},
    {"scale": 1024.0, "clip": True},
    {"compression": "push=int8"},
    {"compression": "bf16"},
    {"compression": "push=topk:0.1", "scale": 1024.0, "overflow": True},
    {"kind": torch.optim.Adamax},  # the store has no rule for it: reduced gradients come back
]


CASE_NAMES = ["plain", "clip", "scaler", "overflow", "scaler and clip", "int8", "bf16", "topk", "worker step"]


FOLLOWING: list[dict[str, Any]] = [{"compression": "push=sign,pull=sign"}, {"compression": "push=bf16,pull=int8"}]
"""Changes are pulled, which shards on a device do not make: they send values."""


@pytest.mark.parametrize("case", [*CASES, *FOLLOWING], ids=[*CASE_NAMES, "sign, followed", "int8, followed"])
def test_a_model_on_a_gpu_trains_as_on_the_cpu(
    gpu: StandIn, case: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = train(**case)
    gpu.stand_in(monkeypatch)
    trained = train(gpu=gpu, **case)
    assert all(map(torch.equal, trained, expected))


@pytest.mark.parametrize("case", CASES, ids=CASE_NAMES)
def test_a_model_on_the_gpu_of_its_store_trains_as_on_the_cpu(
    gpu: StandIn, case: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = train(**case)
    gpu.stand_in(monkeypatch)
    trained = train(gpu=gpu, url="local://?shards=2&device=fake:0?seed=9", **case)
    assert all(map(torch.equal, trained, expected))


def test_gradients_on_the_stores_own_gpu_are_left_to_step(gpu: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks would be most of a step's work in Python, and there is nothing to send."""
    gpu.stand_in(monkeypatch)

    def hook(*_: object) -> None:
        raise AssertionError("a hook ran")

    monkeypatch.setattr(gradients.Gradients, "_on_gradient", hook)
    with pytest.raises(AssertionError, match="hook"):
        train(gpu=gpu)
    train(gpu=gpu, url="local://?shards=2&device=fake:0")


def test_nothing_waits_for_the_gpu_while_backward_runs(gpu: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.stand_in(monkeypatch)

    def backward(loss: torch.Tensor) -> None:
        with pytest.MonkeyPatch.context() as watched:
            for name in ("item", "tolist", "cpu", "numpy", "__bool__"):
                watched.setattr(torch.Tensor, name, _refused)
            torch.Tensor.backward(loss)  # type: ignore[no-untyped-call]

    monkeypatch.setattr(torch.cuda, "synchronize", _refused)
    monkeypatch.setattr(StandIn, "postpone", lambda gpu, parameter: None)  # it looks at the values itself
    train(gpu=gpu, backward=backward)
    assert gpu.waits
    assert all(thread.startswith("psstore-copies") for thread in gpu.waits)


def _refused(*_: object, **__: object) -> None:
    raise AssertionError("the host waited for the device")
