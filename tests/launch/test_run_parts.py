"""The launcher's parts that need no process: lines, prefixes, environments, commands."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psstore.config import worker_environment
from psstore.launch import output
from psstore.launch.environment import find_gpus, meeting_environ, worker_environ
from psstore.launch.output import Line, LineCutter, Outlet, Prefixer
from psstore.launch.store import server_command
from psstore.types import Consistency

WITHOUT_NVIDIA_SMI = {"PATH": "/nonexistent"}


def cut(*chunks: bytes) -> list[bytes]:
    cutter = LineCutter()
    return [line for chunk in chunks for line in cutter.feed(chunk)] + cutter.finish()


@given(st.binary(max_size=200), st.integers(1, 7))
def test_lines_do_not_depend_on_how_the_bytes_arrive(data: bytes, size: int) -> None:
    assert cut(*(data[i : i + size] for i in range(0, len(data), size))) == cut(data)


def test_the_last_line_needs_no_newline() -> None:
    assert cut(b"one\ntwo") == [b"one", b"two"]
    assert cut(b"one\n\n") == [b"one", b""]


def test_a_progress_bar_is_shown_as_it_stands_at_the_end_of_its_line() -> None:
    assert cut(b"  1%\r 50%\r100%\nnext\r\n") == [b"100%", b"next"]


def test_output_without_newlines_is_passed_on_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "MAX_LINE_BYTES", 8)
    cutter = LineCutter()
    assert cutter.feed(b"x" * 8) == []
    assert cutter.feed(b"x") == [b"x" * 9]


def test_prefixes_say_who_and_keep_the_streams_apart() -> None:
    read, write = zip(os.pipe(), os.pipe(), strict=True)
    out, err = map(Outlet, write)
    prefixer = Prefixer(out=out, err=err, colour=False)

    async def show() -> None:
        await prefixer(Line("rank 0", False, b"hello"))
        await prefixer(Line("store", True, b"\xff"))

    asyncio.run(show())
    assert [os.read(pipe, 100) for pipe in read] == [b"[rank 0] hello\n", b"[store] \xff\n"]
    for pipe in (*read, *write):
        os.close(pipe)


def test_who_writes_into_a_full_pipe_waits_and_nobody_else_does() -> None:
    read, write = os.pipe()
    lines = [bytes([65 + i]) * (1 << 17) for i in range(3)]  # each more than a pipe holds

    async def show() -> bytes:
        outlet, came = Outlet(write), b""
        writing = [asyncio.create_task(outlet.write(line)) for line in lines]
        done, _ = await asyncio.wait(writing, timeout=0.1)
        assert not done
        while len(came) < sum(map(len, lines)):
            came += await asyncio.to_thread(os.read, read, 1 << 16)
        await asyncio.gather(*writing)
        return came

    assert asyncio.run(show()) == b"".join(lines)
    os.close(read)
    with pytest.raises(BrokenPipeError):
        asyncio.run(Outlet(write).write(b"x"))
    os.close(write)


def test_each_rank_has_its_colour_in_a_terminal() -> None:
    prefixer = Prefixer(out=Outlet(1), err=Outlet(2), colour=True)
    prefixes = {prefixer.prefix(source) for source in ("rank 0", "rank 1", "store")}
    assert len(prefixes) == 3
    assert all(prefix.endswith(b"\x1b[0m ") for prefix in prefixes)


def test_workers_are_told_who_they_are() -> None:
    environ = worker_environ({"HOME": "/root"}, url="ps://127.0.0.1:1", rank=1, num_workers=3, gpus=[])
    assert environ == {
        "HOME": "/root",
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "3",
        "LOCAL_WORLD_SIZE": "3",
        "PSSTORE_URL": "ps://127.0.0.1:1",
        "OMP_NUM_THREADS": "1",
    }


def test_workers_of_one_host_are_told_where_torchs_process_group_meets_unless_that_is_chosen() -> None:
    found = meeting_environ({}, free_port=lambda: 4711)
    assert found == {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4711"}
    assert meeting_environ({"MASTER_PORT": "29500"}, free_port=lambda: 4711) == {}


@pytest.mark.parametrize(("chosen", "num_workers", "expected"), [("4", 2, "4"), (None, 2, "1"), (None, 1, None)])
def test_omp_threads_are_one_each_unless_chosen(chosen: str | None, num_workers: int, expected: str | None) -> None:
    base = {} if chosen is None else {"OMP_NUM_THREADS": chosen}
    environ = worker_environ(base, url="", rank=0, num_workers=num_workers, gpus=[])
    assert environ.get("OMP_NUM_THREADS") == expected


def test_each_worker_has_one_gpu_and_they_take_turns() -> None:
    given = [
        worker_environ({}, url="", rank=rank, num_workers=3, gpus=["2", "5"])["CUDA_VISIBLE_DEVICES"]
        for rank in range(3)
    ]
    assert given == ["2", "5", "2"]


@pytest.mark.parametrize(("visible", "expected"), [("3,1", ["3", "1"]), ("", []), ("-1", [])])
def test_gpus_that_the_user_hides_stay_hidden(visible: str, expected: list[str]) -> None:
    assert find_gpus({"CUDA_VISIBLE_DEVICES": visible}) == expected


def test_gpus_are_found_without_nvidia_smi(tmp_path: Path) -> None:
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / name).mkdir()
    assert find_gpus(WITHOUT_NVIDIA_SMI, proc=tmp_path) == ["0", "1"]
    assert find_gpus(WITHOUT_NVIDIA_SMI, proc=tmp_path / "nowhere") == []


def test_gpus_are_counted_by_nvidia_smi(tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-1)'\necho 'GPU 1: NVIDIA H200 (UUID: GPU-2)'\n")
    program.chmod(0o755)
    assert find_gpus({"PATH": f"{tmp_path}:/bin:/usr/bin"}) == ["0", "1"]


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"RANK": "1", "WORLD_SIZE": "4"}, (1, 4)),
        ({"SLURM_PROCID": "2", "SLURM_NTASKS": "3"}, (2, 3)),
        ({"SLURM_PROCID": "2", "SLURM_NTASKS": "3", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}, (2, 3)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "3", "SLURM_JOB_ID": "7"}, (None, None)),
        ({"SLURM_PROCID": "2", "SLURM_NTASKS": "3", "RANK": "0", "WORLD_SIZE": "2"}, (0, 2)),
        ({"SLURM_PROCID": "2", "SLURM_NTASKS": "3", "WORLD_SIZE": "2"}, (None, 2)),
        ({}, (None, None)),
    ],
)
def test_a_worker_takes_its_rank_from_its_launcher_or_from_srun(
    environ: dict[str, str], expected: tuple[int | None, int | None]
) -> None:
    """A batch script has a SLURM_PROCID, too, but is no task of a step."""
    found = worker_environment(environ)
    assert (found.rank, found.num_workers) == expected


@pytest.mark.parametrize(
    ("mode", "quorum", "staleness"),
    [("sync", "4", "0"), ("backup", "3", "0"), ("ssp", "1", "2"), ("async", "1", "unbounded")],
)
def test_the_server_is_told_the_mode_as_two_numbers(mode: str, quorum: str, staleness: str) -> None:
    command = server_command(num_shards=2, consistency=Consistency.of_mode(mode, num_workers=4), ready_fd=7)
    assert command[:3] == [sys.executable, "-m", "psstore.cli.server"]
    flags = dict(zip(command[3::2], command[4::2], strict=True))
    assert (flags["--quorum"], flags["--staleness"], flags["--workers"]) == (quorum, staleness, "4")
