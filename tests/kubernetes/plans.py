"""Plans that differ in all that what is rendered depends on."""

from __future__ import annotations

from psstore.launch.kubernetes.plan import KubernetesPlan

TRAIN = ("python", "train.py", "--name", 'a "quoted" one: {{ x }}')

PLANS = {
    "least": KubernetesPlan(image="registry.example/train:1", command=("python", "train.py")),
    "checkpoints": KubernetesPlan(
        image="i",
        command=TRAIN,
        shards=4,
        workers="8",
        checkpoint="s3://bucket/run",
        checkpoint_every="500",
        env_secrets=("s3-credentials", "more"),
        gpus=2,
        grace_s=45,
    ),
    "standbys": KubernetesPlan(image="i", command=TRAIN, shards=3, standbys=1, workers="5", mode="async", stay=True),
    "certificates": KubernetesPlan(
        image="i",
        command=TRAIN,
        shards=2,
        workers="2:5",
        tls_secret="store-tls",
        checkpoint="gs://bucket/run",
        token_secret="another",
        worker_token_secret="workers",
        name="run-7",
    ),
    "everything": KubernetesPlan(
        image="i",
        command=TRAIN,
        shards=2,
        standbys=1,
        workers="3",
        mode="ssp",
        checkpoint="s3://bucket/run",
        tls_secret="store-tls",
        tls_client_secret="worker-tls",
        env_secrets=("s3-credentials",),
        shard_memory="512Gi",
        shard_cpu="500m",
        worker_memory="1.5Gi",
        worker_cpu="16",
        gpus=1,
        grace_s=7,
    ),
}
