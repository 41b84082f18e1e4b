"""Learners that share pseudo-gradients now and then, held against DiLoCo in one process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.optim import SGD, AdamW

import psstore
from psstore.errors import RuleMismatch, UsageError
from psstore.torch import DiLoCo, DistributedOptimizer, learner_step
from psstore.torch.exchange import Exchange
from psstore.torch.fragments import Fragment, cut
from psstore.torch.learner_processes import LearnerProcesses
from psstore.torch.parameters import Trained
from tests.support.fork_server import TrainingPopen
from tests.support.server_process import StoreProcess
from tests.torch.learners import Reference
from tests.torch.support import (
    WIDTH,
    Odd,
    OptimizerFactory,
    assert_same_bits,
    backward,
    batches,
    deep,
    in_threads,
    num_bytes,
    on_each_worker,
)

STEPS = 24
ADAMW: OptimizerFactory = partial(AdamW, lr=0.01)
WHOLE: OptimizerFactory = partial(SGD, lr=1.0)
"""An outer optimizer that makes the values the mean."""


class Snapping(SGD):
    """Keeps parameters on a grid, so that their differences and the means of two are exact."""

    GRID = 2.0**-10

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.copy_((parameter / self.GRID).round() * self.GRID)


def cut_alone(trained: Sequence[Trained], number: int) -> list[Fragment]:
    """By a learner of one process."""
    return cut(trained, LearnerProcesses().wholes(trained), number)


def fragments_of(model: torch.nn.Module, number: int) -> list[list[str]]:
    trained = [Trained(name, one, 0) for name, one in model.named_parameters()]
    return [fragment.names for fragment in cut_alone(trained, number)]


def train(model: Odd, optimizer: torch.optim.Optimizer, steps: int, *, seed: int) -> None:
    for inputs in batches(steps, seed=seed):
        optimizer.zero_grad()
        backward(model, inputs)
        optimizer.step()


# ---- against one process ----


@pytest.mark.parametrize("num_learners", [2, 3])
@pytest.mark.parametrize("delay", [0, 2])
def test_learners_equal_one_process(num_learners: int, delay: int) -> None:
    """Of every=10 and four fragments, whose rounds are not evenly spread."""
    models = [Odd(seed=rank) for rank in range(num_learners)]

    def work(store: psstore.Store, rank: int) -> None:
        model = models[rank]
        optimizer = DiLoCo(model, ADAMW(model.parameters()), store, every=10, fragments=4, delay=delay, merge=0.5)
        train(model, optimizer, STEPS, seed=100 + rank)

    on_each_worker(num_learners, work, shards=2)
    plain = [Odd(seed=rank) for rank in range(num_learners)]
    reference = Reference(plain, ADAMW, fragments_of(plain[0], 4), every=10, merge=0.5, delay=delay)
    reference.train(STEPS)
    assert reference.rounds == 9
    for model, expected in zip(models, plain, strict=True):
        assert_same_bits(model, expected)


def test_weights_are_the_tokens_since_the_last_round_of_the_fragment() -> None:
    models = [Odd(seed=rank) for rank in range(2)]

    def work(store: psstore.Store, rank: int) -> None:
        model = models[rank]
        optimizer = DiLoCo(model, ADAMW(model.parameters()), store, every=4, fragments=2, weight="tokens")
        for number, inputs in enumerate(batches(8, seed=100 + rank), 1):
            optimizer.zero_grad()
            backward(model, inputs)
            optimizer.count(number if rank else 1)
            optimizer.step()

    on_each_worker(2, work)
    plain = [Odd(seed=rank) for rank in range(2)]
    # Fragment 0 has its rounds after steps 2 and 6, fragment 1 after 4 and 8.
    of_round = {1: (2.0, 1.0 + 2), 2: (4.0, 1.0 + 2 + 3 + 4), 3: (4.0, 3.0 + 4 + 5 + 6), 4: (4.0, 5.0 + 6 + 7 + 8)}
    parts = fragments_of(plain[0], 2)
    Reference(plain, ADAMW, parts, every=4, weigh=lambda rank, round: of_round[round][rank]).train(8)
    for model, expected in zip(models, plain, strict=True):
        assert_same_bits(model, expected)


def test_an_outer_step_of_the_whole_difference_is_model_averaging() -> None:
    averaged, learned = [[Odd(seed=rank) for rank in range(2)] for _ in range(2)]
    inner = partial(Snapping, lr=0.1)
    for model in (*averaged, *learned):
        inner(model.parameters()).step()  # onto the grid

    def average(store: psstore.Store, rank: int) -> None:
        model = averaged[rank]
        optimizer = DistributedOptimizer(inner(model.parameters()), store, model.named_parameters(), mode="average")
        train(model, optimizer, STEPS, seed=rank)

    def learn(store: psstore.Store, rank: int) -> None:
        model = learned[rank]
        outer = WHOLE(model.parameters())
        optimizer = DiLoCo(model, inner(model.parameters()), store, every=1, fragments=1, outer=outer)
        train(model, optimizer, STEPS, seed=rank)

    on_each_worker(2, average)
    on_each_worker(2, learn)
    plain = [Odd(seed=rank) for rank in range(2)]
    for model in plain:
        inner(model.parameters()).step()
    Reference(plain, inner, fragments_of(plain[0], 1), every=1, outer=WHOLE).train(STEPS, seed=0)
    for model, *others in zip(learned, averaged, plain, strict=True):
        for other in others:
            assert_same_bits(model, other)


# ---- learners that come, go, and are late ----


def patient(num_learners: int = 3, *, grace_s: float = 0.05) -> psstore.LocalStore:
    """Two learners make a round."""
    return psstore.LocalStore(workers=num_learners, mode="backup", backups=num_learners - 2, grace_s=grace_s)


def test_training_goes_on_without_a_learner_that_is_lost_and_with_one_that_comes() -> None:
    target = Odd(seed=7)

    def loss_of(model: Odd, inputs: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (model(inputs) - target(inputs).detach()).square().mean()
        return loss

    held_out = torch.cat(list(batches(20, seed=99)))
    begun = loss_of(Odd(seed=0), held_out).item()
    ended: list[float] = []

    def learn(local: psstore.LocalStore, rank: int, rounds: range, *, dies: bool = False) -> None:
        model = Odd(seed=0)
        store = local.connect(rank=rank)
        optimizer = DiLoCo(model, ADAMW(model.parameters()), store, every=4, fragments=2)
        for inputs in batches(10_000, seed=rank + 10 * len(rounds)):
            if store.version >= rounds.stop:
                break
            optimizer.zero_grad()
            loss_of(model, inputs).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        if not dies:
            ended.append(loss_of(model, held_out).item())
        store.end(leave=not dies)

    def dies_and_comes_back(local: psstore.LocalStore) -> None:
        learn(local, 2, range(10), dies=True)
        learn(local, 2, range(60))

    with patient() as local:
        in_threads(
            [
                partial(learn, local, 0, range(60)),
                partial(learn, local, 1, range(60)),
                partial(dies_and_comes_back, local),
            ]
        )
    assert len(ended) == 3
    assert max(ended) < 0.75 * begun


def test_a_learner_that_is_late_contributes_to_the_open_round() -> None:
    """Its own turns are fewer; what it has done counts all the same, and nobody has waited for it."""
    models = [Odd(seed=0) for _ in range(3)]

    def make(local: psstore.LocalStore, rank: int) -> DiLoCo:
        model = models[rank]
        still = SGD(model.parameters(), lr=0.0)
        outer = WHOLE(model.parameters())
        return DiLoCo(model, still, local.connect(rank=rank), every=1, fragments=1, outer=outer)

    def move(rank: int, by: float) -> None:
        with torch.no_grad():
            models[rank].bias.add_(by)

    def step(one: DiLoCo, model: Odd) -> None:
        backward(model, next(batches(1)))
        one.step()

    with patient(grace_s=0.0) as local:
        learners = [make(local, rank) for rank in range(3)]
        begun = models[0].bias.detach().clone()
        for _ in range(3):
            in_threads([partial(step, learners[rank], models[rank]) for rank in (0, 1)])
        assert learners[0].store.version == 3
        move(0, 0.25)
        move(2, 0.75)
        in_threads([partial(step, learners[rank], models[rank]) for rank in (0, 2)])
        assert learners[2].store.version == 4
        for rank in (0, 2):
            assert torch.equal(models[rank].bias, begun - (begun - (begun + 0.25) + (begun - (begun + 0.75))) / 2)


def test_a_learner_that_goes_astray_is_told_and_the_others_go_on_as_if_it_were_not_there() -> None:
    models = [Odd(seed=0) for _ in range(2)]

    def work(store: psstore.Store, rank: int) -> None:
        model = models[rank]
        still, outer = SGD(model.parameters(), lr=0.0), WHOLE(model.parameters())
        optimizer = DiLoCo(model, still, store, every=1, fragments=1, outer=outer)
        backward(model, next(batches(1)))
        for round in range(1, 7):
            with torch.no_grad():
                model.bias.add_(1000.0 if (rank, round) == (1, 5) else 1.0)
            optimizer.step()

    with warnings.catch_warnings(record=True) as caught, psstore.LocalStore(workers=2, refuse_norm=10.0) as local:
        warnings.simplefilter("always")
        in_threads([partial(work, local.connect(rank=rank), rank) for rank in range(2)])
        told = [str(one.message) for one in caught if "refused" in str(one.message)]
        assert len(told) == 1
        assert told[0].startswith("the contribution of rank 1 was refused: its norm is ")
        assert told[0].endswith("; round 5 went on without it")
    assert_same_bits(*models)
    moved = models[0].bias.detach() - Odd(seed=0).bias.detach()
    torch.testing.assert_close(moved, torch.full_like(moved, 6.0))


def in_turns(local: psstore.LocalStore, models: Sequence[Odd], fragments: int) -> list[DiLoCo]:
    """Learners that share in each step, and move by hand alone; what a round has made of them they take whole."""
    learners = []
    for rank, model in enumerate(models):
        outer, still = WHOLE(model.parameters()), SGD(model.parameters(), lr=0.0)
        store = local.connect(rank=rank)
        learners.append(DiLoCo(model, still, store, every=fragments, fragments=fragments, outer=outer))
        backward(model, next(batches(1)))
    return learners


def move(model: Odd) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5)


@pytest.mark.parametrize(
    "missed", [3, 6], ids=["one cycle", "past an edge where two of three turns are one fragment's"]
)
def test_a_learner_that_has_missed_rounds_merges_what_they_were_about(missed: int) -> None:
    models = [Odd(seed=0) for _ in range(3)]
    with patient(grace_s=0.0) as local:
        learners = in_turns(local, models, 3)
        for model in models[:2]:
            move(model)
        for _ in range(missed):
            in_threads([learners[rank].step for rank in (0, 1)])
        in_threads([learners[rank].step for rank in (0, 2)])
        assert learners[2].store.version == missed + 1
    assert_same_bits(models[2], models[0])


def offsets(model: Odd) -> dict[str, float]:
    """By how much each parameter is off what it began with; those that have elements."""
    begun = zip(model.named_parameters(), Odd(seed=0).parameters(), strict=True)
    return {name: (one - was).detach().mean().item() for (name, one), was in begun if one.numel()}


def test_what_came_too_late_for_its_round_is_shared_in_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    models = [Odd(seed=0) for _ in range(3)]
    with patient(grace_s=0.0) as local:
        learners = in_turns(local, models, 1)
        move(models[2])
        in_threads([learners[rank].step for rank in (0, 1)])
        with monkeypatch.context() as patched:  # the round is decided after it was found open
            patched.setattr(learner_step.LearnerStep, "_open_round", lambda self: self._training.store.round)
            learners[2].step()
        assert offsets(models[2]) == pytest.approx(dict.fromkeys(offsets(models[2]), 0.5))
        in_threads([learners[rank].step for rank in (0, 2)])
        for rank in (0, 2):
            assert offsets(models[rank]) == pytest.approx(dict.fromkeys(offsets(models[rank]), 0.25))


def test_a_learner_that_is_always_two_rounds_behind_has_a_say_in_both_fragments() -> None:
    models = [Odd(seed=0) for _ in range(3)]
    with patient(grace_s=0.0) as local:
        learners = in_turns(local, models, 2)
        for _ in range(3):
            in_threads([learners[rank].step for rank in (0, 1)])
            move(models[2])
            in_threads([learners[rank].step for rank in (0, 2)])
        learners[0].synchronize()
    for (name, one), begun in zip(models[0].named_parameters(), Odd(seed=0).parameters(), strict=True):
        assert one.numel() == 0 or not torch.equal(one, begun), f"{name} is as it was"


def test_a_weight_is_a_share_in_the_mean() -> None:
    models = [Odd(seed=0) for _ in range(2)]
    begun = models[0].bias.detach().clone()

    def work(store: psstore.Store, rank: int) -> None:
        model = models[rank]
        still, outer = SGD(model.parameters(), lr=0.0), WHOLE(model.parameters())
        optimizer = DiLoCo(model, still, store, every=1, fragments=1, outer=outer, weight=3.0 if rank else 1.0)
        backward(model, next(batches(1)))
        with torch.no_grad():
            model.bias.add_(float(rank))
        optimizer.step()

    on_each_worker(2, work)
    expected = begun - 3.0 * (begun - (begun + 1.0)) / 4.0
    for model in models:
        assert torch.equal(model.bias, expected)


@pytest.mark.parametrize("way", ["learn", "average"])
def test_nobody_waits_for_a_learner_that_is_killed_and_another_one_takes_its_place(
    way: str, tmp_path: Path, repository: Path
) -> None:
    stop = tmp_path / "stop"

    def start(url: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-u", "-m", "tests.torch.learner_worker", way, str(stop)]
        environ = {**os.environ, "PSSTORE_URL": url}
        return TrainingPopen(command, stdout=subprocess.PIPE, text=True, cwd=repository, env=environ)

    def line_of(learner: subprocess.Popen[str]) -> str:
        assert learner.stdout is not None
        return learner.stdout.readline()

    with StoreProcess("--workers", "3", "--quorum", "2", "--grace-s", "0.1", "--lost", "drop") as store:
        learners = [start(store.url) for _ in range(3)]
        try:
            for learner in learners:
                assert line_of(learner).startswith("began at ")
                assert line_of(learner).startswith("round ")
            learners[2].kill()
            learners[2].wait()
            learners.append(start(store.url))
            found = re.fullmatch(r"began at (\d+)\n", line_of(learners[3]))
            assert found is not None
            assert int(found[1]) >= 4, "it has the newest values"
            assert line_of(learners[3]).startswith("round "), "it trains with the others"
            learners[3].kill()
            stop.touch()
            for learner in learners[:2]:
                assert line_of(learner).startswith("ended at ")
                assert learner.wait(60.0) == 0
        finally:
            for learner in learners:
                learner.kill()
                learner.wait()


# ---- what an optimizer of torch's does ----


def test_a_learner_goes_on_from_its_state_dict() -> None:
    plain, first, second = Odd(), Odd(), Odd(seed=3)
    options = {"every": 10, "fragments": 4, "merge": 0.5, "weight": "tokens"}

    def learn(model: Odd, optimizer: DiLoCo, begin: int, end: int) -> None:
        for number, inputs in enumerate(batches(end, seed=1)):
            if number >= begin:
                optimizer.zero_grad()
                backward(model, inputs)
                optimizer.count(number + 1)
                optimizer.step()

    with psstore.connect("local://") as store:
        learn(plain, DiLoCo(plain, ADAMW(plain.parameters()), store, **options), 0, STEPS)  # type: ignore[arg-type]
    with psstore.LocalStore() as local:
        with local.connect() as store:
            optimizer = DiLoCo(first, ADAMW(first.parameters()), store, **options)  # type: ignore[arg-type]
            learn(first, optimizer, 0, 13)
            saved = deepcopy((first.state_dict(), optimizer.state_dict()))
        with local.connect() as store:
            with pytest.warns(UserWarning, match="has trained"):
                optimizer = DiLoCo(second, ADAMW(second.parameters()), store, **options)  # type: ignore[arg-type]
            second.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            learn(second, optimizer, 13, STEPS)
    assert_same_bits(second, plain)
    AdamW(plain.parameters()).load_state_dict(saved[1])  # the inner optimizer's class takes it, too


def test_a_learner_that_loads_a_state_dict_ends_the_round_that_is_under_way() -> None:
    """Else what was shared in it would be shared again with the next."""
    model = Odd()
    begun = model.bias.detach().clone()
    with psstore.connect("local://") as store:
        outer = SGD(model.parameters(), lr=1.0)
        optimizer = DiLoCo(model, SGD(model.parameters(), lr=0.0), store, every=2, fragments=1, delay=2, outer=outer)
        saved = optimizer.state_dict()
        backward(model, next(batches(1)))
        for _ in range(2):
            for _ in range(2):
                move(model)
                optimizer.step()
            optimizer.load_state_dict(saved)
        moved = model.bias.detach() - begun
        optimizer.synchronize()
        torch.testing.assert_close(model.bias.detach() - begun, moved, rtol=0, atol=1e-6)


def test_schedulers_and_closures_are_those_of_the_inner_optimizer_and_the_outer_one_has_its_own() -> None:
    models = [Odd(seed=rank) for rank in range(2)]

    def work(store: psstore.Store, rank: int) -> None:
        model = models[rank]
        outer = SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        optimizer = DiLoCo(model, ADAMW(model.parameters()), store, every=2, fragments=2, outer=outer)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        for number, inputs in enumerate(batches(8, seed=100 + rank)):

            def closure(inputs: torch.Tensor = inputs) -> float:
                optimizer.zero_grad()
                return backward(model, inputs)

            assert optimizer.step(closure) > 0.0
            scheduler.step()
            if number == 3:
                outer.param_groups[0]["lr"] = 0.1

    on_each_worker(2, work)
    plain = [Odd(seed=rank) for rank in range(2)]
    reference = Reference(plain, ADAMW, fragments_of(plain[0], 2), every=2)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(one, 0.9) for one in reference.optimizers]

    def after(step: int) -> None:
        for scheduler in schedulers:
            scheduler.step()
        if step == 4:
            for outer in reference.outers:
                outer.param_groups[0]["lr"] = 0.1

    reference.train(8, after=after)
    for model, expected in zip(models, plain, strict=True):
        assert_same_bits(model, expected)


def test_parameters_change_in_step_alone_while_a_round_is_under_way() -> None:
    model = Odd()
    with psstore.connect("local://") as store:
        optimizer = DiLoCo(model, SGD(model.parameters(), lr=0.0), store, every=4, fragments=1, delay=3)
        with torch.no_grad():
            model.bias.add_(1.0)
        moved = model.bias.detach().clone()
        for number in range(1, 8):
            optimizer.zero_grad()
            backward(model, next(batches(1)))
            before = model.bias.detach().clone()
            if number == 6:
                while store.version == 0:
                    pass  # the round is decided, and nothing has changed here
            assert torch.equal(model.bias, before)
            optimizer.step()
            assert torch.equal(model.bias, moved) == (number < 7)


def test_a_learner_of_half_precision_that_takes_no_steps_changes_nothing() -> None:
    """What rounding takes from the store's float32 is no step."""
    model = Odd(dtype=torch.bfloat16)
    with psstore.connect("local://") as store:
        store.create("bias", torch.full((9,), 0.1), rule="sgd")
        optimizer = DiLoCo(model, SGD(model.parameters(), lr=0.0), store, every=1, fragments=1)
        for inputs in batches(3, dtype=torch.bfloat16):
            optimizer.zero_grad()
            backward(model, inputs)
            optimizer.step()
        assert torch.equal(torch.from_numpy(store.pull("bias")), torch.full((9,), 0.1))


