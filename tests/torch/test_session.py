"""`psstore.torch.session`: where it begins, where it ends, and what stands around its steps."""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import subprocess
import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from itertools import chain, repeat
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import psstore
from psstore.checkpoint.handed import pack_handed, unpack_handed
from psstore.checkpoint.place import COMPLETE, open_place
from psstore.client.store import Store
from psstore.errors import BadArgument, RolledBack, UsageError, VersionGone
from psstore.torch import (
    Compression,
    DistributedOptimizer,
    Embedding,
    Hook,
    ResumableLoader,
    Step,
    TrainingSession,
    session,
    worker_state,
)
from tests.support.cluster import PACE_S, PATIENCE_S
from tests.support.fork_server import ServedPopen
from tests.support.server_process import StoreProcess, eventually, reshard_command

MODES = {
    "sync": (),
    "backup": ("--mode", "backup", "--quorum", "2"),
    "ssp": ("--mode", "ssp", "--staleness", "2"),
    "async": ("--mode", "async"),
}

KEEPS_BACK = Compression(push="int8", min_elems=16)
NUM_ITEMS, ITEM_DIM = 30, 7

MODEL = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Dropout(0.3), nn.Linear(30, 3))


goes_on = pytest.mark.filterwarnings("ignore:the store has trained:UserWarning")


class Trainee(NamedTuple):
    """A worker's model and what trains it."""

    model: nn.Module
    optimizer: DistributedOptimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    items: Embedding | None = None
    """A table that is trained beside it."""


def trainee(store: Store, *, items: Embedding | None = None, **options: Any) -> Trainee:
    model = deepcopy(MODEL)
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    schedule = torch.optim.lr_scheduler.StepLR(plain, 3, 0.7)
    tables = [] if items is None else [items]
    optimizer = DistributedOptimizer(plain, store, model.named_parameters(), tables=tables, **options)
    return Trainee(model, optimizer, schedule, items)


def turn(one: Trainee, step: Step, *, clips: bool = False) -> None:
    """The body of a loop: it draws from torch's and Python's random numbers, and notes what it has done."""
    inputs = torch.randn(8, 20) * random.random()
    one.optimizer.zero_grad()
    loss = one.model(inputs).square().mean()
    if one.items is not None:
        loss = loss + (one.items(torch.randint(0, NUM_ITEMS, (8,))) * inputs[:, :ITEM_DIM]).mean()
    loss.backward()
    if clips:
        one.optimizer.clip_grad_norm_(0.01)
    one.optimizer.step()
    one.schedule.step()
    one.optimizer.checkpoint_state["steps"] = one.optimizer.checkpoint_state.get("steps", 0) + 1
    step.report(loss=loss)


def end_of(one: Trainee) -> list[Any]:
    """What must be the same bit by bit."""
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in one.model.parameters())
    if one.items is not None:
        weights += one.items.store.pull_rows(one.items.table, range(NUM_ITEMS)).tobytes()
    lr = one.optimizer.param_groups[0]["lr"]
    return [weights, lr, one.schedule.last_epoch, dict(one.optimizer.checkpoint_state), random.random(), torch.rand(1)]


def in_threads(url: str, count: int, work: Callable[[Store], Any]) -> list[Any]:
    """What each of so many workers returns, by rank."""

    def worker(rank: int) -> Any:
        with psstore.connect(url, rank=rank, num_workers=count, wait_s=PATIENCE_S) as store:
            return work(store)

    with ThreadPoolExecutor(count) as pool:
        return [done.result() for done in [pool.submit(worker, rank) for rank in range(count)]]


# ---- where it begins ----


@pytest.mark.filterwarnings("error:the store has trained:UserWarning")  # a store that was restored is to go on
@pytest.mark.parametrize("compression", [None, KEEPS_BACK], ids=["whole", "int8"])
def test_training_goes_on_bit_for_bit_with_everything_around_it(
    tmp_path: Path, compression: Compression | None
) -> None:
    def train(stop_at: int, shards: int, place: str) -> list[Any]:
        flags = ("--checkpoint", place, "--restore", "auto", "--checkpoint-every", "1000000")
        with (
            StoreProcess("--shards", str(shards), *flags) as process,
            psstore.connect(process.url, wait_s=PATIENCE_S) as store,
        ):
            items = None if compression is None else Embedding("items", ITEM_DIM, store, compression="push=int8")
            one = trainee(store, compression=compression, items=items)
            random.seed(stop_at)  # another life's are other ones,
            torch.manual_seed(stop_at)
            if store.version == 0:
                random.seed(5)
                torch.manual_seed(5)
            for step in session(one.optimizer, stop_at=stop_at, state={"schedule": one.schedule}, checkpoint="4"):
                turn(one, step)
            assert store.version == stop_at
            return end_of(one)

    whole = train(11, 2, str(tmp_path / "whole"))
    train(6, 1, str(tmp_path / "parted"))
    process = open_place(str(tmp_path / "parted"))
    assert [one.version for one in process.place.list()][-1] == 6, "one at the end"
    assert train(11, 3, str(tmp_path / "parted")) == whole


