"""Readers that follow a store which goes back to a checkpoint."""

from __future__ import annotations

import signal
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import psutil
import pytest
from numpy.testing import assert_array_equal

import psstore
from psstore.errors import StoreUnreachable
from psstore.server.other_member import refuses
from tests.server.test_checkpoints import SHAPES, served, step, training
from tests.support.cluster import PATIENCE_S
from tests.support.free_ports import free_ports
from tests.support.server_process import END_S, eventually

pytestmark = [pytest.mark.sockets, pytest.mark.one_loop]


def test_a_reader_of_a_store_that_goes_back_reads_it_whole_and_says_so(tmp_path: Path) -> None:
    flags = ("--checkpoint", str(tmp_path / "run"))
    (port,) = free_ports(1)
    with ExitStack() as ends, served(*flags, shards=2, port=port) as first, training(first) as worker:
        reader = ends.enter_context(psstore.follow(first.url, list(SHAPES), timeout_s=PATIENCE_S))
        step(worker, 1)
        worker.checkpoint()
        before = reader.next()
        step(worker, 2)
        assert (reader.next().number, before.number, before.restored) == (2, 1, False)
        orphans = first.shards()
        first.signal(signal.SIGKILL)
        places = [f"ps://127.0.0.1:{port + shard}" for shard in range(2)]
        assert eventually(lambda: all(map(refuses, places)))  # they listen until they have seen that it is gone
        ends.callback(psutil.wait_procs, orphans, timeout=END_S)
        with served(*flags, "--restore", "auto", shards=2, port=port) as second:
            version = None
            until = time.monotonic() + PATIENCE_S
            while version is None and time.monotonic() < until:
                try:
                    version = reader.next()
                except StoreUnreachable:  # it may be found to be out of reach first
                    continue
            assert version is not None
            assert (version.number, version.restored) == (1, True)
            assert version.changed == {name for name in SHAPES if version.values[name].size > 0}
            with training(second) as again:
                for name in SHAPES:
                    assert_array_equal(version.values[name], np.asarray(again.pull(name)))
                step(again, 2)
                later = reader.next()
                assert (later.number, later.restored) == (2, False)
                reader.verify()
