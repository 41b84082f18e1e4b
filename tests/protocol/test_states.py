"""The tables of states: what they say is what happens, what they lack can't happen, and the document shows them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from psstore import _core, errors
from psstore.protocol import auth
from psstore.protocol.connection import Connection
from psstore.protocol.membership import Membership, Worker
from psstore.protocol.roles import NO_TOKENS, Tokens
from psstore.protocol.states import (
    CONNECTION,
    LINK,
    STANDBY,
    WORKER,
    ConnectionEvent,
    ConnectionState,
    LinkEvent,
    LinkState,
    StateTable,
    WorkerEvent,
    WorkerState,
)
from psstore.wire import messages as m
from tests.protocol.support import LIVENESS, NONCE, OPS
from tests.protocol.test_session import CLIENT, Far

TOKEN = b"the token of the store"
TOKENS = Tokens.single(TOKEN)
TABLES = {"LINK": LINK, "CONNECTION": CONNECTION, "WORKER": WORKER, "STANDBY": STANDBY}


def kinds(table: StateTable[Any, Any]) -> tuple[type[Enum], type[Enum]]:
    """The enums of a table's states and events."""
    (state,) = {type(one) for one in table.rows}
    (event,) = {type(one) for row in table.rows.values() for one in row}
    return state, event


def cells(table: StateTable[Any, Any]) -> pytest.MarkDecorator:
    """Parametrizes a test with each state and event of a table."""
    states, events = kinds(table)
    pairs = [(state, event) for state in states for event in events]
    return pytest.mark.parametrize(("state", "event"), pairs, ids=lambda one: one.name)


# ---- a client's link ----


class LinkLife:
    """A session that has come to `state`, the shortest way."""

    def __init__(self, state: LinkState) -> None:
        self.far = Far()
        way = {
            LinkState.DOWN: (),
            LinkState.HANDSHAKE: (LinkEvent.CONNECTED,),
            LinkState.UP: (LinkEvent.CONNECTED, LinkEvent.WELCOMED),
            LinkState.FAILED: (LinkEvent.GIVEN_UP,),
        }
        for event in way[state]:
            self.happen(event)

    def happen(self, event: LinkEvent) -> None:
        match event:
            case LinkEvent.CONNECTED:
                self.far.session.connected()
            case LinkEvent.WELCOMED:
                self.far.welcome()
            case LinkEvent.DISCONNECTED:
                self.far.session.disconnected()
            case LinkEvent.GIVEN_UP:
                self.far.session.give_up(errors.StoreClosed("closed"))


@cells(LINK)
def test_link_goes_where_its_table_says(state: LinkState, event: LinkEvent) -> None:
    link = LinkLife(state)
    assert link.far.session.state is state
    if event in LINK.rows[state]:
        link.happen(event)
        assert link.far.session.state is LINK.rows[state][event]
    elif event is LinkEvent.CONNECTED:
        with pytest.raises(errors.InternalError, match="'connected' cannot happen here"):
            link.happen(event)
    elif state is not LinkState.DOWN:  # where there is no connection for a frame to come from
        link.happen(event)
        assert link.far.session.state is state, "a WELCOME that nobody waits for changes nothing"


# ---- a server's connection ----


class ConnectionLife:
    """A connection that has come to `state`, the shortest way; to a store with a token, if it is asked for one."""

    def __init__(self, state: ConnectionState) -> None:
        self.connection = Connection(id=1, opened_at=0.0, protocol=mock.Mock())
        way = {
            ConnectionState.HELLO: (),
            ConnectionState.AUTH: (ConnectionEvent.CHALLENGED,),
            ConnectionState.OPEN: (ConnectionEvent.ADMITTED,),
            ConnectionState.CLOSED: (ConnectionEvent.ENDED,),
        }
        for event in way[state]:
            self.happen(event)

    def happen(self, event: ConnectionEvent) -> None:
        hello = m.Hello(client=CLIENT, nonce=NONCE)
        match event:
            case ConnectionEvent.ADMITTED:
                self.connection.handshake(frame("HELLO", hello), NO_TOKENS, NONCE)
            case ConnectionEvent.CHALLENGED:
                self.connection.handshake(frame("HELLO", hello), TOKENS, NONCE)
            case ConnectionEvent.PROVED:
                proof = auth.proof(TOKEN, "client", client=CLIENT, client_nonce=NONCE, shard_nonce=NONCE)
                self.connection.handshake(frame("AUTH", m.Auth(proof=proof)), TOKENS, NONCE)
            case ConnectionEvent.ENDED:
                self.connection.end()


def frame(op: str, body: m.Message) -> _core.Frame:
    decoder = _core.FrameDecoder()
    decoder.feed(_core.encode_frame(OPS[op], body=m.encode_body(body)))
    came = decoder.next_frame()
    assert came is not None
    return came


@cells(CONNECTION)
def test_connection_goes_where_its_table_says(state: ConnectionState, event: ConnectionEvent) -> None:
    life = ConnectionLife(state)
    assert life.connection.state is state
    if event in CONNECTION.rows[state]:
        life.happen(event)
        assert life.connection.state is CONNECTION.rows[state][event]
        return
    wrong = errors.InternalError if event is ConnectionEvent.ENDED else errors.UnexpectedMessage
    with pytest.raises(wrong):
        life.happen(event)
    assert life.connection.state is state


