"""Checkpoints to and from torch's files: training goes on from an export bit for bit as if nothing had happened."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import psstore
from psstore import _core
from psstore.checkpoint.exchange.dcp import write_dcp
from psstore.checkpoint.exchange.exporting import export_checkpoint
from psstore.checkpoint.exchange.importing import import_model
from psstore.checkpoint.exchange.safetensors_file import read_safetensors, write_safetensors
from psstore.checkpoint.exchange.torch_optimizer import optimizer_state_dicts
from psstore.checkpoint.exchange.whole_model import WholeModel, WholeTensor, read_whole_model, write_whole_model
from psstore.checkpoint.local_storage import LocalStorage
from psstore.checkpoint.ownership import take
from psstore.checkpoint.place import CheckpointPlace, open_checkpoint
from psstore.checkpoint.reader import verify
from psstore.checkpoint.state import HyperRecord
from psstore.errors import BadArgument, CheckpointPlaceTaken
from psstore.hyper import HYPER_DEFAULTS
from psstore.torch import DelayedNesterov, DistributedOptimizer
from psstore.torch.param_groups import hyper_of, rule_of
from psstore.types import TensorSpec, complete_hyper
from tests.checkpoint.support import make_model, specs_of_every_rule, write_model

safetensors_torch = pytest.importorskip("safetensors.torch")

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd plain": lambda params: torch.optim.SGD(params, lr=0.1),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True, betas=(0.8, 0.99)),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01, initial_accumulator_value=0.1),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.5, centered=True),
    "delayed_nesterov": lambda params: DelayedNesterov(params, lr=0.1, momentum=0.9, every=2, activation=0.25),
}


def make_net(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))


def groups_of(net: torch.nn.Module) -> list[dict[str, Any]]:
    weights = [p for p in net.parameters() if p.ndim > 1]
    others = [p for p in net.parameters() if p.ndim <= 1]
    return [{"params": weights}, {"params": others, "lr": 0.05}]


def names_of(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    names = {parameter: name for name, parameter in net.named_parameters()}
    return [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]


def train(net: torch.nn.Module, optimizer: torch.optim.Optimizer, *, steps: int) -> None:
    generator = torch.Generator().manual_seed(7)
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(8, 5, generator=generator)).square().mean().backward()
        optimizer.step()


def save(folder: Path, net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.save(net.state_dict(), folder / "model.pt")
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")


def equal(first: torch.nn.Module, second: torch.nn.Module) -> bool:
    pairs = zip(first.state_dict().items(), second.state_dict().items(), strict=True)
    return all(one == other and torch.equal(a, b) for (one, a), (other, b) in pairs)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_goes_on_from_an_export_as_if_nothing_had_happened(tmp_path: Path, kind: str) -> None:
    net = make_net()
    optimizer = OPTIMIZERS[kind](groups_of(net))
    train(net, optimizer, steps=3)
    save(tmp_path, net, optimizer)
    model = import_model(
        tmp_path / "model.pt", optimizer=tmp_path / "optimizer.pt", names=names_of(net, optimizer), version=3
    )
    write_whole_model(CheckpointPlace(LocalStorage(tmp_path / "place")), model)
    verify(LocalStorage(tmp_path / "place"), 3)
    with open_checkpoint(str(tmp_path / "place")) as checkpoint:
        export_checkpoint(checkpoint, tmp_path / "out", form="torch")
    other = make_net(seed=1)
    resumed = OPTIMIZERS[kind](groups_of(other))
    other.load_state_dict(torch.load(tmp_path / "out" / "model.pt", weights_only=True))
    resumed.load_state_dict(torch.load(tmp_path / "out" / "optimizer.pt", weights_only=True))
    groups = zip(resumed.param_groups, optimizer.param_groups, strict=True)
    assert all({**a, "params": 0} == {**b, "params": 0} for a, b in groups)
    train(net, optimizer, steps=3)
    train(other, resumed, steps=3)
    assert equal(net, other)


def test_the_three_files_need_no_psstore(tmp_path: Path) -> None:
    write_model(LocalStorage(tmp_path), make_model(specs_of_every_rule()[16:24], whole=True), 3)
    with open_checkpoint(str(tmp_path)) as checkpoint:
        written = export_checkpoint(checkpoint, tmp_path / "out", form="torch")
        values = {tensor.spec.name: tensor.value for tensor in read_whole_model(checkpoint).tensors}
    assert [path.name for path in written] == ["model.safetensors", "model.pt", "optimizer.pt"]
    program = (
        "import sys; sys.modules['psstore'] = None\n"
        "import torch; from safetensors.torch import load_file\n"
        f"model = torch.load({str(written[1])!r}, weights_only=True)\n"
        f"same = load_file({str(written[0])!r})\n"
        "assert model.keys() == same.keys() and all(model[n].shape == same[n].shape for n in model)\n"
        "params = [torch.nn.Parameter(one.clone()) for one in model.values()]\n"
        "optimizer = torch.optim.SGD(params, lr=1.0)\n"
        f"optimizer.load_state_dict(torch.load({str(written[2])!r}, weights_only=True))\n"
        "assert len(optimizer.state) == len([p for p in params if p.numel()])\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    for name, array in safetensors_torch.load_file(written[0]).items():
        assert array.numpy().tobytes() == values[name].tobytes()


def test_optimizers_of_several_rules_have_a_file_each(tmp_path: Path) -> None:
    write_model(LocalStorage(tmp_path), make_model(specs_of_every_rule(), whole=True), 2)
    with open_checkpoint(str(tmp_path)) as checkpoint:
        written = export_checkpoint(checkpoint, tmp_path / "out", form="torch")
    assert {path.name for path in written} == {
        "model.safetensors",
        "model.pt",
        *(f"optimizer-{rule}.pt" for rule in ("adagrad", "adam", "adamw", "delayed_nesterov", "rmsprop", "sgd")),
    }
    model = torch.load(tmp_path / "out" / "model.pt", weights_only=True)
    assert not any(name.startswith("reduce/") for name in model)


@pytest.mark.parametrize("kind", [kind for kind in OPTIMIZERS if kind != "sgd plain"])
def test_what_is_exported_is_what_the_optimizer_says(kind: str) -> None:
    """The state dict of a live DistributedOptimizer, and that of the same slots in a checkpoint."""
    net = make_net()
    plain = OPTIMIZERS[kind](groups_of(net))
    with psstore.connect("local://", rank=0) as store:
        optimizer = DistributedOptimizer(plain, store, named_parameters=net.named_parameters())
        train(net, optimizer, steps=2)
        names = names_of(net, optimizer)
        model = model_in(store, plain, names)
        (exported,) = optimizer_state_dicts(model).values()
        live = optimizer.state_dict()
    assert exported["names"] == names
    assert exported["state"].keys() == live["state"].keys()
    for number, state in live["state"].items():
        assert exported["state"][number].keys() == state.keys()
        for name, one in state.items():
            assert torch.equal(exported["state"][number][name], one), (number, name)
    for ours, its in zip(exported["param_groups"], live["param_groups"], strict=True):
        assert {name: ours[name] for name in ours} == {name: its[name] for name in ours}


def model_in(store: Any, optimizer: torch.optim.Optimizer, names: list[str]) -> WholeModel:
    tensors = []
    numbers = [index for index, group in enumerate(optimizer.param_groups) for _ in group["params"]]
    groups = optimizer.param_groups
    rule = rule_of(optimizer, groups[0])
    for name, number, state in zip(names, numbers, store.pull_state(names), strict=True):
        value = np.asarray(store.pull(name))
        spec = TensorSpec(name=name, shape=value.shape, rule=rule, group=number)
        tensors.append(WholeTensor(spec, value, dict(state.buffers), state.steps))
    hypers = {i: HyperRecord(rule=rule, values=hyper_of(rule, group)) for i, group in enumerate(groups)}
    return WholeModel(tensors, hypers)


# ---- torch.distributed.checkpoint ----


def trained(kind: str = "adam") -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    net = make_net()
    optimizer = OPTIMIZERS[kind](net.parameters())
    train(net, optimizer, steps=2)
    return net, optimizer


@pytest.mark.parametrize("allow_pickle", [False, True])
def test_a_distributed_checkpoint_comes_in_and_goes_out(tmp_path: Path, allow_pickle: bool) -> None:
    # Here, as they take 0.6 s, which each of pytest's workers would.
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
    from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

    net, optimizer = trained()
    model_state, optimizer_state = get_state_dict(net, optimizer)
    dcp_save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(BadArgument, match=r"\.metadata is a pickle"):
        import_model(tmp_path / "dcp")
    model = import_model(tmp_path / "dcp", allow_pickle=True, version=2)
    write_whole_model(CheckpointPlace(LocalStorage(tmp_path / "place")), model)
    with open_checkpoint(str(tmp_path / "place")) as checkpoint:
        export_checkpoint(checkpoint, tmp_path / "out", form="dcp", allow_pickle=allow_pickle)
    other = make_net(seed=1)
    resumed = OPTIMIZERS["adam"](other.parameters())
    train(other, resumed, steps=1)
    model_state, optimizer_state = get_state_dict(other, resumed)
    content: dict[str, Any] = {"model": model_state, "optimizer": dict(optimizer_state)}
    if allow_pickle:
        dcp_load(content, checkpoint_id=tmp_path / "out", no_dist=True)
    else:
        content["optimizer"] = {"state": optimizer_state["state"]}
        dcp_load(content, storage_reader=HuggingFaceStorageReader(str(tmp_path / "out")), no_dist=True)
        content["optimizer"]["param_groups"] = optimizer_state["param_groups"]
    set_state_dict(other, resumed, model_state_dict=content["model"], optim_state_dict=content["optimizer"])
    train(net, optimizer, steps=2)
    train(other, resumed, steps=2)
    assert equal(net, other)


def test_a_distributed_checkpoint_of_safetensors_comes_in(tmp_path: Path) -> None:
    net, optimizer = trained("adamw")
    save(tmp_path, net, optimizer)
    names = names_of(net, optimizer)
    model = import_model(tmp_path / "model.pt", optimizer=tmp_path / "optimizer.pt", names=names)
    write_whole_model(CheckpointPlace(LocalStorage(tmp_path / "place")), model)
    with open_checkpoint(str(tmp_path / "place")) as checkpoint:
        export_checkpoint(checkpoint, tmp_path / "dcp", form="dcp")
    with pytest.raises(BadArgument, match="--rule"):
        import_model(tmp_path / "dcp")
    back = {tensor.spec.name: tensor for tensor in import_model(tmp_path / "dcp", rule="adamw").tensors}
    assert back.keys() == {tensor.spec.name for tensor in model.tensors}
    for tensor in model.tensors:
        same = back[tensor.spec.name]
        assert (same.spec.rule, same.steps, same.value.tobytes()) == (
            tensor.spec.rule,
            tensor.steps,
            tensor.value.tobytes(),
        )
        assert {name: one.tobytes() for name, one in same.state.items()} == {
            name: one.tobytes() for name, one in tensor.state.items()
        }


@pytest.mark.parametrize("allow_pickle", [False, True])
def test_a_distributed_checkpoint_of_several_optimizers_comes_back(tmp_path: Path, allow_pickle: bool) -> None:
    model = WholeModel([], {})
    for group, rule in enumerate(("adam", "adagrad")):
        spec = TensorSpec(name=f"layer.{rule}", shape=(3, 2), rule=rule, group=group, zeros=False)
        state = {name: np.full((3, 2), 2.5, np.float32) for name in _core.STATES[rule] if name is not None}
        model.tensors.append(WholeTensor(spec, np.full((3, 2), 1.5, np.float32), state, steps=7))
    model.hypers = {
        group: HyperRecord(rule=rule, values=complete_hyper(rule, {"lr": 0.25}))
        for group, rule in enumerate(("adam", "adagrad"))
    }
    write_dcp(tmp_path / "dcp", model, allow_pickle=allow_pickle)
    write_safetensors(tmp_path / "dcp" / "tables.safetensors", {"ids/emb": np.arange(3, dtype=np.uint64)})
    back = import_model(tmp_path / "dcp", allow_pickle=allow_pickle)
    assert {tensor.spec.name for tensor in back.tensors} == {"layer.adam", "layer.adagrad"}
    for tensor in back.tensors:
        rule = tensor.spec.rule
        assert (tensor.spec.name, tensor.steps, back.hypers[tensor.spec.group].rule) == (f"layer.{rule}", 7, rule)
        assert tensor.state.keys() == {name for name in _core.STATES[rule] if name is not None}
        assert all((one == 2.5).all() for one in tensor.state.values())
        assert back.hypers[tensor.spec.group].values["lr"] == (0.25 if allow_pickle else HYPER_DEFAULTS[rule]["lr"])


@pytest.mark.parametrize("other", ["lm_head.weight", "model.norm.weight"])
def test_a_folder_of_a_model_alone_comes_in_whole(tmp_path: Path, other: str) -> None:
    """As transformers writes them: of its parts one is called 'model', or all are, where the head is the embedding."""
    arrays = {"model.embed.weight": torch.randn(4, 2), other: torch.randn(4, 2)}
    safetensors_torch.save_file(arrays, tmp_path / "model.safetensors")
    found = {tensor.spec.name: tensor.value for tensor in import_model(tmp_path).tensors}
    assert found.keys() == arrays.keys()
    assert all(torch.equal(torch.from_numpy(found[name].copy()), array) for name, array in arrays.items())


def test_what_else_a_training_has_saved_is_none_of_the_models(tmp_path: Path) -> None:
    """As the learning rates of an optimizer that may be captured, and a scheduler's numbers."""
    arrays = {
        "model.w": torch.randn(4),
        "optimizer.state.w.exp_avg": torch.ones(4),
        "optimizer.state.w.exp_avg_sq": torch.ones(4),
        "optimizer.state.w.step": torch.tensor(7.0),
        "optimizer.param_groups.w.lr": torch.tensor(0.25),
        "scheduler.last_epoch": torch.tensor(3),
    }
    safetensors_torch.save_file(arrays, tmp_path / "model.safetensors")
    (tensor,) = import_model(tmp_path, rule="adam").tensors
    assert (tensor.spec.name, tensor.steps, tensor.spec.rule) == ("w", 7, "adam")