def test_names_that_the_restored_store_has_not_trained_are_said(tmp_path: Path) -> None:
    """As of a layer that has another name in the program by now: its weights are those that it was made with."""
    with StoreProcess("--checkpoint", str(tmp_path)) as process, psstore.connect(process.url) as store:
        turn(trainee(store), Step(1))
        assert store.checkpoint() == 1
    with StoreProcess("--restore", str(tmp_path)) as process, psstore.connect(process.url) as store:
        with pytest.warns(UserWarning, match=r"of version 1 .* not trained 'new/0.weight'.*until store\.drop"):
            trainee(store, name="new")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            trainee(store)


@goes_on
def test_what_was_handed_in_at_another_version_is_not_put_back(tmp_path: Path) -> None:
    with StoreProcess() as process:
        with psstore.connect(process.url) as store:
            one = trainee(store)
            for step in session(one.optimizer, stop_at=2):
                turn(one, step)
            turn(one, Step(3))
            assert store.version == 3, "what comes after a session is training like any other"
        with psstore.connect(process.url) as store:
            again = trainee(store)
            with pytest.warns(UserWarning, match="is of version 2: its random states and schedulers begin anew"):
                assert not list(session(again.optimizer, stop_at=1))


@goes_on
def test_parts_on_one_side_only_are_named(tmp_path: Path) -> None:
    with StoreProcess() as process:
        with psstore.connect(process.url) as store:
            one = trainee(store)
            for step in session(one.optimizer, stop_at=1, state={"old": one.schedule}):
                turn(one, step)
        with psstore.connect(process.url) as store:
            again = trainee(store)
            with pytest.warns(UserWarning, match="begins anew") as said:
                assert not list(session(again.optimizer, stop_at=1, state={"new": again.schedule}))
            told = " ".join(str(one.message) for one in said)
            assert "'new' begins anew: it is not in the checkpoint" in told
            assert "'old' begins anew: it is in the checkpoint, and state= has it not" in told


def test_state_comes_back_as_it_was() -> None:
    given: dict[str, Any] = {
        "tensors": [torch.arange(6, dtype=torch.int64).reshape(2, 3), torch.ones(3, dtype=torch.bfloat16)],
        "strange": (torch.empty(0, 4), torch.tensor(2.5), torch.randn(4, 6).t()),
        "array": np.linspace(0, 1, 7),
        "counter": Counter({3: 2, 9: 1}),
        "rest": {"a": None, 4: 1 << 70, "f": float("inf"), "b": b"xy", "t": True},
    }
    back = worker_state._whole(unpack_handed(pack_handed(worker_state._plain(given))))
    for mine, its in zip([*given["tensors"], *given["strange"]], [*back["tensors"], *back["strange"]], strict=True):
        assert mine.dtype == its.dtype
        assert torch.equal(mine, its)
    assert type(back["strange"]) is tuple
    assert np.array_equal(given["array"], back["array"])
    assert (back["counter"], type(back["counter"])) == (given["counter"], Counter)
    assert back["rest"] == given["rest"]


# ---- where it goes back to ----


@pytest.mark.parametrize(
    ("overlap", "clips"), [("none", False), ("none", True), ("backward", False), ("backward", True), ("eager", False)]
)
@pytest.mark.parametrize("compression", [None, KEEPS_BACK], ids=["whole", "int8"])
def test_what_the_store_takes_back_is_done_again_to_the_same_bytes(
    tmp_path: Path, overlap: str, clips: bool, compression: Compression | None
) -> None:
    def train(place: str, *, killed_at: Sequence[int]) -> list[Any]:
        flags = ("--checkpoint", place, "--checkpoint-every", "1000000", "--restarts", "2")
        left = list(killed_at)
        with (
            StoreProcess("--shards", "2", *flags) as process,
            psstore.connect(process.url, wait_s=PATIENCE_S) as store,
        ):
            one = trainee(store, overlap=overlap, compression=compression)
            random.seed(5)
            torch.manual_seed(5)
            diary = Diary()
            running = session(
                one.optimizer, stop_at=11, state={"schedule": one.schedule}, checkpoint="4", hooks=[diary]
            )
            for step in running:
                if left and step.number == left[0]:
                    assert eventually(lambda: any(one.status == COMPLETE for one in open_place(place).place.list()))
                    os.kill(process.shard_pids()[len(left) % 2], signal.SIGKILL)
                    del left[0]
                    if not clips:
                        one.optimizer.publish()  # which is the first to hear of it
                turn(one, step, clips=clips)
            assert store.version == 11
            assert not one.optimizer.bears_rollbacks
            assert len(diary.went_back_to) == len(killed_at)
            return end_of(one)

    undisturbed = train(str(tmp_path / "whole"), killed_at=[])
    assert train(str(tmp_path / "taken back"), killed_at=[7, 10]) == undisturbed


