"""The documents are enough to write a client: docs_client.py, which knows nothing else, trains on a real store."""

from __future__ import annotations

import ast
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from numpy.typing import NDArray

import psstore
from tests.docs.docs_client import Client, Link, Refused, prove
from tests.docs.docs_wire import Body, Frame, KeptRow, Op, Violation, crc32c, receive, send
from tests.support.server_process import StoreProcess
from tests.support.server_thread import make_service, serving

pytestmark = [pytest.mark.sockets, pytest.mark.one_loop]

F32 = np.float32
Model = dict[str, NDArray[Any]]

TOKEN = b"correct horse battery staple"
AUTH_FAILED = 7
NUM_SHARDS = 4
NUM_ROUNDS = 6

LR = 1 / 64
"""A power of two: the product in fma(g, -lr, p) is exact, and numpy's p - lr * g has the same bytes."""

WEIGHTS = (1.0, 3.0)
"""Of the two workers' contributions: as many examples as each has, over 8."""

BLOCKS = [f"block{i}" for i in range(NUM_SHARDS)]
NAMES = [*BLOCKS, "bias"]


class ForgetfulLink(Link):
    """Loses the first answer to each request, and the connection with it: the store gets everything twice."""

    def __init__(self, address: str, client: str, role: str, token: bytes | None) -> None:
        self._lost: set[int] = set()
        super().__init__(address, client, role, token)

    def _try(self, request: Frame) -> Frame:
        reply = super()._try(request)
        part_of_connecting = request.op in (Op.HELLO, Op.AUTH, Op.ATTACH)
        if not part_of_connecting and request.request not in self._lost:
            self._lost.add(request.request)
            raise ConnectionResetError("the answer was lost")
        return reply


class ForgetfulClient(Client):
    link_type = ForgetfulLink


class RecordingLink(Link):
    """Remembers what was asked, so that it can be asked again much later."""

    def ask(self, request: Frame) -> Frame:
        self.asked = [*getattr(self, "asked", []), request]
        return super().ask(request)


class RecordingClient(Client):
    link_type = RecordingLink


# ---- what is trained: y = Σ x[:, block] @ W[block] + bias, squared error --------------------------


def first_values() -> Model:
    random = np.random.default_rng(7)
    blocks = {name: random.standard_normal((3, 2)).astype(F32) for name in BLOCKS}
    return {**blocks, "bias": np.zeros(2, F32)}


def gradients(model: Model, rank: int, round: int) -> Model:
    random = np.random.default_rng((rank, round))
    inputs = random.standard_normal((int(8 * WEIGHTS[rank]), NUM_SHARDS, 3)).astype(F32)
    errors = (
        sum((inputs[:, i] @ model[name] for i, name in enumerate(BLOCKS)), model["bias"]) - inputs.sum(axis=1)[:, :2]
    )
    blocks = {name: inputs[:, i].T @ errors / F32(len(inputs)) for i, name in enumerate(BLOCKS)}
    return {**blocks, "bias": errors.mean(axis=0)}


def by_numpy() -> list[Model]:
    """The model after each round: contributions are summed in rank order, and divided by the sum of the weights."""
    model, history = first_values(), []
    for round in range(1, NUM_ROUNDS + 1):
        first, second = (gradients(model, rank, round) for rank in (0, 1))
        for name in NAMES:
            mean = (F32(WEIGHTS[0]) * first[name] + F32(WEIGHTS[1]) * second[name]) / F32(sum(WEIGHTS))
            model = {**model, name: model[name] - F32(LR) * mean}
        history.append(model)
    return history


def specs() -> list[Body]:
    return [
        {"name": name, "shape": list(value.shape), "rule": "sgd", "zeros": False}
        for name, value in first_values().items()
    ]


def as_bytes(model: Model) -> dict[str, bytes]:
    return {name: value.tobytes() for name, value in model.items()}


def pull_model(client: Client) -> Model:
    shapes = {name: value.shape for name, value in first_values().items()}
    return {name: np.frombuffer(value, F32).reshape(shapes[name]) for name, value in client.pull(NAMES).items()}


def by_docs_client(client: Client) -> list[Model]:
    """One worker's life, as protocol.md tells it step by step: what it pulled after each round."""
    rank = client.join()
    client.create(specs(), as_bytes(first_values()))
    model, history = pull_model(client), []
    for round in range(1, NUM_ROUNDS + 1):
        assert client.round == round
        client.push(as_bytes(gradients(model, rank, round)))
        client.commit({0: {"lr": LR}}, weight=WEIGHTS[rank])
        model = pull_model(client)
        history.append(model)
    client.leave()
    return history


# ---- training -------------------------------------------------------------------------------------


