"""The arrows of the source tree: which layer may use which, and what importing psstore may load.

Read from the sources, so that a forbidden arrow fails here even if no test runs into it.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

# ---- Python: the layers of psstore, lowest first ----------------------------------------------------

LEAVES = {"_core", "errors", "exit_codes", "hyper", "types", "config", "memory", "release", "text"}
PURE = {"wire", "partition", "codec"}
BELOW_NET = LEAVES | PURE | {"protocol"}
BELOW_ENDS = BELOW_NET | {"net"}

PYTHON_ARROWS: dict[str, set[str]] = {
    "errors": set(),
    "exit_codes": set(),
    "text": set(),
    "release": set(),
    "hyper": set(),
    "types": {"_core", "errors", "hyper"},
    "config": {"errors", "types"},
    "memory": {"_core", "errors"},
    "cuda": LEAVES,
    "wire": LEAVES,
    "partition": LEAVES,
    "codec": LEAVES,
    "checkpoint": LEAVES | {"partition"},
    "protocol": LEAVES | PURE,
    "net": BELOW_NET,
    "server": BELOW_ENDS | {"checkpoint"},
    "client": BELOW_ENDS | {"checkpoint"},
    "torch": BELOW_ENDS | {"checkpoint", "client"},
    "integrations": {"errors", "client", "torch"},
    "launch": BELOW_ENDS | {"client", "server"},
    "cluster": BELOW_ENDS | {"client", "launch"},
    "ray": {"launch"},
    "cli": BELOW_ENDS | {"checkpoint", "client", "server", "torch", "launch", "cuda", "__init__"},
    "__init__": {"release", "client", "errors", "cuda", "torch", "cluster", "ray"},
}
"""Top-level module or package of psstore -> those it may import, besides itself. `__init__` is the public
names of psstore: what a user has."""

NO_IO_NO_CLOCK = {"asyncio", "uvloop", "socket", "select", "selectors", "threading", "time", "torch"}
"""What sans-IO code does without: bytes and the time are its arguments."""

CLIENT_ARROWS: dict[str, set[str]] = {
    "device": {"arrays", "layout"},
    "compression": {"arrays", "layout", "device"},
}
"""Folder of psstore.client -> those of its files and folders that it may import, besides itself."""

EXCHANGE = "checkpoint/exchange"
"""The one folder below psstore/checkpoint that may import torch and numpy: servers, which do without, use the rest."""

ONE_DOOR = {"psstore.client.device.peers": "client/device"}
"""Module -> the folder below psstore that alone may import it."""

FOREIGN_BANS: dict[str, set[str]] = {
    "errors": NO_IO_NO_CLOCK,
    "hyper": NO_IO_NO_CLOCK | {"msgspec"},
    "types": NO_IO_NO_CLOCK,
    "wire": NO_IO_NO_CLOCK,
    "partition": NO_IO_NO_CLOCK,
    "codec": NO_IO_NO_CLOCK,
    "checkpoint": {"asyncio", "uvloop", "socket", "pickle"},
    "protocol": NO_IO_NO_CLOCK,
    "net": {"torch"},
    "server": {"torch", "numpy"},
    "__init__": {"torch", "numpy", "asyncio", "uvloop"},
}
"""Top-level module or package of psstore -> modules of others that it may not import, not even lazily."""


class Arrow(NamedTuple):
    """One import: where it stands, and the dotted name of what is imported."""

    source: Path
    line: int
    target: str


def imports_of(source: Path) -> Iterator[Arrow]:
    """All imports of a file, those under TYPE_CHECKING and inside functions included."""
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Arrow(source, node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source}:{node.lineno}: relative import; name the package"
            assert node.module is not None
            for alias in node.names:
                yield Arrow(source, node.lineno, f"{node.module}.{alias.name}")


def layer_of_import(target: str) -> str | None:
    """The layer that a dotted name belongs to; None if it is not psstore's."""
    package, _, rest = target.partition(".")
    if package != "psstore":
        return None
    name = rest.partition(".")[0]
    return name if name in PYTHON_ARROWS or name == "_core" else "__init__"


def python_arrows(repository: Path) -> Iterator[tuple[str, Arrow]]:
    root = repository / "python" / "psstore"
    for source in sorted(root.rglob("*.py")):
        layer = source.relative_to(root).with_suffix("").parts[0]
        for arrow in imports_of(source):
            yield layer, arrow


def test_python_layers_import_only_what_lies_below(repository: Path) -> None:
    wrong = []
    for layer, arrow in python_arrows(repository):
        target = layer_of_import(arrow.target)
        if target is not None and target != layer and target not in PYTHON_ARROWS[layer]:
            wrong.append(f"{arrow.source}:{arrow.line}: {layer} may not import psstore.{target}")
    assert not wrong, "\n".join(wrong)


