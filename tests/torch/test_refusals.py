"""What DistributedOptimizer can't do, said in a sentence that tells what to do."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW

import psstore
from psstore.errors import (
    BadArgument,
    BadHyper,
    DTypeMismatch,
    NotAWorker,
    NotInitialised,
    RuleMismatch,
    ShapeMismatch,
    TensorExists,
    UsageError,
)
from psstore.torch import DiLoCo, DistributedOptimizer, ElasticSampler, Embedding
from psstore.wire.messages import Exist
from tests.torch.support import (
    DECOUPLED_ADAM,
    Odd,
    OptimizerFactory,
    assert_same_bits,
    backward,
    batches,
    distributed,
    in_threads,
    on_each_worker,
    wrap,
)

MOMENTUM = partial(SGD, lr=0.1, momentum=0.9, foreach=False)


def linear() -> nn.Linear:
    return nn.Linear(2, 2)


torch_: Any = psstore.torch
"""As callers without a type checker see it."""


class Makers:
    """Makes what trains a model, as callers without a type checker may."""

    def __init__(self, store: psstore.Store) -> None:
        self.store = store
        self.model = nn.BatchNorm1d(2)
        self.inner = SGD(self.model.parameters(), lr=0.1)

    def distributed(self, **options: Any) -> DistributedOptimizer:
        return DistributedOptimizer(self.inner, self.store, self.model.named_parameters(), **options)

    def learner(self, **options: Any) -> DiLoCo:
        return DiLoCo(self.model, self.inner, self.store, **{"every": 4, "fragments": 2, **options})

    def sampler(self, **options: Any) -> ElasticSampler:
        return ElasticSampler(9, self.distributed(), **options)


def trained(model: Odd, store: psstore.Store, *, steps: int = 1) -> Odd:
    optimizer = distributed(model, store, MOMENTUM)
    for inputs in batches(steps):
        optimizer.zero_grad()
        backward(model, inputs)
        optimizer.step()
    return model


# ---- the optimizer ----


def test_implementation_flags_are_ignored_and_differentiable_is_not(store: psstore.Store) -> None:
    model = linear()
    wrap(AdamW(model.parameters(), fused=True), store, model)
    with pytest.raises(UsageError, match="differentiable=True"):
        wrap(AdamW(model.parameters(), differentiable=True), store, model)


def test_a_store_that_is_no_worker_cant_train() -> None:
    model = linear()
    with (
        psstore.LocalStore() as local,
        local.connect(role="client") as reader,
        pytest.raises(NotAWorker, match="role='worker'"),
    ):
        distributed(model, reader, partial(SGD, lr=0.1))


def test_wrapping_twice_is_refused(store: psstore.Store) -> None:
    model = linear()
    outer = distributed(model, store, partial(SGD, lr=0.1))
    with pytest.raises(UsageError, match="already"):
        wrap(outer, store, model)


def test_unnamed_parameters_are_refused_with_their_place_and_shape(store: psstore.Store) -> None:
    model, other = linear(), nn.Linear(3, 5)
    optimizer = SGD([*model.parameters(), *other.parameters()], lr=0.1)
    with pytest.raises(UsageError, match=r"parameter 2 of group 0, of shape \(5, 3\), has no name"):
        wrap(optimizer, store, model)


def test_duplicate_names_are_refused_with_the_way_out(store: psstore.Store) -> None:
    one, other = linear(), linear()
    named = list(itertools.chain(one.named_parameters(), other.named_parameters()))
    optimizer = SGD([parameter for _, parameter in named], lr=0.1)
    with pytest.raises(UsageError, match=r"two parameters are named 'weight'.*prefix="):
        DistributedOptimizer(optimizer, store, named_parameters=named)


def test_parameters_in_place_of_named_parameters_are_refused(store: psstore.Store) -> None:
    model = linear()
    with pytest.raises(UsageError, match=r"not model\.parameters"):
        DistributedOptimizer(SGD(model.parameters(), lr=0.1), store, named_parameters=model.parameters())  # type: ignore[arg-type]


def test_complex_parameters_are_refused(store: psstore.Store) -> None:
    weight = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(UsageError, match="dtype complex64"):
        DistributedOptimizer(SGD([weight], lr=0.1), store, named_parameters=[("w", weight)])


def test_parameters_whose_elements_share_memory_are_refused(store: psstore.Store) -> None:
    model = nn.Module()
    model.wide = nn.Parameter(torch.randn(1).expand(5))
    with pytest.raises(UsageError, match=r"'wide' has elements that share memory.*clone\(\)"):
        distributed(model, store, partial(SGD, lr=0.1))
    assert store.keys() == []


def test_parameters_made_in_inference_mode_are_refused(store: psstore.Store) -> None:
    with torch.inference_mode():
        model = linear()
    with pytest.raises(UsageError, match=r"'weight' was made under torch.inference_mode\(\)"):
        distributed(model, store, partial(SGD, lr=0.1))


def test_a_fully_frozen_optimizer_has_nothing_to_train(store: psstore.Store) -> None:
    model = linear().requires_grad_(False)
    with pytest.raises(UsageError, match="nothing to train"):
        distributed(model, store, partial(SGD, lr=0.1))


def test_what_is_no_optimizer_or_no_store_is_refused(store: psstore.Store) -> None:
    model = linear()
    with pytest.raises(UsageError, match="a Linear is no optimizer"):
        DistributedOptimizer(model, store, model.named_parameters())  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"a str is no store.*psstore\.connect\(\)"):
        DistributedOptimizer(SGD(model.parameters(), lr=0.1), "local://", model.named_parameters())  # type: ignore[arg-type]


def test_named_parameters_that_were_used_up_are_refused(store: psstore.Store) -> None:
    named = linear().named_parameters()
    optimizer = SGD([parameter for _, parameter in named], lr=0.1)
    with pytest.raises(UsageError, match=r"yields nothing.*used up"):
        DistributedOptimizer(optimizer, store, named)


@pytest.mark.parametrize("option", ["overlap", "mode", "exist"])
def test_unknown_options_are_refused_with_what_there_is(store: psstore.Store, option: str) -> None:
    model = linear()
    with pytest.raises(UsageError, match=rf"{option} is 'sometimes'; it must be one of '"):
        DistributedOptimizer(
            SGD(model.parameters(), lr=0.1),
            store,
            model.named_parameters(),
            **{option: "sometimes"},  # type: ignore[arg-type]
        )


@pytest.mark.parametrize(("missing", "key"), [("lr", "lr"), ("betas", "betas"), ("amsgrad", "amsgrad")])
def test_a_group_without_a_hyper_parameter_is_refused_by_its_name(store: psstore.Store, missing: str, key: str) -> None:
    model = linear()
    outer = distributed(model, store, partial(AdamW, lr=0.1))
    del outer.param_groups[0][missing]
    model.weight.grad = torch.ones_like(model.weight)
    with pytest.raises(UsageError, match=rf"group of 2 parameters has no '{key}'.*param_groups"):
        outer.step()


@pytest.mark.skipif(not DECOUPLED_ADAM, reason="torch has no such flag")
@pytest.mark.parametrize("begun", [True, False])
def test_a_decay_that_is_decoupled_later_is_refused_as_it_is_another_rule(store: psstore.Store, begun: bool) -> None:
    model = linear()
    outer = distributed(model, store, partial(Adam, lr=0.1, weight_decay=0.5, decoupled_weight_decay=begun))
    model.weight.grad = torch.ones_like(model.weight)
    outer.step()
    before = model.weight.detach().clone()
    outer.param_groups[0]["decoupled_weight_decay"] = not begun
    with pytest.raises(UsageError, match=f"group 0 has decoupled_weight_decay={not begun}, and had {begun} .*set it"):
        outer.step()
    torch.testing.assert_close(model.weight.detach(), before, rtol=0, atol=0)
    outer.param_groups[0]["weight_decay"] = 0.0
    outer.step()  # both rules are one then


@pytest.mark.parametrize("overlap", ["backward", "none", "eager"])
@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("lr", 1e300, r"'lr' is 1e\+300, which is infinite in float32"),
        ("lr", math.inf, "'lr' is not a finite number"),
        ("betas", (1.5, 0.9), "'beta1' is not below 1"),
    ],
)
def test_a_hyper_parameter_that_no_step_could_use_is_refused_and_can_be_set_right(
    store: psstore.Store, name: str, value: Any, words: str, overlap: Any
) -> None:
    model, plain = linear(), linear()
    plain.load_state_dict(model.state_dict())
    outer = DistributedOptimizer(AdamW(model.parameters(), lr=0.1), store, model.named_parameters(), overlap=overlap)
    inner = AdamW(plain.parameters(), lr=0.1)
    right = outer.param_groups[0][name]
    outer.param_groups[0][name] = value
    before = store.round
    for one in (model, plain):
        one(torch.ones(1, 2)).sum().backward()
    with pytest.raises(BadHyper, match=f"parameter group 0: .*{words}"):
        outer.step()
    assert store.round == before
    outer.param_groups[0][name] = right
    outer.step()
    inner.step()
    torch.testing.assert_close(model.weight, plain.weight)


@pytest.mark.parametrize("overlap", ["backward", "none"])
def test_gradients_of_which_processes_have_parts_are_refused(store: psstore.Store, mesh: Any, overlap: Any) -> None:
    model = linear()
    outer = DistributedOptimizer(SGD(model.parameters(), lr=0.1), store, model.named_parameters(), overlap=overlap)
    model(torch.ones(1, 2)).sum().backward()
    model.weight.grad = mesh(torch.ones(2, 2))
    with pytest.raises(UsageError, match=r"the gradient of 'weight' is a DTensor"):
        outer.step()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda one: one.distributed(mode="average", every=2.5), r"every is 2\.5; expected an integer"),
        (lambda one: one.distributed(mode="average", every=math.nan), "every is nan; expected an integer"),
        (lambda one: one.distributed(mode="average", every=True), "every is True; expected an integer"),
        (lambda one: one.distributed(max_norm="1"), "max_norm is '1'; expected a number"),
        (lambda one: one.distributed(max_norm=True), "max_norm is True; expected a number"),
        (lambda one: one.distributed(name=5), "name is 5; expected a string"),
        (lambda one: one.distributed(named_buffers=one.model.buffers()), r"pass model\.named_buffers\(\), not"),
        (lambda one: one.distributed(named_buffers=5), r"named_buffers must yield pairs of a name and a tensor"),
        (lambda one: DistributedOptimizer(one.inner, one.store, one.model), r"named_parameters must yield pairs"),
        (lambda one: torch_.publish(one.store, one.model), "named_parameters must yield pairs"),
        (
            lambda one: torch_.load(one.store, one.model.parameters()),
            "named_parameters must yield",
        ),
        (lambda one: setattr(one.distributed(), "weight", "a"), "weight is 'a'; expected a number"),
        (lambda one: one.distributed().clip_grad_norm_(None), "max_norm is None; expected a number"),
        (lambda one: one.distributed().expect_loss_scale(0), "loss_scale is 0; expected a finite number above 0"),
        (lambda one: one.learner(every=2.5), r"every is 2\.5; expected an integer"),
        (lambda one: one.learner(fragments=True), "fragments is True; expected an integer"),
        (lambda one: one.learner(delay=1.5), r"delay is 1\.5; expected an integer"),
        (lambda one: one.learner(merge=None), "merge is None; expected a number"),
        (lambda one: one.learner(weight="some"), "weight is 'some'; expected a number, or 'tokens'"),
        (lambda one: one.sampler(batch_size=2.5), r"batch_size is 2\.5; expected an integer"),
        (lambda one: one.sampler(batch_size=True), "batch_size is True; expected an integer"),
        (lambda one: one.sampler(batch_size=-1), "batch_size -1.*at least 1"),
        (lambda one: one.sampler(target_batch="8"), "target_batch is '8'; expected an integer"),
        (lambda one: one.sampler(batch_size=1, seed=-1), "seed is -1; expected an integer from 0 on"),
        (lambda one: one.sampler(batch_size=1, version=-1), "version is -1; expected a version"),
        (
            lambda one: torch_.ElasticSampler(2.5, one.distributed(), batch_size=1),
            r"dataset is 2\.5; expected",
        ),
        (
            lambda one: torch_.ElasticSampler(9, one.inner, batch_size=1),
            "a SGD is no psstore.torch",
        ),
        (lambda one: torch_.Embedding("rows", 2, "local://"), r"a str is no store that blocks"),
        (
            lambda one: torch_.Embedding("rows", 2, one.store, padding_idx=1.5),
            r"padding_idx is 1\.5; expected",
        ),
        (lambda one: torch_.Embedding("rows", 2, one.store, lr="a"), "lr = 'a' is not a finite number"),
        (
            lambda one: torch_.Embedding("rows", 2, one.store, rule="adam", betas=0.9),
            r"betas is 0\.9; expected two",
        ),
        (lambda one: torch_.Compression(push=None), "push is None, and pull 'none'; expected names of codecs"),
        (lambda one: torch_.Compression(min_elems=2.5), r"min_elems is 2\.5; expected a number of elements"),
        (lambda one: torch_.DelayedNesterov(one.model.parameters(), every="a"), "every is 'a'; expected a number"),
        (lambda one: torch_.DelayedNesterov(one.model.parameters(), every=2**64), r"'every' is 1.*from 1 to 2\^53"),
        (lambda one: torch_.hooks.SummaryHook("nowhere", every=0), "every is 0; .*expected 1 or more"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_arguments_of_the_wrong_kind_are_named(
    store: psstore.Store, make: Callable[[Makers], object], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        make(Makers(store))


def test_pieces_that_do_not_say_what_they_are_of_are_refused(store: psstore.Store) -> None:
    """Those of a FullyShardedDataParallel: rank 0's would have been everybody's."""
    from torch.distributed.fsdp import _common_utils

    model = linear()
    named = [(f"{_common_utils.FSDP_WRAPPED_MODULE}.{name}", one) for name, one in model.named_parameters()]
    message = r"'_fsdp_wrapped_module\.weight' is of a FullyShardedDataParallel: .*fully_shard"
    with pytest.raises(UsageError, match=message):
        DistributedOptimizer(SGD(model.parameters(), lr=0.1), store, named)
    with pytest.raises(UsageError, match=message):
        psstore.torch.publish(store, named)
    with pytest.raises(UsageError, match=message):
        psstore.torch.load(store, named)
    assert store.keys() == []


@pytest.mark.parametrize("overlap", ["backward", "eager"])
def test_who_else_averages_gradients_is_named(overlap: Any) -> None:
    def work(store: psstore.Store, rank: int) -> None:
        model = nn.Sequential()
        model.module = linear()  # what DistributedDataParallel calls it
        outer = DistributedOptimizer(SGD(model.parameters(), lr=0.1), store, model.named_parameters(), overlap=overlap)
        model(torch.ones(1, 2)).sum().backward()
        for gradient in [parameter.grad for parameter in model.parameters() if parameter.grad is not None]:
            gradient.div_(2)
        with pytest.raises(UsageError, match=r"as DistributedDataParallel has them.*docs/coming_from_ddp"):
            outer.step()

    on_each_worker(1 if overlap == "eager" else 2, work)


def test_without_torch_the_extra_is_named() -> None:
    """In a process that has none."""
    program = "import sys; sys.modules['torch'] = None; import psstore.torch"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert "pip install 'psstore[torch]'" in run.stderr


# ---- what the store has already ----


@pytest.mark.parametrize(
    ("other", "error", "words"),
    [
        (lambda: nn.Linear(3, 2), ShapeMismatch, r"shape \(2, 2\) in the store, not \(2, 3\)"),
        (lambda: nn.Linear(2, 2).double(), DTypeMismatch, "dtype float32 in the store, not float64"),
    ],
)
def test_tensors_of_another_kind_are_refused_with_the_ways_out(
    store: psstore.Store, other: Callable[[], nn.Module], error: type[UsageError], words: str
) -> None:
    distributed(linear(), store, partial(SGD, lr=0.1))
    with pytest.raises(
        error, match=rf"'weight' has {words}; use another name, or exist='overwrite'.*alike on every worker.*pass name="
    ):
        distributed(other(), store, partial(SGD, lr=0.1))


def test_what_rank_0_does_not_train_is_not_waited_for_without_a_word() -> None:
    models = [linear(), linear()]
    models[0].weight.requires_grad_(False)
    with psstore.LocalStore(workers=2) as local:
        stores = [local.connect(rank=rank, wait_s=0.1) for rank in range(2)]
        distributed(models[0], stores[0], partial(SGD, lr=0.1))
        with pytest.raises(NotInitialised, match=r"'weight'.*rank 0.*frozen.*alike on every worker"):
            distributed(models[1], stores[1], partial(SGD, lr=0.1))


def test_tensors_of_another_rule_are_refused_with_the_ways_out(store: psstore.Store) -> None:
    distributed(linear(), store, partial(SGD, lr=0.1))
    with pytest.raises(RuleMismatch, match=r"'adamw'.*pass name="):
        distributed(linear(), store, partial(AdamW, lr=0.1))


def test_a_store_from_yesterday_is_gone_on_with_and_told_of() -> None:
    with psstore.LocalStore() as local:
        with local.connect() as store:
            yesterdays = trained(Odd(), store)
        model = Odd(seed=3)
        with local.connect() as store, pytest.warns(UserWarning, match=r"trained 'first', .* up to version 1.*exist="):
            distributed(model, store, MOMENTUM)
    assert_same_bits(model, yesterdays)


def test_a_store_from_yesterday_is_refused_if_asked() -> None:
    with psstore.LocalStore() as local:
        with local.connect() as store:
            model = trained(Odd(), store)
        with local.connect() as store, pytest.raises(TensorExists, match="exist='overwrite'"):
            DistributedOptimizer(MOMENTUM(model.parameters()), store, model.named_parameters(), exist="error")


def test_a_store_from_yesterday_is_overwritten_if_asked() -> None:
    """Its momenta too. All workers have rank 0's new values, whoever comes first."""
    models = [Odd(seed=3 + rank) for rank in range(2)]
    with psstore.LocalStore(shards=2, workers=2) as local:

        def run(rank: int, *, model: Odd, exist: Exist) -> None:
            with local.connect(rank=rank) as store:
                optimizer = DistributedOptimizer(
                    MOMENTUM(model.parameters()), store, model.named_parameters(), exist=exist
                )
                for inputs in batches(3):
                    optimizer.zero_grad()
                    backward(model, inputs)
                    optimizer.step()

        in_threads([partial(run, rank, model=Odd(), exist="error") for rank in range(2)])
        in_threads([partial(run, rank, model=models[rank], exist="overwrite") for rank in range(2)])
    with psstore.connect("local://") as store:
        fresh = trained(Odd(seed=3), store, steps=3)
    for model in models:
        assert_same_bits(model, fresh)