def test_synchronize_takes_the_values_that_all_have_made() -> None:
    models = [Odd(seed=rank) for rank in range(2)]

    def work(store: psstore.Store, rank: int) -> None:
        optimizer = DiLoCo(
            models[rank], ADAMW(models[rank].parameters()), store, every=8, fragments=2, delay=1, merge=0.5
        )
        train(models[rank], optimizer, 4, seed=rank)
        optimizer.synchronize()
        assert store.version == 1, "the round that was under way"
        values = store.pull_many([name for name, _ in models[rank].named_parameters()])
        for one, value in zip(models[rank].parameters(), values, strict=True):
            assert torch.equal(one, torch.from_numpy(value))

    on_each_worker(2, work)
    assert_same_bits(*models)


def test_pseudo_gradients_and_values_travel_in_codecs() -> None:
    """The bytes of int8 both ways: a byte for an element, and 4 for a block of 256."""
    models = [deep(seed=rank) for rank in range(2)]
    pushed: list[int] = []

    def work(store: psstore.Store, rank: int) -> None:
        model = models[rank]
        optimizer = DiLoCo(model, SGD(model.parameters(), lr=1e-4), store, every=3, fragments=3, compression="int8")
        before = store.bytes_pushed
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randn(4, WIDTH)).square().sum().backward()
            optimizer.step()
        pushed.append(store.bytes_pushed - before)
        assert optimizer.residuals()
        optimizer.synchronize()

    on_each_worker(2, work)
    for sent in pushed:
        assert sent < 2 * num_bytes(models[0]) * 0.26
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)