# ---- what comes in ----


@pytest.mark.parametrize(
    ("state_dict", "said"),
    [
        ({"state": {}, "param_groups": 5}, "not iterable"),
        ({"state": {}, "param_groups": [{"lr": 0.1}]}, "'params'"),
        ({"state": {}, "param_groups": [{"params": ["w"], "lr": None}]}, "not 'NoneType'"),
        ({"state": {"w": {"exp_avg": 0.5}}, "param_groups": [{"params": ["w"]}]}, "has no attribute 'shape'"),
        ({"state": {"w": {"step": -1}}, "param_groups": [{"params": ["w"]}]}, "'w' is that of -1 steps"),
        ({"state": {}, "param_groups": [{"params": ["w", "w"]}]}, "of which 'w' comes twice"),
    ],
)
def test_the_state_of_another_kind_of_optimizer_is_refused(tmp_path: Path, state_dict: Any, said: str) -> None:
    torch.save({"w": torch.zeros(2), "v": torch.zeros(2)}, tmp_path / "model.pt")
    torch.save(state_dict, tmp_path / "optimizer.pt")
    with pytest.raises(BadArgument, match=said):
        import_model(tmp_path / "model.pt", optimizer=tmp_path / "optimizer.pt", rule="adam")


def test_short_floats_come_in_and_what_is_no_array_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.tensor([0.5, -2.0]).to(torch.float8_e4m3fn)}, tmp_path / "model.pt")
    (tensor,) = import_model(tmp_path / "model.pt").tensors
    assert (tensor.spec.dtype, tensor.value.tolist()) == ("float32", [0.5, -2.0])
    torch.save({"w": torch.zeros(2, device="meta")}, tmp_path / "model.pt")
    with pytest.raises(BadArgument, match="has 'w', which is no array: Cannot copy out of meta"):
        import_model(tmp_path / "model.pt")


