"""torch's clipping, left in the script, clips what all workers' gradients come to together, as under DDP; what the
store can't do is refused, and said what to write instead."""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import utils
from torch.nn.utils import clip_grad, clip_grad_norm_  # before there is an optimizer, as scripts do
from torch.optim import SGD, NAdam

import psstore
from psstore.errors import UsageError
from psstore.torch import DistributedOptimizer, GradScaler
from psstore.torch.change_detection import CHECKED_ROUNDS
from psstore.torch.torch_clipping import HANDLERS, decorated
from tests.torch.support import Odd, assert_same_bits, backward, batches, on_each_worker
from tests.torch.test_clip import one_process

Parameters = Iterable[torch.Tensor]
Clip = Callable[[Parameters], Any]

STEPS = 3
MAX_NORM = 0.02
PLAIN = partial(SGD, lr=0.05, foreach=False)
MOMENTUM = partial(SGD, lr=0.1, momentum=0.9, foreach=False)


def by_accelerate(parameters: Parameters) -> Any:
    accelerate: Any = import_module("accelerate")
    return accelerate.Accelerator(cpu=True).clip_grad_norm_(parameters, MAX_NORM)


def by_fabric(parameters: Parameters) -> Any:
    """As Lightning's Fabric, and its Trainer, do."""
    strategies: Any = import_module("lightning.fabric.strategies")
    module = nn.Module()
    module.all = nn.ParameterList(parameters)
    optimizer = SGD(module.parameters())
    return strategies.SingleDeviceStrategy().clip_gradients_norm(module, optimizer, MAX_NORM, error_if_nonfinite=False)


CLIPS: dict[str, Clip] = {
    "torch.nn.utils": lambda parameters: utils.clip_grad_norm_(parameters, MAX_NORM),
    "imported by name": lambda parameters: clip_grad_norm_(list(parameters), max_norm=MAX_NORM, foreach=False),
    "the old name": lambda parameters: clip_grad.clip_grad_norm(parameters, MAX_NORM),
    "accelerate": by_accelerate,
    "fabric": by_fabric,
}


def on(store: psstore.Store, model: nn.Module, rule: Any = MOMENTUM, **options: Any) -> DistributedOptimizer:
    return DistributedOptimizer(rule(model.parameters()), store, model.named_parameters(), **options)


def trained(
    clip: Clip, *, num_workers: int = 2, shards: int = 1, steps: int = 6, mode: str = "sync", **options: Any
) -> tuple[list[Odd], list[list[float]]]:
    """Each worker's model, and the norms that it was told."""
    models = [Odd(seed=rank) for rank in range(num_workers)]
    norms: list[list[float]] = [[] for _ in models]

    def work(store: psstore.Store, rank: int) -> None:
        optimizer = on(store, models[rank], **options)
        for inputs in batches(steps, seed=100 + rank):
            optimizer.zero_grad()
            backward(models[rank], inputs)
            before = [parameter.grad.clone() for parameter in models[rank].parameters() if parameter.grad is not None]
            norm = clip(models[rank].parameters())
            norms[rank].append(float(norm))
            after = [parameter.grad for parameter in models[rank].parameters() if parameter.grad is not None]
            if mode == "sync" and num_workers > 1:
                assert all(map(torch.equal, before, after)), "they are this worker's own"
            optimizer.step()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*deprecated", FutureWarning)
        warnings.filterwarnings("ignore", "the store has trained")  # where a worker is ahead of rank 0
        warnings.filterwarnings("ignore", "the store has no rule for")
        on_each_worker(num_workers, work, shards=shards, mode=mode)
    return models, norms


# ---- with other workers ----


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("overlap", ["auto", "backward", "none", "auto, shared memory"])
def test_torchs_clipping_is_of_the_average_over_all_workers(
    overlap: str, shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psstore.Store, "shares_memory", "shared memory" in overlap)
    models, norms = trained(CLIPS["torch.nn.utils"], shards=shards, overlap=overlap.partition(",")[0])
    expected, expected_norms = one_process(2, MAX_NORM)
    assert max(expected_norms) > MAX_NORM
    for model, seen in zip(models, norms, strict=True):
        assert seen == pytest.approx(expected_norms, rel=1e-6)
        assert_same_bits(model, expected)


@pytest.mark.parametrize("clip", CLIPS)
def test_whoever_calls_it_and_however_it_was_imported(clip: str) -> None:
    if clip in ("accelerate", "fabric"):
        pytest.importorskip("lightning" if clip == "fabric" else clip)
        with warnings.catch_warnings():  # which they change as they are imported
            CLIPS[clip](nn.Linear(1, 1).parameters())
    models, _ = trained(CLIPS[clip])
    for model in models:
        assert_same_bits(model, one_process(2, MAX_NORM)[0])