def test_going_back_to_a_checkpoint_without_what_a_worker_has_handed_in_is_said(tmp_path: Path) -> None:
    def train(process: StoreProcess, one: Trainee) -> None:
        is_killed = False
        for step in session(one.optimizer, stop_at=4, state={"schedule": one.schedule}):
            if step.number == 3 and not is_killed:
                is_killed = True
                with psstore.connect(process.url, role="client") as client:
                    assert client.checkpoint(gather_s=0.0) == 2
                os.kill(process.shard_pids()[0], signal.SIGKILL)
            turn(one, step)

    flags = ("--checkpoint", str(tmp_path), "--checkpoint-every", "1000000", "--restarts", "1")
    with StoreProcess(*flags) as process, psstore.connect(process.url, wait_s=PATIENCE_S) as store:
        one = trainee(store)
        with pytest.warns(UserWarning, match=r"rank 0 has handed in is not there: its random .* stay as they are"):
            train(process, one)
        assert one.schedule.last_epoch == 5, "one step was taken twice"


@pytest.mark.parametrize(("overlap", "clips"), [("none", True), ("backward", False), ("eager", False)])
def test_training_goes_on_with_other_numbers_of_shards_to_the_same_bytes(overlap: str, clips: bool) -> None:
    def train(numbers: Sequence[int], stop_at: int | None = None) -> list[Any]:
        left, asked = list(numbers), list[subprocess.Popen[bytes]]()
        with StoreProcess("--shards", "2", "--workers", "2") as process:

            def work(store: Store) -> list[Any]:
                one, diary = trainee(store, overlap=overlap), Diary()
                one.optimizer.weight = 1.0 + (store.rank or 0)
                running = session(one.optimizer, stop_at=stop_at, state={"schedule": one.schedule}, hooks=[diary])
                for step in running:
                    if numbers and store.rank == 0 and all(command.poll() is not None for command in asked):
                        if not left:
                            running.stop()
                        else:
                            command = reshard_command(process.url, left.pop())
                            asked.append(ServedPopen(command, stdout=subprocess.DEVNULL))
                    time.sleep(PACE_S if numbers else 0)
                    own = torch.Generator().manual_seed(1000 * step.number + (store.rank or 0))
                    one.optimizer.zero_grad()
                    one.model.eval()(torch.randn(8, 20, generator=own)).square().mean().backward()
                    if clips:
                        one.optimizer.clip_grad_norm_(0.01)
                    one.optimizer.step()
                    one.schedule.step()
                weights = b"".join(parameter.detach().numpy().tobytes() for parameter in one.model.parameters())
                went = len(diary.went_back_to)
                return [store.version, weights, one.schedule.last_epoch, len(store.stats()), went]

            ends = in_threads(process.url, 2, work)
        assert [command.returncode for command in asked] == [0] * len(numbers)
        return ends

    disturbed = train([1, 3])
    calm = train([], stop_at=disturbed[0][0])
    assert [one[:3] for one in calm] == [one[:3] for one in disturbed]
    assert [one[3] for one in disturbed] == [1, 1]
    # One, where the second change comes while the worker still takes up the first.
    assert all(1 <= one[4] <= 2 for one in disturbed)


@pytest.mark.parametrize("cache_bytes", [None, 1 << 20])
@pytest.mark.parametrize("overlap", ["none", "backward"])
def test_tables_go_back_and_on_with_the_store_to_the_same_bytes(
    tmp_path: Path, overlap: str, cache_bytes: int | None
) -> None:
    def train(place: str, *, disturbed: bool) -> list[Any]:
        flags = ("--checkpoint", place, "--checkpoint-every", "1000000", "--restarts", "1")
        with (
            StoreProcess("--shards", "2", *flags) as process,
            psstore.connect(process.url, wait_s=PATIENCE_S) as store,
        ):
            one = trainee(store, items=Embedding("items", ITEM_DIM, store, cache_bytes=cache_bytes), overlap=overlap)
            random.seed(5)
            torch.manual_seed(5)
            diary = Diary()
            running = session(
                one.optimizer, stop_at=24, state={"schedule": one.schedule}, checkpoint="4", hooks=[diary]
            )
            for step in running:
                if disturbed and not diary.went_back_to and step.number == 8:
                    assert eventually(lambda: any(one.status == COMPLETE for one in open_place(place).place.list()))
                    os.kill(process.shard_pids()[1], signal.SIGKILL)
                elif disturbed and len(diary.went_back_to) == 1 and step.number == 12:
                    asked = ServedPopen(reshard_command(process.url, 3), stdout=subprocess.DEVNULL)
                elif disturbed and len(diary.went_back_to) == 1 and step.number > 12:
                    time.sleep(0.5)  # twelve steps are left for it to happen
                turn(one, step)
            if disturbed:
                assert asked.wait() == 0
            assert len(diary.went_back_to) == (2 if disturbed else 0)
            return end_of(one)

    undisturbed = train(str(tmp_path / "whole"), disturbed=False)
    assert train(str(tmp_path / "taken back"), disturbed=True) == undisturbed


