"""`psstore kubernetes stop`: what it asks of an API server, and what it says where that can't be."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from psstore.errors import AvailabilityError, BadArgument, NotAllowed
from psstore.launch.kubernetes.stopping import scale_to_zero
from tests.kubernetes.api_server import ApiServer

pytestmark = [pytest.mark.sockets, pytest.mark.one_loop]


class Api:
    """An API server in a thread, and what it was asked for."""

    def __init__(self, folder: Path, status: int) -> None:
        self.asked: list[tuple[str, str, int]] = []
        self.status = status
        self._api = ApiServer(self._answer)
        for name, text in self._api.account("store-stop").items():
            (folder / name).write_text(text)

    def _answer(self, account: str, name: str, replicas: int) -> int:
        self.asked.append((account, name, replicas))
        return self.status

    @contextlib.contextmanager
    def serving(self) -> Iterator[dict[str, str]]:
        """What a pod's environment says of it."""
        loop, port = asyncio.new_event_loop(), 0
        over, ready = asyncio.Event(), threading.Event()

        async def serve() -> None:
            nonlocal port
            async with self._api.serve("127.0.0.1", 0) as port:
                ready.set()
                await over.wait()

        thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
        thread.start()
        assert ready.wait(30)
        try:
            yield {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(port)}
        finally:
            loop.call_soon_threadsafe(over.set)
            thread.join()
            loop.close()


def test_the_set_is_scaled_to_nothing_by_the_pods_account(tmp_path: Path) -> None:
    api = Api(tmp_path, status=200)
    with api.serving() as environ:
        assert scale_to_zero("store", environ, tmp_path)
    assert api.asked == [("store-stop", "store", 0)]


def test_a_set_that_is_no_more_has_ended(tmp_path: Path) -> None:
    with Api(tmp_path, status=404).serving() as environ:
        assert not scale_to_zero("store", environ, tmp_path)


def test_a_refusal_names_the_right_that_is_needed(tmp_path: Path) -> None:
    with Api(tmp_path, status=403).serving() as environ, pytest.raises(NotAllowed, match="statefulsets/scale of store"):
        scale_to_zero("store", environ, tmp_path)


def test_an_api_server_in_trouble_and_one_that_is_not_there_are_told_apart(tmp_path: Path) -> None:
    with Api(tmp_path, status=500).serving() as environ, pytest.raises(AvailabilityError, match="answers 500"):
        scale_to_zero("store", environ, tmp_path)
    with pytest.raises(AvailabilityError, match=r"no API server at 127\.0\.0\.1"):
        scale_to_zero("store", environ, tmp_path)


def test_an_api_server_of_another_ca_is_not_told_the_token(tmp_path: Path) -> None:
    api = Api(tmp_path, status=200)
    Api(tmp_path, status=200)  # whose CA is in the files now
    with api.serving() as environ, pytest.raises(AvailabilityError, match="CERTIFICATE_VERIFY_FAILED"):
        scale_to_zero("store", environ, tmp_path)
    assert api.asked == []


def test_elsewhere_it_says_what_does_it_there(tmp_path: Path) -> None:
    with pytest.raises(BadArgument, match="kubectl scale statefulset store --replicas 0"):
        scale_to_zero("store", {}, tmp_path)
    command = [sys.executable, "-m", "psstore.cli.main", "kubernetes", "stop", "store"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stderr.count("kubectl scale")) == (3, 1)
