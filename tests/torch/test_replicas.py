"""Replicas: one process, a replica of the model on each device, the gradients of the whole batch.

A gradient is a sum over the batch; over replicas it is a sum of sums, which rounds elsewhere. So the parity tests
compare to a few units in the last place of the tensor's largest element, and only runs of the same split bit for bit.
"""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import psstore
from psstore.errors import UsageError
from psstore.torch import Replicas
from tests.torch.support import Odd, assert_same_bits, backward, batches, distributed

ULP = 8
"""Tolerance in ulps of the tensor's largest element. Measured: up to 2.9, for ten seeds of the models here."""


class Knots(nn.Module):
    """What is hard to replicate: caches of parameters, lists, tied weights, weights that hooks compute."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.recurrent = nn.LSTM(5, 7, batch_first=True)
        self.attention = nn.MultiheadAttention(7, 1, batch_first=True)
        self.listed = nn.ParameterList([nn.Parameter(torch.randn(7, 7)) for _ in range(2)])
        self.left, self.right = nn.Linear(7, 7), nn.Linear(7, 7)
        self.right.weight = self.left.weight
        self.spectral = nn.utils.spectral_norm(nn.Linear(7, 3))
        self.weighted = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.unused = nn.Parameter(torch.zeros(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.recurrent(inputs)
        hidden = (hidden + self.attention(hidden, hidden, hidden)[0])[:, -1]
        for matrix in self.listed:
            hidden = torch.tanh(hidden @ matrix)
        outputs: torch.Tensor = self.frozen(self.weighted(self.spectral(self.right(self.left(hidden)))))
        return outputs * sum(p.numel() for p in self.parameters())  # replicas have their parameters listed


def gradients_of(model: nn.Module, inputs: torch.Tensor) -> dict[str, torch.Tensor | None]:
    model.zero_grad()
    model(inputs).square().mean().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_close(found: dict[str, torch.Tensor | None], expected: dict[str, torch.Tensor | None]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        got = found[name]
        if gradient is None or got is None:
            assert gradient is None, f"{name} has no gradient"
            assert got is None, f"{name} has a gradient"
        elif gradient.numel():
            step = float(gradient.abs().max()) * torch.finfo(gradient.dtype).eps
            assert float((got - gradient).abs().max()) <= ULP * step, name


class Recorder(nn.Module):
    """Does to its arguments what it is told, and keeps what it saw."""

    def __init__(self, work: Callable[..., Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.work = work
        self.seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.seen.append((args, kwargs))
        return self.work(*args, **kwargs)


def on_cpus(work: Callable[..., Any], count: int = 2) -> Replicas:
    return Replicas(Recorder(work), ["cpu"] * count)


# ---- gradients ----


@pytest.mark.parametrize("make", [Odd, Knots])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_gradients_are_those_of_the_whole_batch(make: type[nn.Module], count: int) -> None:
    model = make()
    inputs = torch.randn(7, 5) if make is Odd else torch.randn(7, 4, 5)  # 7: parts of unequal size
    expected = gradients_of(copy.deepcopy(model), inputs)
    assert_close(gradients_of(Replicas(model, ["cpu"] * count), inputs), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_gradients_on_gpus_are_those_of_the_whole_batch() -> None:
    devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    devices = devices if len(devices) > 1 else devices * 2
    model = Odd().to(devices[0])
    inputs = torch.randn(7, 5)
    expected = gradients_of(copy.deepcopy(model), inputs.to(devices[0]))
    assert_close(gradients_of(Replicas(model, devices), inputs), expected)


@pytest.mark.parametrize("count", [2, 3])
def test_the_same_run_gives_the_same_bits(count: int) -> None:
    def trained() -> nn.Module:
        model = Odd()
        replicas = Replicas(model, ["cpu"] * count)
        optimizer = torch.optim.AdamW(replicas.parameters(), lr=0.1)
        for inputs in batches(20):
            optimizer.zero_grad()
            backward(replicas, inputs)
            optimizer.step()
        return model

    assert_same_bits(trained(), trained())


def test_a_parameter_gets_its_gradient_once() -> None:
    replicas = Replicas(Knots(), ["cpu"] * 3)
    arrivals: Counter[str] = Counter()
    for name, parameter in replicas.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda _, name=name: arrivals.update([name])
            )
    gradients = gradients_of(replicas, torch.randn(6, 4, 5))
    assert arrivals == Counter(name for name, gradient in gradients.items() if gradient is not None)


def test_gradients_accumulate_over_batches() -> None:
    model, plain = Odd(), Odd()
    replicas = Replicas(model, ["cpu", "cpu"])
    for inputs in batches(3):
        backward(replicas, inputs)
        backward(plain, inputs)
    grads = [{name: p.grad for name, p in one.named_parameters()} for one in (replicas, plain)]
    assert_close(*grads)


def test_gradients_reach_the_inputs_and_can_be_differentiated_again() -> None:
    results = []
    for model in (Odd(), Replicas(Odd(), ["cpu", "cpu"])):
        inputs = next(batches(1)).requires_grad_()
        first = dict(model.named_parameters())["first"]
        (gradient,) = torch.autograd.grad(model(inputs).square().sum(), first, create_graph=True)
        gradient.square().sum().backward()  # type: ignore[no-untyped-call]
        results.append({"inputs": inputs.grad, "first": first.grad})
    assert_close(*results)


def test_a_sparse_gradient_stays_sparse() -> None:
    replicas = Replicas(nn.Embedding(10, 3, sparse=True), ["cpu", "cpu"])
    replicas(torch.tensor([1, 2, 2, 7])).sum().backward()
    gradient = replicas.module.weight.grad
    assert isinstance(gradient, torch.Tensor)
    assert gradient.is_sparse
    assert gradient.to_dense().sum(1).tolist() == [0, 3, 6, 0, 0, 0, 0, 3, 0, 0]


# ---- training on a store ----


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_store_gets_each_gradient_once_whatever_the_number_of_replicas(count: int) -> None:
    model, plain = Odd(), Odd()
    replicas = Replicas(model, ["cpu"] * count)
    factory = partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=False)
    optimizer = factory(plain.parameters())
    gradient_bytes = 4 * sum(parameter.numel() for parameter in model.parameters())
    with psstore.connect("local://?shards=2") as store:
        stored = distributed(replicas, store, factory)
        assert sorted(store.keys()) == sorted(name for name, _ in plain.named_parameters())
        before = store.bytes_pushed
        for inputs in batches(10):
            for one, stepped in ((replicas, stored), (plain, optimizer)):
                stepped.zero_grad()
                backward(one, inputs)
                stepped.step()
        assert store.bytes_pushed - before == 10 * gradient_bytes
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-5, atol=1e-6)  # ten steps of a few ulp each


# ---- what goes in and comes out ----


def test_tensors_are_split_wherever_they_are_and_the_rest_goes_to_each() -> None:
    class Pair(NamedTuple):
        tensor: torch.Tensor
        note: str

    replicas = on_cpus(lambda pair, nested, *, flag: pair.tensor)
    tensor = torch.arange(5)
    assert torch.equal(replicas(Pair(tensor, "note"), {"a": [tensor, (tensor, 7)]}, flag=True), tensor)
    seen = sorted(replicas.module.seen, key=lambda call: call[0][0].tensor[0].item())  # type: ignore[arg-type]
    for ((pair, nested), kwargs), part in zip(seen, ([0, 1, 2], [3, 4]), strict=True):
        assert pair.tensor.tolist() == part
        assert pair.note == "note"
        assert nested["a"][0].tolist() == nested["a"][1][0].tolist() == part
        assert nested["a"][1][1] == 7
        assert kwargs == {"flag": True}


@pytest.mark.parametrize(("samples", "used"), [(0, 1), (1, 1), (2, 2), (3, 3), (4, 3)])
def test_a_small_batch_uses_fewer_replicas(samples: int, used: int) -> None:
    replicas = on_cpus(lambda inputs: inputs, count=3)
    assert torch.equal(replicas(torch.arange(samples)), torch.arange(samples))
    assert len(replicas.module.seen) == used  # type: ignore[arg-type]


def test_a_call_without_tensors_runs_once() -> None:
    replicas = on_cpus(lambda size: torch.ones(size))
    assert replicas(3).tolist() == [1, 1, 1]
    assert len(replicas.module.seen) == 1  # type: ignore[arg-type]


def test_outputs_are_joined_in_their_structure() -> None:
    replicas = on_cpus(lambda inputs: {"same": inputs, "more": (inputs + 1, [None]), "mean": inputs.mean()})
    joined = replicas(torch.tensor([0.0, 1.0, 2.0, 3.0]))
    assert joined["same"].tolist() == [0, 1, 2, 3]
    assert joined["more"][0].tolist() == [1, 2, 3, 4]
    assert joined["more"][1] == [None]
    assert joined["mean"].tolist() == [0.5, 2.5]  # one per replica, as in DataParallel


def test_one_device_is_the_model_itself() -> None:
    replicas = on_cpus(lambda inputs: inputs.mean().item(), count=1)
    assert replicas(torch.ones(4)) == 1.0


# ---- what threads carry over ----


def test_gradients_are_off_where_the_caller_turned_them_off() -> None:
    replicas = Replicas(Odd(), ["cpu", "cpu"])
    inputs = next(batches(1))
    with torch.no_grad():
        assert not replicas(inputs).requires_grad
    with torch.inference_mode():
        assert replicas(inputs).is_inference()
    assert replicas(inputs).requires_grad


def test_autocast_reaches_the_replicas() -> None:
    replicas = Replicas(nn.Linear(3, 3), ["cpu", "cpu"])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = replicas(torch.ones(4, 3))
    assert outputs.dtype == torch.bfloat16
    outputs.float().sum().backward()
    assert replicas.module.weight.grad is not None
    assert replicas.module.weight.grad.dtype == torch.float32
    assert replicas(torch.ones(4, 3)).dtype == torch.float32


def test_an_exception_keeps_its_type_and_names_the_replica() -> None:
    class Refused(ValueError):
        pass

    def refuse(inputs: torch.Tensor) -> torch.Tensor:
        if 3 in inputs:
            raise Refused("three is not welcome")
        return inputs

    with pytest.raises(Refused, match="replica 1 on cpu: three is not welcome"):
        on_cpus(refuse)(torch.arange(4))


# ---- the model's state ----


def test_names_are_the_models_own_whatever_holds_the_replicas() -> None:
    model = Knots()
    replicas = Replicas(model, ["cpu", "cpu"])
    assert [name for name, _ in replicas.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert [name for name, _ in replicas.named_buffers()] == [name for name, _ in model.named_buffers()]
    assert list(replicas.state_dict()) == list(model.state_dict())
    outer = nn.Sequential(nn.Linear(2, 2), replicas)
    plain = nn.Sequential(nn.Linear(2, 2), model)
    assert [name for name, _ in outer.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert list(outer.state_dict()) == list(plain.state_dict())


@pytest.mark.parametrize("wrap", [lambda module: module, nn.Sequential], ids=["alone", "as a part"])
def test_checkpoints_fit_with_and_without_replicas(wrap: Callable[[nn.Module], nn.Module]) -> None:
    plain, replicas = wrap(Odd(1)), wrap(Replicas(Odd(2), ["cpu", "cpu"]))
    replicas.load_state_dict(plain.state_dict())
    assert_same_bits(replicas, plain)
    other = wrap(Odd(3))
    other.load_state_dict(replicas.state_dict())
    assert_same_bits(other, plain)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*stranger"):
        replicas.load_state_dict({**plain.state_dict(), "0.stranger": torch.ones(1)})


def test_replica_0_updates_the_models_buffers() -> None:
    class Counting(nn.Module):
        count: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, inputs: torch.Tensor) -> Any:
            self.count = self.count + len(inputs)
            return self.norm(inputs)

    model, plain = Counting(), Counting()
    inputs = torch.randn(8, 3)
    Replicas(model, ["cpu", "cpu"])(inputs)
    plain(inputs[:4])
    for name, expected in plain.named_buffers():
        assert torch.equal(dict(model.named_buffers())[name], expected), name


def test_training_mode_reaches_every_module() -> None:
    replicas = Replicas(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)), ["cpu", "cpu"])
    replicas.eval()
    inputs = torch.randn(4, 3)
    assert torch.equal(replicas(inputs), replicas.module(inputs))
    replicas.train()
    assert 0.0 in replicas(torch.ones(64, 3))


def test_module_hooks_run_in_every_replica() -> None:
    replicas = Replicas(nn.Linear(3, 3), ["cpu", "cpu"])
    parts: list[int] = []
    replicas.module.register_forward_hook(lambda module, args, output: parts.append(len(args[0])))
    replicas(torch.ones(5, 3))
    assert sorted(parts) == [2, 3]


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))], ids=["deepcopy", "pickle"]
)
def test_copies_are_whole_and_their_own(duplicate: Callable[[Replicas], Replicas]) -> None:
    replicas = Replicas(Odd(), ["cpu", "cpu"])
    inputs = next(batches(1))
    backward(replicas, inputs)
    copied = duplicate(replicas)
    assert_same_bits(copied, replicas)
    with torch.no_grad():
        dict(copied.named_parameters())["scale"].zero_()
    assert not copied(inputs).any()
    assert replicas(inputs).any()


# ---- errors ----


@pytest.mark.parametrize(
    ("devices", "sentence"),
    [
        ([], "was given none"),
        (["cpu", "nonsense"], "can't use device 'nonsense' for a replica"),
        (["cpu", "cuda:77"], "can't use device 'cuda:77' for a replica"),
        (["meta"], "parameter 'weight' is on cpu, and the first of devices is meta"),
    ],
)
def test_devices_that_wont_do_are_refused(devices: Sequence[str], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        Replicas(nn.Linear(2, 2), devices)


def test_a_model_that_moved_away_is_refused() -> None:
    replicas = Replicas(nn.BatchNorm1d(2, affine=False), ["cpu", "cpu"])
    replicas.to("meta")
    with pytest.raises(UsageError, match=r"buffer 'running_mean' is on meta.*model\.to\('cpu'\)"):
        replicas(torch.ones(4, 2))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((torch.ones(4), torch.tensor(1.0)), "a 0-d tensor can't be split"),
        ((torch.ones(4), {"mask": torch.ones(6, 6)}), "tensors of 4 and 6 samples"),
    ],
)
def test_batches_that_cant_be_split_are_refused(arguments: tuple[Any, ...], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        on_cpus(lambda *args: args[0])(*arguments)


@pytest.mark.parametrize(
    ("work", "sentence"),
    [
        (lambda inputs: (inputs, "text"), "an output of type str can't be joined"),
        (lambda inputs: [inputs] * len(inputs), "differ in structure"),
    ],
)
def test_outputs_that_cant_be_joined_are_refused(work: Callable[..., Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        on_cpus(work)(torch.ones(3))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_a_scripted_module_is_refused() -> None:
    scripted = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(UsageError, match="a scripted module can't be replicated"):
        Replicas(nn.Sequential(scripted), ["cpu", "cpu"])
