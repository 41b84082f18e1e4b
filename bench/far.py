"""Workers on hosts of their own, for benches of slow links: processes that this one has forked, each in the network
of its virtual host, and the rounds that they take together."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Protocol

from bench.harness import Turn
from psstore.server.processes import requests_to_end

FORK = multiprocessing.get_context("fork")
"""What this process has imported, torch above all, its children need not import again: on a machine with few cores
that would take longer than the bench. Fork before there are threads."""

PATIENCE_S = 10.0
"""For a worker to end by itself."""


def forked(work: Callable[..., None], *arguments: object) -> Any:
    """A process that works, until it is told to end: what the bench has to clear away then, only the bench does."""
    process = FORK.Process(target=_plainly, args=(work, *arguments), daemon=True)
    process.start()
    return process


def _plainly(work: Callable[..., None], *arguments: object) -> None:
    for request in requests_to_end():
        signal.signal(request, signal.SIG_DFL)
    work(*arguments)


class Hosts(Protocol):
    """Where workers and shards are: on virtual hosts, or all of them here."""

    interface: str
    """What the network is called there."""

    def address(self, index: int) -> str: ...
    def on(self, index: int, command: Sequence[str]) -> list[str]: ...
    def move_to(self, index: int) -> None: ...


class ThisHost:
    """All of them in one: this machine, and its loopback."""

    interface = "lo"

    def address(self, index: int) -> str:
        return "127.0.0.1"

    def on(self, index: int, command: Sequence[str]) -> list[str]:
        return list(command)

    def move_to(self, index: int) -> None:
        """It is here already."""


class Crew:
    """One object on each host, all of the same kind, whose methods are called everywhere at once."""

    def __init__(self, links: Sequence[Connection]) -> None:
        self._links = links

    def turn(self, method: str, *arguments: object) -> Turn:
        """A round of it: the seconds from the first one's beginning to the last one's end."""
        return partial(self._timed, method, arguments)

    def call(self, method: str, *arguments: object) -> list[Any]:
        """What each returned. Raises what one of them raised."""
        return [result for result, _, _ in self._called(method, arguments)]

    def _timed(self, method: str, arguments: tuple[object, ...]) -> float:
        answers = self._called(method, arguments)
        return max(end for _, _, end in answers) - min(begin for _, begin, _ in answers)

    def _called(self, method: str, arguments: tuple[object, ...]) -> list[tuple[Any, float, float]]:
        for link in self._links:
            link.send((method, arguments))
        answers = [link.recv() for link in self._links]
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers


@contextlib.contextmanager
def crew(hosts: Hosts, count: int, make: Callable[[int], object]) -> Iterator[Crew]:
    """`make(rank)` on the first `count` hosts, in the order of their ranks."""
    with contextlib.ExitStack() as ends:
        links, processes = [], []
        for rank in range(count):
            ours, theirs = FORK.Pipe()
            processes.append(forked(_serve, theirs, hosts, rank, make))
            theirs.close()
            ends.callback(_end, processes[-1], ours)
            links.append(ours)
        try:
            yield Crew(links)
        except BaseException:  # nobody wants the round that they are in
            for process in processes:
                process.terminate()
            raise


def _end(process: Any, link: Connection) -> None:
    with contextlib.suppress(OSError):  # it has ended
        link.send(None)
    process.join(PATIENCE_S)
    process.terminate()
    process.join()


def _serve(link: Connection, hosts: Hosts, rank: int, make: Callable[[int], object]) -> None:
    """In the worker's process, until it is told None."""
    hosts.move_to(rank)
    worker = make(rank)
    while (question := link.recv()) is not None:
        method, arguments = question
        begin = time.perf_counter()
        try:
            result = getattr(worker, method)(*arguments)
            link.send((result, begin, time.perf_counter()))
        except Exception:  # whatever it is: the bench ends with it, and not with silence
            link.send(RuntimeError(f"rank {rank}, {method}: {traceback.format_exc()}"))