def test_other_models_under_the_same_names_are_told_of(store: psstore.Store) -> None:
    one, other = linear(), linear()
    distributed(one, store, partial(SGD, lr=0.1))
    with pytest.warns(UserWarning, match=r"'weight', 'bias' of this store.*pass name="):
        distributed(other, store, partial(SGD, lr=0.1))


@pytest.mark.parametrize("steps", [0, 2])
def test_a_cell_that_ran_again_says_how_to_take_the_new_weights(store: psstore.Store, steps: int) -> None:
    """In a notebook, where the model of before lives until its name is another's."""
    model = Odd(seed=0)
    optimizer = distributed(model, store, MOMENTUM)
    for inputs in batches(steps):
        optimizer.zero_grad()
        backward(model, inputs)
        optimizer.step()
    again, new = Odd(seed=1), Odd(seed=1)
    with pytest.warns(UserWarning, match=r"same names.*has the store's weights.*take the new ones.*exist='overwrite'"):
        distributed(again, store, MOMENTUM)
    assert_same_bits(again, model)
    with pytest.warns(UserWarning, match="same names"):
        DistributedOptimizer(MOMENTUM(new.parameters()), store, new.named_parameters(), exist="overwrite")
    assert_same_bits(new, Odd(seed=1))


def test_two_optimizers_that_share_state_are_told_of_once(store: psstore.Store) -> None:
    """Whose momentum it is can't be told apart without names."""
    model = Odd()
    older, newer = distributed(model, store, MOMENTUM), distributed(model, store, MOMENTUM)
    backward(model, next(batches(1)))
    newer.step()
    with pytest.warns(UserWarning, match=r"same momenta and other state.*pass name="):
        older.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        newer.step()
        older.step()