@pytest.mark.parametrize("shape", [b"[1e999]", b"[" * 100_000])
def test_a_header_of_numbers_and_depths_that_nobody_has_is_refused(tmp_path: Path, shape: bytes) -> None:
    header = b'{"w":{"dtype":"F32","shape":' + shape + b',"data_offsets":[0,4]}}'
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(BadArgument, match="is no safetensors file"):
        import_model(tmp_path / "model.safetensors")


def test_what_holds_no_tensors_is_refused(tmp_path: Path) -> None:
    """A place of checkpoints is such a folder."""
    write_model(LocalStorage(tmp_path), make_model(specs_of_every_rule()), 1)
    with pytest.raises(BadArgument, match=f"{tmp_path} holds no tensors"):
        import_model(tmp_path)


def test_safetensors_of_any_dtype_come_in(tmp_path: Path) -> None:
    arrays = {
        "half": torch.randn(3, 4).half(),
        "brain": torch.randn(5).bfloat16(),
        "double": torch.randn(2, dtype=torch.float64),
        "count": torch.tensor(7),
        "flags": torch.tensor([True, False]),
        "none": torch.empty(0, 3),
    }
    safetensors_torch.save_file(arrays, tmp_path / "model.safetensors")
    model = import_model(tmp_path / "model.safetensors", rule="sgd")
    found = {tensor.spec.name: tensor for tensor in model.tensors}
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        stored = torch.float64 if array.dtype in (torch.float64, torch.int64, torch.bool) else torch.float32
        assert torch.equal(torch.from_numpy(found[name].value.copy()), array.to(stored))
        assert found[name].spec.rule == ("assign" if name in ("count", "flags") else "sgd")
    write_whole_model(CheckpointPlace(LocalStorage(tmp_path / "place")), model)
    with open_checkpoint(str(tmp_path / "place")) as checkpoint:
        export_checkpoint(checkpoint, tmp_path / "out", form="safetensors")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"model.safetensors"}
    for name, value in read_safetensors(tmp_path / "out" / "model.safetensors").items():
        assert value.tobytes() == found[name].value.tobytes()