# ---- a worker ----


class WorkerLife:
    """A worker that has come to `state`, the shortest way."""

    def __init__(self, state: WorkerState) -> None:
        self.membership = Membership(num_workers=2, liveness=LIVENESS)
        self.worker = Worker(rank=0, incarnation=1, client=CLIENT, clock=0, last_seen=0.0)
        self.now = 0.0
        way = {
            WorkerState.ABSENT: (),
            WorkerState.LIVE: (WorkerEvent.JOINED,),
            WorkerState.LOST: (WorkerEvent.JOINED, WorkerEvent.SILENT),
            WorkerState.REFUSED: (WorkerEvent.JOINED, WorkerEvent.REFUSED),
            WorkerState.LEFT: (WorkerEvent.JOINED, WorkerEvent.LEAVES),
            WorkerState.REPLACED: (WorkerEvent.JOINED, WorkerEvent.SILENT, WorkerEvent.REPLACED),
        }
        self._join("b" * 32, rank=1)  # so that the group goes on when rank 0 leaves
        for event in way[state]:
            self.happen(event)

    def happen(self, event: WorkerEvent) -> None:
        match event:
            case WorkerEvent.JOINED:
                self.worker = self._join(CLIENT, rank=0)
            case WorkerEvent.SILENT:
                self.now += LIVENESS.silence_s
                self.membership.sweep(self.now)
            case WorkerEvent.HEARD:
                self.membership.seen(self.worker, self.now)
            case WorkerEvent.REFUSED:
                self.membership.refuse(self.worker, errors.MissingContribution("missing"), 0.0)
            case WorkerEvent.LEAVES:
                self.membership.leave(self.worker)
            case WorkerEvent.REPLACED:
                self.membership.detach(1, self.now)
                self._join("d" * 32, rank=0)

    def _join(self, client: str, *, rank: int) -> Worker:
        return self.membership.join(client=client, conn=rank + 1, rank=rank, announced=None, clock=0, now=self.now)


LISTED = [(state, event) for state, row in WORKER.rows.items() for event in row]


@pytest.mark.parametrize(("state", "event"), LISTED, ids=lambda one: one.name)
def test_worker_goes_where_its_table_says(state: WorkerState, event: WorkerEvent) -> None:
    life = WorkerLife(state)
    worker = life.worker
    assert worker.state is state
    life.happen(event)
    after = life.worker if event is WorkerEvent.JOINED else worker
    assert after.state is WORKER.rows[state][event]


@pytest.mark.parametrize("state", [state for state in WorkerState if WorkerEvent.HEARD not in WORKER.rows[state]])
def test_word_from_a_worker_that_is_not_lost_changes_nothing(state: WorkerState) -> None:
    life = WorkerLife(state)
    life.happen(WorkerEvent.HEARD)
    assert life.worker.state is state


# ---- the tables are all there is ----


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_table_has_every_state_and_every_event(table: StateTable[Any, Any]) -> None:
    states, events = kinds(table)
    assert set(table.rows) == set(states)
    assert {event for row in table.rows.values() for event in row} == set(events)
    for state in states:
        for missing in set(events) - set(table.rows[state]):
            with pytest.raises(errors.InternalError, match=f"{states.__name__} {state.name}: .* cannot happen here"):
                table.after(state, missing)


def test_no_code_assigns_a_state_but_from_its_table(repository: Path) -> None:
    sources = [path for folder in ("protocol", "net", "server", "client") for path in folder_of(repository, folder)]
    wrong = [
        f"{path}:{node.lineno}"
        for path in sources
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign))
        and any(is_state(part) for target in targets(node) for part in ast.walk(target))
        and not is_from_a_table(node.value)
    ]
    assert not wrong


def folder_of(repository: Path, folder: str) -> Iterator[Path]:
    return (repository / "python" / "psstore" / folder).rglob("*.py")


def targets(node: ast.Assign | ast.AnnAssign | ast.AugAssign) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]


def is_state(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "state"


def is_from_a_table(value: ast.expr | None) -> bool:
    """`TABLE.after(…)`."""
    return isinstance(value, ast.Call) and ast.unparse(value.func) in {f"{name}.after" for name in TABLES}


# ---- the document ----


def as_markdown(table: StateTable[Any, Any]) -> str:
    """A row for each state, a column for each event, and in each cell the state that follows."""
    events = list(kinds(table)[1])
    lines = [
        ["state", *(event.value for event in events)],
        ["---"] * (1 + len(events)),
        *(
            [state.name, *(row[event].name if event in row else "–" for event in events)]
            for state, row in table.rows.items()
        ),
    ]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines).replace("| ---", "|---").replace("--- |", "---|")


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_document_shows_the_table(table: StateTable[Any, Any], repository: Path) -> None:
    assert as_markdown(table) in (repository / "docs" / "protocol.md").read_text()


def test_who_was_refused_hears_why_although_the_others_have_gone_on_without_it() -> None:
    life = WorkerLife(WorkerState.REFUSED)
    life.membership.drop(life.worker, had_ended=False)
    with pytest.raises(errors.MissingContribution, match="missing"):
        life.membership.worker_of(CLIENT)
