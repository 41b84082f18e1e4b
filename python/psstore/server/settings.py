"""What `psstore-server` can be told."""

from __future__ import annotations

import importlib.util
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from psstore.checkpoint.interval import CheckpointInterval, parse_interval
from psstore.config import MAX_BUSY_POLL_US, Credentials
from psstore.errors import BadArgument
from psstore.memory import DEFAULT_SNAPSHOT_PART, limit_bytes, parse_size
from psstore.net.address import DEFAULT_PORT, TcpAddress
from psstore.net.certificates import Certificates
from psstore.net.sockets import check_congestion_control
from psstore.net.token_files import TokenSources
from psstore.protocol.membership import OfLost
from psstore.server.hosts import advertised_hosts, parse_hosts, split_hosts
from psstore.types import UNBOUNDED, Consistency, grace_seconds, parse_workers, place_shards

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]
Loop = Literal["auto", "uvloop", "asyncio"]
Seconds = Annotated[float, Meta(gt=0)]


def _text(description: str) -> Meta:
    return Meta(description=description)


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One field per flag, variable and config key; psstore.config says which of them counts."""

    shards: Annotated[int, Meta(ge=1, le=1024), _text("shard processes")] = 1
    standbys: Annotated[
        int,
        Meta(ge=0, le=1),
        _text(
            "processes beside each shard that have all that it has: if it dies, one leads, and nothing is lost; takes"
            " twice the memory"
        ),
    ] = 0
    shards_at: Annotated[
        str | None,
        _text("host:port of every shard, separated by commas, where each has a host of its own; needs a token"),
    ] = None
    standbys_at: Annotated[
        str | None,
        _text(
            "host:port of every shard's standby, in the order of --shards-at: another host has all that the shard has,"
            " and leads if it dies"
        ),
    ] = None
    shard_index: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        _text("which of --shards-at runs here: 0 for the first; those of --standbys-at count on"),
    ] = None
    host: Annotated[str, _text("address to listen on; off loopback a token is needed")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535), _text("port of shard 0, shard i is at port+i; 0: any free ports")] = (
        DEFAULT_PORT
    )
    uds: Annotated[
        str | None, _text("unix socket of shard 0, shard i is at UDS.i; no TCP unless that is asked for")
    ] = None
    advertise: Annotated[
        str | None,
        _text(
            "where clients are told to connect to, if not where shards listen: a host, a host:port of shard 0 (shard i"
            " is at port+i), or one for each shard, separated by commas"
        ),
    ] = None
    workers: Annotated[
        int | str,
        _text(
            "training workers that a synchronous round waits for; FEWEST:MOST, as 2:8: they come and go, and a round"
            " waits for those who are there"
        ),
    ] = 1
    lost: Annotated[
        Literal["fail", "wait", "drop"] | None,
        _text(
            "what the others do when nobody took a lost worker's place within rejoin_s: fail with WorkerLost, wait on,"
            " or go on without it, which needs --workers FEWEST:MOST or a quorum (default: drop with the first, else"
            " fail)"
        ),
    ] = None
    mode: Annotated[
        Literal["sync", "backup", "ssp", "async"] | None, _text("a name for usual choices of quorum and staleness")
    ] = None
    quorum: Annotated[int | None, _text("commits that make a decision (default: all workers)")] = None
    grace_s: Annotated[
        Annotated[float, Meta(ge=0)] | Literal["auto"],
        _text(
            "how long a round that has its quorum stays open for the other workers that are there: seconds, or 'auto',"
            " as long as that pays by how long they have taken before"
        ),
    ] = 0.0
    staleness: Annotated[
        Annotated[int, Meta(ge=0)] | Literal["unbounded"] | None,
        _text("rounds that a worker may be ahead of the slowest: a number or 'unbounded' (default: 0)"),
    ] = None
    token_file: Annotated[
        str | None,
        _text("file with the secret that clients must have (default, on loopback: this user's programs may come)"),
    ] = None
    worker_token_file: Annotated[
        str | None,
        _text("file with the secret of those who train, and may not see to the store as with --token-file's"),
    ] = None
    read_token_file: Annotated[str | None, _text("file with the secret of those who only read")] = None
    tls_cert: Annotated[
        str | None,
        _text("file with this host's certificate (PEM), and those up to its CA: clients connect to pss://, by TLS 1.3"),
    ] = None
    tls_key: Annotated[str | None, _text("file with the private key of tls_cert (default: in the same file)")] = None
    tls_ca: Annotated[
        str | None,
        _text(
            "file with a CA of clients: only those with a certificate of it may connect, and other hosts' shards too"
        ),
    ] = None
    until_done: Annotated[bool, _text("end with status 0 when all workers have joined and left")] = False
    patience_s: Annotated[
        Seconds,
        _text(
            "shards on other hosts that are out of reach for so long are gone; so are lost workers with --until-done"
        ),
    ] = 60.0
    device: Annotated[
        str,
        _text("where parameters live: cpu, cuda:0, or several, separated by commas, for the shards in turn"),
    ] = "cpu"
    max_memory: Annotated[
        str | None,
        _text(
            "main memory that the shards of this host may take together, as 8GiB; each gets its part, and refuses what"
            " goes beyond it (default: four fifths of what the machine or its control group has)"
        ),
    ] = None
    snapshot_memory: Annotated[
        str | None,
        _text(
            "of max_memory, what the shards of this host may keep together of older versions while snapshots read them,"
            " as 2GiB (default: a quarter of it); beyond that, snapshots are told that their version is gone"
        ),
    ] = None
    checkpoint: Annotated[
        str | None,
        _text(
            "folder or URL to write checkpoints to, as file:///shared/run or s3://bucket/run; it is this store's alone"
        ),
    ] = None
    checkpoint_every: Annotated[
        str, _text("how often: so many decisions, as 500, or seconds, as 60s; one more is written at a clean end")
    ] = "300s"
    keep: Annotated[int, Meta(ge=1), _text("how many of the newest checkpoints stay")] = 3
    full_every: Annotated[
        int,
        Meta(ge=1),
        _text(
            "of so many checkpoints one has all rows of tables, and the others those that changed since; takes 4 to 8"
            " bytes a row of snapshot_memory (1: each has all)"
        ),
    ] = 1
    restore: Annotated[
        str | None,
        _text(
            "begin with what URL has, URL@VERSION or URL@latest, whatever number of shards wrote it; auto: with the"
            " latest at --checkpoint, if there is one"
        ),
    ] = None
    restarts: Annotated[
        int,
        Meta(ge=0),
        _text(
            "how often all shards start again, from the latest checkpoint, when one has died; needs --checkpoint, and"
            " with --shards-at the same on every host"
        ),
    ] = 0
    metrics: Annotated[
        Annotated[int, Meta(ge=0, le=65535)] | None,
        _text(
            "port, at --host, of /metrics for Prometheus, /livez and /readyz; 0: any free one; needs psstore[metrics]"
        ),
    ] = None
    refuse_non_finite: Annotated[bool, _text("refuse pushes that hold NaN or infinity")] = False
    refuse_norm: Annotated[
        float | None,
        _text(
            "refuse contributions whose norm is more than so many times the median of the last ones to the same"
            " tensors, as 10, or not finite; rounds go on without them"
        ),
    ] = None
    heartbeat_s: Annotated[Seconds, _text("how often workers say that they live")] = 1.0
    silence_s: Annotated[Seconds, _text("a worker that said nothing for so long is lost")] = 10.0
    rejoin_s: Annotated[
        Annotated[float, Meta(ge=0)],
        _text("how long the others wait for another worker in a lost one's place before they hear of the loss"),
    ] = 0.0
    max_connections: Annotated[int, Meta(ge=1), _text("connections that one shard takes")] = 4096
    congestion_control: Annotated[
        str | None,
        _text("TCP's, of what shards send: bbr fills long links that lose packets (default: the system's)"),
    ] = None
    busy_poll_us: Annotated[
        float,
        Meta(ge=0, le=MAX_BUSY_POLL_US),
        _text("microseconds that a shard asks for the next request before it sleeps; takes a core while workers train"),
    ] = 0.0
    loop: Annotated[Loop, _text("event loop: auto takes uvloop if it is installed")] = "auto"
    log_level: Annotated[LogLevel, _text("least important messages to log")] = "info"
    log_format: Annotated[LogFormat, _text("text or one JSON object per line")] = "text"

    def check(self) -> None:
        """Raises BadArgument for settings that don't go together."""
        self.consistency().check()
        if self.silence_s < 2 * self.heartbeat_s:
            raise BadArgument(
                f"silence_s is {self.silence_s:g}, heartbeat_s {self.heartbeat_s:g}: one late heartbeat would be a"
                " death; make silence_s at least twice heartbeat_s"
            )
        if self.port and self.port + self.shards > 65536:
            raise BadArgument(f"{self.shards} shards from port {self.port} on go beyond port 65535; use --port 0")
        self.advertised()
        self.snapshot_memory_bytes()
        self.checkpoint_interval()
        if self.restore == "auto" and self.checkpoint is None:
            raise BadArgument("--restore auto takes the latest checkpoint at --checkpoint; say where that is")
        if self.restarts and self.checkpoint is None:
            raise BadArgument("--restarts goes back to the latest checkpoint at --checkpoint; say where that is")
        terms = self.consistency()
        if self.lost == "drop" and not terms.elastic and terms.mode != "backup":
            raise BadArgument(
                f"--lost drop is for workers that come and go; say how few will do: --workers 1:{self.workers}, or a"
                " quorum"
            )
        self._check_trust()
        place_shards(self.device, self.shards)
        if self.standbys and self.device != "cpu":
            raise BadArgument(f"device is {self.device}: --standbys is for shards in main memory (--device cpu)")
        if self.standbys and self.shards_at is not None:
            raise BadArgument(
                "--standbys is for shards that one psstore-server starts on its host; with --shards-at say where they"
                " are: --standbys-at host:port,host:port,…"
            )
        if self.metrics is not None and importlib.util.find_spec("prometheus_client") is None:
            raise BadArgument("--metrics needs prometheus-client: pip install 'psstore[metrics]'")
        if self.congestion_control is not None:
            check_congestion_control("congestion_control", self.congestion_control)
        self._check_hosts()

    def hosts(self) -> tuple[TcpAddress, ...] | None:
        """Where each shard runs, if each has a host of its own; None: all of them run on this host."""
        return None if self.shards_at is None else self._places("shards_at", self.shards_at)

    def begins_as_standby(self) -> bool:
        """What runs here is in the place of a standby: it begins nothing by itself."""
        return (self.shard_index or 0) >= len(self.hosts() or (None,))

    def standby_hosts(self) -> tuple[TcpAddress, ...]:
        """Where each shard's standby runs, on a host of its own; none: there are no such standbys."""
        return () if self.standbys_at is None else self._places("standbys_at", self.standbys_at)

    def _places(self, what: str, text: str) -> tuple[TcpAddress, ...]:
        return tuple(place._replace(tls=self.has_tls()) for place in parse_hosts(what, split_hosts(text)))

    def has_tls(self) -> bool:
        """What comes by TCP does so by TLS."""
        return self.tls_cert is not None

    def token_sources(self, own: bytes | None) -> TokenSources:
        """`own`: a token that was made for this store alone, if it was given none."""
        return TokenSources(own=own, admin=self.token_file, worker=self.worker_token_file, read=self.read_token_file)

    def _check_trust(self) -> None:
        if self.token_file is None and (self.worker_token_file or self.read_token_file):
            raise BadArgument(
                "--worker-token-file and --read-token-file are for those who may do less than the store's owner, whose"
                " token --token-file names; give that, too"
            )
        if self.tls_cert is None and (self.tls_key or self.tls_ca):
            raise BadArgument("--tls-key and --tls-ca go with a certificate of this host; give --tls-cert, too")
        if self.has_tls():
            Certificates(self.certificates(), server=True)

    def certificates(self) -> Credentials:
        """What this host's shards show, and whom they believe."""
        return Credentials(tls_cert=self.tls_cert, tls_key=self.tls_key, tls_ca=self.tls_ca)

    def credentials(self, token: bytes | None) -> Credentials:
        """What the store's own processes connect to each other with. Without a CA they believe the certificate that
        this host has, which is every host's then. `token`: where there is no file with one."""
        ca = self.tls_ca or self.tls_cert
        return msgspec.structs.replace(self.certificates(), tls_ca=ca, token=token, token_file=self.token_file)

    def advertised(self) -> tuple[tuple[str, int | None], ...] | None:
        """Host and port at which clients find each shard, a port that is None being the one that it listens at; None:
        as they listen. Raises BadArgument."""
        return None if self.advertise is None else advertised_hosts(self.advertise, self.shards)

    def max_memory_bytes(self) -> int:
        """What all shards of this host may take together."""
        return limit_bytes(self.max_memory)

    def snapshot_memory_bytes(self) -> int:
        """What snapshots may keep on this host. Raises BadArgument if that is more than there is."""
        most = self.max_memory_bytes()
        if self.snapshot_memory is None:
            return most // DEFAULT_SNAPSHOT_PART
        asked = parse_size("snapshot_memory", self.snapshot_memory)
        if asked > most:
            raise BadArgument(f"snapshot_memory is {self.snapshot_memory}, more than max_memory, {most} bytes")
        return asked

    def checkpoint_interval(self) -> CheckpointInterval:
        """Raises BadArgument for what is none."""
        return parse_interval("checkpoint_every", self.checkpoint_every)

    def of_lost(self) -> OfLost:
        """What becomes of workers that are given up."""
        return self.lost or ("drop" if self.consistency().elastic else "fail")

    def _check_standbys(self, hosts: tuple[TcpAddress, ...]) -> None:
        places = self.standby_hosts()
        if places and len(places) != len(hosts):
            raise BadArgument(
                f"standbys_at names {len(places)} places for the {len(hosts)} shards of shards_at; expected as many"
            )
        if twice := set(places) & set(hosts):
            raise BadArgument(f"{min(twice)} is in --shards-at and in --standbys-at; each needs a place of its own")
        if places and self.device != "cpu":
            raise BadArgument(f"device is {self.device}: --standbys-at is for shards in main memory (--device cpu)")
        if places and self.restarts:
            raise BadArgument(
                "--standbys-at and --restarts don't go together: a shard that dies is led by its standby, and a store"
                " that loses both begins again with --restore auto"
            )

    def _check_hosts(self) -> None:
        hosts = self.hosts()
        if self.standbys_at is not None and hosts is None:
            raise BadArgument("--standbys-at says where the standbys of --shards-at are: say where these are, too")
        if (hosts is None) != (self.shard_index is None):
            raise BadArgument("--shards-at and --shard-index go together: where all shards are, and which one this is")
        if hosts is None or self.shard_index is None:
            return
        places = [*hosts, *self.standby_hosts()]
        if self.shard_index >= len(places):
            of = "shards_at names" if self.standbys_at is None else "shards_at and standbys_at name"
            raise BadArgument(f"shard_index is {self.shard_index}, but {of} {len(places)}: 0 is the first")
        if self.shards not in (1, len(hosts)):
            raise BadArgument(f"shards is {self.shards}, but shards_at names {len(hosts)}; leave --shards out")
        self._check_standbys(hosts)
        if self.uds is not None or self.advertise is not None:
            raise BadArgument(
                "--shards-at says where clients find the shards; leave --uds and --advertise out. A shard that listens"
                " elsewhere than it is found is told where by --host and --port"
            )

    def consistency(self) -> Consistency:
        """What mode, quorum and staleness say together: the mode fills in what is not given."""
        bound = UNBOUNDED if self.staleness == "unbounded" else self.staleness
        fewest, num_workers = parse_workers("workers", self.workers)
        if num_workers == 1:
            alone = Consistency(num_workers=1, quorum=self.quorum or 1, refuse_norm=self.refuse_norm)
            alone.check()
            return alone  # nobody is ahead of anybody
        mode = self.mode or ("ssp" if bound and self.quorum is None else "sync")
        usual = Consistency.of_mode(mode, num_workers=num_workers, refuse_norm=self.refuse_norm)
        chosen = Consistency(
            num_workers=num_workers,
            quorum=usual.quorum if self.quorum is None else self.quorum,
            staleness=usual.staleness if bound is None else bound,
            fewest=fewest,
            grace_s=grace_seconds(self.grace_s),
            refuse_norm=self.refuse_norm,
        )
        chosen.check()
        if self.mode and chosen != usual and chosen.mode != self.mode:
            raise BadArgument(
                f"mode {self.mode!r} does not go with quorum {chosen.quorum} of {num_workers} workers and staleness"
                f" {self.staleness}: that is {chosen.mode!r}; leave out one of them"
            )
        return chosen
