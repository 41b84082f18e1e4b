"""How a command ends that has something to clear away first."""

from __future__ import annotations

import signal

from psstore.server.processes import requests_to_end


def end_as_by_ctrl_c() -> None:
    """From now on whatever asks this program to end raises KeyboardInterrupt, as Ctrl-C does: it would end at once."""
    for request in requests_to_end():
        if request is not signal.SIGINT:
            signal.signal(request, signal.default_int_handler)
