"""The commands of a run, each on a host of its own if there are hosts: started, listened to, killed with all that they
have started, and started again."""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence

import psutil

from tests.chaos.stage import Command


class Programs:
    """All of a run's, by the place that their commands have in it."""

    def __init__(self, commands: Sequence[Command], hear: Callable[[str, str], None]) -> None:
        """`hear`: called with who says something, and the line, on a thread of that program's."""
        self._commands = commands
        self._hear = hear
        self._changed = threading.Condition()
        self._programs = [Program(one, hear) for one in commands]
        self._is_down = [False] * len(commands)
        self._begin_again = True

    def wait(self) -> dict[str, int]:
        """Until all have ended that nobody starts again; how each did."""
        for index in range(len(self._commands)):
            self._await_last_life(index)
        return {one.command.who: one.wait() for one in self._programs}

    def _await_last_life(self, index: int) -> None:
        while True:
            program = self._programs[index]
            program.wait()
            with self._changed:
                self._changed.wait_for(lambda: not self._is_down[index])
                if self._programs[index] is program:
                    return

    def give_up(self) -> None:
        """What is down stays down."""
        with self._changed:
            self._begin_again = False

    @contextlib.contextmanager
    def down(self, index: int, *, alone: bool = False) -> Iterator[bool]:
        """Meanwhile nothing of it is there: its processes are killed all at once, or its first one `alone`, and those
        that it has started end by themselves. Then its command begins again. False: it has ended by itself."""
        program = self._programs[index]
        with self._changed:
            met = self._is_down[index] = program.process.poll() is None
        try:
            if met and alone:
                program.process.kill()
                program.wait()
            elif met:
                for one in program.suspend():  # none of them sees that another one dies
                    with contextlib.suppress(psutil.NoSuchProcess):
                        one.kill()
                program.wait()
            yield met
        finally:
            with self._changed:
                if met and self._begin_again:
                    self._programs[index] = Program(program.command, self._hear)
                self._is_down[index] = False
                self._changed.notify_all()

    @contextlib.contextmanager
    def still(self, index: int) -> Iterator[bool]:
        """Meanwhile none of its processes does anything. False: it has ended."""
        stopped = self._programs[index].suspend()
        try:
            yield bool(stopped)
        finally:
            for one in stopped:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.resume()


class Program:
    """One life of a command."""

    def __init__(self, command: Command, hear: Callable[[str, str], None]) -> None:
        self.command = command
        self.process = subprocess.Popen(
            command.arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=dict(command.environ)
        )
        self._lines = threading.Thread(target=self._listen, args=(hear,))
        self._lines.start()

    def wait(self) -> int:
        """Its exit code, when it has ended and all that it said was heard."""
        self._lines.join()
        return self.process.wait()

    def suspend(self) -> list[psutil.Process]:
        """Has it and what it has started stand still: it first, so that it starts no more. Returns them."""
        try:
            first = psutil.Process(self.process.pid)
            first.suspend()
            found = [first, *first.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []
        for one in found[1:]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.suspend()
        return found

    def _listen(self, hear: Callable[[str, str], None]) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                hear(self.command.who, line.rstrip("\n"))