def test_names_are_asked_for_where_they_are_not_known(tmp_path: Path) -> None:
    net, optimizer = trained()
    save(tmp_path, net, optimizer)
    model, state = tmp_path / "model.pt", tmp_path / "optimizer.pt"
    with pytest.raises(BadArgument, match=r"has 6 parameters, and 9 names .*--names FILE"):
        import_model(model, optimizer=state)
    with pytest.raises(BadArgument, match=r"'nobody' is not in the model"):
        import_model(model, optimizer=state, names=["nobody"] * 6)
    with pytest.raises(BadArgument, match=r"has 'exp_avg' of shape .*--names FILE"):
        import_model(model, optimizer=state, names=names_of(net, optimizer)[::-1])


def test_names_that_torch_keeps_are_used(tmp_path: Path) -> None:
    net = make_net()
    optimizer = OPTIMIZERS["adam"](net.named_parameters())
    train(net, optimizer, steps=1)
    save(tmp_path, net, optimizer)
    model = import_model(tmp_path / "model.pt", optimizer=tmp_path / "optimizer.pt")
    assert {tensor.spec.name for tensor in model.tensors if tensor.steps} == dict(net.named_parameters()).keys()


def test_an_optimizer_of_an_older_torch_needs_its_rule(tmp_path: Path) -> None:
    net, optimizer = trained()
    content = copy.deepcopy(optimizer.state_dict())
    del content["param_groups"][0]["decoupled_weight_decay"]
    save(tmp_path, net, optimizer)
    torch.save(content, tmp_path / "optimizer.pt")
    names = names_of(net, optimizer)
    with pytest.raises(BadArgument, match="--rule"):
        import_model(tmp_path / "model.pt", optimizer=tmp_path / "optimizer.pt", names=names)
    model = import_model(tmp_path / "model.pt", optimizer=tmp_path / "optimizer.pt", names=names, rule="adam")
    assert model.hypers[0].rule == "adam"


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("evil"),)


