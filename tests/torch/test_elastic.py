"""Workers that come and go while they train: who trains on what, and what comes of it."""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import partial
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psstore
from psstore.client.local import LocalStore
from psstore.client.store import Store
from psstore.errors import NotAWorker, UsageError
from psstore.torch import DistributedOptimizer, ElasticSampler
from psstore.wire.messages import Members, members_after
from tests.support.cluster import PATIENCE_S
from tests.support.server_process import StoreProcess

NUM_SAMPLES = 40
MODEL = nn.Linear(NUM_SAMPLES, 1, bias=False)
ONE_HOT = TensorDataset(torch.eye(NUM_SAMPLES))
"""The gradient of a sample's output is 1 at its weight, so that weights count how often each was trained on."""


class Log:
    """What all workers have done, by version."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.batches: defaultdict[int, dict[int, list[int]]] = defaultdict(dict)
        """Version that a step began at -> rank -> its samples."""
        self.epochs: dict[int, int] = {}
        self.members: Sequence[Members] = ()

    def note(self, version: int, rank: int, epoch: int, samples: list[int]) -> None:
        with self.lock:
            assert self.epochs.setdefault(version, epoch) == epoch
            self.batches[version][rank] = samples

    def per_epoch(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = defaultdict(list)
        for version, shares in self.batches.items():
            for samples in shares.values():
                found[self.epochs[version]] += samples
        return found


def work(
    connect: Callable[..., Store], log: Log, *, rank: int | None, num_steps: int, epochs: int, **sizes: Any
) -> None:
    """One worker's stay: so many steps at most, or until the epochs are over."""
    with connect(rank=rank) as store:
        assert store.rank is not None
        model = deepcopy(MODEL)
        plain = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = DistributedOptimizer(plain, store, model.named_parameters())
        sampler = ElasticSampler(ONE_HOT, optimizer, seed=3, **sizes)
        loader = DataLoader(ONE_HOT, batch_sampler=sampler)
        while sampler.epoch < epochs and num_steps > 0:
            epoch = sampler.epoch
            for (inputs,) in loader:
                counts = optimizer.weight > 1e-9  # else it is there because a batch is never empty
                log.note(store.version, store.rank, epoch, inputs.argmax(1).tolist() if counts else [])
                optimizer.zero_grad()
                model(inputs).mean().backward()
                optimizer.step()
                num_steps -= 1
                if num_steps == 0:
                    break
        with log.lock:
            log.members = max(log.members, list(store.member_log), key=len)


@pytest.mark.parametrize("sizes", [{"batch_size": 2}, {"target_batch": 7}], ids=str)
def test_each_epoch_has_each_sample_once_whoever_comes_and_goes(sizes: dict[str, int]) -> None:
    """A hundred joins and leaves; and weights are the log's, replayed: a mean over samples, however shared out."""
    chance, log = random.Random(5), Log()
    server = LocalStore(2, workers="1:6")
    threads = []
    for number in range(50):
        named = {"rank": None, "num_steps": 600 if number == 0 else chance.randint(1, 12), "epochs": 15, **sizes}
        threads.append(
            threading.Thread(target=work, args=(partial(server.connect, wait_s=PATIENCE_S), log), kwargs=named)
        )
    for thread in threads:
        thread.start()
        while sum(one.is_alive() for one in threads) > 5:
            threading.Event().wait(0.002)
    for thread in threads:
        thread.join(PATIENCE_S)
    with server.connect(role="client") as reader:
        (name,) = (name for name in reader.keys() if "weight" in name)
        weights = reader.pull(name).reshape(-1)
    server.close()
    assert len(log.members) > 20, "hardly anybody came or went"
    assert {epoch: sorted(samples) for epoch, samples in log.per_epoch().items()} == {
        epoch: list(range(NUM_SAMPLES)) for epoch in range(15)
    }
    np.testing.assert_allclose(weights, replayed(log), atol=1e-5)


def replayed(log: Log) -> npt.NDArray[np.float64]:
    weights = MODEL.weight.detach().numpy().reshape(-1).astype(np.float64)
    for version in sorted(log.batches):
        samples = list(chain.from_iterable(log.batches[version].values()))
        weights[samples] -= 1.0 / len(samples)
    return weights


def test_a_sample_that_hardly_counts_does_not_count_either_where_all_others_are_gone() -> None:
    """Of an epoch's last step all is another worker's, which leaves in place of it."""
    data = TensorDataset(torch.eye(NUM_SAMPLES)[:3])
    counts = []

    def attend(store: Store, num_steps: int) -> None:
        model = deepcopy(MODEL)
        nn.init.zeros_(model.weight)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), store, model.named_parameters())
        sampler = ElasticSampler(data, optimizer, batch_size=1, shuffle=False, version=store.version)
        for (inputs,) in islice(chain.from_iterable(repeat(DataLoader(data, batch_sampler=sampler))), num_steps):
            optimizer.zero_grad()
            model(inputs).mean().backward()
            optimizer.step()
            if store.members == (1,):
                counts.append(-model.weight.detach().reshape(-1)[:3])
        store.close()

    server = LocalStore(1, workers="1:2")
    with ThreadPoolExecutor() as pool:
        first = server.connect(rank=0)
        late = pool.submit(server.connect, rank=1, wait_s=PATIENCE_S)
        while len(first.members) < 2:
            first.commit()
        for stay in [pool.submit(attend, first, 1), pool.submit(attend, late.result(), 3)]:
            stay.result()
    server.close()
    assert [one.tolist() for one in counts] == [[0.5, 0.5, 0.0], [0.5, 0.5, 1.0]]