def test_where_the_workers_step_too() -> None:
    models, _ = trained(CLIPS["torch.nn.utils"], rule=partial(NAdam, lr=0.01))
    others, _ = trained(lambda _: torch.zeros(()), rule=partial(NAdam, lr=0.01), max_norm=MAX_NORM)
    assert_same_bits(models[0], models[1])
    assert_same_bits(models[0], others[0])


def test_an_infinite_bound_measures_and_changes_no_bit() -> None:
    """As Hugging Face's Trainer logs a norm that it does not clip."""
    measured, norms = trained(lambda parameters: utils.clip_grad_norm_(parameters, math.inf))
    expected, expected_norms = one_process(2, math.inf)
    assert norms[0] == norms[1] == pytest.approx(expected_norms, rel=1e-6)
    assert_same_bits(measured[0], expected)


def test_a_worker_without_a_gradient_clips_with_the_others() -> None:
    models = [Odd(), Odd()]
    norms: list[float] = [0.0, 0.0]

    def work(store: psstore.Store, rank: int) -> None:
        optimizer = on(store, models[rank])
        if rank == 0:
            backward(models[rank], next(batches(1)))
        norms[rank] = float(utils.clip_grad_norm_(models[rank].parameters(), MAX_NORM))
        optimizer.step()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is none
        on_each_worker(2, work)
    assert norms[0] == norms[1] > 0
    assert_same_bits(*models)


def test_a_script_may_leave_out_the_step_of_a_norm_that_is_not_finite() -> None:
    models = [Odd(), Odd()]

    def work(store: psstore.Store, rank: int) -> None:
        optimizer = on(store, models[rank])
        for number, inputs in enumerate(batches(4, seed=rank)):
            optimizer.zero_grad()
            backward(models[rank], inputs * (math.inf if number in (1, 3) and rank == 1 else 1.0))
            norm = utils.clip_grad_norm_(models[rank].parameters(), MAX_NORM)
            assert norm.isfinite() == (number not in (1, 3))
            if norm.isfinite():
                optimizer.step()
                assert not optimizer.skipped
        assert models[rank].first.isfinite().all()

    on_each_worker(2, work)
    assert_same_bits(*models)


def test_of_two_optimizers_of_the_same_parameters_the_last_clips() -> None:
    models, others = [Odd(), Odd()], [Odd(), Odd()]

    def work(store: psstore.Store, rank: int) -> None:
        first = on(store, models[rank])
        second = on(store, models[rank], name="second")
        other = on(store, others[rank], name="other")
        for model, optimizer in ((models[rank], second), (others[rank], other)):
            backward(model, next(batches(1, seed=rank)))
            utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
        assert first.norm is None
        assert second.norm is not None

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that they share parameters
        on_each_worker(2, work)
    assert_same_bits(models[0], models[1])
    assert_same_bits(models[0], others[0])


def test_unscaled_gradients_are_clipped_together() -> None:
    models, expected = [Odd(), Odd()], [Odd(), Odd()]

    def work(store: psstore.Store, rank: int, *, chosen: list[Odd], scale: bool) -> None:
        model = chosen[rank]
        optimizer, scaler = on(store, model), GradScaler("cpu", init_scale=1024.0, enabled=scale)
        for inputs in batches(STEPS, seed=rank):
            optimizer.zero_grad()
            scaler.scale(model(inputs).square().mean()).backward()
            scaler.unscale_(optimizer)
            utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            scaler.step(optimizer)
            scaler.update()

    on_each_worker(2, partial(work, chosen=models, scale=True))
    on_each_worker(2, partial(work, chosen=expected, scale=False))
    assert_same_bits(models[0], models[1])
    assert_same_bits(models[0], expected[0])


@pytest.mark.parametrize("overlap", ["backward", "none"])
def test_in_a_compiled_step_it_is_left_out_of_the_graphs(overlap: str) -> None:
    torch._dynamo.reset()

    def compiled(parameters: Parameters) -> Any:
        kept = list(parameters)

        @torch.compile(backend="aot_eager")
        def clip() -> torch.Tensor:
            return utils.clip_grad_norm_(kept, MAX_NORM)

        return clip()

    models, _ = trained(compiled, overlap=overlap)
    assert_same_bits(models[0], one_process(2, MAX_NORM)[0])


