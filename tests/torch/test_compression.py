"""DistributedOptimizer with compression: what travels, what is kept back, and what may not be combined."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from bench.compression import FORGETFUL, train_together
from torch import nn

import psstore
from psstore import _core
from psstore.cli.demo.data import load
from psstore.cli.demo.messages import Settings
from psstore.codec.codecs import parse
from psstore.errors import UsageError
from psstore.torch import Compression, DistributedOptimizer, GradScaler
from tests.torch.support import Odd, assert_same_bits, backward, batches, distributed, on_each_worker

SIGN_PUSH = Compression(push="sign", min_elems=1)


def compressed(
    model: nn.Module, store: psstore.Store, compression: Compression | str | None, **options: Any
) -> DistributedOptimizer:
    return DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        store,
        named_parameters=model.named_parameters(),
        compression=compression,
        **options,
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *, steps: int = 4, seed: int = 1) -> float:
    loss = 0.0
    for inputs in batches(steps, seed=seed):
        optimizer.zero_grad()
        loss = backward(model, inputs)
        optimizer.step()
    return loss


class Feedback:
    """A reference: plain torch's optimizer on what a codec makes of gradient and residual."""

    def __init__(self, model: nn.Module, codec: str) -> None:
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        self._codec = parse(codec)
        self._residuals = {parameter: torch.zeros_like(parameter) for parameter in model.parameters()}

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self) -> None:
        for parameter, residual in self._residuals.items():
            if parameter.grad is not None and parameter.numel():
                parameter.grad = self._said(parameter.grad, residual)
        self.optimizer.step()

    def _said(self, gradient: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """What arrives. Changes the residual."""
        codec = self._codec
        assert codec is not None
        wanted = (gradient + residual).contiguous()
        payload = bytearray(codec.num_bytes(wanted.numel()))
        number = _core.DTYPES[codec.dtype]
        said = torch.empty(wanted.shape)
        _core.encode_slice(number, wanted.numpy(), None, payload, codec.num_kept(wanted.numel()))
        _core.decode_slice(number, payload, said.numpy())
        residual.copy_(wanted - said)
        return said


@pytest.mark.parametrize("overlap", ["none", "backward", "eager"])
@pytest.mark.parametrize("codec", ["int8", "sign", "topk:0.1"])
def test_compressed_steps_are_those_of_error_feedback(codec: str, overlap: str) -> None:
    model, expected = Odd(), Odd()
    with psstore.connect("local://?shards=2") as store:
        train(model, compressed(model, store, Compression(push=codec, min_elems=1), overlap=overlap))
    train(expected, Feedback(expected, codec))  # type: ignore[arg-type]
    assert_same_bits(model, expected)


@pytest.mark.parametrize("overlap", ["none", "backward", "eager"])
@pytest.mark.parametrize("codec", ["bf16", "fp16", "int8", "sign"])
def test_compressed_both_ways_all_workers_have_the_same_bits(codec: str, overlap: str) -> None:
    models = [Odd(), Odd(seed=1)]
    losses: dict[int, tuple[float, float]] = {}

    def work(store: psstore.Store, rank: int) -> None:
        optimizer = compressed(models[rank], store, Compression(codec, codec, min_elems=1), overlap=overlap)
        losses[rank] = train(models[rank], optimizer, steps=1), train(models[rank], optimizer, steps=12)

    on_each_worker(2, work, shards=2)
    assert_same_bits(*models)
    assert losses[0][1] < losses[0][0]


def test_values_pulled_as_deltas_tend_to_the_store_s() -> None:
    model = Odd()
    with psstore.connect("local://") as store:
        optimizer = compressed(model, store, Compression(pull="sign", min_elems=1))
        train(model, optimizer)
        away = (model.first - torch.from_numpy(store.pull("first"))).norm()
        optimizer.param_groups[0]["lr"] = 0.0
        train(model, optimizer, steps=60)
        assert (model.first - torch.from_numpy(store.pull("first"))).norm() < 0.1 * away


def test_small_parameters_travel_as_they_are() -> None:
    model = nn.Linear(64, 32)
    with psstore.connect("local://") as store:
        optimizer = compressed(model, store, "int8")
        pushed, pulled = store.bytes_pushed, store.bytes_pulled
        model(torch.ones(4, 64)).sum().backward()
        optimizer.step()
        assert store.bytes_pushed - pushed == 2048 + 8 * 4 + 32 * 4
        assert store.bytes_pulled - pulled == 2048 + 8 * 4 + 32 * 4


def test_a_parameter_group_has_its_own_compression() -> None:
    first, second = nn.Linear(64, 32, bias=False), nn.Linear(32, 64, bias=False)
    groups: list[dict[str, Any]] = [{"params": [first.weight], "compression": "push=sign"}, {"params": [second.weight]}]
    with psstore.connect("local://") as store:
        named = {"first": first.weight, "second": second.weight}
        optimizer = DistributedOptimizer(
            torch.optim.SGD(groups, lr=0.1), store, named_parameters=named.items(), compression="push=int8"
        )
        pushed = store.bytes_pushed
        second(first(torch.ones(4, 64))).sum().backward()
        optimizer.step()
        assert store.bytes_pushed - pushed == (2048 // 8 + 8 * 4) + (2048 + 8 * 4)
        torch.optim.SGD(groups, lr=0.1).load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("overlap", ["none", "backward"])
def test_accumulated_gradients_are_encoded_once(overlap: str) -> None:
    model, expected = Odd(), Odd()
    with psstore.connect("local://") as store:
        optimizer = compressed(model, store, SIGN_PUSH, overlap=overlap)
        reference = Feedback(expected, "sign")
        for inputs in batches(3):
            optimizer.zero_grad()
            reference.zero_grad()
            with optimizer.no_sync():
                backward(model, inputs)
            backward(expected, inputs)
            backward(model, 2 * inputs)
            backward(expected, 2 * inputs)
            backward(model, 3 * inputs)  # without no_sync: what was sent is sent again
            backward(expected, 3 * inputs)
            optimizer.step()
            reference.step()
    assert_same_bits(model, expected)


def test_clipping_goes_by_the_norm_of_what_arrived() -> None:
    model, expected = Odd(), Odd()
    with psstore.connect("local://?shards=2") as store:
        optimizer = compressed(model, store, SIGN_PUSH)
        backward(model, next(batches(1)))
        norm = optimizer.clip_grad_norm_(0.01)
        optimizer.step()
        reference = Feedback(expected, "sign")
        backward(expected, next(batches(1)))
        reference.step()
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(expected.parameters(), math.inf))
        assert store.residuals(["first"])["first"].any()


def test_a_loss_scale_that_changes_changes_nothing() -> None:
    """Powers of two: the bits are those without a scaler, and the skipped step leaves the residuals alone."""
    model, expected = Odd(), Odd()
    scaler = GradScaler("cpu", init_scale=256.0, growth_interval=2)
    with psstore.connect("local://") as store, psstore.connect("local://") as plain:
        optimizer, reference = compressed(model, store, SIGN_PUSH), compressed(expected, plain, SIGN_PUSH)
        for number, inputs in enumerate(batches(7)):
            optimizer.zero_grad()
            scaler.scale(model(inputs).square().mean()).backward()
            if number == 4:
                with torch.no_grad():
                    assert model.first.grad is not None
                    model.first.grad[0, 0] = torch.inf
            scaler.step(optimizer)
            scaler.update()
            if number != 4:
                train_step(expected, reference, inputs)
    assert_same_bits(model, expected)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("scale_is_known", [True, False])
def test_a_loss_scale_that_was_not_expected_is_brought_in(scale_is_known: bool) -> None:
    """As after a checkpoint of the scaler was loaded: gradients were encoded with residuals of another scale."""
    model, expected = Odd(), Odd()
    with psstore.connect("local://") as store, psstore.connect("local://") as plain:
        optimizer, reference = compressed(model, store, SIGN_PUSH), compressed(expected, plain, SIGN_PUSH)
        for scale, inputs in zip((64.0, 1024.0), batches(2), strict=True):
            scaler = GradScaler("cpu", init_scale=scale)
            if scale_is_known:
                optimizer.expect_loss_scale(scale)
            optimizer.zero_grad()
            scaler.scale(model(inputs).square().mean()).backward()
            scaler.step(optimizer)
            train_step(expected, reference, inputs)
    assert_same_bits(model, expected)


def test_state_dict_goes_on_with_what_was_kept_back() -> None:
    model = Odd()
    with psstore.connect("local://") as store:
        optimizer = compressed(model, store, SIGN_PUSH)
        train(model, optimizer)
        saved, weights = optimizer.state_dict(), {k: v.clone() for k, v in model.state_dict().items()}
        train(model, optimizer, seed=2)
    again = Odd(seed=5)
    again.load_state_dict(weights)
    with psstore.connect("local://") as store:
        optimizer = compressed(again, store, SIGN_PUSH)
        optimizer.load_state_dict(saved)
        train(again, optimizer, seed=2)
    assert_same_bits(again, model)


def test_state_dict_of_compression_is_plain_torch_s_with_more(tmp_path: Any) -> None:
    model = Odd()
    with psstore.connect("local://") as store:
        optimizer = compressed(model, store, SIGN_PUSH)
        train(model, optimizer)
        torch.save(optimizer.state_dict(), tmp_path / "state.pt")
        saved = torch.load(tmp_path / "state.pt", weights_only=True)
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9).load_state_dict(saved)
        assert saved["residuals"]["rank"] == 0
        saved["residuals"]["rank"] = 1
        optimizer.load_state_dict(saved)
        assert "residuals" not in optimizer.state_dict()


