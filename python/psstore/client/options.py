"""What a caller of `connect` wants."""

from __future__ import annotations

from dataclasses import dataclass

from psstore.config import Transport
from psstore.wire.messages import Role


@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of psstore.connect, with defaults filled in. Times are in seconds."""

    role: Role = "worker"
    rank: int | None = None
    num_workers: int | None = None
    token: bytes | None = None
    timeout_s: float = 30.0
    wait_s: float = 300.0
    connect_timeout_s: float = 10.0
    transport: Transport = "auto"
    busy_poll_us: float = 0.0
    connections: int = 1
    congestion_control: str | None = None
