"""The board at `/` of --metrics: one page, which draws in the browser what /metrics says."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

PAGE = files("psstore.launch").joinpath("board.html").read_bytes()


def policy() -> str:
    """The Content-Security-Policy of the page: its own style and script, and what this server says; nothing else."""
    style, script = (_hash_of(tag) for tag in ("style", "script"))
    return f"default-src 'none'; connect-src 'self'; style-src {style}; script-src {script}"


def _hash_of(tag: str) -> str:
    found = re.search(f"<{tag}>(.*?)</{tag}>".encode(), PAGE, re.DOTALL)
    assert found is not None, f"the page has a {tag}"
    return f"'sha256-{base64.b64encode(hashlib.sha256(found[1]).digest()).decode()}'"
