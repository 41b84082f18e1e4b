"""Writes a store down as it stands still: `python -m psstore.launch.resharding`, started by the supervisor.

The supervisor then ends the shards and starts as many as were wanted with what is written. stdout tells what came of
it. The store stands still until the supervisor has it go on.
"""

from __future__ import annotations

import asyncio

from psstore.client.arguments import Options
from psstore.client.operations import GATHER_S, Operations
from psstore.client.remote import open_remote
from psstore.errors import PsstoreError
from psstore.launch.supervised import take_duty
from psstore.net.address import parse_addresses
from psstore.server import logs
from psstore.server.orders import report
from psstore.server.pipe_words import NOT_WRITTEN, WRITTEN
from psstore.server.processes import ReshardDuty

WRITE_S = 600.0
"""How long all of it may take. Nobody is told anything meanwhile."""


def main() -> None:
    """Ends when it has told."""
    duty = take_duty(ReshardDuty)
    logs.configure(who="resharding", level=duty.log_level, form=duty.log_format)
    try:
        operations, remote = open_remote(
            parse_addresses(duty.url), Options(role="resharder", client=duty.client, credentials=duty.credentials)
        )
        version = remote.thread.submit(written(operations, duty)).result()
    except PsstoreError as error:
        report(NOT_WRITTEN, " ".join(error.message.split()))
    else:
        report(WRITTEN, str(version))


async def written(operations: Operations, duty: ReshardDuty) -> int:
    """The version of what is written. Raises PsstoreError."""
    return await operations.client.checkpoints.write_at_standstill(
        duty.place, gather_s=GATHER_S, pause=asyncio.sleep, wait_s=WRITE_S
    )


if __name__ == "__main__":
    main()
