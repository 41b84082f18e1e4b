"""Exit codes of `psstore` and `psstore-server`: the one table, which each command's --help ends with."""

from __future__ import annotations

import signal
from collections.abc import Mapping

EXIT_OK = 0

EXIT_FAILED = 1
"""What was asked for was right, and did not come out."""

EXIT_USAGE = 2
"""Asked for wrongly: as argparse and click have it."""

EXIT_MISSING = 3
"""What the command needs is not there: a store, a place to start one, a package."""

EXIT_NO_PROGRAM = 127
"""A program can't be started: as a shell has it."""

EXIT_SIGNAL = 128
"""And a signal's number: as a shell has it."""


def signal_name(number: int) -> str:
    """'SIGKILL'; 'signal 40' of those that have only numbers."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


OF_ALL: Mapping[int, str] = {
    EXIT_OK: "done",
    EXIT_FAILED: "the system refuses, as a full disk does",
    EXIT_USAGE: "asked for wrongly: an unknown flag, a value that can't be",
    EXIT_SIGNAL + 2: "Ctrl-C",
}
"""What holds of each command whose row does not say otherwise."""

_NO_STORE = {EXIT_MISSING: "no store answers there"}
_STORAGE = {EXIT_FAILED: "a checkpoint is damaged or not there, or storage fails"}
_SERVER = {
    EXIT_OK: "told to end (SIGTERM, Ctrl-C) and drained, or its workers are done",
    EXIT_FAILED: "the store was lost, or its last checkpoint was not written",
    EXIT_MISSING: "can't start: a setting, a port, a device",
}

OF_COMMAND: Mapping[str, Mapping[int, str]] = {
    "psstore-server": _SERVER,
    "server": _SERVER,
    "run": {
        EXIT_OK: "all workers ended with 0, or all but those that the others went on without",
        EXIT_FAILED: "the store was lost, or its last checkpoint was not written, or output can't be shown; a worker's"
        " own exit code otherwise",
        EXIT_MISSING: "the store can't start or be reached",
        EXIT_NO_PROGRAM: "a worker can't be started",
        EXIT_SIGNAL: "plus a signal's number: it ended a worker, or this run",
    },
    "demo": {
        EXIT_FAILED: "weights differ that should not, or a training did not go on",
        EXIT_MISSING: "no torch or scikit-learn, or the store can't start",
    },
    "bench": _NO_STORE,
    "status": _NO_STORE,
    "top": _NO_STORE,
    "trace": {**_NO_STORE, EXIT_FAILED: "workers took too few steps, or noted none; it says which"},
    "doctor": {EXIT_OK: "nothing is wrong", EXIT_FAILED: "something is wrong; it says what, and what mends it"},
    "promote": {EXIT_MISSING: "nobody answers there, the other shards object, or it does not lead"},
    "reshard": {EXIT_MISSING: "no store answers there, or it can't go on with so many: it says why"},
    "relay": {
        EXIT_OK: "told to end (SIGTERM, Ctrl-C)",
        EXIT_FAILED: "the store here was lost, or the other one refuses its reader from the first",
        EXIT_MISSING: "the store here can't start",
    },
    "plan": {},
    "version": {},
    "checkpoint ls": _STORAGE,
    "checkpoint verify": _STORAGE,
    "checkpoint save": {EXIT_FAILED: "no store answers there, or storage fails"},
    "checkpoint export": {**_STORAGE, EXIT_MISSING: "no package for that format"},
    "checkpoint import": {**_STORAGE, EXIT_MISSING: "no package for that format"},
    "kubernetes render": {EXIT_MISSING: "no PyYAML"},
    "kubernetes worker": {
        EXIT_OK: "the program ended with 0; its own exit code otherwise",
        EXIT_NO_PROGRAM: "the program can't be started",
        EXIT_SIGNAL: "plus a signal's number: it ended the program, or told it to end",
    },
    "kubernetes stop": {EXIT_FAILED: "the API server refuses, or does not answer", EXIT_MISSING: "no pod of a cluster"},
}
"""By command, as it is typed after `psstore`."""


def exit_codes_of(command: str) -> list[str]:
    """A line for each code that the command may end with. Raises KeyError for one that the table lacks."""
    meanings = _meanings_of(command)
    return [f"{code}: {meanings[code]}" for code in sorted(meanings)]


def exit_codes_of_group(group: str) -> list[str]:
    """A line for each code that one of the group's commands may end with; where it is not the same for all of them, it
    says for which."""
    commands = {name.removeprefix(f"{group} "): name for name in OF_COMMAND if name.startswith(f"{group} ")}
    who: dict[int, dict[str, list[str]]] = {}
    for name, command in commands.items():
        for code, meaning in _meanings_of(command).items():
            who.setdefault(code, {}).setdefault(meaning, []).append(name)
    return [
        f"{code}: "
        + "; ".join(
            meaning if len(names) == len(commands) else f"{meaning} ({', '.join(names)})"
            for meaning, names in who[code].items()
        )
        for code in sorted(who)
    ]


def _meanings_of(command: str) -> dict[int, str]:
    meanings = {**OF_ALL, **OF_COMMAND[command]}
    if OF_COMMAND[command] is _SERVER:
        del meanings[EXIT_SIGNAL + 2]
    return meanings