def test_a_loader_that_is_under_way_goes_back_with_the_store(tmp_path: Path) -> None:
    def train(place: str, *, killed_at: int | None) -> list[Any]:
        seen: list[float] = []
        with (
            StoreProcess(*("--checkpoint", place, "--checkpoint-every", "1000000", "--restarts", "1")) as process,
            psstore.connect(process.url, wait_s=PATIENCE_S) as store,
        ):
            one = trainee(store)
            torch.manual_seed(5)
            batches = ResumableLoader(DataLoader(list(torch.randn(12, 20)), 3, shuffle=True))  # type: ignore[arg-type]
            endless = chain.from_iterable(repeat(batches))
            for step in session(one.optimizer, stop_at=11, state={"batches": batches}, checkpoint="4"):
                if step.number == killed_at:
                    assert eventually(lambda: any(one.status == COMPLETE for one in open_place(place).place.list()))
                    os.kill(process.shard_pids()[0], signal.SIGKILL)
                    killed_at = None
                one.optimizer.zero_grad()
                batch = next(endless)
                one.model(batch).square().mean().backward()
                one.optimizer.step()
                seen[step.number - 1 :] = [batch.sum().item()]
            return [seen, *end_of(one)[:1]]

    assert train(str(tmp_path / "taken back"), killed_at=8) == train(str(tmp_path / "whole"), killed_at=None)


@pytest.mark.parametrize("overlap", ["none", "backward", "eager"])
def test_what_goes_on_holds_nothing_of_the_store_that_was(tmp_path: Path, overlap: str) -> None:
    with (
        StoreProcess("--shards", "2", "--checkpoint", str(tmp_path), "--restarts", "1") as process,
        psstore.connect(process.url, wait_s=PATIENCE_S) as store,
    ):
        one, old = trainee(store, overlap=overlap), weakref.ref(store._backend)
        gc.collect()
        gc.disable()  # so that what is collected is so by whoever reconnects
        try:
            for step in session(one.optimizer, stop_at=6):
                if step.number == 3 and store._backend is old():
                    store.checkpoint()
                    os.kill(process.shard_pids()[1], signal.SIGKILL)
                turn(one, step)
        finally:
            gc.enable()
        assert store.version == 6
        assert old() is None


def test_whoever_does_not_go_on_by_itself_is_told(tmp_path: Path) -> None:
    with (
        StoreProcess("--checkpoint", str(tmp_path), "--restarts", "1") as process,
        psstore.connect(process.url, wait_s=PATIENCE_S) as store,
    ):
        one = trainee(store)
        one.model(torch.ones(1, 20)).sum().backward()
        one.optimizer.step()
        store.checkpoint()
        os.kill(process.shard_pids()[0], signal.SIGKILL)
        with pytest.raises(RolledBack):
            one.optimizer.step()
        store.reconnect()
        one.optimizer.reattach()
        one.optimizer.step()
        assert store.version == 2


def test_it_begins_with_a_store_that_went_back_since_the_optimizer_was_made(tmp_path: Path) -> None:
    """As where data are loaded meanwhile: hooks are told of a beginning, and of nothing that was before."""
    with (
        StoreProcess("--checkpoint", str(tmp_path), "--restarts", "1") as process,
        psstore.connect(process.url, wait_s=PATIENCE_S) as store,
    ):
        one, diary = trainee(store), Diary()
        one.model(torch.ones(1, 20)).sum().backward()
        one.optimizer.step()
        store.checkpoint()
        os.kill(process.shard_pids()[0], signal.SIGKILL)
        for step in session(one.optimizer, stop_at=3, hooks=[diary]):
            turn(one, step)
        assert diary.lines[0] == ("begin", 1)
        assert diary.went_back_to == []
        assert store.version == 3


# ---- where it ends ----


