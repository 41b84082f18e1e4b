"""Which task of which cluster a process is: flags, TF_CONFIG, and both; pure functions."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from psstore.cluster import from_flags
from psstore.errors import BadArgument, DeadlineExceeded
from psstore.launch.cluster import Cluster, make_cluster
from psstore.launch.cluster_sources import find_cluster, parse_flags, read_tf_config
from psstore.launch.task import task_environ
from psstore.net.address import TcpAddress

FLAGS: dict[str, str | None] = {
    "ps_hosts": "h1:2222,h2:2222",
    "worker_hosts": "w1,w2",
    "job_name": "worker",
    "task_index": "1",
}
CLUSTER = {"ps": ["h1:2222", "h2:2222"], "worker": ["w1:2222", "w2:2222"]}


def tf_config(kind: str = "worker", index: object = 0, cluster: Mapping[str, object] = CLUSTER) -> dict[str, str]:
    return {
        "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}, "environment": "cloud"})
    }


def found(flags: Mapping[str, str | None], environ: Mapping[str, str] | None = None) -> Cluster:
    cluster = find_cluster(flags, environ or {}).cluster
    assert cluster is not None
    return cluster


def told(environ: Mapping[str, str]) -> Cluster:
    """By TF_CONFIG alone."""
    return found({}, environ)


# ---- flags ------------------------------------------------------------------------------------------


def test_the_classic_flags_make_a_cluster() -> None:
    cluster = found(FLAGS)
    assert cluster == Cluster(
        ps_hosts=("h1:2222", "h2:2222"), worker_hosts=("w1", "w2"), job_name="worker", task_index=1
    )
    assert cluster.shards == (TcpAddress("h1", 2222), TcpAddress("h2", 2222))
    assert cluster.url == "ps://h1:2222"


@pytest.mark.parametrize("spelling", ["--{}={}", "--{} {}"])
@pytest.mark.parametrize("dashes", [False, True])
def test_flags_are_spelled_with_underscores_or_dashes(spelling: str, dashes: bool) -> None:
    names = {name: name.replace("_", "-") if dashes else name for name in FLAGS}
    argv = " ".join(spelling.format(names[name], value) for name, value in FLAGS.items()).split()
    flags, rest = parse_flags(["--epochs", "3", *argv, "--verbose", "data"])
    assert {name: flags[name] for name in FLAGS} == FLAGS
    assert rest == ["--epochs", "3", "--verbose", "data"]


def test_flags_of_the_script_that_begin_like_ours_are_left_to_it() -> None:
    assert parse_flags(["--ps", "x", "--task", "9"])[1] == ["--ps", "x", "--task", "9"]


def test_no_flag_and_no_variable_is_no_cluster() -> None:
    assert find_cluster(dict.fromkeys(FLAGS), {"TF_CONFIG": ""}).cluster is None


def test_hosts_may_do_without_ports() -> None:
    cluster = found({**FLAGS, "ps_hosts": "h1, h2", "worker_hosts": "w1,w1"})
    assert cluster.shards == (TcpAddress("h1", 5700), TcpAddress("h2", 5700))
    assert cluster.num_workers == 2


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"task_index": "2"}, "task_index is 2, which no worker task has; worker_hosts names 2"),
        ({"task_index": "-1"}, "task_index is -1"),
        ({"task_index": "one"}, "task_index is 'one'; expected a number"),
        ({"job_name": "ps", "task_index": "5"}, "task_index is 5, which no ps task has; ps_hosts names 2"),
        ({"job_name": "master"}, "job_name is 'master'; expected one of ps, worker, evaluator; a chief is worker 0"),
        ({"job_name": "Worker"}, "job_name is 'Worker'; expected one of ps, worker, evaluator$"),
        ({"ps_hosts": ","}, "ps_hosts is empty; without ps tasks there is no store"),
        (
            {"ps_hosts": None},
            "--ps_hosts is missing, and without ps tasks there is no store: .* or train by all-reduce",
        ),
        ({"ps_hosts": None, "worker_hosts": None}, "--ps_hosts is missing; a task of a cluster needs --ps_hosts, "),
        ({"worker_hosts": ""}, "worker_hosts is empty"),
        ({"ps_hosts": "h1:1,h2:1,h1:1"}, "ps_hosts names 'h1:1' twice"),
        ({"ps_hosts": "h1,h1:5700"}, "ps_hosts names 'h1:5700' twice"),
        ({"worker_hosts": "w1:1,w1:1"}, "worker_hosts names 'w1:1' twice; write the host alone"),
        ({"ps_hosts": "http://h1:2222"}, "ps_hosts: 'http://h1:2222' is no host:port"),
        ({"ps_hosts": "h1:0"}, "ps_hosts: 'h1:0' is no host:port"),
        ({"worker_hosts": "w1:99999,w2"}, "worker_hosts: 'w1:99999' is no host:port"),
        ({"worker_hosts": None}, "--worker_hosts is missing; a task of a cluster needs --ps_hosts, --worker_hosts"),
    ],
)
def test_flags_that_make_no_sense_are_explained(changed: dict[str, str | None], sentence: str) -> None:
    with pytest.raises(BadArgument, match=sentence):
        find_cluster({**FLAGS, **changed}, {})


def test_a_flag_without_a_value_is_explained() -> None:
    with pytest.raises(BadArgument, match="--ps_hosts"):
        parse_flags(["--ps_hosts"])


# ---- TF_CONFIG --------------------------------------------------------------------------------------


def test_tf_config_says_the_same_as_flags() -> None:
    assert told(tf_config("worker", 1)) == found({**FLAGS, "worker_hosts": "w1:2222,w2:2222"})
    assert told(tf_config("ps", 1)).job_name == "ps"
    assert told(tf_config(index="1")).task_index == 1


@pytest.mark.parametrize("chief", ["chief", "master"])
def test_the_chief_is_worker_0_and_the_workers_follow(chief: str) -> None:
    cluster = {**CLUSTER, chief: ["c:2222"]}
    tasks = [told(tf_config(kind, index, cluster)) for kind, index in ((chief, 0), ("worker", 0), ("worker", 1))]
    assert [(task.job_name, task.task_index) for task in tasks] == [("worker", 0), ("worker", 1), ("worker", 2)]
    assert {task.worker_hosts for task in tasks} == {("c:2222", "w1:2222", "w2:2222")}


def test_an_evaluator_is_no_worker() -> None:
    cluster = told(tf_config("evaluator", 3))
    assert (cluster.job_name, cluster.num_workers) == ("evaluator", 2)


@pytest.mark.parametrize("task", [("ps", 1), ("worker", 1), ("evaluator", 0)])
def test_a_cluster_can_be_told_on_as_tf_config(task: tuple[str, int]) -> None:
    cluster = told(tf_config(*task))
    assert make_cluster(read_tf_config(cluster.tf_config())) == cluster


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "TF_CONFIG is no JSON"),
        ("[]", "TF_CONFIG: Expected `object`"),
        ('{"task": {"type": "ps"}}', "required field `cluster`"),
        ('{"cluster": {"ps": ["h"], "worker": ["w"]}}', "required field `task`"),
        (
            '{"cluster": {"worker": ["w"]}, "task": {"type": "worker", "index": 0}}',
            "names no ps tasks, and .* all-reduce",
        ),
        ('{"cluster": {"ps": ["h"]}, "task": {"type": "ps", "index": 0}}', "worker_hosts is empty"),
        ('{"cluster": {"ps": {"0": "h"}}, "task": {"type": "ps"}}', "Expected `array`"),
        ('{"cluster": {"ps": ["h"], "worker": ["w"]}, "task": {"type": "tpu", "index": 0}}', "job_name is 'tpu'"),
        ('{"cluster": {"ps": ["h"], "chief": ["c"]}, "task": {"type": "worker", "index": -1}}', ">= 0"),
    ],
)
def test_a_tf_config_that_makes_no_sense_is_explained(text: str, sentence: str) -> None:
    with pytest.raises(BadArgument, match=sentence):
        find_cluster({}, {"TF_CONFIG": text})


def test_flags_beat_tf_config_part_by_part_and_it_is_said() -> None:
    result = find_cluster({"task_index": "0", "job_name": "worker"}, tf_config("worker", 1))
    assert result.cluster == told(tf_config("worker", 0))
    assert result.notes == ("--task_index says 0, TF_CONFIG says 1: the flag counts",)


def test_flags_that_say_it_all_need_no_good_tf_config() -> None:
    result = find_cluster(FLAGS, {"TF_CONFIG": "{"})
    assert result.cluster == found(FLAGS)
    assert "is no JSON" in result.notes[0]
    with pytest.raises(BadArgument, match="is no JSON"):
        find_cluster({"job_name": "ps"}, {"TF_CONFIG": "{"})


# ---- what a task's script is told -------------------------------------------------------------------


def test_a_worker_finds_its_place_in_the_environment() -> None:
    cluster = found({**FLAGS, "worker_hosts": "a:1,b:1,a:2", "task_index": "2"})
    environ = task_environ(cluster, {"HOME": "/root", "RANK": "7", "CUDA_VISIBLE_DEVICES": "5"})
    assert {name: environ[name] for name in environ if name != "TF_CONFIG"} == {
        "HOME": "/root",
        "PSSTORE_URL": "ps://h1:2222",
        "RANK": "2",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "5",
    }
    assert told(environ) == cluster


def test_workers_on_one_host_take_different_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psstore.launch.task.find_gpus", lambda environ: ["0", "1"])
    hosts = "a,b,a,a"
    clusters = [found({**FLAGS, "worker_hosts": hosts, "task_index": str(index)}) for index in range(4)]
    assert [task_environ(cluster, {})["CUDA_VISIBLE_DEVICES"] for cluster in clusters] == ["0", "0", "1", "0"]


def test_an_evaluator_is_told_no_rank() -> None:
    environ = task_environ(told(tf_config("evaluator", 0)), {})
    assert set(environ) == {"PSSTORE_URL", "TF_CONFIG"}


def test_a_script_waits_as_long_as_its_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PSSTORE_URL", "local://?workers=2")
    monkeypatch.setenv("PSSTORE_WAIT_S", "0.01")
    with from_flags([]) as store, pytest.raises(DeadlineExceeded):
        store.barrier()
