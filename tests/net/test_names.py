"""What the hosts file says of names, to whoever connects."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import psstore
from psstore.errors import StoreUnreachable
from psstore.net.names import current_host, read_hosts, write_hosts
from tests.support.server_process import StoreProcess


def test_a_hosts_file_is_read_as_etc_hosts_is(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# all of them\n10.0.0.1 one  uno # the first\n\nfd00::2\ttwo\n")
    assert read_hosts(file) == {"one": "10.0.0.1", "uno": "10.0.0.1", "two": "fd00::2"}


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    hosts = {"one": "10.0.0.1", "two": "fd00::2"}
    write_hosts(tmp_path / "hosts", {"one": "10.9.9.9"})
    write_hosts(tmp_path / "hosts", hosts)
    assert read_hosts(tmp_path / "hosts") == hosts
    assert [file.name for file in tmp_path.iterdir()] == ["hosts"]


def test_names_that_the_file_does_not_have_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert current_host("one") == "one"
    write_hosts(tmp_path / "hosts", {"one": "10.0.0.1"})
    monkeypatch.setenv("PSSTORE_HOSTS_FILE", str(tmp_path / "hosts"))
    assert current_host("one") == "10.0.0.1"
    assert current_host("two") == "two"


@pytest.mark.sockets
@pytest.mark.one_loop
def test_a_client_finds_a_store_that_has_moved_under_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is at another address each time that it connects; nobody has told the client."""
    file, token = tmp_path / "hosts", tmp_path / "token"
    token.write_text("0123456789abcdef" * 4)
    token.chmod(0o600)
    monkeypatch.setenv("PSSTORE_TOKEN_FILE", str(token))
    monkeypatch.setenv("PSSTORE_HOSTS_FILE", str(file))
    with StoreProcess("--host", "0.0.0.0", "--advertise", "shard-0.moving") as store:
        url = store.url
        with pytest.raises(StoreUnreachable):
            psstore.connect(url, connect_timeout_s=0.2)
        write_hosts(file, {"shard-0.moving": "127.0.0.2"})
        with psstore.connect(url) as client:
            client.create("w", np.ones(3, "f4"), rule="sgd")
        write_hosts(file, {"shard-0.moving": "127.0.0.3"})
        with psstore.connect(url, role="client") as client:
            assert_array_equal(client.pull("w"), np.ones(3, "f4"))
