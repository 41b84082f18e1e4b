"""A few views of every kind; `python -m tests.torn --views 100000` for many."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest

from psstore.client.layout import OneVersion
from tests.support.python_forkserver import end_forkserver
from tests.torn.cases import LINKS, MODES, SHARDS, TornCase, all_cases
from tests.torn.reading import Views, problem_of, read

CASES = (
    TornCase("sync", 3, "unix"),
    TornCase("backup", 5, "shm"),
    TornCase("ssp", 1, "tcp", connections=3),
    TornCase("async", 8, "tcp"),
)


@pytest.fixture(scope="module", autouse=True)
def no_server_of_forks() -> Iterator[None]:
    """Workers are forked by a process that would stay until this one ends."""
    yield
    end_forkserver()


@pytest.mark.sockets
@pytest.mark.one_loop
@pytest.mark.parametrize("case", CASES, ids=str)
def test_nobody_reads_a_torn_version_whoever_dies(case: TornCase) -> None:
    views = read(case, num_views=100, num_kills=1, seed=1)
    assert not views.problems
    assert views.taken + views.gone == 100
    assert views.versions > 0
    assert views.killed == 1


@pytest.mark.sockets
@pytest.mark.one_loop
def test_a_reader_that_does_not_compare_versions_is_noticed() -> None:
    case = TornCase("async", 8, "tcp")
    views = Views()
    with mock.patch.object(OneVersion, "__bool__", return_value=True):
        for seed in range(10):
            views.add(read(case, num_views=500, num_kills=0, seed=seed))
            if views.torn:
                break
    assert views.torn


def test_what_is_wrong_with_a_view_is_said() -> None:
    three, four = np.full(4, -3, np.float32), np.full(2, -4, np.float32)
    assert problem_of([three, three], None, 3.0) is None
    assert problem_of([three], 3, 0.0) is None
    assert problem_of([three, four], None, 0.0) == "torn: versions 3 to 4"
    assert problem_of([np.concatenate((three, four))], None, 0.0) == "torn: versions 3 to 4"
    assert problem_of([four], 3, 0.0) == "values of version 4, said to be of 3"
    assert problem_of([three], None, 4.0) == "version 3 after 4"


def test_every_case_comes_once() -> None:
    assert len(set(all_cases())) == len(all_cases()) == len(MODES) * len(SHARDS) * len(LINKS)
