"""`psstore status`, of real stores."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import psstore
from psstore.cli.main import app
from tests.support.server_process import StoreProcess

pytestmark = [pytest.mark.sockets, pytest.mark.one_loop]


def status(*arguments: str) -> tuple[int, str]:
    ran = CliRunner().invoke(app, ["status", *arguments])
    return ran.exit_code, ran.output


def test_it_says_how_a_store_is(tmp_path: Path) -> None:
    with StoreProcess("--shards", "2", "--workers", "2", "--checkpoint", str(tmp_path)) as process:
        code, text = status(process.url)
        assert code == 0
        assert text.splitlines()[:3] == [
            "store       version 0, 0 tensors, sync; began empty",
            "workers     none has joined (of 2)",
            "checkpoint  none in this life",
        ]
        with psstore.connect(process.url, rank=0) as store, psstore.connect(process.url, rank=1) as other:
            store.create("w", shape=(600_000,), rule="sgd")
            store.create_table("items", dim=2, rule="adagrad", group=1)
            for one in (store, other):
                one.push("w", np.ones(600_000, np.float32))
                one.push_rows("items", [1, 2, 3], np.ones((3, 2), np.float32))
            store.start_commit({"lr": 1.0})
            other.commit({"lr": 1.0})
            other.close()
            store.checkpoint()
            lines = status(process.url)[1].splitlines()
            code, text = status(process.url, "--json")
    assert lines[1] == "workers     rank 0 trains; rank 1 has left (of 2)"
    assert lines[-1] == "table items: 3 rows, 0.0 MiB; 0 evicted, 0 refused"
    told = json.loads(text)
    shards, workers, checkpoint = told.pop("shards"), told.pop("workers"), told.pop("checkpoint")
    transfers = told.pop("transfers")
    assert told == {
        "mode": "sync", "num_workers": 2, "fewest": None, "version": 1, "tensors": 2,
        "live": [0], "lost": [], "left": [1], "absent": [],
        "staleness": {"0": 2}, "commits_waiting": 0, "waited_for": "", "torn": "", "restored": None,
        "tables": [{"name": "items", "rows": 3, "row_bytes": 72, "rows_evicted": 0, "rows_refused": 0}],
    }  # fmt: skip
    assert [(one["rank"], one["clock"], one["ahead"]) for one in workers] == [(0, 1, 0)]
    assert (checkpoint["version"], checkpoint["written"], checkpoint["failed"]) == (1, 1, 0)
    assert sum(shard["value_bytes"] for shard in shards) == 4 * 600_000
    assert [(one["rank"], one["shard"]) for one in transfers] == [(0, 0), (0, 1)]
    assert sum(one["pushed_bytes"] for one in transfers) == 4 * 600_000 + 3 * 16
    assert sum(shard["received_bytes"] for shard in shards) == 2 * (4 * 600_000 + 3 * 16)


def test_it_says_who_is_there_where_workers_come_and_go() -> None:
    with StoreProcess("--workers", "1:3") as process:
        assert "none has joined (of 1 to 3 that come and go)" in status(process.url)[1]
        with psstore.connect(process.url, rank=0), psstore.connect(process.url, role="client"):
            assert status(process.url)[1].splitlines()[1] == "workers     rank 0 trains (of 1 to 3 that come and go)"


def test_a_store_that_is_not_there_is_said(tmp_path: Path) -> None:
    code, text = status(f"unix://{tmp_path}/none")
    assert code == 3
    assert "no connection" in text