@pytest.mark.parametrize("mode", MODES)
def test_it_ends_at_that_version_exactly(mode: str) -> None:
    with StoreProcess("--shards", "2", "--workers", "3", *MODES[mode]) as process:

        def work(store: Store) -> int:
            one = trainee(store)
            for step in session(one.optimizer, stop_at=20):
                turn(one, step)
            return store.version

        assert in_threads(process.url, 3, work) == [20] * 3
        with psstore.connect(process.url, role="client") as reader:
            assert reader.stats()[0]["decisions"] == 20


@pytest.mark.parametrize("overlap", ["none", "eager"])
@pytest.mark.parametrize("how", ["break", "raise", "stop", "at once"])
def test_it_ends_on_all_workers_when_it_ends_on_one(how: str, overlap: str) -> None:
    with StoreProcess("--shards", "2", "--workers", "2") as process:

        def work(store: Store) -> tuple[int, bool, str | None]:
            one = trainee(store, overlap=overlap)
            chosen = session(one.optimizer, stop_at=1000, log_every_s=None)
            try:
                for step in chosen:
                    turn(one, step)
                    if store.rank == 1 and step.number == 5:
                        if how == "break":
                            break
                        if how == "raise":
                            raise ZeroDivisionError
                        chosen.stop("enough", at_once=how == "at once")
            except ZeroDivisionError:
                assert store.rank == 1
            return store.version, chosen.is_clean, chosen.why

        after = 6 if how == "stop" else 5
        first, second = in_threads(process.url, 2, work)
        assert first == (after, True, None)
        assert second == (after, how in ("stop", "at once"), "enough" if how in ("stop", "at once") else None)


def test_it_ends_though_it_is_told_to_in_each_step() -> None:
    """As where a script stops once its loss is small."""
    with StoreProcess("--workers", "2") as process:

        def work(store: Store) -> int:
            one = trainee(store)
            chosen = session(one.optimizer, stop_at=20)
            for step in chosen:
                turn(one, step)
                if step.number >= 3:
                    chosen.stop()
            return store.version

        assert in_threads(process.url, 2, work) == [4, 4]


def test_a_stop_leaves_all_workers_where_a_checkpoint_can_go_on(tmp_path: Path) -> None:
    place = str(tmp_path / "run")
    with StoreProcess("--workers", "2", "--checkpoint", place, "--checkpoint-every", "1000000") as process:

        def work(store: Store) -> None:
            one = trainee(store)
            chosen = session(one.optimizer, checkpoint="1000")
            for step in chosen:
                turn(one, step)
                if store.rank == 0 and step.number == 3:
                    chosen.stop()

        in_threads(process.url, 2, work)
    with open_place(f"{place}@4").place.open(4) as checkpoint:
        parts = [checkpoint.worker(rank) for rank in checkpoint.ranks]
    assert [(one.rank, one.version, one.handed["own"]) for one in parts] == [
        (rank, 4, {"steps": 4}) for rank in range(2)
    ]


def test_where_training_has_ended_for_all_none_begins_a_step_in_vain() -> None:
    """As where a worker's group came to its end while it was started anew."""
    with psstore.connect("local://") as store:
        one = trainee(store)
        store.stop(0, everyone=True)
        for step in session(one.optimizer, stop_at=9):
            pytest.fail(f"step {step.number} would not count")


def test_a_clipped_step_that_does_not_count_any_more_is_no_error() -> None:
    with psstore.connect("local://") as store:
        one = trainee(store)
        chosen = session(one.optimizer)
        for step in chosen:
            if step.number == 3:
                store.stop()
            one.model(torch.ones(4, 20)).sum().backward()
            one.optimizer.clip_grad_norm_(1.0)
            one.optimizer.step()
        assert (store.version, chosen.is_clean) == (2, True)


def test_a_report_that_is_not_finite_ends_it(caplog: pytest.LogCaptureFixture) -> None:
    with psstore.connect("local://") as store:
        one = trainee(store)
        chosen = session(one.optimizer, stop_at=9)
        for step in chosen:
            turn(one, step)
            if step.number == 4:
                step.report(loss=torch.tensor(float("nan")))
        assert (store.version, chosen.why) == (4, "loss is nan on rank 0 at version 4")
        assert "training is stopped: loss is nan" in caplog.text


def test_a_worker_that_is_drained_ends_alone() -> None:
    with StoreProcess("--workers", "2") as process:

        def work(store: Store) -> tuple[int, bool, bool]:
            one = trainee(store)
            chosen = session(one.optimizer, stop_at=9)
            last = 0
            for step in chosen:
                turn(one, step)
                last = store.version
                if store.rank == 1 and step.number == 3:
                    chosen.drain("it is wanted elsewhere")
            return last, chosen.is_drained, chosen.is_clean

        assert in_threads(process.url, 2, work) == [(9, False, True), (3, True, True)]


