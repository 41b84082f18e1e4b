"""The workers of one contestant, each in a process of its own, and the rounds that they take together."""

from __future__ import annotations

import contextlib
import math
import signal
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any

from bench.harness import Turn, process_tree
from bench.peers import Worker, load
from bench.processes import FRESH, child, signal_all
from bench.work import Work, expected_last


class WorkerFailed(Exception):
    """With the traceback of what happened in its process."""


@contextlib.contextmanager
def _death_told() -> Iterator[None]:
    try:
        yield
    except (EOFError, ConnectionError):
        raise WorkerFailed("a worker's process has ended") from None


class Team:
    """`turns`: the contestant's variants. Each is a round of all workers, which tells its own time."""

    def __init__(self, work: Work, links: Sequence[Connection], *, processes: Sequence[int], spins: bool) -> None:
        """`spins`: the processes stand still between turns."""
        self.processes = processes
        """Ids of the servers, then of the workers."""
        self._work = work
        self._links = links
        self._spins = spins
        self._rounds = 0
        self.turns: Mapping[str, Turn] = {variant: partial(self._round, variant) for variant in self._answers()[0]}
        self._rest()

    def check(self) -> None:
        """Raises if the parameters are not what so many steps make of them: everybody has to do the same work."""
        expected = expected_last(self._work, self._rounds)
        for last in self._ask(None):
            if not math.isclose(last, expected, rel_tol=1e-3):
                raise AssertionError(f"after {self._rounds} rounds the last element is {last}, not {expected}")

    def wake(self) -> None:
        """Whoever stands still goes on."""
        if self._spins:
            signal_all(self.processes, signal.SIGCONT)

    def _rest(self) -> None:
        if self._spins:
            signal_all(self.processes, signal.SIGSTOP)

    def _round(self, variant: str) -> float:
        """Seconds from the first worker's beginning to the last one's end."""
        self._rounds += 1
        begins, ends = zip(*self._ask(variant), strict=True)
        return float(max(ends) - min(begins))

    def _ask(self, question: str | None) -> list[Any]:
        self.wake()
        with _death_told():
            for link in self._links:
                link.send(question)
        answers = self._answers()
        self._rest()
        return answers

    def _answers(self) -> list[Any]:
        with _death_told():
            answers = [link.recv() for link in self._links]
        for answer in answers:
            if isinstance(answer, WorkerFailed):
                raise answer
        return answers


@contextlib.contextmanager
def team(peer: str, work: Work, transport: str) -> Iterator[Team]:
    """The contestant's servers and workers, all of them ready."""
    forkserver.ensure_running()  # a process that is in no team
    others = set(process_tree())
    with contextlib.ExitStack() as ends:
        module = load(peer)
        where = ends.enter_context(module.serve(work, transport))
        links = []
        for rank in range(1 if module.IN_ONE_PROCESS else work.num_workers):
            ours, theirs = FRESH.Pipe()
            ends.enter_context(child(_work, theirs, peer, work, rank, where))
            theirs.close()  # so that the end of the process is the end of the link
            links.append(ours)
        for link in links:
            ends.callback(link.close)  # all before any process is waited for: some say good-bye to each other
        its_team = Team(work, links, processes=sorted(set(process_tree()) - others), spins=module.SPINS)
        ends.callback(its_team.wake)  # so that it can end
        yield its_team


def _work(link: Connection, peer: str, work: Work, rank: int, where: str) -> None:
    """In the worker's process, until the link ends. Questions are variants to take a round of, or None."""
    with contextlib.suppress(EOFError):
        try:
            worker = load(peer).join(work, rank, where)
            link.send(list(worker.variants))
            while True:
                link.send(_answer(worker, link.recv()))
        except EOFError:
            worker.close()
        except Exception:
            link.send(WorkerFailed(traceback.format_exc()))


def _answer(worker: Worker, question: str | None) -> Any:
    if question is None:
        return worker.last
    begin = time.perf_counter()
    worker.variants[question]()
    return begin, time.perf_counter()