def test_a_state_dict_without_compression_has_no_residuals() -> None:
    model = Odd()
    with psstore.connect("local://") as store:
        optimizer = distributed(model, store, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        train(model, optimizer)
        assert optimizer.state_dict().keys() == {"state", "param_groups"}


@pytest.mark.parametrize("pull", ["bf16", "int8"])
def test_values_that_are_not_the_store_s_are_no_edits(pull: str) -> None:
    model = Odd()
    with psstore.connect("local://") as store, warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = compressed(model, store, Compression(pull=pull, min_elems=1))
        train(model, optimizer)
        with torch.no_grad():
            model.first.mul_(1.0)
        train(model, optimizer)


def test_edited_values_are_published_through_deltas() -> None:
    models = [Odd(), Odd()]

    def work(store: psstore.Store, rank: int) -> None:
        optimizer = compressed(models[rank], store, Compression(pull="int8", min_elems=1))
        train(models[rank], optimizer)
        if rank == 0:
            with torch.no_grad():
                models[0].bias.fill_(3.0)
        optimizer.publish()
        assert models[rank].bias.eq(3.0).all()
        train(models[rank], optimizer)

    on_each_worker(2, work)
    assert_same_bits(*models)


def test_an_optimizer_without_a_rule_compresses_its_pushes() -> None:
    model, expected = Odd(), Odd()
    with psstore.connect("local://") as store:
        optimizer = DistributedOptimizer(
            torch.optim.NAdam(model.parameters()),
            store,
            named_parameters=model.named_parameters(),
            compression=SIGN_PUSH,
        )
        train(model, optimizer)
    reference = Feedback(expected, "sign")
    reference.optimizer = torch.optim.NAdam(expected.parameters())  # type: ignore[assignment]
    train(expected, reference)  # type: ignore[arg-type]
    assert_same_bits(model, expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("int8", Compression("int8", "int8")),
        ("topk:0.01", Compression("topk:0.01", "none")),
        ("push=sign,pull=bf16", Compression("sign", "bf16")),
        ("pull=int8", Compression("none", "int8")),
        ("none", Compression()),
        (None, Compression()),
    ],
)
def test_compression_is_said_in_a_word(text: str | None, expected: Compression) -> None:
    assert Compression.of(text) == expected


@pytest.mark.parametrize("text", ["int4", "push=int8,int8", "both=int8", "push=", "pull=topk:0.1"])
def test_compression_that_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        Compression.of(text)


def test_what_can_not_be_compressed_is_refused() -> None:
    with psstore.connect("local://") as store:
        model = Odd()
        with pytest.raises(UsageError, match="push=int8"):
            DistributedOptimizer(
                torch.optim.NAdam(model.parameters()),
                store,
                named_parameters=model.named_parameters(),
                compression=Compression("int8", "int8", min_elems=1),
            )
        with pytest.raises(UsageError, match="float64"):
            compressed(Odd(dtype=torch.float64), store, Compression("int8", min_elems=1))


def test_the_bench_trains_and_counts_bytes() -> None:
    settings = Settings(num_workers=2, epochs=1)
    plain, forgetful = (train_together(load(None), settings, row) for row in ("none", FORGETFUL))
    assert plain.pushed_bytes == plain.pulled_bytes == forgetful.pulled_bytes > 40 * forgetful.pushed_bytes
    assert len(plain.losses) == 1