def test_everybody_knows_who_takes_part() -> None:
    with LocalStore(1, workers="1:4").connect() as store:
        assert (store.num_workers, store.members, store.rank, store.is_first) == (1, (0,), 0, True)
        store.create("w", np.zeros(4, np.float32), rule="sgd")
        store.push("w", np.ones(4, np.float32))
        store.commit({"lr": 1.0})
        assert store.members == (0,)


def test_whoever_comes_learns_all_of_a_log_that_one_answer_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psstore.protocol.roster.MAX_TOLD", 20)
    server, known = LocalStore(1, workers="1:4"), []

    def come_and_go() -> None:
        with server.connect(wait_s=PATIENCE_S) as store:
            known.append(list(store.member_log))
            assert store.members == members_after((), store.member_log)

    with server.connect() as first:
        for _ in range(12):
            late = threading.Thread(target=come_and_go)
            late.start()
            while late.is_alive():
                first.commit()
        log = list(first.member_log)
    server.close()
    assert all(one == log[: len(one)] for one in known)
    assert len(known[-1]) > 10


def test_what_can_not_be_is_refused_at_once() -> None:
    model = nn.Linear(3, 1)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    with psstore.connect("local://?workers=2&mode=async") as store:
        optimizer = DistributedOptimizer(plain, store, model.named_parameters())
        with pytest.raises(UsageError, match="needs mode 'sync'"):
            ElasticSampler(10, optimizer, batch_size=2)
        store.leave()
        with pytest.raises(NotAWorker, match="not a worker's"):
            ElasticSampler(10, optimizer, batch_size=2)


def test_a_loader_that_fetches_ahead_is_refused() -> None:
    model = nn.Linear(3, 1)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    with psstore.connect("local://") as store:
        sampler = ElasticSampler(
            10, DistributedOptimizer(plain, store, model.named_parameters()), batch_size=2, shuffle=False
        )
        batches = iter(sampler)
        assert next(batches) == [0, 1]
        with pytest.raises(UsageError, match=r"a second batch was asked for at version 0.*num_workers=0"):
            next(batches)


def test_a_step_that_is_taken_again_has_its_samples_again() -> None:
    """Where the store goes back to the version that it is at."""
    model = nn.Linear(3, 1)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    with psstore.connect("local://") as store:
        optimizer = DistributedOptimizer(plain, store, model.named_parameters())
        batches = iter(ElasticSampler(10, optimizer, batch_size=2, shuffle=False))
        assert next(batches) == [0, 1]
        optimizer.reattach()
        assert next(batches) == [0, 1]


@pytest.mark.sockets
@pytest.mark.one_loop
def test_a_restored_store_goes_on_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    """Whoever comes then, and in whatever number."""
    flags = ("--workers", "1:3", "--checkpoint", str(tmp_path / "run"), "--restore", "auto")
    log = Log()
    for num_steps in (11, 1000):
        with StoreProcess(*flags, "--checkpoint-every", "1000000") as process:
            connect = partial(psstore.connect, process.url, wait_s=PATIENCE_S)
            work(connect, log, rank=2, num_steps=num_steps, epochs=3, batch_size=3)
            with psstore.connect(process.url, role="client") as client:
                assert client.checkpoint() == client.version
    assert {epoch: sorted(samples) for epoch, samples in log.per_epoch().items()} == {
        epoch: list(range(NUM_SAMPLES)) for epoch in range(3)
    }


@pytest.mark.sockets
@pytest.mark.one_loop
def test_an_epoch_goes_on_in_a_store_whose_number_of_workers_is_fixed_for_a_while(tmp_path: Path) -> None:
    flags = ("--checkpoint", str(tmp_path / "run"), "--restore", "auto", "--checkpoint-every", "1000000")
    log = Log()
    for workers, ranks, num_steps in (("1:3", [2], 11), ("2", [0, 1], 4), ("1:3", [1], 1000)):
        with StoreProcess("--workers", workers, *flags) as process:
            connect = partial(psstore.connect, process.url, wait_s=PATIENCE_S)
            with ThreadPoolExecutor() as pool:
                stays = [
                    pool.submit(work, connect, log, rank=rank, num_steps=num_steps, epochs=3, batch_size=3)
                    for rank in ranks
                ]
            for stay in stays:
                stay.result()
            with psstore.connect(process.url, role="client") as client:
                assert client.checkpoint() == client.version
    assert {epoch: sorted(samples) for epoch, samples in log.per_epoch().items()} == {
        epoch: list(range(NUM_SAMPLES)) for epoch in range(3)
    }
