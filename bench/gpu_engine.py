"""A device and one queue of work on it: what the GPU bench and the GPU tests have in common.

"fake:0", the stand-in for a device, is one as well: every line runs where there is no GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from psstore import _core


@dataclass(frozen=True)
class Engine:
    name: str
    """'cuda:0', or 'fake:0'."""

    @property
    def is_gpu(self) -> bool:
        return self.name.startswith("cuda")

    @property
    def torch_device(self) -> torch.device:
        """Where torch keeps what the device can reach: a fake one has host memory."""
        return torch.device(self.name if self.is_gpu else "cpu")

    @cached_property
    def device(self) -> _core.Device:
        return _core.open_device(self.name)

    @cached_property
    def queue(self) -> _core.Queue:
        return self.device.make_queue()

    def pinned(self, num_bytes: int) -> _core.Buffer:
        """Memory of the host's that the device copies to and from by itself."""
        return _core.PinnedPool(self.device, max_idle_bytes=0).allocate(num_bytes)

    def finish(self) -> None:
        """Waits for all that is in the queue."""
        self.queue.record().wait()

    def finish_torch(self) -> None:
        """And for what torch has put into its own streams."""
        if self.is_gpu:
            torch.cuda.synchronize(self.torch_device)