# ---- without ----


@pytest.mark.parametrize("overlap", ["backward", "none"])
@pytest.mark.parametrize("options", [{}, {"mode": "average"}], ids=["gradients", "average"])
def test_a_worker_alone_gets_plain_torchs_bits(store: psstore.Store, options: Any, overlap: str) -> None:
    models = [Odd(), Odd()]
    optimizers = PLAIN(models[0].parameters()), on(store, models[1], PLAIN, overlap=overlap, **options)
    for model, optimizer in zip(models, optimizers, strict=True):
        for inputs in batches(STEPS):
            optimizer.zero_grad()
            backward(model, inputs)
            utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            utils.clip_grad_value_(model.parameters(), 0.001)
            optimizer.step()
    assert_same_bits(*models)


@pytest.mark.parametrize("mode", ["ssp", "async"])
def test_where_a_step_is_one_workers_torch_clips_that_workers_gradient(mode: str) -> None:
    def clip(parameters: Parameters) -> torch.Tensor:
        kept = list(parameters)
        norm = utils.clip_grad_norm_(kept, MAX_NORM)
        utils.clip_grad_value_(kept, 0.001)
        assert all(one.grad.abs().max() <= 0.001 for one in kept if one.grad is not None and one.grad.numel())
        return norm

    trained(clip, mode=mode)


def test_other_parameters_are_clipped_by_torch_alone() -> None:
    def work(store: psstore.Store, rank: int) -> None:
        on(store, Odd())
        other, expected = Odd(), Odd()
        for model in (other, expected):
            backward(model, next(batches(1)))
        norm = utils.clip_grad_norm_(other.parameters(), MAX_NORM, norm_type=1.0)
        gradients = [one.grad for one in expected.parameters() if one.grad is not None]
        total = sum(gradient.abs().sum() for gradient in gradients)
        torch.testing.assert_close(norm, torch.as_tensor(total))
        for one, gradient in zip(other.parameters(), gradients, strict=True):
            torch.testing.assert_close(one.grad, gradient * (MAX_NORM / (norm + 1e-6)))
        with pytest.warns(UserWarning, match="empty generator"):
            utils.clip_grad_norm_((one for one in list[torch.Tensor]()), MAX_NORM)

    on_each_worker(2, work)


def test_the_functions_are_torchs_own_again_when_the_last_optimizer_is_gone() -> None:
    functions = [getattr(clip_grad, name) for name in HANDLERS if hasattr(clip_grad, name)]

    def inner() -> list[Any]:
        cells = [decorated(function) for function in functions]
        assert None not in cells, "torch makes them in another way now"
        return [cell.cell_contents for cell in cells if cell is not None]

    gc.collect()
    before = inner()
    with psstore.connect("local://") as first, psstore.connect("local://") as second:
        one = on(first, Odd())
        other = on(second, Odd())
        during = inner()
        assert not set(before) & set(during)
        del one
        gc.collect()
        assert inner() == during
        del other
        gc.collect()
    assert inner() == before


def test_a_function_that_is_made_in_another_way_is_left_alone() -> None:
    assert decorated(None) is None
    assert decorated(len) is None
    assert decorated(lambda: None) is None


# ---- max_norm= ----


@pytest.mark.parametrize("rule", [MOMENTUM, partial(NAdam, lr=0.01)], ids=["by the store", "by the workers"])
@pytest.mark.parametrize("overlap", ["backward", "none"])
def test_max_norm_clips_every_step_as_the_call_does(rule: Any, overlap: Any) -> None:
    models, plain = [Odd(), Odd()], [Odd(), Odd()]

    def work(store: psstore.Store, rank: int, *, chosen: list[Odd], **options: Any) -> None:
        optimizer = on(store, chosen[rank], rule, overlap=overlap, **options)
        for inputs in batches(STEPS, seed=rank):
            optimizer.zero_grad()
            backward(chosen[rank], inputs)
            if not options:
                expected = optimizer.clip_grad_norm_(MAX_NORM)
                assert optimizer.norm is expected
            optimizer.step()
            assert optimizer.norm is not None
            assert optimizer.norm > MAX_NORM

    on_each_worker(2, partial(work, chosen=models, max_norm=MAX_NORM))
    on_each_worker(2, partial(work, chosen=plain))
    assert_same_bits(models[0], models[1])
    assert_same_bits(models[0], plain[0])