def test_sigterm_drains_a_worker_and_its_program_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    with psstore.connect("local://") as store:
        one = trainee(store)
        chosen = session(one.optimizer, stop_at=1000)
        for step in chosen:
            if step.number == 4:
                os.kill(os.getpid(), signal.SIGTERM)
            turn(one, step)
        assert (store.version, chosen.is_drained) == (4, True)
    assert "leaves after version 3: it was sent SIGTERM" in caplog.text
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_sigterm_ends_processes_that_a_step_has_forked() -> None:
    """As those of a `multiprocessing.Pool`, which sends it to them at its end, and waits: even at once, many times."""
    with psstore.connect("local://") as store:
        one = trainee(store)
        for step in session(one.optimizer, stop_at=1):
            turn(one, step)
            for _ in range(50):
                child = os.fork()
                if child == 0:
                    time.sleep(PATIENCE_S)
                    os._exit(1)
                os.kill(child, signal.SIGTERM)
                assert os.waitpid(child, 0)[1] == signal.SIGTERM


def test_a_program_with_a_handler_of_its_own_keeps_it() -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        with psstore.connect("local://") as store:
            one = trainee(store)
            for step in session(one.optimizer, stop_at=3):
                os.kill(os.getpid(), signal.SIGTERM)
                turn(one, step)
            assert (store.version, came) == (3, [signal.SIGTERM] * 3)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_signal_may_end_it() -> None:
    """As a scheduler of jobs sends it before it takes the machine away."""
    with psstore.connect("local://") as store:
        one = trainee(store)
        chosen = session(one.optimizer, stop_at=1000)
        before = signal.signal(signal.SIGTERM, lambda *_: chosen.stop("SIGTERM"))
        try:
            for step in chosen:
                turn(one, step)
                if step.number == 3:
                    signal.raise_signal(signal.SIGTERM)
        finally:
            signal.signal(signal.SIGTERM, before)
        assert (store.version, chosen.is_clean) == (4, True)


class DiesAtTheEnd(Hook):
    """A shard is killed once all workers have come to the end."""

    def __init__(self, process: StoreProcess) -> None:
        self._process = process
        self.num_ends = 0

    def finish(self, session: TrainingSession) -> None:
        self.num_ends += 1
        if self.num_ends == 1:
            os.kill(self._process.shard_pids()[0], signal.SIGKILL)


@pytest.mark.parametrize("comes_to_it", [False, True], ids=["asked for", "come to"])
def test_an_end_holds_in_a_store_that_went_back(tmp_path: Path, *, comes_to_it: bool) -> None:
    place = str(tmp_path / "run")
    with (
        StoreProcess("--checkpoint", place, "--checkpoint-every", "1000000", "--restarts", "1") as process,
        psstore.connect(process.url, wait_s=PATIENCE_S) as store,
    ):
        one, ending, diary = trainee(store), DiesAtTheEnd(process), Diary()
        hooks = [diary, ending] if comes_to_it else [diary]
        chosen = session(one.optimizer, stop_at=1000, checkpoint="2", hooks=hooks)
        for step in chosen:
            if step.number == 5 and not diary.went_back_to:
                assert eventually(lambda: any(one.status == COMPLETE for one in open_place(place).place.list()))
                chosen.stop()
                if not comes_to_it:
                    os.kill(process.shard_pids()[0], signal.SIGKILL)
            turn(one, step)
        (back,) = diary.went_back_to
        assert back <= 5, "a checkpoint that was begun in the end's step may be of that"
        assert store.version == (5 if comes_to_it else back + 1)


class Killed(Exception):
    """Of a worker whose process is gone."""


class IsKilledAtTheEnd(Hook):
    """Its worker is, once all have come to the end."""

    def finish(self, session: TrainingSession) -> None:
        session.store.end(leave=False)
        raise Killed


def test_a_worker_that_is_killed_at_the_end_is_replaced_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place = str(tmp_path / "run")
    options = ("--checkpoint", place, "--checkpoint-every", "1000000", "--rejoin-s", "60")
    with StoreProcess("--workers", "2", *options) as process:

        def train(store: Store, *hooks: Hook) -> int:
            one = trainee(store)
            for step in session(one.optimizer, stop_at=3, hooks=hooks):
                turn(one, step)
            return store.version

        def work(store: Store) -> int:
            if store.rank == 1:
                return train(store)
            with pytest.raises(Killed):
                train(store, IsKilledAtTheEnd())
            with psstore.connect(process.url, rank=0, num_workers=2, wait_s=PATIENCE_S) as again:
                return train(again)

        assert in_threads(process.url, 2, work) == [3, 3]
        assert [one.version for one in open_place(place).place.list() if one.status == COMPLETE] == [3]
    assert "not every worker has come to its end" not in caplog.text


