"""vLLM's weight transfer from a store: `--weight-transfer-config '{"backend": "psstore"}'`, of vLLM 0.25 or newer.

Each worker of vLLM follows the store by itself, in the dtype of its model, so that what comes over the network is what
has changed. vLLM's loading makes its own of what checkpoints have (fused, sharded, quantised), layer by layer, and
needs all of a layer at once: a block of which anything has changed is loaded whole, from what is here, the others are
left alone. Loading begins once a version is here and ends within the same call: the model can serve whatever fails.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

try:
    base: Any = import_module("vllm.distributed.weight_transfer.base")
    layerwise: Any = import_module("vllm.model_executor.model_loader.reload.layerwise")
except ModuleNotFoundError as error:
    if error.name != "vllm":
        raise
    raise ModuleNotFoundError("psstore.integrations.vllm needs vLLM: pip install vllm", name="vllm") from None

from psstore.client.first_tensors import RELAYED
from psstore.client.follow import FollowingReader, follow
from psstore.errors import DeadlineExceeded, UsageError
from psstore.torch.follower import as_tensor
from psstore.torch.parameters import STORED_AS
from psstore.torch.warnings import dtype_name


@dataclass
class StoreInitInfo(base.WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is not where this is checked
    """What `init_weight_transfer_engine` is given in `init_info`."""

    url: str | None = None
    """The store's, or that of a relay of it (default: PSSTORE_URL of vLLM's processes)."""
    name: str = ""
    """That of the trainer's DistributedOptimizer, if it has one: what is before the names."""


@dataclass
class StoreUpdateInfo(base.WeightTransferUpdateInfo):  # type: ignore[misc]
    """What `update_weights` is given in `update_info`."""

    version: int
    """The trainer's `store.version`, which the model is to have."""
    timeout_s: float = 300.0
    """How long to wait for it."""


class StoreEngine(base.WeightTransferEngine):  # type: ignore[misc]
    """A worker's end of the transfer: it follows the store, and loads blocks that have changed."""

    init_info_cls = StoreInitInfo
    update_info_cls = StoreUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._reader: FollowingReader | None = None
        self._prefix = ""
        self._changed: set[str] | None = set()
        """Tensors that the model does not have yet as they are in the reader; None: it may be any of them."""

    def init_transfer_engine(self, init_info: StoreInitInfo) -> None:
        """Connects. Raises what `psstore.follow` raises."""
        self.shutdown()
        self._prefix = f"{init_info.name}/" if init_info.name else ""
        dtype = self.model_config.dtype
        self._reader = follow(init_info.url, dtype=dtype_name(dtype) if dtype in STORED_AS else None)

    def start_weight_update(self) -> None:
        """Begins nothing: the model keeps its weights until a version is here, also if none comes."""

    def receive_weights(self, update_info: StoreUpdateInfo) -> None:
        """Brings the model to that version; alone, a worker may take a newer one.

        Raises DeadlineExceeded if it does not come; UsageError if workers that share a model could come to have
        different versions of it; what `psstore.follow` raises. After these the model is what it was. Raises what vLLM's
        loading does: after that some of the model is old and some new, until an update ends well.
        """
        reader = self._opened()
        if reader.version is not None:
            with suppress(DeadlineExceeded):
                self._advance(reader, 0.0)  # a store that has gone back to a checkpoint counts from there
        while reader.version is None or _version_of(reader) < update_info.version:
            self._advance(reader, update_info.timeout_s)
        if _version_of(reader) > update_info.version and self.parallel_config.world_size_across_dp > 1:
            raise UsageError(
                f"version {update_info.version} was asked for, and the store is at {_version_of(reader)}: the workers"
                " that share a model read it each by itself, so take no step between store.version and the end of"
                " update_weights"
            )
        ours = self._of_model(reader.values)
        changed = ours if self._changed is None else self._of_model(dict.fromkeys(self._changed))
        blocks = {_block_of(name) for name in changed}
        self._load((name, as_tensor(ours[name])) for name in ours if _block_of(name) in blocks)
        self._changed = set()

    def finish_weight_update(self) -> None:
        """Does nothing: `receive_weights` has ended the loading that it began."""

    def shutdown(self) -> None:
        """Disconnects. The model stays what it is."""
        if self._reader is not None:
            self._reader.close()
        self._reader = None
        self._changed = set()

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> None:
        """Raises UsageError: a trainer has nothing to send. For vLLM 0.25, whose engines have to have it."""
        raise UsageError(
            "what trains with a store has nothing to send: its optimizer's step, or psstore.torch.publish, has written"
            " the weights; call update_weights with the version"
        )

    def _advance(self, reader: FollowingReader, timeout_s: float) -> None:
        changed, self._changed = self._changed, None  # until it is known: an interrupt may lose what came
        try:
            version = reader.next(timeout_s=timeout_s)
        except DeadlineExceeded:
            self._changed = changed
            raise
        self._changed = None if changed is None else changed | version.changed

    def _load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Has vLLM load them, layer by layer. A layer of which nothing comes keeps its weights; if loading raises, so
        does one of which a part has come."""
        try:
            layerwise.initialize_layerwise_reload(self.model)
            self.model.load_weights(weights)
        except BaseException:
            for layer in self.model.modules():  # or vLLM would leave the rest of it undefined
                layerwise.get_layerwise_info(layer).load_numel = 0
            raise
        finally:
            layerwise.finalize_layerwise_reload(self.model, self.model_config)

    def _opened(self) -> FollowingReader:
        if self._reader is None:
            raise UsageError("the store is not known yet: call init_weight_transfer_engine first")
        return self._reader

    def _of_model(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """What is the model's, by the model's names: tensors of others have a `/` in theirs."""
        found = {name.removeprefix(self._prefix): v for name, v in values.items() if name.startswith(self._prefix)}
        return {name: value for name, value in found.items() if "/" not in name}


def _version_of(reader: FollowingReader) -> int:
    """The trainer's number, also behind relays."""
    passed_on = reader.values.get(RELAYED)
    return int(passed_on[0]) if passed_on is not None else reader.version or 0


def _block_of(name: str) -> str:
    """What is fused is of one block: `model.layers.3` of `model.layers.3.mlp.up_proj.weight`. What is in none, as
    embeddings that may be tied, is one block together."""
    parts = name.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1]) if numbers else ""
