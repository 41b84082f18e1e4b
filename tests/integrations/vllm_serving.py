"""What vLLM has of its own for an engine of weight transfer: a model as it is served, and what creates the engine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

LAYERWISE = "vllm.model_executor.model_loader.reload.layerwise"
OLD = 7.0
"""Each weight of a model that nothing has been loaded into."""


def trained_model() -> nn.Module:
    """The model as it is trained, by whose names it is loaded."""
    blocks = [nn.ModuleDict({"gate": nn.Linear(4, 4), "up": nn.Linear(4, 4)}) for _ in range(2)]
    return nn.ModuleDict({"embed": nn.Embedding(5, 4), "layers": nn.ModuleList(blocks)})


class FusedModel(nn.Module):
    """The model as it is served, which keeps `gate` and `up` as one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.layers = nn.ModuleList(nn.ModuleDict({"gate_up": nn.Linear(4, 8)}) for _ in range(2))
        self.bfloat16().requires_grad_(requires_grad=False)
        for parameter in self.parameters():
            nn.init.constant_(parameter, OLD)
            vars(parameter)["weight_loader"] = load_part
        self.loaded: list[str] = []
        """Names that the last loading brought."""
        self.fails_at: str | None = None

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters: dict[str, Any] = dict(self.named_parameters())
        self.loaded = []
        for name, tensor in weights:
            if name == self.fails_at:
                raise RuntimeError(f"no room for {name}")
            parameter = parameters[name.replace(".gate.", ".gate_up.").replace(".up.", ".gate_up.")]
            parameter.weight_loader(parameter, tensor, 1 if ".up." in name else 0)
            self.loaded.append(name)

    def as_checkpoint(self) -> dict[str, torch.Tensor]:
        """Copies of what it serves, by the names that it is loaded by."""
        found = {}
        for name, parameter in self.named_parameters():
            parts = ["gate", "up"] if "gate_up" in name else [""]
            for part, tensor in zip(parts, parameter.chunk(len(parts)), strict=True):
                found[name.replace("gate_up", part)] = tensor.clone()
        return found


def load_part(param: nn.Parameter, loaded_weight: torch.Tensor, part: int) -> None:
    param.data.narrow(0, part * len(loaded_weight), len(loaded_weight)).copy_(loaded_weight)


@dataclass
class Serving:
    """A worker of vLLM, as far as an engine sees it, for one test."""

    world_size: int = 1
    data_parallel_size: int = 1
    phases: list[str] = field(default_factory=list)
    """Of the loading that was begun: `start` and `finish`."""

    def engine(self, model: FusedModel) -> Any:
        """Creates the engine of psstore, by vLLM's factory."""
        import_module(LAYERWISE).record_metadata_for_reloading(model)
        vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(
                world_size=self.world_size, world_size_across_dp=self.world_size * self.data_parallel_size
            ),
            model_config=SimpleNamespace(dtype=torch.bfloat16),
        )
        factory: Any = import_module("vllm.distributed.weight_transfer").WeightTransferEngineFactory
        return factory.create_engine(SimpleNamespace(backend="psstore"), vllm_config, torch.device("cpu"), model)

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Has `phases` tell what is begun and ended, and the integration be imported for the vLLM that is there."""
        monkeypatch.delitem(sys.modules, "psstore.integrations.vllm", raising=False)
        layerwise = import_module(LAYERWISE)
        for phase, name in {"start": "initialize_layerwise_reload", "finish": "finalize_layerwise_reload"}.items():
            monkeypatch.setattr(layerwise, name, partial(self._in_phase, phase, getattr(layerwise, name)))

    def _in_phase(self, phase: str, function: Callable[..., None], *args: Any) -> None:
        self.phases.append(phase)
        function(*args)
