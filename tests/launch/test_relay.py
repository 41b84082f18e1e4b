"""A store that has what another one has: whole versions, whatever becomes of the other one and of its tensors."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import psstore
from psstore import FollowingReader, LocalStore
from psstore.cli import relay as relay_command
from psstore.client.changes import Version
from psstore.client.first_tensors import RELAYED
from psstore.client.store import Store
from psstore.errors import (
    AuthFailed,
    DeadlineExceeded,
    MissingContribution,
    NotInitialised,
    PsstoreError,
    StoreUnreachable,
    UnknownKey,
    UnknownTensor,
)
from psstore.launch.relay import Relay
from tests.support.between_frames import between_frames
from tests.support.cluster import PATIENCE_S, SHM, clusters
from tests.support.free_ports import consecutive_ports
from tests.support.server_process import END_S, StoreProcess, reshard

F32 = np.float32
NUM_SCHEDULES = 60
ELEMS = 150_000
"""Three slices."""
LATE = DeadlineExceeded("no answer")
SILENT = StoreUnreachable("no connection")


class Chain:
    """A store, one relay behind it or two, and the reader of the last one."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.values = np.random.default_rng(seed)
        self.stores = [LocalStore(self.draw.choice((1, 3))) for _ in range(self.draw.choice((2, 3)))]
        self.trainer = self.stores[0].connect(rank=0)
        self.readers = [FollowingReader(one.connect(role="client"), None, None) for one in self.stores]
        self.relays = [Relay(one.connect(rank=0)) for one in self.stores[1:]]

    def change(self) -> None:
        names = list(self.trainer.keys())
        what = self.draw.random()
        if what < 0.3 or not names:
            rule = self.draw.choice(("reduce", "assign"))
            value = self.values.standard_normal(self.draw.choice((0, 1, 40_000)), F32)
            group = psstore.types.REDUCED_GROUP if rule == "reduce" else 0
            self.trainer.create(self.draw.choice("abcd"), value, rule=rule, group=group, exist="overwrite")
        elif what < 0.35:
            self.trainer.drop(self.draw.choice(names))
        else:
            trained = [name for name in names if self.trainer.describe(name).spec.rule == "reduce"]
            chosen = self.draw.sample(trained, self.draw.randint(0, len(trained)))
            self.trainer.publish({name: self.trainer.pull(name) + F32(1) for name in chosen})

    def pass_on(self, *, may_fail: bool = True) -> None:
        """By each relay that has something new to pass on, or loses its reader and begins anew, or fails halfway."""
        for place, relay in enumerate(self.relays):
            if self.draw.random() < 0.1:
                self.readers[place] = FollowingReader(self.stores[place].connect(role="client"), None, None)
            try:
                version = self.readers[place].next(timeout_s=0.0)
            except DeadlineExceeded:
                continue
            if may_fail and self.draw.random() < 0.2:
                late = mock.patch.object(relay._own._operations, "commit", side_effect=LATE)
                with late, pytest.raises(DeadlineExceeded):
                    relay.publish(version)
            else:
                relay.publish(version)

    def check(self) -> None:
        """All that is trained is at the end of the chain as it is at its beginning, and says of which version it is."""
        self.trainer.publish({"end": np.ones(1, F32)})
        self.pass_on(may_fail=False)
        end = self.readers[-1].verify().values
        assert end[RELAYED] == [self.trainer.version]
        names = set(self.trainer.keys())
        assert names == end.keys() - {RELAYED}
        for name in names:
            if self.trainer.describe(name).spec.rule == "reduce":
                assert end[name].tobytes() == self.trainer.pull(name).tobytes()

    def close(self) -> None:
        for store in self.stores:
            store.close()


@pytest.mark.parametrize("seed", range(0, NUM_SCHEDULES, 10))
def test_whatever_relays_miss_their_readers_have_the_same_bits(seed: int) -> None:
    for number in range(seed, seed + 10):
        chain = Chain(number)
        for _ in range(12):
            chain.change()
            if chain.draw.random() < 0.5:
                chain.pass_on()
        chain.check()
        chain.close()


