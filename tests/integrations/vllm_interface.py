"""The part of vLLM that its engines of weight transfer meet, by its signatures: written for tests, where vLLM, which
needs gigabytes, is not installed. As of vLLM 0.25:

https://docs.vllm.ai/en/v0.25.0/training/weight_transfer/base/
https://docs.vllm.ai/en/v0.25.0/api/vllm/distributed/weight_transfer/base/
https://docs.vllm.ai/en/v0.26.0/api/vllm/distributed/weight_transfer/factory/
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn


class WeightTransferInitInfo:
    pass


class WeightTransferUpdateInfo:
    pass


class WeightTransferEngine(ABC):
    init_info_cls: type[Any]
    update_info_cls: type[Any]

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: nn.Module) -> None:
        self.config, self.vllm_config, self.device, self.model = config, vllm_config, device, model
        self.parallel_config, self.model_config = vllm_config.parallel_config, vllm_config.model_config

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.update_info_cls(**update_info))

    @abstractmethod
    def init_transfer_engine(self, init_info: Any) -> None: ...

    @abstractmethod
    def start_weight_update(self) -> None: ...

    @abstractmethod
    def finish_weight_update(self) -> None: ...

    @abstractmethod
    def receive_weights(self, update_info: Any) -> None: ...

    @abstractmethod
    def shutdown(self) -> None: ...

    @staticmethod
    @abstractmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> None: ...


class WeightTransferEngineFactory:
    registered: ClassVar[dict[str, tuple[str, str]]] = {}

    @classmethod
    def register_engine(cls, name: str, module_path_or_cls: str, class_name: str) -> None:
        if name in cls.registered:
            raise ValueError(f"Weight transfer engine '{name}' is already registered.")
        cls.registered[name] = (module_path_or_cls, class_name)

    @classmethod
    def create_engine(cls, config: Any, vllm_config: Any, device: torch.device, model: nn.Module) -> Any:
        module, name = cls.registered[config.backend]
        return getattr(import_module(module), name)(config, vllm_config, device, model)


class FusedModel(nn.Module):
    """A model whose checkpoints have `gate` and `up`, which it keeps as one tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.own = {name: torch.full_like(p, torch.nan).bfloat16() for name, p in model.named_parameters()}
        self.loaded: list[str] = []
        self.phases: list[str] = []

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.phases.append("load")
        self.loaded = []
        for name, tensor in weights:
            self.loaded.append(name)
            self.own[name].copy_(tensor)


@dataclass
class Installed:
    """vLLM, for one test."""

    factory: type[WeightTransferEngineFactory]
    world_size: int = 1
    config: Any = field(default_factory=lambda: SimpleNamespace(backend="psstore"))

    def engine(self, model: nn.Module) -> Any:
        vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(world_size=self.world_size),
            model_config=SimpleNamespace(dtype=torch.bfloat16),
        )
        return self.factory.create_engine(self.config, vllm_config, torch.device("cpu"), model)


def install(monkeypatch: pytest.MonkeyPatch) -> Installed:
    """Puts it where it is imported from."""
    factory = type("Factory", (WeightTransferEngineFactory,), {"registered": {}})
    modules: dict[str, dict[str, Any]] = {
        "vllm.distributed.weight_transfer": {"WeightTransferEngineFactory": factory},
        "vllm.distributed.weight_transfer.base": {
            "WeightTransferEngine": WeightTransferEngine,
            "WeightTransferInitInfo": WeightTransferInitInfo,
            "WeightTransferUpdateInfo": WeightTransferUpdateInfo,
        },
        "vllm.model_executor.model_loader.reload": {
            "initialize_layerwise_reload": lambda model: model.phases.append("start"),
            "finalize_layerwise_reload": lambda model, model_config: model.phases.append("finish"),
        },
    }
    for path, names in modules.items():
        folders = path.split(".")
        for depth in range(1, len(folders) + 1):
            at = ".".join(folders[:depth])
            if at not in sys.modules:
                monkeypatch.setitem(sys.modules, at, ModuleType(at))
        for name, value in names.items():
            setattr(sys.modules[path], name, value)
    monkeypatch.delitem(sys.modules, "psstore.integrations.vllm", raising=False)
    return Installed(factory)
