"""Asks a store what `psstore doctor` wants to know: first one shard who they all are, then each where clients are told
that it is."""

from __future__ import annotations

import asyncio
import resource
import secrets
import statistics
import time
from collections.abc import Sequence

from psstore.config import Credentials
from psstore.errors import AuthFailed, DeadlineExceeded, PsstoreError, StoreUnreachable, TlsFailed
from psstore.launch.diagnosis import Finding, Here, ShardAnswers, diagnose
from psstore.launch.packet_sizes import PADDING, find_packet_sizes
from psstore.net.address import Address, TcpAddress, is_loopback, parse_address, parse_addresses
from psstore.net.asking import counters, greet, greeted, tie
from psstore.net.client import CURT, MUTE
from psstore.net.user_token import find
from psstore.protocol.handshake import ClientIdentity
from psstore.wire.messages import Welcome

PATIENCE_S = 6.0
"""How long a shard may take to be reached: longer than a handshake and a resent SYN take."""

ASKED = 5
"""How often each is asked."""


def examine(url: str, *, credentials: Credentials, version: str) -> list[Finding]:
    """What is wrong with the store there. `version`: of psstore, here. Raises BadArgument for what is no address."""
    addresses = parse_addresses(url)
    return asyncio.run(_examine(addresses, credentials, version))


async def _examine(seeds: Sequence[Address], credentials: Credentials, version: str) -> list[Finding]:
    identity = ClientIdentity(client=secrets.token_hex(16), role="client", credentials=credentials, find_token=find)
    welcome: Welcome | None = None
    unreached: list[Finding] = []
    for seed in seeds:
        try:
            welcome = await greet(identity, str(seed), patience_s=PATIENCE_S)
            break
        except PsstoreError as error:
            large = await _loses_large_packets(0, str(seed), credentials) if _takes_connections(error) else None
            unreached.append(large or _unreached(seed, error, has_token=credentials.secret() is not None))
    if welcome is None:
        return unreached
    looks = await asyncio.gather(
        *[_look(shard, addresses, credentials) for shard, addresses in enumerate(welcome.addresses)]
    )
    answers = [one for one in looks if isinstance(one, ShardAnswers)]
    found = [one for one in looks if isinstance(one, Finding)]
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return [*found, *diagnose(answers, Here(version, files))]


async def _look(shard: int, addresses: Sequence[str], credentials: Credentials) -> ShardAnswers | Finding:
    """A shard, by the first of its addresses at which it is reached."""
    failures: list[tuple[str, PsstoreError]] = []  # one for each address
    for address in addresses:
        identity = ClientIdentity(client=secrets.token_hex(16), role="client", credentials=credentials, find_token=find)
        reconnector = tie(identity, address, shard=shard, patience_s=PATIENCE_S)
        try:
            await greeted(reconnector)
            taken_s, ahead_s = [], []
            for _ in range(ASKED):
                began, clock_s = time.monotonic(), time.time()
                told = await counters(reconnector, timeout_s=PATIENCE_S)
                taken_s.append(time.monotonic() - began)
                ahead_s.append(float(told["time_s"]) - clock_s - taken_s[-1] / 2)
            await counters(reconnector, timeout_s=PATIENCE_S, padding=PADDING)
            return ShardAnswers(shard, address, told, statistics.median(taken_s), statistics.median(ahead_s))
        except PsstoreError as error:
            failures.append((address, error))
        finally:
            await reconnector.close()
    where, failure = failures[-1]
    is_silent = _takes_connections(failure) or isinstance(failure, DeadlineExceeded)
    if is_silent and (large := await _loses_large_packets(shard, where, credentials)) is not None:
        return large
    if is_silent:
        return _hanging(f"shard {shard} at {where}")
    return Finding(
        "advertised",
        f"clients are told that shard {shard} is at {where}, where it can't be reached from here: {failure.message}",
        "psstore-server --advertise HOST, a name that means the store's host wherever workers run (docs/clusters.md);"
        f" or open that port to them: nc -vz {_host_and_port(where)}",
    )


async def _loses_large_packets(shard: int, address: str, credentials: Credentials) -> Finding | None:
    sizes = await find_packet_sizes(address, shard, credentials)
    if sizes is None:
        return None
    return Finding(
        "mtu",
        f"packets of {sizes.sent} bytes, as this host sends them, are lost on the way to shard {shard} at {address} or"
        f" back, and nobody says so; those of {sizes.passing} arrive",
        f"ip link set dev DEVICE mtu {sizes.passing}, here and on the shard's host; or let ICMP through between them,"
        " which tells them",
    )


def _unreached(seed: Address, error: PsstoreError, *, has_token: bool) -> Finding:
    """Why no shard could be asked."""
    if isinstance(error, AuthFailed):
        if has_token:
            mend = "copy here the file that the store was started with (--token-file): PSSTORE_TOKEN_FILE is to name it"
        else:
            mend = "export PSSTORE_TOKEN_FILE=…, a copy of the file that the store was started with (--token-file)"
        return Finding("token", f"the store at {seed} does not know the token here: {error.message}", mend)
    if isinstance(error, TlsFailed):
        return Finding(
            "tls",
            f"no TLS with the store at {seed}: {error.message}",
            f"openssl s_client -connect {_host_and_port(str(seed)).replace(' ', ':')} -tls1_3 -showcerts < /dev/null"
            " shows what it has; PSSTORE_TLS_CA=FILE names the CA to believe (docs/clusters.md)",
        )
    if not isinstance(error, StoreUnreachable):
        return Finding(
            "protocol",
            f"what is at {seed} is no store of this version: {error.message}",
            "pip install the same psstore everywhere",
        )
    if _takes_connections(error):
        return _hanging(f"what is at {seed}")
    mend = f"is the address right, and the way open? nc -vz {_host_and_port(str(seed))}"
    if isinstance(seed, TcpAddress) and not is_loopback(seed.host):
        mend += "; psstore-server listens on loopback unless told: --host 0.0.0.0 --advertise HOST --token-file token"
    else:
        mend += "; to start a store: psstore-server --shards 1"
    return Finding("unreachable", f"nothing answers at {seed} from here: {error.message}", mend)


def _takes_connections(error: PsstoreError) -> bool:
    return any(words in error.message for words in (MUTE, CURT))


def _hanging(who: str) -> Finding:
    return Finding(
        "hangs",
        f"{who} takes connections and answers nothing: its process hangs, or stands still",
        "on its host: kill -CONT its process, if it was stopped; else end psstore-server and start it again (/livez"
        " does that in Kubernetes)",
    )


def _host_and_port(address: str) -> str:
    parsed = parse_address(address)
    return f"{parsed.host} {parsed.port}" if isinstance(parsed, TcpAddress) else f"-U {parsed.path}"
