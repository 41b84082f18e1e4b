"""`psstore relay`: a store near its readers, which has what another one has."""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING, Annotated

import typer

from psstore.cli.choices import checked_url, fail
from psstore.cli.credentials import with_credentials
from psstore.cli.ending import end_as_by_ctrl_c
from psstore.errors import (
    AuthFailed,
    AvailabilityError,
    DeadlineExceeded,
    InternalError,
    NotInitialised,
    PsstoreError,
    UnknownKey,
    UnknownTensor,
)
from psstore.exit_codes import EXIT_FAILED, EXIT_MISSING, EXIT_USAGE

if TYPE_CHECKING:
    from psstore.launch.relay import Relay
    from psstore.launch.server_process import ServerProcess

LOOK_S = 5.0
"""How long the other store is asked for a newer version before it is looked how the own one is."""

AGAIN_S = 1.0
"""Before the other store is connected to again."""

REFUSED_AGAIN_S = 10.0
"""Before one that has refused the relay's token is connected to again: of wrong proofs in quick succession all clients
on this host would suffer (protocol/proof_limits.py)."""

COMING_AND_GOING = (UnknownTensor, UnknownKey, NotInitialised)
"""What is heard of tensors that are just being created, or dropped."""

_log = logging.getLogger("psstore.relay")


def _checked_dtype(dtype: str | None) -> str | None:
    """One to follow in, or None. Ends the command with a sentence for others: it was asked for wrongly."""
    from psstore.client.changes import Copies

    try:
        Copies(None, dtype)
    except PsstoreError as error:
        fail(error.message)
    return dtype


@with_credentials
def relay(
    context: typer.Context,
    url: Annotated[str, typer.Argument(help="Of the store to follow: ps://host:port.", callback=checked_url)],
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Follow float32 tensors in 'bfloat16' or 'float16', for readers in that: far less comes, and what is"
            " here is rounded to it. Default: as stored.",
            callback=_checked_dtype,
        ),
    ] = None,
    ready_fd: Annotated[
        int | None,
        typer.Option(metavar="N", help="Write psstore-server's ready line as JSON to this descriptor."),
    ] = None,
) -> None:
    """Follow a store, and serve what it has: `psstore relay ps://h1:5700 --port 5800`.

    Readers of this one are none of the other's, which sends each version once, and only what has changed in it. All
    other flags are those of `psstore-server`, which runs here with one worker, the relay: `--port`, `--shards`,
    `--read-token-file`, …. Clients read; what they write, the next version may write over. If the other store is out of
    reach, what is here stays until it is back.
    """
    from psstore.client.connect import connect
    from psstore.launch.relay import Relay
    from psstore.launch.server_process import ServerProcess
    from psstore.server import logs

    logs.configure(who="relay", level="info", form="text")
    end_as_by_ctrl_c()
    os.environ.pop("PSSTORE_TRACE", None)  # its file there would be that of the training's rank 0
    server = ServerProcess(_environ(), [*context.args, "--workers", "1"])
    try:
        own_url = server.await_ready(ready_fd=ready_fd)
        if own_url is None:
            code = server.wait()
            fail(
                f"psstore-server has ended with exit code {code}",
                exit_code=EXIT_USAGE if code == EXIT_USAGE else EXIT_MISSING,
            )
        with connect(own_url, rank=0, num_workers=1) as own:
            passes_on, said = Relay(own), None
            while not server.has_ended:
                said = _follow(url, dtype, passes_on, server, said=said)
        fail("the store here has ended by itself; its messages are above", exit_code=EXIT_FAILED)
    except KeyboardInterrupt:
        pass
    except PsstoreError as error:
        fail(error.message, exit_code=EXIT_FAILED)
    finally:
        server.tell_to_end()
        server.wait()


def _environ() -> dict[str, str]:
    """The server's: it has the certificates that this client has, if they are its own."""
    environ = dict(os.environ)
    if "PSSTORE_TLS_CERT" not in environ:
        environ.pop("PSSTORE_TLS_CA", None)
    return environ


def _follow(
    url: str, dtype: str | None, relay: Relay, server: ServerProcess, *, said: type[PsstoreError] | None = None
) -> type[PsstoreError] | None:
    """Passes versions on until the store here has ended, or something is wrong that may pass: with one of the stores,
    or the way to it. Returns of what kind that is, which is told unless it was `said` last. Raises what will not pass.
    """
    from psstore.client.follow import follow

    try:
        relay.renew()
        with follow(url, dtype=dtype) as reader:
            while not server.has_ended:
                try:
                    version = reader.next(timeout_s=LOOK_S)
                except DeadlineExceeded:
                    if not server.has_ended:  # where it might start again by itself, it would be waited for
                        relay.renew()
                    continue
                relay.publish(version)  # out here, as its own DeadlineExceeded is a failure: all is read and sent anew
                said = None
    except PsstoreError as error:
        if not _may_pass(error, relay):
            raise
        if type(error) is not said:
            _log.warning("%s; what is here stays", error.message)
        time.sleep(REFUSED_AGAIN_S if isinstance(error, AuthFailed) else AGAIN_S)
        return type(error)
    return said


def _may_pass(error: PsstoreError, relay: Relay) -> bool:
    """At first a store that refuses this one is taken at its word. One that was followed may have another token or
    certificate by now, which are about to be replaced here, too."""
    if isinstance(error, (AvailabilityError, *COMING_AND_GOING)):
        return True
    return relay.has_begun and not isinstance(error, InternalError)