# ---- fragments ----


def test_fragments_are_whole_tensors_balanced_by_bytes_whatever_their_order() -> None:
    sizes = {"a": 10, "b": 70, "c": 30, "d": 30, "e": 5, "f": 60}
    trained = [Trained(name, torch.zeros(size), 0) for name, size in sizes.items()]
    fragments = cut_alone(trained, 3)
    assert sorted(fragment.num_bytes for fragment in fragments) == [4 * 65, 4 * 70, 4 * 70]
    again = cut_alone(trained[::-1], 3)
    assert [set(one.names) for one in fragments] == [set(one.names) for one in again]


# ---- what is refused ----


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"every": 3, "fragments": 4}, "every is 3 and fragments 4"),
        ({"fragments": 0}, "fragments 0"),
        ({"every": 8, "fragments": 4, "delay": 3}, "delay is 3; .* expected 0 to every/fragments, which is 2"),
        ({"merge": 0.0}, "merge is 0.0"),
        ({"weight": "samples"}, "weight is 'samples'; expected a number, or 'tokens'"),
        ({"fragments": 7}, "fragments is 7; .* this model trains 6"),
        ({"outer": torch.optim.NAdam([torch.zeros(1)])}, "no rule for NAdam, and takes the outer step"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, object], said: str) -> None:
    model = Odd()
    with psstore.connect("local://") as store:
        with pytest.raises(UsageError, match=said):
            DiLoCo(model, ADAMW(model.parameters()), store, **options)  # type: ignore[arg-type]
        assert store.keys() == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"every": 25}, "every=25 here and 50 there"),
        ({"fragments": 2}, "fragments=2 here and 4 there"),
        ({"weight": "tokens"}, "weight by tokens=1 here and 0 there"),
        ({"outer": SGD([torch.zeros(1)], lr=0.7)}, "the outer optimizer's momentum=0 here and 0.9 there"),
    ],
)
def test_a_learner_that_does_otherwise_than_those_of_the_store_is_refused(
    options: dict[str, object], said: str
) -> None:
    first, second = Odd(), Odd(seed=1)
    with psstore.LocalStore(workers=2) as local, local.connect(rank=0) as store, local.connect(rank=1) as other:
        DiLoCo(first, ADAMW(first.parameters()), store)
        with pytest.raises(UsageError, match=said):
            DiLoCo(second, ADAMW(second.parameters()), other, **options)  # type: ignore[arg-type]
        DiLoCo(second, ADAMW(second.parameters()), other)