@pytest.fixture
def sync_store() -> Iterator[StoreProcess]:
    """Its shards measure what workers push."""
    with StoreProcess("--shards", str(NUM_SHARDS), "--workers", "2", "--refuse-norm", "1000") as store:
        yield store


@pytest.mark.parametrize("kind", [Client, ForgetfulClient])
def test_two_workers_train_to_the_bytes_of_numpy(kind: type[Client], sync_store: StoreProcess) -> None:
    workers = [kind(sync_store.url) for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        histories = list(threads.map(by_docs_client, workers))
    expected = by_numpy()
    for history in histories:
        for pulled, computed in zip(history, expected, strict=True):
            for name in NAMES:
                assert_array_equal(pulled[name], computed[name], strict=True)
    assert {shard for worker in workers for t in worker.tensors.values() for shard in t["shards"]} == {0, 1, 2, 3}
    with psstore.connect(sync_store.url, role="client") as store:
        for name in NAMES:
            assert_array_equal(store.pull(name), expected[-1][name], strict=True)


def test_reader_sees_a_round_that_nobody_has_told_the_shards(sync_store: StoreProcess) -> None:
    workers = [Client(sync_store.url) for _ in WEIGHTS]
    for worker in workers:
        worker.join()
        worker.create(specs(), as_bytes(first_values()))
    model = pull_model(workers[0])
    for worker in workers:
        worker.push(as_bytes(gradients(model, worker.rank, 1)))
    with ThreadPoolExecutor(len(workers)) as pool:
        list(pool.map(lambda one: one.commit({0: {"lr": LR}}, weight=WEIGHTS[one.rank]), workers))
    reader = Client(sync_store.url, role="client")
    reader.describe()
    found, expected = pull_model(reader), by_numpy()[0]
    for name in NAMES:
        assert_array_equal(found[name], expected[name])
    for client in (*workers, reader):
        client.close()


@pytest.fixture(scope="module")
def store() -> Iterator[StoreProcess]:
    with StoreProcess("--shards", str(NUM_SHARDS)) as store:
        yield store


@pytest.mark.parametrize("half", [None, psstore._core.DTYPES["bfloat16"]])
def test_reader_is_told_what_has_changed(half: int | None, sync_store: StoreProcess) -> None:
    first, second, reader = (Client(sync_store.url) for _ in range(3))
    names, elems = ["x", "y"], 1000
    with ThreadPoolExecutor() as pool:
        list(pool.map(Client.join, (first, second), (0, 1)))
        specs = [{"name": name, "shape": [elems], "rule": "sgd"} for name in names]
        first.create(specs, {name: bytes(4 * elems) for name in names})
        second.create(specs, {})
        reader.describe()
        for name in names:
            reader.tensors[name] = first.tensors[name]
        copies: dict[int, tuple[int, bytes]] = {}
        came = []
        for number in range(4):
            came.append(reader.follow(names, copies, half))
            gradient = np.zeros(elems, F32)
            gradient[number::300] = 1 if number % 2 else 2.0**-140
            for worker in (first, second):
                worker.push({name: gradient.tobytes() for name in names})
            list(pool.map(lambda worker: worker.commit({0: {"lr": LR}}), (first, second)))
        reader.follow(names, copies, half)
        values = reader.pull(names)
    assert came == [[False] * 2, [True] * 2, [True] * 2, [True] * 2]
    for name in names:
        (part,) = (key for key in copies if key >> 24 == reader.tensors[name]["id"])
        whole = np.frombuffer(values[name], F32)
        if half is None:
            assert copies[part][1] == whole.tobytes()
        else:
            halves = np.empty(elems, np.int16)
            psstore._core.convert(whole, psstore._core.DTYPES["float32"], halves, half)
            assert copies[part][1] == halves.tobytes()
    for client in (first, second, reader):
        client.close()


def test_reader_keeps_rows_and_is_sent_those_that_have_changed(store: StoreProcess) -> None:
    name, ids, kept = "rows", range(100), dict[int, KeptRow]()
    with psstore.connect(store.url, role="client") as other:
        other.create_table(name, dim=3, rule="sgd", group=1, init="normal(0, 1)")
        reader = Client(store.url, role="client")
        reader.describe()
        assert reader.keep_rows(name, ids, kept) == len(ids)
        assert reader.keep_rows(name, ids, kept) == 0
        other.assign_rows(name, [5, 70], np.ones((2, 3), F32))
        assert 2 <= reader.keep_rows(name, range(50, 120), kept) + reader.keep_rows(name, ids, kept) <= 2 + 20 + 5
        expected = other.pull_rows(name, range(120))
        reader.close()
    assert b"".join(kept[one].data for one in range(120)) == expected.tobytes()


def test_what_is_sent_again_after_its_decision_changes_nothing(store: StoreProcess) -> None:
    client = RecordingClient(store.url)
    client.join()
    client.create(specs(), as_bytes(first_values()))
    client.push(as_bytes(first_values()))
    committed = client.commit({0: {"lr": LR}})
    before = client.pull(NAMES)
    for link in client.links:
        assert isinstance(link, RecordingLink)
        link.stream.close()
        link.connect()
        again = {request.op: link.ask(request) for request in link.asked if request.op in (Op.PUSH, Op.COMMIT)}
        assert Op.PUSH in again
        assert again.get(Op.COMMIT, Frame(0, body=committed)).body == committed
    assert client.pull(NAMES) == before
    assert [client.stats(shard)["version"] for shard in range(NUM_SHARDS)] == [1] * NUM_SHARDS
    client.leave()


# ---- plain keys and values ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Client, ForgetfulClient])
def test_plain_writes_count_once(kind: type[Client], store: StoreProcess) -> None:
    """One tensor in two slices, of 65536 elements and of 5, one without elements, and one number."""
    shapes: dict[str, tuple[int, ...]] = {"long": (65_541,), "empty": (0, 3), "number": ()}
    values = {name: np.arange(np.prod(shape), dtype=F32).reshape(shape) for name, shape in shapes.items()}
    client = kind(store.url, role="client")
    client.create([{"name": name, "shape": list(shape)} for name, shape in shapes.items()], {})
    client.assign(as_bytes(values))
    client.add(as_bytes(values))
    client.add({"number": F32(3).tobytes()})
    expected = {**{name: 2 * value for name, value in values.items()}, "number": np.asarray(3, F32)}
    assert client.pull(shapes) == as_bytes(expected)
    assert len(client.tensors["long"]["shards"]) == 2
    with psstore.connect(store.url, role="client") as ordinary:
        for name, value in expected.items():
            assert_array_equal(ordinary.pull(name), value, strict=True)
    client.close()


def test_tensors_of_others_are_described(store: StoreProcess) -> None:
    with psstore.connect(store.url, role="client") as ordinary:
        ordinary.create("theirs", np.arange(6, dtype=np.float64).reshape(2, 3), rule="add")
    client = Client(store.url, role="client")
    assert "theirs" in client.describe()
    assert_array_equal(np.frombuffer(client.pull(["theirs"])["theirs"]), np.arange(6.0))
    client.close()


# ---- the token ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def locked_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    token_file: Path = tmp_path_factory.mktemp("docs-client") / "token"
    token_file.write_bytes(TOKEN + b"\n")
    token_file.chmod(0o600)
    with StoreProcess("--shards", str(NUM_SHARDS), "--token-file", str(token_file)) as store:
        yield store


def test_worker_with_the_token_is_served(locked_store: StoreProcess) -> None:
    client = Client(locked_store.url, token=TOKEN)
    assert client.join() == 0
    assert [client.stats(shard)["shard"] for shard in range(NUM_SHARDS)] == [0, 1, 2, 3]
    client.leave()


def test_wrong_token_is_refused(locked_store: StoreProcess) -> None:
    with pytest.raises(Refused) as refused:
        Client(locked_store.url, token=b"incorrect horse")
    assert refused.value.code == AUTH_FAILED


def test_client_with_a_token_wants_to_be_asked_for_it() -> None:
    with serving(make_service()) as url, pytest.raises(Violation, match="asks for no token"):
        Client(url, token=TOKEN)


def test_shard_that_can_not_prove_its_token_is_left() -> None:
    def pretend(listener: socket.socket) -> None:
        stream, _ = listener.accept()
        with stream:
            hello = receive(stream)
            send(stream, Frame(Op.CHALLENGE, hello.request, {"nonce": bytes(32)}))
            auth = receive(stream)
            guessed = prove(b"guessed", b"shard", hello.fields["client"], hello.fields["nonce"], bytes(32))
            send(stream, Frame(Op.WELCOME, auth.request, {"proof": guessed, "version": 0}))

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:
        pretending = threads.submit(pretend, listener)
        with pytest.raises(Violation, match="another token"):
            Client(f"ps://127.0.0.1:{listener.getsockname()[1]}", token=TOKEN)
        pretending.result()


# ---- the client itself ----------------------------------------------------------------------------


def test_checksum_is_the_documents() -> None:
    assert crc32c(b"123456789") == 0xE3069283


@pytest.mark.parametrize("module", ["docs_client.py", "docs_wire.py"])
def test_client_stands_on_the_documents_alone(module: str) -> None:
    tree = ast.parse((Path(__file__).parent / module).read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not {name for name in imported if name.startswith("psstore")}