@pytest.mark.sockets
@pytest.mark.one_loop
def test_a_version_that_its_store_did_not_take_in_time_is_passed_on_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if no newer one comes."""
    monkeypatch.setattr(relay_command, "LOOK_S", 1.0)
    monkeypatch.setattr(relay_command, "AGAIN_S", 0.0)
    server = mock.Mock()
    type(server).has_ended = mock.PropertyMock(side_effect=[False, False, True, True])
    with clusters("tcp") as start, LocalStore() as near:
        followed, own = start(), near.connect(rank=0)
        followed.connect(rank=0).publish({"x": np.ones(4, F32)})
        relay, publish = Relay(own), own.publish
        monkeypatch.setattr(own, "publish", mock.Mock(side_effect=[LATE, mock.DEFAULT], wraps=publish))
        for _ in range(2):
            relay_command._follow(followed.url, None, relay, server)
        assert_array_equal(own.pull("x"), np.ones(4, F32))


@pytest.mark.sockets
@pytest.mark.one_loop
def test_a_store_whose_token_is_replaced_is_followed_again_once_the_relay_has_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that refuses it from the beginning is not."""
    monkeypatch.setattr(relay_command, "REFUSED_AGAIN_S", 0.0)
    files = [tmp_path / "store", tmp_path / "relay"]
    monkeypatch.setenv("PSSTORE_TOKEN_FILE", str(files[1]))

    def give(token: str, *to: Path) -> None:
        for file in to:
            file.touch(0o600)
            file.write_text(16 * token)

    flags, port = ("--host", "127.0.0.1", "--token-file", str(files[0])), consecutive_ports(1)
    with LocalStore() as near, ExitStack() as ends:

        def serve(number: int) -> StoreProcess:
            store = ends.enter_context(StoreProcess(*flags, port=port))
            with psstore.connect(store.url, rank=0, token=files[0].read_text()) as trainer:
                trainer.publish({"x": np.full(4, number, F32)})
            return store

        def passes_on() -> Iterator[bool]:
            """Whether the own store has ended."""
            yield False
            first.end()
            give("new", files[0])
            serve(2)
            yield False
            yield False
            yield True

        own, server = near.connect(rank=0), mock.Mock()
        type(server).has_ended = mock.PropertyMock(side_effect=passes_on())
        give("old", *files)
        first = serve(1)
        relay = Relay(own)
        assert relay_command._follow(first.url, None, relay, server) is AuthFailed
        give("new", files[1])
        assert relay_command._follow(first.url, None, relay, server) is None
        assert_array_equal(own.pull("x"), np.full(4, 2, F32))
        give("wrong", files[1])
        with pytest.raises(AuthFailed):
            relay_command._follow(first.url, None, Relay(own), server)


