"""The part of vLLM that its engines of weight transfer meet, by its signatures, for tests where vLLM is not installed.
As of vLLM 0.25 and 0.33, of which only the first has `trainer_send_weights`:

https://docs.vllm.ai/en/v0.25.0/training/weight_transfer/base/
https://docs.vllm.ai/en/v0.25.0/api/vllm/distributed/weight_transfer/base/
https://docs.vllm.ai/en/v0.26.0/api/vllm/distributed/weight_transfer/factory/
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from .vllm_serving import LAYERWISE


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


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts it where vLLM is imported from."""
    modules: dict[str, dict[str, Any]] = {
        "vllm.distributed.weight_transfer": {
            "WeightTransferEngineFactory": type("Factory", (WeightTransferEngineFactory,), {"registered": {}})
        },
        "vllm.distributed.weight_transfer.base": {
            "WeightTransferEngine": WeightTransferEngine,
            "WeightTransferInitInfo": WeightTransferInitInfo,
            "WeightTransferUpdateInfo": WeightTransferUpdateInfo,
        },
        LAYERWISE: {
            "record_metadata_for_reloading": lambda model: None,
            "initialize_layerwise_reload": lambda model: None,
            "finalize_layerwise_reload": lambda model, model_config: None,
            "get_layerwise_info": lambda layer: SimpleNamespace(),
        },
    }
    for path, names in modules.items():
        folders = path.split(".")
        for depth in range(1, len(folders)):
            at = ".".join(folders[:depth])
            if not isinstance(sys.modules.get(at), Stub):
                monkeypatch.setitem(sys.modules, at, Stub(at))
        monkeypatch.setitem(sys.modules, path, module := Stub(path))
        vars(module).update(names)


class Stub(ModuleType):
    """A module of the interface, and not of vLLM."""
