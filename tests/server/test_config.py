"""Settings of the server: which source counts, what --print-config shows, and what they mean together."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from psstore.cli.server import run
from psstore.config import config_path, resolve
from psstore.errors import BadArgument
from psstore.net.address import TcpAddress, UnixAddress, is_loopback, parse_address
from psstore.server.settings import ServerSettings
from psstore.types import ADAPTIVE, UNBOUNDED, Consistency

# ---- layers -----------------------------------------------------------------------------------------


def test_flag_beats_variable_beats_file_beats_default(tmp_path: Path) -> None:
    file = tmp_path / "store.toml"
    file.write_text("shards = 2\nworkers = 2\nport = 2\n")
    environ = {"PSSTORE_SHARDS": "3", "PSSTORE_WORKERS": "3"}
    resolved = resolve(ServerSettings, flags={"shards": "4"}, file=file, environ=environ)
    settings = resolved.settings
    assert (settings.shards, settings.consistency().num_workers, settings.port, settings.host) == (4, 3, 2, "127.0.0.1")
    sources = {name: resolved.sources[name] for name in ("shards", "workers", "port", "host")}
    assert sources == {
        "shards": "--shards",
        "workers": "PSSTORE_WORKERS",
        "port": f"config file {file}",
        "host": "default",
    }


def test_empty_variable_says_nothing() -> None:
    assert resolve(ServerSettings, flags={}, file=None, environ={"PSSTORE_PORT": ""}).settings.port == 5700


def test_each_source_converts_to_the_type_of_the_setting(tmp_path: Path) -> None:
    file = tmp_path / "store.toml"
    file.write_text('refuse_non_finite = true\nstaleness = "unbounded"\nheartbeat_s = 2\n')
    in_file = resolve(ServerSettings, flags={}, file=file, environ={}).settings
    assert (in_file.refuse_non_finite, in_file.staleness, in_file.heartbeat_s) == (True, "unbounded", 2.0)
    environ = {"PSSTORE_REFUSE_NON_FINITE": "true", "PSSTORE_STALENESS": "3"}
    in_environ = resolve(ServerSettings, flags={}, file=None, environ=environ).settings
    assert (in_environ.refuse_non_finite, in_environ.staleness) == (True, 3)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("shard = 2", "no setting is named 'shard'"),
        ("shards = ", "config file"),
        ("shards = 'many'", r"shards \(config file .*\) is 'many': Expected `int`"),
    ],
)
def test_config_file_that_is_wrong_is_explained(tmp_path: Path, content: str, sentence: str) -> None:
    file = tmp_path / "store.toml"
    file.write_text(content)
    with pytest.raises(BadArgument, match=sentence):
        resolve(ServerSettings, flags={}, file=file, environ={})


def test_config_file_that_is_missing_is_named() -> None:
    with pytest.raises(BadArgument, match=r"config file /nowhere\.toml: No such file"):
        resolve(ServerSettings, flags={}, file=Path("/nowhere.toml"), environ={})


def test_config_file_is_named_by_flag_or_variable() -> None:
    assert config_path("a", {"PSSTORE_CONFIG": "b"}) == Path("a")
    assert config_path(None, {"PSSTORE_CONFIG": "b"}) == Path("b")
    assert config_path(None, {}) is None


def test_print_config_shows_every_setting_and_its_source(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PSSTORE_LOG_LEVEL", "debug")
    assert run(["--print-config", "--shards", "4", "--no-refuse-non-finite"]) == 0
    rows = {row.split()[0]: row.split()[1:] for row in capsys.readouterr().out.splitlines()}
    assert list(rows) == list(ServerSettings.__struct_fields__)
    assert rows["shards"] == ["4", "--shards"]
    assert rows["log_level"] == ["debug", "PSSTORE_LOG_LEVEL"]
    assert rows["refuse_non_finite"] == ["false", "--refuse-non-finite"]
    assert rows["port"] == ["5700", "default"]
    assert rows["uds"] == ["-", "default"]


def test_help_names_every_setting() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "psstore.cli.server", "--help"], capture_output=True, text=True, check=True, timeout=30
    )
    for name in ServerSettings.__struct_fields__:
        assert f"--{name.replace('_', '-')}" in done.stdout


# ---- what they mean together ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "quorum", "staleness", "mode"),
    [
        ({}, 4, 0, "sync"),
        ({"mode": "sync"}, 4, 0, "sync"),
        ({"mode": "backup"}, 3, 0, "backup"),
        ({"mode": "backup", "quorum": 2}, 2, 0, "backup"),
        ({"quorum": 2}, 2, 0, "backup"),
        ({"quorum": 1}, 1, 0, "backup"),
        ({"mode": "ssp"}, 1, 2, "ssp"),
        ({"mode": "ssp", "staleness": 5}, 1, 5, "ssp"),
        ({"staleness": 5}, 1, 5, "ssp"),
        ({"mode": "async"}, 1, UNBOUNDED, "async"),
        ({"staleness": "unbounded"}, 1, UNBOUNDED, "async"),
    ],
)
def test_mode_quorum_and_staleness_say_one_thing(
    given: dict[str, str | int], quorum: int, staleness: int, mode: str
) -> None:
    consistency = resolve(ServerSettings, flags={"workers": 4, **given}, file=None, environ={}).settings.consistency()
    assert consistency == Consistency(num_workers=4, quorum=quorum, staleness=staleness)
    assert consistency.mode == mode


@pytest.mark.parametrize("given", [{"workers": "2:4"}, {"workers": 4, "quorum": 3}, {"workers": 4}])
def test_the_lost_are_dropped_where_a_round_can_do_without_them(given: dict[str, str | int]) -> None:
    settings = resolve(ServerSettings, flags={**given, "lost": "drop"}, file=None, environ={}).settings
    if given == {"workers": 4}:
        with pytest.raises(BadArgument, match=r"--lost drop is .* --workers 1:4, or a quorum"):
            settings.check()
    else:
        settings.check()


def test_a_quorum_has_the_grace_that_it_was_given() -> None:
    given = {"workers": 4, "quorum": 3, "grace_s": 5.0}
    settings = resolve(ServerSettings, flags=given, file=None, environ={}).settings
    assert settings.consistency() == Consistency(num_workers=4, quorum=3, grace_s=5.0)
    environ = {"PSSTORE_GRACE_S": "auto"}
    adaptive = resolve(ServerSettings, flags={"workers": 4, "quorum": 3}, file=None, environ=environ).settings
    assert adaptive.consistency() == Consistency(num_workers=4, quorum=3, grace_s=ADAPTIVE)
    alone = resolve(ServerSettings, flags={"grace_s": 5.0}, file=None, environ={}).settings
    assert alone.consistency() == Consistency(), "with one worker nobody is waited for"


@pytest.mark.parametrize("workers", [1, 4])
def test_a_store_refuses_by_the_norm_that_it_was_given(workers: int) -> None:
    given = {"workers": workers, "refuse_norm": 10.0}
    settings = resolve(ServerSettings, flags=given, file=None, environ={}).settings
    assert settings.consistency().refuse_norm == 10.0


@pytest.mark.parametrize("mode", ["sync", "backup", "ssp", "async"])
def test_every_mode_goes_with_one_worker_and_with_two(mode: str) -> None:
    for workers in (1, 2):
        settings = resolve(ServerSettings, flags={"workers": workers, "mode": mode}, file=None, environ={}).settings
        settings.check()


@pytest.mark.parametrize(
    "given",
    [
        {"mode": "sync", "quorum": 2},
        {"mode": "async", "staleness": 3},
        {"mode": "ssp", "staleness": "unbounded"},
        {"quorum": 5},
        {"quorum": 3, "staleness": 1},
        {"mode": "ssp", "staleness": 0},
        {"grace_s": 5.0},
        {"mode": "async", "grace_s": 5.0},
        {"quorum": 3, "grace_s": float("inf")},
        {"grace_s": "auto"},
        {"refuse_norm": 1.0},
        {"refuse_norm": float("inf")},
        {"workers": 1, "refuse_norm": 0.0},
    ],
)
def test_settings_that_contradict_each_other_are_refused(given: dict[str, str | int | float]) -> None:
    with pytest.raises(BadArgument):
        resolve(ServerSettings, flags={"workers": 4, **given}, file=None, environ={}).settings.check()


# ---- addresses --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("advertise", "found"),
    [
        ("h1", (("h1", None), ("h1", None))),
        ("h1:80", (("h1", 80), ("h1", 81))),
        ("h1:80, h2:80", (("h1", 80), ("h2", 80))),
        ("h1,h2:90", (("h1", None), ("h2", 90))),
        ("fd00::1", (("fd00::1", None), ("fd00::1", None))),
        ("[fd00::1]:80", (("fd00::1", 80), ("fd00::1", 81))),
    ],
)
def test_advertised_places_are_of_all_shards_or_of_each(
    advertise: str, found: tuple[tuple[str, int | None], ...]
) -> None:
    assert ServerSettings(shards=2, advertise=advertise).advertised() == found


@pytest.mark.parametrize("advertise", ["", "h1:0", "h1:http", "h1,h2,h3", "h1:80,h1:80", "h1:65535", "ps://h1"])
def test_advertised_places_that_make_no_sense_are_refused(advertise: str) -> None:
    with pytest.raises(BadArgument, match="advertise"):
        ServerSettings(shards=2, advertise=advertise).check()


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("ps://127.0.0.1:5700", TcpAddress("127.0.0.1", 5700)),
        ("ps://store.example", TcpAddress("store.example", 5700)),
        ("ps://[::1]:80", TcpAddress("::1", 80)),
        ("ps://localhost:1/", TcpAddress("localhost", 1)),
        ("unix:///run/store", UnixAddress("/run/store")),
    ],
)
def test_address_is_read(text: str, address: TcpAddress | UnixAddress) -> None:
    assert parse_address(text) == address
    assert parse_address(str(address)) == address


@pytest.mark.parametrize(
    "text", ["", "ps://", "ps://:5700", "ps://host:99999", "ps://host:x", "ps://::1", "unix://store", "http://host"]
)
def test_text_that_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(
        BadArgument, match="expected ps://host:port, pss://host:port for a store with TLS, or unix:///absolute/path"
    ):
        parse_address(text)


def test_loopback_is_what_only_this_machine_reaches() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.1.2.3", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "10.0.0.1", "::", "store.example", "")))