@pytest.mark.filterwarnings("error")
def test_an_optimizer_that_could_not_be_made_retires_no_other(store: psstore.Store) -> None:
    model = Odd()
    optimizer = distributed(model, store, MOMENTUM)
    with pytest.raises(RuleMismatch):
        distributed(model, store, partial(AdamW, lr=0.1))
    backward(model, next(batches(1)))
    optimizer.step()


@pytest.mark.filterwarnings("error")
def test_making_an_optimizer_anew_for_the_same_model_is_nothing_to_tell_of(store: psstore.Store) -> None:
    model = linear()
    distributed(model, store, partial(SGD, lr=0.1))
    distributed(model, store, partial(SGD, lr=0.1))


def test_another_number_of_workers_than_announced_is_refused() -> None:
    with pytest.raises(BadArgument, match="believes in 3 workers, the store was started for 2"):
        psstore.connect("local://?workers=2", num_workers=3)


# ---- groups ----


def test_a_group_that_was_removed_is_told_of(store: psstore.Store) -> None:
    model = Odd()
    first, *rest = model.parameters()
    outer = wrap(torch.optim.SGD([{"params": rest}, {"params": [first]}], lr=0.1), store, model)
    del outer.param_groups[1]
    with pytest.raises(UsageError, match="has 1 parameter groups, and had 2"):
        outer.step()