def test_a_learner_of_another_scheme_of_turns_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Odd(), Odd(seed=1)
    with psstore.LocalStore(workers=2) as local, local.connect(rank=0) as store, local.connect(rank=1) as other:
        DiLoCo(first, ADAMW(first.parameters()), store)
        monkeypatch.setattr(learner_step, "SCHEME", 1)
        with pytest.raises(UsageError, match="scheme of turns=1 here and 2 there"):
            DiLoCo(second, ADAMW(second.parameters()), other)


def test_a_decay_of_the_outer_optimizer_that_is_decoupled_later_is_refused() -> None:
    """It is another rule, and the store goes on by the one that its tensors have."""
    model = Odd(seed=0)
    outer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    if "decoupled_weight_decay" not in outer.defaults:
        pytest.skip("this torch has no such flag")
    with psstore.connect("local://") as store:
        optimizer = DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), store, every=1, fragments=1, outer=outer)
        backward(model, torch.ones(2, 5))
        optimizer.step()
        outer.param_groups[0]["decoupled_weight_decay"] = False
        with pytest.raises(UsageError, match="group has decoupled_weight_decay=False, and had True"):
            optimizer.step()
        outer.param_groups[0]["decoupled_weight_decay"] = True
        optimizer.step()
        assert store.version == 2


