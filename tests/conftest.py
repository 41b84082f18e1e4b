"""What every test stands on: the event loop under test, and that no test leaves a process behind."""

from __future__ import annotations

import gc
import os
import signal
import uuid
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path

import psutil
import pytest

from psstore import _core
from psstore.client.store import Store
from tests.support.cluster import TRANSPORTS, Cluster, clusters
from tests.support.fake_shards import on_devices

LOOPS = ("uvloop", "asyncio")
BOTH = "both"

SESSION_VARIABLE = "PSSTORE_TEST_SESSION"
"""Inherited by every process that a test starts, so that orphans are recognised too."""

EXIT_GRACE_S = 30.0
"""How long a process that was told to end may take, once its test is over."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--loop",
        choices=(*LOOPS, BOTH),
        default=LOOPS[0],
        help=f"event loop of servers under test; {BOTH}: tests that are marked so run under each",
    )
    parser.addoption(
        "--damages",
        type=int,
        default=300,
        help="how many damaged checkpoints tests/checkpoint makes",
    )
    parser.addoption(
        "--device",
        choices=("cpu", "fake"),
        default="cpu",
        help="where shards of the tests' own process are, if they do not say it themselves",
    )


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault(
        "OMP_NUM_THREADS", "1"
    )  # torch's: tests share few cores, where threads that spin are in the way
    os.environ[SESSION_VARIABLE] = uuid.uuid4().hex
    if config.getoption("--device") == "fake":
        _core.Shard = on_devices()  # type: ignore[assignment,misc]
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job, which interrupts itself in vain
        signal.signal(signal.SIGINT, signal.default_int_handler)


TESTS = Path(__file__).parent

FIRST = (
    *("cpp", "server/test_apart_standbys.py", "chaos", "client/test_reconnect.py", "torch/test_session.py", "sim"),
    *("cli", "docs", "launch", "kubernetes", "torch", "client", "server", "integrations"),
)
"""Files that take long, and folders that have some, the longest first: what is last, one worker does alone."""


@pytest.hookimpl(trylast=True)  # where the marks of parameters and of fixtures' parameters are known
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.config.getoption("--loop") != BOTH:
        return
    marks = {mark.name for mark in metafunc.definition.iter_markers()}
    if "one_loop" in marks:
        return
    if "sockets" in marks or any(_under_both(call.marks) for call in metafunc._calls):
        metafunc.parametrize("loop_name", LOOPS, indirect=True, scope="module")


def _under_both(marks: Iterable[pytest.Mark | pytest.MarkDecorator]) -> bool:
    names = {mark.name for mark in marks}
    return "sockets" in names and "one_loop" not in names


def _needs_no_second_loop(item: pytest.Item) -> bool:
    """A parameter may say that what its test is about is in no event loop, or in any."""
    callspec = getattr(item, "callspec", None)
    second = callspec is not None and callspec.params.get("loop_name") == LOOPS[1]
    return second and not _under_both(item.iter_markers())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = sorted((item for item in items if not _needs_no_second_loop(item)), key=_turn)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keeps the garbage collector from walking through what collecting leaves, which is no garbage: meanwhile, 3 s of
    15, and each time that somebody asks it to collect: 0.4 s, and seven microseconds without."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def _turn(item: pytest.Item) -> int:
    """Its file's place among those that come first."""
    file = item.path.relative_to(TESTS)
    for place in (str(file), *(str(folder) for folder in file.parents)):
        if place in FIRST:
            return FIRST.index(place)
    examples_and_scripts = file.parent == Path()  # which train
    return len(FIRST) if examples_and_scripts else len(FIRST) + 1


def pytest_report_header(config: pytest.Config) -> str:
    return f"event loop: {config.getoption('--loop')}"


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every shard that is made here has a device of its own."""
    monkeypatch.setattr(_core, "Shard", on_devices())


@pytest.fixture(scope="module", autouse=True)
def loop_name(request: pytest.FixtureRequest) -> str:
    """'uvloop' or 'asyncio': what servers under test use. A module's fixture that starts one takes this, since servers
    of one loop have to end before those of the other start."""
    option = request.config.getoption("--loop")
    name = str(getattr(request, "param", LOOPS[0] if option == BOTH else option))
    os.environ["PSSTORE_LOOP"] = name
    return name


@pytest.fixture(scope="session")
def repository() -> Path:
    """Root of the source tree that the tests lie in."""
    return Path(__file__).resolve().parent.parent


def _started_by_tests() -> list[psutil.Process]:
    session = os.environ[SESSION_VARIABLE]
    return [process for process in psutil.process_iter() if _belongs(process, session)]


MAY_STAY = (
    *("multiprocessing.resource_tracker", "tests.support.fork_server"),
    *("torch._inductor.compile_worker", "torch/_inductor/compile_worker"),
)
"""In the command lines of processes that live as long as the one that runs the tests."""


def _belongs(process: psutil.Process, session: str) -> bool:
    try:
        return (
            process.pid != os.getpid()
            and process.environ().get(SESSION_VARIABLE) == session
            and process.status() != psutil.STATUS_ZOMBIE
            and not any(word in " ".join(process.cmdline()) for word in MAY_STAY)
        )
    except psutil.Error:  # it ended meanwhile, or is another user's
        return False


@pytest.fixture(scope="module", autouse=True)
def no_process_left_behind(loop_name: str) -> Iterator[None]:
    """Fails the last test of a module, under one loop, if a process that it started outlives it, and kills that."""
    before = set(_started_by_tests())
    yield
    left = [process for process in _started_by_tests() if process not in before]
    _, alive = psutil.wait_procs(left, timeout=EXIT_GRACE_S)
    described = [_describe(process) for process in alive]
    for process in alive:
        process.kill()
    assert not described, "processes left behind:\n" + "\n".join(described)


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid}: {' '.join(process.cmdline())}"
    except psutil.Error:
        return f"{process.pid}: ended while it was looked at"


@pytest.fixture(scope="module", params=TRANSPORTS)
def cluster(loop_name: str, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Two shards and one worker's place, over each transport."""
    with clusters(request.param) as start:
        yield start(shards=2)


@pytest.fixture
def store(cluster: Cluster) -> Iterator[Store]:
    """A worker of a store whose tensors are gone after the test."""
    with cluster.connect(rank=0) as store:
        yield store
        for name in store.keys():
            store.drop(name)