def test_max_norm_needs_no_unscaling() -> None:
    models, plain = [Odd(), Odd()], [Odd(), Odd()]

    def work(store: psstore.Store, rank: int, *, chosen: list[Odd], scale: bool) -> None:
        optimizer, scaler = on(store, chosen[rank], max_norm=MAX_NORM), GradScaler("cpu", enabled=scale)
        for inputs in batches(STEPS, seed=rank):
            optimizer.zero_grad()
            scaler.scale(chosen[rank](inputs).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()

    on_each_worker(2, partial(work, chosen=models, scale=True))
    on_each_worker(2, partial(work, chosen=plain, scale=False))
    assert_same_bits(models[0], models[1])
    assert_same_bits(models[0], plain[0])


@pytest.mark.parametrize(("given", "called"), [(MAX_NORM, 1.0), (1.0, MAX_NORM), (MAX_NORM, math.inf)])
def test_of_two_bounds_the_smaller_counts(given: float, called: float) -> None:
    models, _ = trained(lambda parameters: utils.clip_grad_norm_(parameters, called), max_norm=given)
    assert_same_bits(models[0], one_process(2, MAX_NORM)[0])


@pytest.mark.parametrize("mode", ["ssp", "async"])
def test_max_norm_clips_one_workers_gradient_where_a_step_is_one_workers(mode: str) -> None:
    plain, stored = Odd(), Odd()

    def work(store: psstore.Store, rank: int) -> None:
        if rank:
            return
        inner, outer = PLAIN(plain.parameters()), on(store, stored, PLAIN, max_norm=MAX_NORM)
        for inputs in batches(STEPS):
            for model, optimizer in ((plain, inner), (stored, outer)):
                optimizer.zero_grad()
                backward(model, inputs)
            expected = utils.clip_grad_norm_(plain.parameters(), MAX_NORM)
            inner.step()
            outer.step()
            assert outer.norm == expected

    on_each_worker(2, work, mode=mode)
    assert_same_bits(plain, stored)


@pytest.mark.parametrize("max_norm", [-1.0, math.nan])
def test_max_norm_that_is_no_norm_is_refused(store: psstore.Store, max_norm: float) -> None:
    with pytest.raises(UsageError, match="max_norm is"):
        on(store, Odd(), max_norm=max_norm)


def test_max_norm_where_a_round_does_without_some_gradients_is_refused(store: psstore.Store) -> None:
    with pytest.raises(UsageError, match="overlap='eager'"):
        on(store, Odd(), max_norm=1.0, overlap="eager")
    with (
        psstore.LocalStore(workers=2, mode="backup") as local,
        local.connect(rank=0) as other,
        pytest.raises(UsageError, match="mode 'backup'"),
    ):
        on(other, Odd(), max_norm=1.0)


# ---- what is refused ----


Act = Callable[[Odd, DistributedOptimizer], object]


def refused(act: Act, match: str, *, mode: str = "sync", **options: Any) -> None:
    """On a worker of two, which needs the other for nothing."""
    with psstore.LocalStore(workers=2, mode=mode) as local, local.connect(rank=0) as store:
        model = Odd()
        optimizer = on(store, model, **options)
        backward(model, next(batches(1)))
        with pytest.raises(UsageError, match=match):
            act(model, optimizer)


def test_clipping_values_is_refused_with_the_ways_that_there_are() -> None:
    refused(lambda model, _: utils.clip_grad_value_(model.parameters(), 0.1), r"max_norm=.*register_hook")


@pytest.mark.skipif(not hasattr(utils, "clip_grads_with_norm_"), reason="this torch has no such function")
def test_clipping_by_a_norm_of_ones_own_is_refused() -> None:
    refused(
        lambda model, _: utils.clip_grads_with_norm_(model.parameters(), 0.1, torch.ones(())),
        r"torch\.nn\.utils\.clip_grad_norm_\(parameters, max_norm\)",
    )


def test_clipping_a_part_is_refused() -> None:
    refused(lambda model, _: utils.clip_grad_norm_([model.first, model.bias], 0.1), r"called with 2 .* and 4 others")


def test_clipping_one_parameter_after_the_other_is_refused() -> None:
    refused(lambda model, _: [utils.clip_grad_norm_(one, 0.1) for one in model.parameters()], r"called with 1 ")


def test_clipping_with_others_is_refused() -> None:
    other = nn.Linear(5, 1)
    other(torch.ones(5)).sum().backward()
    refused(
        lambda model, _: utils.clip_grad_norm_([*model.parameters(), *other.parameters()], 0.1),
        r"trains 6, and 2 that have gradients are another optimizer's",
    )


def test_another_norm_is_refused() -> None:
    refused(lambda model, _: utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=math.inf), "2-norm")