@pytest.mark.parametrize("error", [UnknownTensor, UnknownKey, NotInitialised])
def test_what_is_heard_of_tensors_that_come_and_go_is_no_end(
    error: type[PsstoreError], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said once."""
    monkeypatch.setattr(relay_command, "AGAIN_S", 0.0)
    reader = mock.MagicMock()
    reader.__enter__.return_value.next.side_effect = error("of no tensor")
    monkeypatch.setattr("psstore.client.follow.follow", lambda *_, **__: reader)
    said = None
    for _ in range(2):
        said = relay_command._follow("ps://h1:5700", None, Relay(mock.Mock()), mock.Mock(has_ended=False), said=said)
    assert said is error
    assert caplog.messages == ["of no tensor; what is here stays"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_relay_in_half_precision_has_what_its_readers_would_have_of_the_store(dtype: str) -> None:
    values = np.random.default_rng(1)
    with LocalStore(2) as followed, LocalStore() as near, followed.connect(rank=0) as trainer:
        at_store, at_relay = (FollowingReader(one.connect(role="client"), None, dtype) for one in (followed, near))
        relay, reader = Relay(near.connect(rank=0)), FollowingReader(followed.connect(role="client"), None, dtype)
        for _ in range(3):
            new = {"large": values.standard_normal((70_000, 2), F32), "scalar": values.standard_normal((), F32)}
            trainer.publish({**new, "double": values.standard_normal(3)})
            relay.publish(reader.next())
            expected, found = at_store.next().values, at_relay.next().values
            assert found.keys() - expected.keys() == {RELAYED}
            for name, value in expected.items():
                assert (found[name].dtype, found[name].tobytes()) == (value.dtype, value.tobytes())


def test_what_its_own_store_begins_with_is_not_in_the_way_of_a_version() -> None:
    """As a checkpoint's tensors, which are of other shapes by now or gone, and what clients have created."""
    with LocalStore() as followed, LocalStore() as near:
        trainer, own = followed.connect(rank=0), near.connect(rank=0)
        reader = FollowingReader(followed.connect(role="client"), None, None)
        trainer.publish({name: np.ones(3, F32) for name in ("gone", "other", "same")})
        Relay(own).publish(reader.next())
        for name in ("clients", "new"):
            own.create(name, np.ones(3, F32))
        for name in ("gone", "other"):
            trainer.drop(name)
        trainer.publish({"other": np.ones(5, F32), "new": np.ones(4, F32)})
        Relay(own).publish(reader.next())
        assert {name: own.describe(name).spec.shape for name in own.keys()} == {
            RELAYED: (1,),
            "clients": (3,),
            "new": (4,),
            "other": (5,),
            "same": (3,),
        }
        assert_array_equal(own.pull("other"), np.ones(5, F32))


def test_a_relay_connects_anew_where_a_client_has_dropped_what_it_was_publishing() -> None:
    """Its worker's life is over then."""
    own = mock.Mock(**{"keys.return_value": [], "publish.side_effect": [MissingContribution("of a"), 2]})
    assert Relay(own).publish(Version(1, {"a": np.ones(3, F32)}, 0)) == 2
    own.reconnect.assert_called_once_with()


@pytest.mark.sockets
@pytest.mark.one_loop
def test_a_relay_goes_on_with_its_own_store_though_that_is_out_of_reach_at_first() -> None:
    with LocalStore() as followed, StoreProcess() as own, psstore.connect(own.url, rank=0) as there:
        trainer, relay = followed.connect(rank=0), Relay(there)
        reader = FollowingReader(followed.connect(role="client"), None, None)
        trainer.publish({"x": np.full(4, 1.0, F32), "y": np.full(4, 1.0, F32)})
        relay.publish(reader.next())
        assert reshard(own.url, 2, timeout_s=PATIENCE_S).returncode == 0
        trainer.publish({"x": np.full(4, 2.0, F32)})
        with mock.patch.object(there, "_again", side_effect=SILENT), pytest.raises(StoreUnreachable):
            relay.publish(reader.next())
        trainer.publish({})
        relay.publish(reader.next())
        with psstore.connect(own.url, role="client") as reading:
            assert_array_equal(reading.pull("x"), np.full(4, 2.0, F32))
            assert_array_equal(reading.pull("y"), np.full(4, 1.0, F32))


@pytest.mark.sockets
@pytest.mark.one_loop
def test_what_its_own_store_has_gone_back_behind_is_there_again_also_if_no_newer_version_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_command, "LOOK_S", 1.0)
    flags = ("--checkpoint", str(tmp_path), "--checkpoint-every", "1000000", "--restarts", "1")
    with clusters("tcp") as start, StoreProcess(*flags) as own, psstore.connect(own.url, rank=0) as there:
        followed = start()
        trainer = followed.connect(rank=0)

        def passes_on() -> Iterator[bool]:
            """Whether the own store has ended, after each version, and where there is none."""
            trainer.publish({"x": np.full(4, 1.0, F32)})
            yield False
            there.checkpoint()
            trainer.publish({"x": np.full(4, 2.0, F32)})
            yield False
            os.kill(own.shard_pids()[0], signal.SIGKILL)
            yield False
            yield False
            yield True

        server = mock.Mock()
        type(server).has_ended = mock.PropertyMock(side_effect=passes_on())
        relay_command._follow(followed.url, None, Relay(there), server)
        with psstore.connect(own.url, role="client") as reading:
            assert_array_equal(reading.pull("x"), np.full(4, 2.0, F32))


