"""What vLLM calls in each of its processes, by the entry point of its plugins: makes the backend `psstore` known."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from typing import Any


def register() -> None:
    """Tells vLLM where the engine is, which is imported when it is asked for. Does nothing a second time, and nothing
    for a vLLM without weight transfer."""
    try:
        factory: Any = import_module("vllm.distributed.weight_transfer").WeightTransferEngineFactory
    except (ImportError, AttributeError):
        return
    with suppress(ValueError):  # it is known already
        factory.register_engine("psstore", "psstore.integrations.vllm", "StoreEngine")