def test_a_pickle_of_anything_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"w": Evil()}, tmp_path / "model.pt")
    with pytest.raises(BadArgument, match=r"model\.pt is no file of tensors"):
        import_model(tmp_path / "model.pt")
    assert not Path("evil").exists()
    for name, content in (("model.safetensors", b"\xff" * 30), ("model.safetensors", b""), ("x.pt", b"nothing")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(BadArgument, match=name):
            import_model(tmp_path / name)


def test_an_import_does_not_overwrite(tmp_path: Path) -> None:
    place = CheckpointPlace(LocalStorage(tmp_path))
    model = WholeModel([WholeTensor(TensorSpec(name="w", shape=(2,)), np.ones(2, np.float32))], {}, 5)
    write_whole_model(place, model)
    with pytest.raises(BadArgument, match="has version 5, and what is imported would be version 5"):
        write_whole_model(place, model)
    model.version = 6
    write_whole_model(place, model)
    assert place.latest() == 6


def test_an_import_waits_for_no_living_store(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    owner = take(storage, lease_s=0.3)
    place = CheckpointPlace(LocalStorage(tmp_path))
    storage_read = place.storage.size

    def size(path: str) -> int:
        if path == "owner.json":
            owner.renew()
        return storage_read(path)

    place.storage.size = size  # type: ignore[method-assign]
    with pytest.raises(CheckpointPlaceTaken):
        write_whole_model(place, WholeModel([], {}, 5))