# ---- driven from outside ----


def test_a_loop_of_somebody_else_drives_it(tmp_path: Path) -> None:
    """What comes between two steps is handed in, too; and an end that is asked for twice is one."""
    place = str(tmp_path / "run")
    with (
        StoreProcess("--checkpoint", place, "--checkpoint-every", "1000000") as process,
        psstore.connect(process.url, wait_s=PATIENCE_S) as store,
    ):
        one, diary = trainee(store), Diary()
        driven = session(one.optimizer, stop_at=5, hooks=[diary])
        assert driven.found("schedule") is None
        driven.begin()
        numbers: list[int] = []
        while not driven.is_over and len(numbers) < 3:
            step = driven.before_step()
            turn(one, step)
            numbers.append(step.number)
            driven.after_step(step)
        one.optimizer.checkpoint_state["evaluated"] = True
        driven.end()
        driven.end(is_clean=False)
        assert (numbers, driven.version, driven.is_clean) == ([1, 2, 3], 3, True)
        assert [line[0] for line in diary.lines].count("end") == 1
        handed = store.handed_in()
        assert handed is not None
        assert (handed.version, handed.state["own"]) == (3, {"steps": 3, "evaluated": True})


@goes_on
def test_what_a_part_is_to_have_back_can_be_asked_before(store: Store) -> None:
    one = trainee(store)
    for step in session(one.optimizer, stop_at=2, state={"schedule": one.schedule}):
        turn(one, step)
    found = session(one.optimizer, state={"schedule": one.schedule}).found("schedule")
    assert found["last_epoch"] == 2


def test_an_optimizer_may_be_wrapped(store: Store) -> None:
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

    one = trainee(store)
    assert session(Wrapper(Wrapper(one.optimizer))).optimizer is one.optimizer


# ---- what stands around its steps ----


class Diary(Hook):
    def __init__(self) -> None:
        self.lines: list[Any] = []

    @property
    def went_back_to(self) -> list[int]:
        return [line[1] for line in self.lines if line[0] == "back"]

    def begin(self, session: TrainingSession) -> None:
        self.lines.append(("begin", session.version))

    def before_step(self, session: TrainingSession, step: Step) -> None:
        self.lines.append(("before", step.number))

    def after_step(self, session: TrainingSession, step: Step) -> None:
        self.lines.append(("after", session.version, step.values()))

    def rolled_back(self, session: TrainingSession) -> None:
        self.lines.append(("back", session.version))

    def end(self, session: TrainingSession) -> None:
        self.lines.append(("end", session.is_clean))


@pytest.mark.parametrize("fails", [False, True])
def test_hooks_are_told_everything_in_order(fails: bool) -> None:
    diary = Diary()
    with psstore.connect("local://") as store:
        one = trainee(store)
        try:
            for step in session(one.optimizer, stop_at=2, hooks=[diary]):
                turn(one, step)
                step.report(loss=2.5, other=torch.tensor(step.number))
                if fails:
                    raise ZeroDivisionError
        except ZeroDivisionError:
            assert diary.lines[1:] == [("before", 1), ("end", False)]
            return
    values = [{"loss": 2.5, "other": float(number)} for number in (1, 2)]
    assert diary.lines == [
        ("begin", 0), ("before", 1), ("after", 1, values[0]), ("before", 2), ("after", 2, values[1]), ("end", True)
    ]  # fmt: skip


def test_rank_0_says_where_it_is(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="psstore.session")
    with psstore.connect("local://") as store:
        one = trainee(store)
        for step in session(one.optimizer, stop_at=2, log_every_s=0.0):
            turn(one, step)
            step.report(loss=0.25)
    assert [record.message.rsplit(",", 1)[0] for record in caplog.records] == [
        f"version {number}, loss 0.25" for number in (1, 2)
    ]


