"""docs/protocol.md names every message with every field, every control operation and the limits as they are."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest
from msgspec import NODEFAULT
from msgspec.structs import FieldInfo, fields

from psstore import _core
from psstore.hyper import HYPER_DEFAULTS, ROW_HYPER_DEFAULTS
from psstore.protocol import clients, connection
from psstore.protocol.coordinator_feed import CONTROL
from psstore.protocol.membership import Liveness
from psstore.types import RowsSpec, Tensor, TensorSpec, applies_by_decision
from psstore.wire import messages


@pytest.fixture(scope="module")
def document(repository: Path) -> str:
    return (repository / "docs" / "protocol.md").read_text()


MESSAGES = [*messages.Message.__subclasses__(), RowsSpec, Tensor, TensorSpec]


def entry_of(message: type[msgspec.Struct], document: str) -> str:
    """What the document says of the message's fields."""
    starts = re.compile(rf"^(?:.*\. )?`{message.__name__}`(?: \([^)]*\)|, the body of `ERROR`)?: ", re.MULTILINE)
    found = starts.search(document)
    assert found, f"no paragraph describes {message.__name__}"
    text = document[found.end() :]
    return re.split(r"\n\n|^`[A-Z]|\. `[A-Z]", text, maxsplit=1, flags=re.MULTILINE)[0]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.__name__)
def test_document_names_every_field_of(message: type[messages.Message], document: str) -> None:
    entry = entry_of(message, document)
    missing = [field for field in message.__struct_fields__ if f"`{field}`" not in entry]
    assert not missing


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.__name__)
def test_document_has_every_default_of(message: type[messages.Message], document: str) -> None:
    """In italics with its default, or plain without one."""
    said = dict(re.findall(r"\*`(\w+)`\*\s=\s`([^`]*)`", entry_of(message, document)))
    assert said == {field.name: as_document(field) for field in fields(message) if not field.required}


def as_document(field: FieldInfo) -> str:
    """The field's default in JSON, but with MessagePack's word for null, and bin as text."""
    default = field.default if field.default is not NODEFAULT else field.default_factory()
    return "nil" if default is None else json.dumps(default.decode() if isinstance(default, bytes) else default)


def test_document_names_every_operation_of_the_coordinator(document: str) -> None:
    names = {number: name for name, number in _core.OPS.items()}
    for op, body in CONTROL.items():
        row = f"| `{names[op]}` | coordinator | {f'`{body.__name__}`' if body else '–'} |"
        assert row in document


def test_document_has_every_hyper_parameter_with_its_default(document: str) -> None:
    for rule, defaults in {**HYPER_DEFAULTS, **ROW_HYPER_DEFAULTS}.items():
        if applies_by_decision(rule):
            row = " ".join(f"`{name}={default}`" for name, default in defaults.items())
            assert f"| `{rule}` | {row} |" in document


def test_document_has_the_limits_as_they_are(document: str) -> None:
    liveness = Liveness()
    for words in (
        f"a body may have {_core.PRE_AUTH_MAX_BYTES} bytes",
        f"not OPEN after {connection.HANDSHAKE_S:g} s",
        f"silent for {liveness.silence_s:g} s",
        f"without a connection for {liveness.detached_s:g} s",
        f"the last {clients.MAX_ANSWERS} of each client",
        f"at most {_core.MAX_PENDING_READS} per connection",
        f"`id << {_core.SLICE_INDEX_BITS} | i`",
    ):
        assert words in document
