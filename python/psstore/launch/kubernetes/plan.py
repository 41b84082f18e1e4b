"""What is to be rendered, and what can't be."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from psstore.config import resolve
from psstore.errors import BadArgument
from psstore.server.settings import ServerSettings
from psstore.types import parse_workers

LONGEST_NAME = 63
"""Letters of a host's name: RFC 1035's label."""

SECRET = "^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$"
LONGEST_SECRET = 253
"""Name of a secret: RFC 1123's subdomain."""

QUANTITY = "^[0-9]+(\\.[0-9]+)?(m|k|[MGTPE]i?|Ki)?$"
"""Memory or processors, as Kubernetes writes them."""


@dataclass(frozen=True, kw_only=True)
class KubernetesPlan:
    """A store, and the workers that train with it."""

    image: str
    """With psstore[metrics], and the training script."""
    command: Sequence[str]
    """What a worker runs."""
    shards: int = 1
    standbys: int = 0
    """How many each shard has: none, or one, in a pod of its own."""
    workers: str = "1"
    """Number of workers, or FEWEST:MOST."""
    mode: str = "sync"
    name: str = "store"
    """Name of the store's objects; the workers' have it with -workers."""
    checkpoint: str | None = None
    """URL that all pods see."""
    checkpoint_every: str = "300s"
    stay: bool = False
    """The store serves on when the workers are done; else it ends."""
    token_secret: str = "psstore-token"
    """Name of the secret whose key `token` is the store's token, with which it signs: the admin's."""
    worker_token_secret: str = "psstore-worker-token"
    """Name of the secret whose key `token` is what workers have in its place: it lets them train, and no more."""
    tls_secret: str | None = None
    """Name of the secret with the store's certificate, `tls.crt`, its key, `tls.key`, and who signed it, `ca.crt`."""
    tls_client_secret: str | None = None
    """Name of the secret with a certificate for workers, `tls.crt` and `tls.key`: the store then asks for one."""
    env_secrets: Sequence[str] = ()
    """Names of secrets that all containers get as environment variables, as those of the checkpoints' storage."""
    shard_memory: str = "8Gi"
    shard_cpu: str = "2"
    worker_memory: str = "8Gi"
    worker_cpu: str = "4"
    gpus: int = 0
    """Devices of each worker."""
    grace_s: int = 120
    """How long a pod that is to end may take: to write a checkpoint, or to end a step."""

    def check(self) -> None:
        """Raises BadArgument for what can't be rendered, or what no store would begin with."""
        if not self.image:
            raise BadArgument("say which image has psstore[metrics] and the training script")
        if self.shards < 1 or self.grace_s < 1 or self.gpus < 0:
            raise BadArgument("shards and grace are at least 1, gpus at least 0")
        if self.standbys not in (0, 1):
            raise BadArgument(f"standbys is {self.standbys}; expected 0, or 1 for each shard")
        if not self.command:
            raise BadArgument("say what a worker runs: … -- python train.py")
        if self.checkpoint is not None and "://" not in self.checkpoint:
            raise BadArgument(
                f"checkpoint is {self.checkpoint!r}; expected a URL that every pod sees, as s3://bucket/run"
            )
        if self.tls_client_secret is not None and self.tls_secret is None:
            raise BadArgument("tls_client_secret is for a store with a certificate: say whose, by tls_secret")
        told = {"workers": self.workers, "mode": self.mode, "checkpoint_every": self.checkpoint_every}
        settings = resolve(ServerSettings, flags=told, file=None, environ={}).settings
        settings.consistency()
        settings.checkpoint_interval()
        self._check_quantities()
        self._check_secrets()
        self._check_name()

    def _check_quantities(self) -> None:
        for what in ("shard_memory", "shard_cpu", "worker_memory", "worker_cpu"):
            quantity = getattr(self, what)
            if re.fullmatch(QUANTITY, quantity) is None:
                raise BadArgument(f"{what} is {quantity!r}; expected a quantity of Kubernetes, as 8Gi or 500m")

    def _check_secrets(self) -> None:
        optional = (self.tls_secret, self.tls_client_secret)
        named = (self.token_secret, self.worker_token_secret, *self.env_secrets)
        for name in (*named, *(one for one in optional if one is not None)):
            if re.fullmatch(SECRET, name) is None or len(name) > LONGEST_SECRET:
                raise BadArgument(
                    f"{name!r} is no secret's name: expected lower-case letters, digits, dashes and dots,"
                    f" {LONGEST_SECRET} at most"
                )

    def _check_name(self) -> None:
        longest = f"{self.name}-workers-worker-0-{self.num_workers - 1}-abcde"  # a worker's pod, as JobSet names it
        if re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", self.name) is None or len(longest) > LONGEST_NAME:
            most = LONGEST_NAME - (len(longest) - len(self.name))
            raise BadArgument(
                f"name is {self.name!r}; expected at most {most} lower-case letters, digits and dashes, a letter first"
                " and no dash last"
            )

    @property
    def num_workers(self) -> int:
        """Pods of workers."""
        return parse_workers("workers", self.workers)[1]

    @property
    def num_shard_pods(self) -> int:
        """Pods of shards and standbys."""
        return self.shards * (1 + self.standbys)

    @property
    def goes_back(self) -> bool:
        """A shard that is lost takes the store back to a checkpoint."""
        return self.checkpoint is not None and not self.standbys