# ---- the wrapped optimizer ----


@pytest.mark.parametrize("factory", [MOMENTUM, torch.optim.NAdam])
def test_a_step_of_the_wrapped_optimizer_is_refused_while_the_other_stands_in(
    store: psstore.Store, factory: OptimizerFactory
) -> None:
    model = Odd()
    inner = factory(model.parameters())
    outer = wrap(inner, store, model)
    backward(model, next(batches(1)))
    with pytest.raises(UsageError, match=r"call step\(\) of the DistributedOptimizer"):
        inner.step()
    assert_same_bits(model, Odd())
    outer.step()
    del outer
    inner.step()


def test_what_is_no_optimizers_state_is_refused_and_changes_nothing(store: psstore.Store) -> None:
    model = linear()
    outer = DistributedOptimizer(AdamW(model.parameters(), lr=0.1), store, model.named_parameters())
    model(torch.ones(1, 2)).sum().backward()
    outer.step()
    before = outer.state_dict()
    no_states: list[Any] = [5, {}, model.state_dict(), {"state": {}}, {**before, "state": []}]
    for given in (*no_states, {**before, "param_groups": [5]}):
        with pytest.raises(UsageError, match=r"load_state_dict takes a state_dict\(\) of an optimizer"):
            outer.load_state_dict(given)
    no_residuals: dict[str, Any] = {"a dict, not int": 5, "are of parameter 9; there are ": {9: torch.ones(2)}}
    for words, kept in no_residuals.items():
        with pytest.raises(UsageError, match=words):
            outer.set_residuals(kept)
    assert outer.state_dict()["param_groups"] == before["param_groups"]
    for one, other in zip(outer.state_dict()["state"].values(), before["state"].values(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_one_module_in_place_of_several_tables_is_refused(store: psstore.Store) -> None:
    model, items = linear(), Embedding("items", 4, store)
    with pytest.raises(UsageError, match="tables= takes several modules, as in a list, not a Embedding"):
        DistributedOptimizer(SGD(model.parameters(), lr=1.0), store, model.named_parameters(), tables=items)  # type: ignore[arg-type]