def test_what_steps_report_is_written_for_tensorboard(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with psstore.connect("local://") as store:
        one = trainee(store)
        for step in session(one.optimizer, stop_at=3, summaries=str(tmp_path)):
            turn(one, step)
            step.report(loss=step.number / 2)
    found = events.EventAccumulator(str(tmp_path)).Reload().Scalars("loss")
    assert [(one.step, one.value) for one in found] == [(1, 0.5), (2, 1.0), (3, 1.5)]


def test_storage_that_fails_ends_no_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    with StoreProcess() as process, psstore.connect(process.url, wait_s=PATIENCE_S) as store:
        one = trainee(store)
        for step in session(one.optimizer, stop_at=3, checkpoint="1", checkpoint_to=str(tmp_path / "file" / "run")):
            turn(one, step)
        assert store.version == 3
    assert "no checkpoint was written, and training goes on" in caplog.text


def test_a_checkpoint_that_gets_no_thread_ends_no_training(caplog: pytest.LogCaptureFixture) -> None:
    with psstore.connect("local://") as store:
        one = trainee(store)
        no_room = mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread"))
        with no_room, mock.patch.object(store, "checkpoint", return_value=3) as written:
            for step in session(one.optimizer, stop_at=3, checkpoint="1", checkpoint_to="/x"):
                turn(one, step)
        written.assert_called_once()  # at the end, by the training's own thread
        assert store.version == 3
    assert "no checkpoint was written, and training goes on: a checkpoint takes threads of its own" in caplog.text


def test_a_version_that_the_store_lets_go_of_ends_no_training(caplog: pytest.LogCaptureFixture) -> None:
    """As where somebody assigns rows all the time, or more changes meanwhile than it has memory for."""
    with psstore.connect("local://") as store:
        one = trainee(store)
        with mock.patch.object(store, "checkpoint", side_effect=VersionGone("version 1 is not kept")):
            for step in session(one.optimizer, stop_at=3, checkpoint="1", checkpoint_to="/x"):
                turn(one, step)
        assert store.version == 3
    assert "no checkpoint was written, and training goes on: version 1 is not kept" in caplog.text


# ---- what is refused ----


def refused(store: Store, **options: Any) -> TrainingSession:
    return session(trainee(store).optimizer, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop_at": -1}, "stop_at is -1"),
        ({"stop_at": 2.5}, "stop_at is 2.5"),
        ({"state": {"plain": {"a": 1}}}, "'plain' is a dict, which has no state_dict"),
        ({"checkpoint": "often"}, "checkpoint is 'often'"),
        ({"stop_at": True}, "stop_at is True; expected an integer"),
        ({"state": [1]}, "state is a list; expected"),
        ({"checkpoint": 5}, "checkpoint is 5; expected decisions, as 500"),
        ({"checkpoint_to": "/x"}, "how often"),
        ({"hooks": Hook()}, "hooks is .*; expected a list of instances of psstore.torch.Hook"),
        ({"hooks": [Hook]}, "hooks is .*; expected a list of instances"),
        ({"log_every_s": "a"}, "log_every_s is 'a'; expected a number"),
        ({"log_every_s": -1}, "log_every_s is -1; expected seconds from 0 on"),
    ],
)
def test_what_can_not_be_is_refused_at_once(store: Store, options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadArgument, match=message):
        refused(store, **options)


def test_state_that_can_not_be_handed_in_is_named_before_the_first_step(store: Store) -> None:
    one = trainee(store)
    one.optimizer.checkpoint_state["when"] = {"deep": [object()]}
    with pytest.raises(BadArgument, match=r"object at \['own'\]\['when'\]\['deep'\]\[0\]"):
        next(iter(session(one.optimizer)))


@goes_on
def test_a_session_is_one_training(store: Store) -> None:
    one = trainee(store)
    chosen = session(one.optimizer, stop_at=1)
    for step in chosen:
        turn(one, step)
    with pytest.raises(UsageError, match="make another one"):
        next(iter(chosen))
    assert [step.number for step in steps_of(session(one.optimizer, stop_at=3), one)] == [2, 3]


def steps_of(chosen: TrainingSession, one: Trainee) -> Sequence[Step]:
    steps = []
    for step in chosen:
        turn(one, step)
        steps.append(step)
    return steps


def test_what_the_store_does_not_have_is_said() -> None:
    with psstore.connect("local://") as store:
        one = trainee(store, mode="average", every=2)
        with pytest.warns(UserWarning, match="the store's checkpoints don't have that"):
            next(iter(session(one.optimizer)))


def test_what_codecs_keep_back_is_left_out_where_it_does_not_fit(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(80, 80)
    with psstore.connect("local://?max_memory=160KiB") as store:
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(plain, store, model.named_parameters(), compression=KEEPS_BACK)
        for _ in session(optimizer, stop_at=3):
            optimizer.zero_grad()
            model(torch.randn(8, 80)).square().mean().backward()
            optimizer.step()
        handed = store.handed_in()
    assert handed is not None
    assert (handed.version, handed.state["residuals"]) == (3, {})
    assert sum("keep back will be in no checkpoint: rank 0 hands in" in one.getMessage() for one in caplog.records) == 1


def test_another_optimizer_is_refused() -> None:
    with pytest.raises(UsageError, match=r"SGD is no psstore\.torch\.DistributedOptimizer"):
        session(torch.optim.SGD(MODEL.parameters()))
