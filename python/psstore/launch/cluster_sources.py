"""Where a process learns which task of which cluster it is: flags first, then TF_CONFIG. Pure functions."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, NoReturn

import msgspec

from psstore.errors import BadArgument
from psstore.launch.cluster import NO_STORE, PARTS, Cluster, make_cluster
from psstore.server.hosts import split_hosts


@dataclass(frozen=True)
class Found:
    """What was found, and what of it deserves a word."""

    cluster: Cluster | None
    """None: neither a flag nor TF_CONFIG speaks of a cluster."""
    notes: tuple[str, ...] = ()
    """A sentence for each part that flags and TF_CONFIG see differently."""


def find_cluster(flags: Mapping[str, str | None], environ: Mapping[str, str]) -> Found:
    """`flags`: by the names of PARTS, None for one that was not given. Raises BadArgument."""
    given = read_flags(flags)
    text = environ.get("TF_CONFIG", "").strip()
    try:
        told = read_tf_config(text) if text else {}
    except BadArgument as error:
        if len(given) < len(PARTS):
            raise
        return Found(make_cluster(given), (f"{error.message}; the flags count",))
    if not given and not told:
        return Found(None)
    notes = [
        f"--{name} says {_shown(given[name])}, TF_CONFIG says {_shown(told[name])}: the flag counts"
        for name in PARTS
        if name in given and name in told and given[name] != told[name]
    ]
    return Found(make_cluster({**told, **given}), tuple(notes))


# ---- flags ------------------------------------------------------------------------------------------


def parse_flags(argv: Sequence[str]) -> tuple[dict[str, str | None], list[str]]:
    """(our flags by name, all other arguments in their order). Raises BadArgument for a flag without a value."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    for name in (*PARTS, "token_file"):
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", dest=name)
    flags, rest = parser.parse_known_args(list(argv))
    return vars(flags), rest


def read_flags(flags: Mapping[str, str | None]) -> dict[str, object]:
    """Text to values, for those that were given. Raises BadArgument."""
    values: dict[str, object] = {}
    for name in PARTS:
        text = flags.get(name)
        if text is None:
            continue
        values[name] = split_hosts(text) if name.endswith("_hosts") else text
    if "task_index" in values:
        values["task_index"] = _integer(str(values["task_index"]))
    return values


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BadArgument(message)


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise BadArgument(f"task_index is {text!r}; expected a number: 0 for the first task of the job") from None


# ---- TF_CONFIG --------------------------------------------------------------------------------------


class _Task(msgspec.Struct):
    type: str
    index: Annotated[int, msgspec.Meta(ge=0)] = 0


class _TfConfig(msgspec.Struct):
    """What we read of it; other fields ('environment', 'rpc_layer') are left alone."""

    cluster: dict[str, list[str]]
    task: _Task


CHIEFS = ("chief", "master")
"""Names of the job whose only task is the first worker; 'master' is the older one."""


def read_tf_config(text: str) -> dict[str, object]:
    """Reads a value of TF_CONFIG as flags: the chief is worker 0, and the workers follow. Raises BadArgument."""
    try:
        config = msgspec.json.decode(text, type=_TfConfig, strict=False)
    except msgspec.ValidationError as error:
        raise BadArgument(f"TF_CONFIG: {error}; expected {_EXAMPLE}") from None
    except msgspec.DecodeError as error:
        raise BadArgument(f"TF_CONFIG is no JSON ({error}); expected {_EXAMPLE}") from None
    hosts, task = config.cluster, config.task
    if not hosts.get("ps"):
        raise BadArgument(f"TF_CONFIG names no ps tasks, and {NO_STORE}. Expected {_EXAMPLE}")
    chiefs = [host for name in CHIEFS for host in hosts.get(name, [])]
    if task.type == "worker":
        job_name, index = "worker", len(chiefs) + task.index
    else:
        job_name, index = "worker" if task.type in CHIEFS else task.type, task.index
    return {
        "ps_hosts": tuple(hosts["ps"]),
        "worker_hosts": (*chiefs, *hosts.get("worker", [])),
        "job_name": job_name,
        "task_index": index,
    }


_EXAMPLE = """{"cluster": {"ps": ["h1:2222"], "worker": ["h2:2222"]}, "task": {"type": "worker", "index": 0}}"""


def _shown(value: object) -> str:
    return ",".join(value) if isinstance(value, tuple) else str(value)