def test_another_outer_optimizer_is_refused() -> None:
    first, second = Odd(), Odd(seed=1)
    with psstore.LocalStore(workers=2) as local, local.connect(rank=0) as store, local.connect(rank=1) as other:
        DiLoCo(first, ADAMW(first.parameters()), store)
        with pytest.raises(RuleMismatch, match="'adam'"):
            DiLoCo(second, ADAMW(second.parameters()), other, outer=torch.optim.Adam(second.parameters()))


def test_a_learner_whose_weights_are_not_finite_sends_nothing() -> None:
    model = Odd()
    with psstore.connect("local://") as store:
        optimizer = DiLoCo(model, ADAMW(model.parameters()), store, every=1, fragments=1)
        with torch.no_grad():
            model.bias[0] = torch.nan
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
        with pytest.raises(UsageError, match="parameter 'bias' holds NaN or infinity"):
            optimizer.step()
        assert store.version == 0
        assert torch.from_numpy(store.pull("bias")).isfinite().all()


def test_tokens_that_nobody_counts_and_parameters_that_come_later_are_refused() -> None:
    model = Odd()
    model.scale.requires_grad_(False)
    with psstore.connect("local://") as store:
        optimizer = DiLoCo(model, ADAMW(model.parameters()), store, every=4, fragments=1, weight="tokens")
        with pytest.raises(UsageError, match=r"none were counted .* optimizer.count"):
            train(model, optimizer, 4, seed=1)
        model.scale.requires_grad_(True)
        with pytest.raises(UsageError, match="'scale' came to be trained after the fragments were cut"):
            train(model, optimizer, 1, seed=1)


# ---- an exchange ----


def test_a_stage_that_failed_is_taken_again_by_whoever_waits_once_more() -> None:
    did: list[str] = []

    def fails_once() -> None:
        did.append("commit")
        if did.count("commit") == 1:
            raise UsageError("not yet")

    exchange = Exchange(lambda: did.append("push"), fails_once, lambda: did.append("pull"))
    exchange.start()
    with pytest.raises(UsageError, match="not yet"):
        exchange.finish()
    exchange.finish()
    assert did == ["push", "commit", "commit", "pull"]


def test_a_round_that_gets_no_thread_is_gone_through_when_its_values_are_due() -> None:
    did: list[str] = []
    exchange = Exchange(lambda: did.append("push"), lambda: did.append("pull"))
    with mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread")):
        exchange.start()
    assert not did
    exchange.finish()
    assert did == ["push", "pull"]
