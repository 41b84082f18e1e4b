"""docs/uneven_machines.md: its commands run as they are written, each on a virtual host of its own."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from bench.virtual_hosts import VirtualHosts, why_not

from tests.launch.cluster_tasks import Cluster

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

PROGRAMS = {name: str(Path(sys.executable).parent / name) for name in ("psstore-server", "python")}


def on_host(block: str, host: int) -> str:
    """What is typed there."""
    lines = [line for line in block.splitlines() if "# on host" not in line or line.endswith(f"# on host{host}")]
    typed = "\n".join(lines)
    for name, path in PROGRAMS.items():
        typed = re.sub(rf"(^| ){name} ", rf"\g<1>{path} ", typed, flags=re.MULTILINE)
    return typed


def test_three_uneven_machines_train_as_it_is_written(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (repository / "docs" / "uneven_machines.md").read_text()
    (script,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    token, store, *trainings = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    monkeypatch.chdir(tmp_path)
    seconds, losses, busy = [], set(), []
    with VirtualHosts(3) as hosts, Cluster(ps_hosts="", worker_hosts="", environ={}) as tasks:
        assert tasks.start(["bash", "-c", on_host(token, 0)]).wait() == 0
        for training in trainings:
            server = tasks.start(hosts.on(0, ["bash", "-c", on_host(store, 0)]))
            workers = [tasks.start(hosts.on(host, ["bash", "-c", on_host(training, host)])) for host in range(3)]
            assert [task.wait() for task in (*workers, server)] == [0] * 4, "".join(task.output() for task in workers)
            said = [re.search(r"rank \d: ([\d.]+) s, .* (\d+) % .* loss ([\d.]+)", one.output()) for one in workers]
            found = [one.groups() for one in said if one is not None]
            assert len(found) == 3
            seconds.append(max(float(one[0]) for one in found))
            busy.append([int(one[1]) for one in found])
            losses |= {one[2] for one in found}
    assert len(trainings) == 2
    assert len(losses) == 1, "the same whole batches, in other shares"
    assert max(busy[0][:2]) < 50 < busy[0][2], "equal shares: the fast ones wait for the slow one"
    assert seconds[1] < seconds[0]
