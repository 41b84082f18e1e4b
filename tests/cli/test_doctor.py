"""`psstore doctor`: each fault that it claims to find is made here, and found. Faults of hosts, which
a test can't bring about on one machine, are made in the answers of a store that is well."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import psstore
from psstore.cli.main import app
from psstore.launch import examining
from psstore.launch.diagnosis import Finding, Here, ShardAnswers, diagnose
from tests.support.server_process import StoreProcess, eventually

pytestmark = [pytest.mark.sockets, pytest.mark.one_loop]

F32 = np.float32
HERE = Here(psstore.__version__, 1024)


def doctor(url: str, monkeypatch: pytest.MonkeyPatch, token: Path | None = None) -> tuple[int, str]:
    """(exit status, what it says)."""
    if token is None:
        monkeypatch.delenv("PSSTORE_TOKEN_FILE", raising=False)
    else:
        monkeypatch.setenv("PSSTORE_TOKEN_FILE", str(token))
    ran = CliRunner().invoke(app, ["doctor", url])
    return ran.exit_code, ran.output


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examining, "PATIENCE_S", 1.0)


def token_file(folder: Path, text: str) -> Path:
    path = folder / f"token-{text}"
    path.write_text(text * 32)
    path.chmod(0o600)
    return path


# ---- between here and there ----


def test_a_store_that_is_well_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    with StoreProcess("--shards", "2") as process:
        assert doctor(process.url, monkeypatch) == (0, "nothing is wrong, as far as can be seen from here\n")


def test_nobody_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    code, text = doctor(f"ps://127.0.0.1:{port}", monkeypatch)
    assert code == 1
    assert text.startswith(f"unreachable: nothing answers at ps://127.0.0.1:{port} from here")
    assert f"nc -vz 127.0.0.1 {port}" in text
    assert "psstore-server --shards 1" in text


def test_no_token_and_a_wrong_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong = token_file(tmp_path, "r"), token_file(tmp_path, "w")
    with StoreProcess("--token-file", str(right)) as process:
        code, text = doctor(process.url, monkeypatch)
        assert (code, text.partition(":")[0]) == (1, "token")
        assert "export PSSTORE_TOKEN_FILE=" in text
        code, text = doctor(process.url, monkeypatch, wrong)
        assert (code, text.partition(":")[0]) == (1, "token")
        assert "copy here the file that the store was started with" in text
        assert doctor(process.url, monkeypatch, right)[0] == 0


def test_an_advertised_address_that_leads_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        port, closed = one.getsockname()[1], other.getsockname()[1]
    with StoreProcess("--advertise", f"127.0.0.1:{closed}", port=port):
        code, text = doctor(f"ps://127.0.0.1:{port}", monkeypatch)
    assert code == 1
    assert text.startswith(
        f"advertised: clients are told that shard 0 is at ps://127.0.0.1:{closed}, where it can't be"
    )
    assert "psstore-server --advertise HOST" in text


def test_a_shard_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    with StoreProcess("--shards", "2") as process:
        os.kill(process.shard_pids()[1], signal.SIGSTOP)
        code, text = doctor(process.url, monkeypatch)
        os.kill(process.shard_pids()[1], signal.SIGCONT)
    assert code == 1
    assert text.startswith(f"hangs: shard 1 at {process.addresses[1]} takes connections and answers nothing")
    assert "kill -CONT" in text


def test_without_an_address_it_asks_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PSSTORE_URL", raising=False)
    ran = CliRunner().invoke(app, ["doctor"])
    assert ran.exit_code == 2
    assert "give a URL" in ran.output


# ---- of the store ----


def test_a_worker_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    with StoreProcess("--workers", "2") as process, psstore.connect(process.url, rank=0) as store:
        psstore.connect(process.url, rank=1).end(leave=False)
        assert eventually(lambda: store.stats()[0]["ranks_lost"] == "1")
        code, text = doctor(process.url, monkeypatch)
    assert code == 1
    assert text == (
        "worker: lost: rank 1\n"
        "    start it again with its rank: RANK=1 python train.py (psstore run --restarts 3 does so by itself)\n"
    )


def test_memory_that_is_nearly_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with StoreProcess("--max-memory", "8MiB") as process, psstore.connect(process.url) as store:
        store.create("w", np.ones(1_950_000, F32))
        code, text = doctor(process.url, monkeypatch)
    assert (code, text.partition(":")[0]) == (1, "memory")
    assert "of the 8 MiB that it may" in text
    assert "psstore-server --max-memory" in text


def test_a_checkpoint_that_came_to_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "run"
    with StoreProcess("--checkpoint", str(place)) as process, psstore.connect(process.url) as store:
        store.create("w", np.ones(10, F32), rule="sgd")
        store.push("w", np.ones(10, F32))
        store.commit({"lr": 1.0})
        for entry in place.iterdir():
            entry.rename(tmp_path / entry.name)
        place.rmdir()
        place.write_text("no folder any more")
        with pytest.raises(psstore.errors.PsstoreError):
            store.checkpoint(wait_s=5.0)
        code, text = doctor(process.url, monkeypatch)
    assert code == 1
    assert "checkpoint: the last checkpoint came to nothing" in text
    assert "psstore checkpoint save" in text


# ---- of its hosts, in the answers of a store that is well ----


@pytest.fixture(scope="module")
def answers() -> Iterator[list[ShardAnswers]]:
    with StoreProcess("--shards", "2", "--workers", "2", "--mode", "async") as process:
        stores = [psstore.connect(process.url, rank=rank) for rank in range(2)]
        counters = stores[0].stats()
        yield [ShardAnswers(i, process.addresses[i], one, 0.001, 0.0) for i, one in enumerate(counters)]
        for store in stores:
            store.close()


def changed(answers: list[ShardAnswers], shard: int, **counters: Any) -> list[ShardAnswers]:
    return [one._replace(counters={**one.counters, **counters}) if one.shard == shard else one for one in answers]


def only(found: list[Finding], kind: str) -> Finding:
    assert [one.kind for one in found] == [kind], found
    return found[0]


def test_answers_of_a_store_that_is_well_tell_of_nothing(answers: list[ShardAnswers]) -> None:
    assert diagnose(answers, HERE) == []


def test_versions_that_differ(answers: list[ShardAnswers]) -> None:
    found = only(diagnose(changed(answers, 1, psstore="9.9.9"), HERE), "versions")
    assert found.what == f"shard 1 runs psstore 9.9.9, and here is {psstore.__version__}"
    assert "pip install psstore==9.9.9" in found.mend


@pytest.mark.parametrize(("ahead_s", "words"), [(30.0, "30.0 s ahead of"), (-4.0, "4.0 s behind")])
def test_a_clock_that_is_off(answers: list[ShardAnswers], ahead_s: float, words: str) -> None:
    found = only(diagnose([answers[0], answers[1]._replace(clock_ahead_s=ahead_s)], HERE), "clock")
    assert words in found.what
    assert "set-ntp" in found.mend


def test_file_limits_there_and_here(answers: list[ShardAnswers]) -> None:
    found = only(diagnose(changed(answers, 0, max_connections=200), HERE), "files")
    assert "takes 200 connections, and not 4096" in found.what
    assert "ulimit -n 5120" in found.mend
    assert "ulimit -n" in only(diagnose(answers, Here(psstore.__version__, 64)), "files here").mend


def test_connections_that_are_nearly_used_up(answers: list[ShardAnswers]) -> None:
    found = only(diagnose(changed(answers, 0, connections=4000), HERE), "connections")
    assert "--max-connections 8192" in found.mend


def test_staleness_that_is_huge(answers: list[ShardAnswers]) -> None:
    found = only(diagnose(changed(answers, 0, rank_clocks="0:500,1:30"), HERE), "staleness")
    assert found.what == "rank 0 is 470 rounds ahead of rank 1"
    assert "--staleness 8" in found.mend


def test_a_shard_that_is_slow(answers: list[ShardAnswers]) -> None:
    found = only(diagnose([answers[0], answers[1]._replace(answer_s=0.3)], HERE), "slow")
    assert "shard 1" in found.what
    assert "takes 300 ms for a plain answer, the others 1.0 ms" in found.what
    assert only(diagnose([answers[0]._replace(answer_s=0.3)], HERE), "slow")


def test_no_standby_that_may_lead(answers: list[ShardAnswers]) -> None:
    found = only(diagnose(changed(answers, 1, standbys_asked=1), HERE), "standby")
    assert "no standby of shard 1 may lead" in found.what


def test_a_round_that_is_torn(answers: list[ShardAnswers]) -> None:
    found = only(diagnose(changed(answers, 0, torn="round 3 is torn"), HERE), "torn")
    assert "--restore URL" in found.mend


def test_a_checkpoint_that_is_old(answers: list[ShardAnswers]) -> None:
    late = {"checkpoint_every_s": 60.0, "checkpoint_age_s": 200.0, "decisions": 7, "checkpoint": 3}
    found = only(diagnose(changed(answers, 0, **late), HERE), "old checkpoint")
    assert "200 s old, and there is to be one every 60 s" in found.what
    assert diagnose(changed(answers, 0, **{**late, "checkpoint": 7}), HERE) == [], "nothing was decided since"