def test_a_store_of_its_own_that_has_ended_is_not_asked_how_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """That waits for one which may start again."""
    reader, relay, server = mock.MagicMock(), mock.Mock(), mock.Mock()
    reader.__enter__.return_value.next.side_effect = LATE
    monkeypatch.setattr("psstore.client.follow.follow", lambda *_, **__: reader)
    type(server).has_ended = mock.PropertyMock(side_effect=[False, True, True])
    relay_command._follow("ps://h1:5700", None, relay, server)
    relay.renew.assert_called_once()


@pytest.mark.parametrize("transport", ["local", SHM])
def test_what_is_borrowed_of_a_relay_is_of_one_version_while_it_passes_on_the_next(transport: str) -> None:
    with LocalStore(2) as followed, clusters(transport) as start:
        near = start(shards=2)
        trainer, relay, reader = followed.connect(rank=0), Relay(near.connect(rank=0)), near.connect(role="client")
        follower = FollowingReader(followed.connect(role="client"), None, None)

        def pass_on() -> None:
            publish(trainer, trainer.version + 1)
            relay.publish(follower.next())

        def borrowed(**options: bool) -> set[float]:
            """All numbers in it, and whether they stay what they are while another version is passed on."""
            with reader.borrow(["a", "b", RELAYED], **options) as values:
                numbers = [np.unique(value) for value in values.values()]
                pass_on()
                assert_array_equal(np.concatenate(numbers), np.concatenate([np.unique(v) for v in values.values()]))
            return set(np.concatenate(numbers).tolist())

        pass_on()
        with between_frames(reader, pass_on):
            assert borrowed(consistent=False) == {1, 2}
            assert borrowed() == {4}


@contextmanager
def running_relay(url: str, *flags: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The URL of its store, as its ready line has it, and the command, which is one of a job's many processes."""
    read_fd, write_fd = os.pipe()
    command = [sys.executable, "-m", "psstore.cli.main", "relay", url, "--port", "0", "--ready-fd", str(write_fd)]
    environ = {**os.environ, "WORLD_SIZE": "8"}
    with (
        os.fdopen(read_fd) as said,
        subprocess.Popen(
            [*command, *flags],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=environ,
            pass_fds=[write_fd],
        ) as process,
    ):
        os.close(write_fd)
        try:
            assert select.select([said], [], [], PATIENCE_S)[0], "no ready line"
            yield json.loads(said.readline())["url"], process
        finally:
            process.terminate()


def publish(store: Store, number: int) -> None:
    store.publish({name: np.full(ELEMS, number, F32) for name in ("a", "b")})


def until(reader: FollowingReader, number: int) -> None:
    """All versions on the way are whole."""
    while True:
        version = reader.next(timeout_s=PATIENCE_S)
        if "b" not in version.values:
            continue
        assert_array_equal(version.values["a"], version.values["b"])
        if version.values["a"][0] == number:
            assert version.values[RELAYED] > 0
            return


@pytest.mark.sockets
@pytest.mark.one_loop
def test_the_command_serves_what_another_store_has_and_waits_for_it(tmp_path: Path) -> None:
    port = consecutive_ports(2)
    followed = ("--checkpoint", str(tmp_path), "--restore", "auto", "--host", "127.0.0.1")
    with ExitStack() as ends:
        store = ends.enter_context(StoreProcess("--shards", "2", *followed, port=port))
        trainer = ends.enter_context(psstore.connect(store.url, rank=0))
        publish(trainer, 1)
        url, relay = ends.enter_context(running_relay(store.url, "--shards", "2", "--dtype", "bfloat16"))
        reader = ends.enter_context(psstore.follow(url, wait_s=PATIENCE_S))
        until(reader, 1)
        publish(trainer, 2)
        until(reader, 2)
        trainer.close()
        assert store.stop() == 0
        again = ends.enter_context(StoreProcess("--shards", "1", *followed, port=port))
        publish(ends.enter_context(psstore.connect(again.url, rank=0)), 3)
        until(reader, 3)
        relay.send_signal(signal.SIGTERM)
        assert relay.wait(END_S) == 0
        with pytest.raises(PsstoreError):
            reader.next(timeout_s=1.0)