def test_backup_workers_and_eager_rounds_are_refused() -> None:
    refused(lambda model, _: utils.clip_grad_norm_(model.parameters(), 0.1), "--mode sync", mode="backup")
    refused(lambda model, _: utils.clip_grad_norm_(model.parameters(), 0.1), "leave overlap= out", overlap="eager")


def test_leaving_out_a_step_of_a_finite_norm_is_refused() -> None:
    def work(store: psstore.Store, rank: int) -> None:
        model = Odd()
        on(store, model)  # which is gone already: it clips for nobody
        optimizer = on(store, model)
        backward(model, next(batches(1)))
        utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.zero_grad()
        backward(model, next(batches(1)))
        with pytest.raises(UsageError, match="only be left out if the norm is not finite"):
            utils.clip_grad_norm_(model.parameters(), MAX_NORM)

    on_each_worker(2, work)


# ---- other changes of gradients ----


@torch.no_grad()
def halve(parameters: Parameters) -> torch.Tensor:
    for one in parameters:
        if one.grad is not None:
            one.grad.mul_(0.5)
    return torch.zeros(())


def by_hand(model: Odd, optimizer: DistributedOptimizer) -> None:
    halve(model.parameters())
    optimizer.step()


WAYS_OUT = r"'first', .*clip_grad_norm_ with all parameters.*max_norm=.*overlap='none'"


@pytest.mark.parametrize("overlap", ["auto", "backward"])
@pytest.mark.parametrize("mode", ["sync", "backup"])
def test_gradients_changed_by_hand_are_refused(overlap: str, mode: str) -> None:
    refused(by_hand, WAYS_OUT, overlap=overlap, mode=mode)


def test_over_shared_memory_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the shards shared memory with this process."""
    monkeypatch.setattr(psstore.Store, "shares_memory", True)
    refused(by_hand, WAYS_OUT)


def test_where_the_workers_step_they_are_refused_too() -> None:
    refused(by_hand, WAYS_OUT.replace("first", "first.grad"), rule=partial(NAdam, lr=0.01))


def test_they_count_as_step_finds_them_where_the_script_has_said_so() -> None:
    models, expected = [Odd(), Odd()], [Odd(), Odd()]

    def work(store: psstore.Store, rank: int, *, chosen: list[Odd], halved: bool) -> None:
        optimizer = on(store, chosen[rank], PLAIN, overlap="none")
        for inputs in batches(STEPS, seed=rank):
            optimizer.zero_grad()
            loss = chosen[rank](inputs).square().mean()
            (loss if halved else loss * 0.5).backward()
            if halved:
                halve(chosen[rank].parameters())
            optimizer.step()

    on_each_worker(2, partial(work, chosen=models, halved=True))
    on_each_worker(2, partial(work, chosen=expected, halved=False))
    assert_same_bits(models[0], expected[0])


@pytest.mark.parametrize(
    "options",
    [{"num_workers": 1}, {"mode": "ssp"}, {"mode": "async"}],
    ids=["a worker alone", "ssp", "async"],
)
@pytest.mark.parametrize("overlap", ["backward", "none"])
def test_nobody_is_refused_where_it_is_one_workers_step(overlap: str, options: dict[str, Any]) -> None:
    trained(halve, overlap=overlap, steps=STEPS, **options)


@pytest.mark.parametrize("overlap", ["auto", "backward", "none", "eager"])
def test_nobody_is_refused_who_changes_nothing(overlap: str) -> None:
    trained_twice_a_step = CHECKED_ROUNDS + 2

    def work(store: psstore.Store, rank: int) -> None:
        model = Odd()
        optimizer = on(store, model, overlap=overlap)
        stream = batches(2 * trained_twice_a_step, seed=rank)
        for first, second in zip(stream, stream, strict=True):
            optimizer.zero_grad(set_to_none=False)
            with optimizer.no_sync() if overlap != "eager" else nullcontext():
                backward(model, first)
            if overlap != "eager":
                backward(model, second)
            optimizer.step()

    on_each_worker(2, work)


def test_hooks_that_look_for_changes_stay_for_a_few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psstore.Store, "shares_memory", True)

    def work(store: psstore.Store, rank: int) -> None:
        model = Odd()
        optimizer = on(store, model)
        for number, inputs in enumerate(batches(CHECKED_ROUNDS + 1)):
            assert bool(model.bias._post_accumulate_grad_hooks) == (number < CHECKED_ROUNDS)
            backward(model, inputs)
            optimizer.step()

    on_each_worker(2, work)
