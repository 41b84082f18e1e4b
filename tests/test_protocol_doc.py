"""docs/protocol.md names every message with every field, every control operation and the limits as they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from psstore import _core
from psstore.protocol import clients, connection, slices
from psstore.protocol.membership import Liveness
from psstore.protocol.service import CONTROL
from psstore.types import Tensor, TensorSpec
from psstore.wire import messages


@pytest.fixture(scope="module")
def document(repository: Path) -> str:
    return (repository / "docs" / "protocol.md").read_text()


MESSAGES = [*messages.Message.__subclasses__(), Tensor, TensorSpec]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.__name__)
def test_document_names_every_field_of(message: type[messages.Message], document: str) -> None:
    starts = re.compile(rf"^(?:.*\. )?`{message.__name__}`(?: \([^)]*\)|, the body of `ERROR`)?: ", re.MULTILINE)
    found = starts.search(document)
    assert found, f"no paragraph describes {message.__name__}"
    text = document[found.end() :]
    entry = re.split(r"\n\n|^`[A-Z]|\. `[A-Z]", text, maxsplit=1, flags=re.MULTILINE)[0]
    missing = [field for field in message.__struct_fields__ if f"`{field}`" not in entry]
    assert not missing


def test_document_names_every_operation_of_the_coordinator(document: str) -> None:
    names = {number: name for name, number in _core.OPS.items()}
    for op, body in CONTROL.items():
        row = f"| `{names[op]}` | coordinator | {f'`{body.__name__}`' if body else '–'} |"
        assert row in document


def test_document_has_the_limits_as_they_are(document: str) -> None:
    liveness = Liveness()
    for words in (
        f"a body may have {_core.PRE_AUTH_MAX_BYTES} bytes",
        f"not OPEN after {connection.HANDSHAKE_S:g} s",
        f"silent for {liveness.silence_s:g} s",
        f"without a connection for {liveness.detached_s:g} s",
        f"the last {clients.MAX_ANSWERS} of each client",
        f"at most {slices.MAX_PARKED} per connection",
        f"`id << {_core.SLICE_INDEX_BITS} | i`",
    ):
        assert words in document