def test_folders_of_the_client_import_only_what_lies_below(repository: Path) -> None:
    root = repository / "python" / "psstore" / "client"
    wrong = []
    for folder, allowed in CLIENT_ARROWS.items():
        for source in sorted((root / folder).glob("*.py")):
            for arrow in imports_of(source):
                package, _, rest = arrow.target.partition("psstore.client.")
                if not package and rest.partition(".")[0] not in allowed | {folder}:
                    wrong.append(f"{arrow.source}:{arrow.line}: client/{folder} may not import {arrow.target}")
    assert not wrong, "\n".join(wrong)


def test_what_is_behind_one_door_is_used_by_nobody_else(repository: Path) -> None:
    root = repository / "python" / "psstore"
    wrong = [
        f"{arrow.source}:{arrow.line}: only {folder} may import {module}"
        for module, folder in ONE_DOOR.items()
        for _, arrow in python_arrows(repository)
        if f"{arrow.target}.".startswith(f"{module}.") and root / folder not in arrow.source.parents
    ]
    assert not wrong, "\n".join(wrong)


def test_python_layers_do_without_banned_modules(repository: Path) -> None:
    wrong = []
    for layer, arrow in python_arrows(repository):
        module = arrow.target.partition(".")[0]
        if module in FOREIGN_BANS.get(layer, set()):
            wrong.append(f"{arrow.source}:{arrow.line}: {layer} may not import {module}")
    assert not wrong, "\n".join(wrong)


def test_checkpoints_are_written_and_read_without_arrays_libraries(repository: Path) -> None:
    root = repository / "python" / "psstore"
    wrong = [
        f"{arrow.source}:{arrow.line}: only {EXCHANGE} may import {arrow.target}"
        for layer, arrow in python_arrows(repository)
        if layer == "checkpoint"
        and root / EXCHANGE not in arrow.source.parents
        and (arrow.target.partition(".")[0] in ("torch", "numpy") or "checkpoint.exchange" in arrow.target)
    ]
    assert not wrong, "\n".join(wrong)


def test_python_layers_are_all_listed(repository: Path) -> None:
    assert {layer for layer, _ in python_arrows(repository)} <= set(PYTHON_ARROWS)


# ---- C++: the directories of csrc, lowest first -----------------------------------------------------

CPP_ARROWS: dict[str, set[str]] = {
    "core": set(),
    "changes": set(),
    "rules": {"core"},
    "kernels": {"core", "rules"},
    "device": {"core", "rules", "kernels"},
    "rows": {"core", "rules", "kernels"},
    "table": {"core", "changes", "rules", "kernels", "device", "rows"},
    "wire": {"core"},
    "shm": {"core", "rules", "kernels", "device"},
    "tls": {"core"},
    "liveness": {"core", "tls"},
    "client": {"core", "wire", "shm", "tls"},
    "shard": {"core", "rules", "kernels", "device", "rows", "table", "wire", "shm"},
    "server": {"core", "device", "table", "shm", "wire", "shard", "tls"},
    "local": {"core", "device", "table", "shm", "wire", "shard", "tls", "client", "server"},
    "bindings": {
        "core",
        "changes",
        "rules",
        "kernels",
        "rows",
        "device",
        "table",
        "wire",
        "shm",
        "tls",
        "liveness",
        "client",
        "shard",
        "server",
        "local",
    },
}
"""Directory of csrc -> those whose headers it may include, besides its own."""

INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


def test_cpp_layers_include_only_what_lies_below(repository: Path) -> None:
    root = repository / "csrc"
    wrong = []
    for source in sorted(root.rglob("*.*")):
        layer = source.relative_to(root).with_suffix("").parts[0]
        if layer == "tests" or source.suffix not in (".h", ".cc", ".cu", ".cuh"):
            continue
        allowed = CPP_ARROWS[layer] | {layer}
        if source.name.endswith("_cuda.cu"):
            allowed |= {"device"}
        for include in INCLUDE.findall(source.read_text()):
            if not (root / include).is_file():
                wrong.append(f"{source}: {include!r} is not a path below csrc")
            elif Path(include).with_suffix("").parts[0] not in allowed:
                wrong.append(f"{source}: {layer} may not include {include}")
    assert not wrong, "\n".join(wrong)


# ---- what an import loads ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("psstore", {"torch", "numpy", "asyncio", "uvloop", "typer", "rich"}),
        ("psstore.client", {"torch"}),
        ("psstore.torch", {"lightning", "accelerate", "transformers"}),
        ("psstore.server", {"torch", "numpy", "rich"}),
        ("psstore.server.supervisor", {"torch", "numpy", "rich", "asyncio", "uvloop"}),
        ("psstore.cli.server", {"torch", "numpy"}),
        ("psstore.checkpoint.owned_place", {"torch", "numpy", "fsspec", "rich", "psstore.protocol"}),
        ("psstore.checkpoint.reader", {"torch", "numpy", "fsspec", "rich", "psstore.protocol"}),
    ],
)
def test_import_loads_nothing_heavy(module: str, unwanted: set[str]) -> None:
    program = f"import sys, {module}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()
    assert not unwanted & set(loaded)
