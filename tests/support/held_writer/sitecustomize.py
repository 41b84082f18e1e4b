"""Of processes that have this folder in their PYTHONPATH: what writes a store down as it stands still says so by one
file, HELD_WRITER with '.frozen', and waits for another, HELD_WRITER, before it writes."""

import os
import sys
from pathlib import Path
from typing import Any

if "psstore.launch.resharding" in sys.orig_argv:
    import asyncio

    from psstore.protocol.checkpoint_leader import CheckpointLeader

    go_on, write = Path(os.environ["HELD_WRITER"]), CheckpointLeader.write

    async def held(self: CheckpointLeader, *arguments: Any, **options: Any) -> int:
        go_on.with_suffix(".frozen").touch()
        while not go_on.exists():  # noqa: ASYNC110, ASYNC240 (another process makes it)
            await asyncio.sleep(0.01)
        return await write(self, *arguments, **options)

    CheckpointLeader.write = held  # type: ignore[method-assign]
