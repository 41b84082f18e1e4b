"""The compiled core, as Python sees it. csrc/bindings implements exactly this; a test compares them.

Every call that does work releases the GIL. Errors are `psstore.errors` classes, chosen by code.
Nothing here waits, does I/O or calls back, but for `DirectCalls`, `CallDriver`, `ClientSession` and `Poller`, whose
calls send, receive and wait, and for `Heartbeat`, whose thread writes one small frame at intervals.
"""

import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Protocol, final

from psstore.errors import PsstoreError

# Anything with the buffer protocol: bytes, memoryview, numpy array, Buffer.
class _HasBuffer(Protocol):
    def __buffer__(self, flags: int, /) -> memoryview: ...

# ---- constants ------------------------------------------------------------------------------------

PROTOCOL_VERSION: int
HEADER_BYTES: int  # 64
FIELDS_CRC_BYTES: int  # of the checksum behind table and body
SLICE_ENTRY_BYTES: int  # 32
SLICE_INDEX_BITS: int  # 24
MAX_SLICES: int  # descriptors in one frame
MAX_BODY_BYTES: int  # control body of one frame
MAX_PENDING_READS: int  # reads of one connection that may wait at a time
MAX_PAYLOAD_BYTES: int  # payload of one frame
PRE_AUTH_MAX_BYTES: int  # body of a frame before the handshake is over; payload must be 0
FLAG_CHECKSUM: int  # header flag: payload_crc holds the payload's CRC-32C
FLAG_SHARED: int  # the payload lies in shared memory; in a PULL: that of its answer may
SHARED_FROM_BYTES: int  # smallest payload that is shared

OPS: Mapping[str, int]  # operation name -> number on the wire
ERROR_CODES: Mapping[str, int]  # error name -> number on the wire
CHANGES_BIT: int
"""Added to a dtype's number in a pull: what has changed since the version that the reader has."""
DTYPES: Mapping[str, int]
"""Of elements: "float32", "float64", "bfloat16", "float16"; encodings of payloads: "int8", "sign", "topk"; of
contributions to rows: "rows", "rows_bfloat16", "rows_float16", "rows_int8" -> number."""
RULES: Mapping[str, int]  # "assign", "add", "sgd", "adam", "adamw", … "reduce", "delayed_nesterov" -> number
ROW_RULES: Mapping[str, int]  # "sparse_sgd", "sparse_adagrad", … "ftrl" -> number
EVICTIONS: Mapping[str, int]  # "lru", "lfu", "ttl" -> number
ADMISSIONS: Mapping[str, int]  # "always", "after", "probability" -> number
MAX_TTL: int
MAX_ADMIT_AFTER: int
REDUCTIONS: Mapping[str, int]  # "mean", "median", "trimmed_mean" -> number
MAX_SORTED: int  # members of a decision
FIRST_VALUES: Mapping[str, int]  # "constant", "uniform", "normal" -> number
MAX_ROW_DIM: int  # elements of a row
STATES: Mapping[str, tuple[str | None, ...]]  # rule name -> names of its state buffers by slot (part = slot + 1)

# ---- memory ---------------------------------------------------------------------------------------

@final
class Buffer:
    """Reference-counted, 64-byte aligned memory from the pool. `memoryview(buffer)` keeps it alive.

    Writable while it is being received into; read-only once it is a slot's value.
    """

    @property
    def nbytes(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __len__(self) -> int: ...

@final
class Segments:
    """A list of contiguous memory ranges owned by others: gathered from on a push, scattered into on a pull.

    Holds a buffer-protocol reference on each range until it is collected.
    """

    def __init__(self, ranges: Sequence[_HasBuffer], *, writable: bool = False) -> None: ...
    @property
    def nbytes(self) -> int: ...
    def __len__(self) -> int: ...
    def pieces(self) -> list[memoryview]:
        """The ranges as a list for `writelines`; runs of small ones are copied into one piece, now."""
    def crc32c(self) -> int: ...

def crc32c(data: _HasBuffer, seed: int = 0) -> int: ...

@final
class FrameMap:
    """Which bytes of which array go into which frame, for arrays of known dtypes and shapes."""

    def __init__(
        self, forms: Sequence[tuple[int, Sequence[int]]], frames: Sequence[Sequence[tuple[int, int, int]]]
    ) -> None:
        """`forms`: (dtype number, shape) of each array. `frames`: what each frame takes, in its order: (position of
        the array, first byte, end). Together they take all bytes of every array."""
    def of_arrays(self, arrays: Sequence[object], *, writable: bool) -> list[Segments] | None:
        """The memory of each frame in numpy arrays and torch tensors. None if one of them is not exactly of its form,
        or not in main memory, in order and without gaps, or is of a class derived from torch's: look at them one by
        one. `writable`: to receive into."""
    def of_bytes(self, arrays: Sequence[object], *, writable: bool) -> list[Segments]:
        """The same for flat numpy arrays of bytes. Raises ValueError if one has another size than the frames take."""

# ---- wire -----------------------------------------------------------------------------------------

@final
class SliceTable:
    """The slice descriptors of one frame, in payload order. Immutable from Python."""

    def __init__(self, entries: Iterable[tuple[int, int, int]]) -> None:
        """`entries`: (key, num_bytes, dtype number) each; versions and statuses are 0."""
    def __len__(self) -> int: ...
    def __bytes__(self) -> bytes: ...
    @property
    def payload_bytes(self) -> int:
        """Sum of num_bytes."""
    def keys(self) -> list[int]: ...
    def versions(self) -> list[int]: ...
    def num_bytes(self) -> list[int]: ...
    def dtypes(self) -> list[int]: ...
    def statuses(self) -> list[int]: ...
    def first_failure(self) -> tuple[int, int] | None:
        """(position, status) of the first entry whose status is none of OK, NOT_MODIFIED, NO_STATE."""
    def has_status(self, status: int) -> bool:
        """Whether some entry has it."""
    def with_versions(self, versions: Sequence[int]) -> SliceTable:
        """A copy that asks 'only if the version is at least this'; 0: in any case. Who has v asks for v + 1.
        In a RESTORE: the number of steps, for parts that are state."""
    def with_parts(self, parts: Sequence[int]) -> SliceTable:
        """A copy about these parts of the slots: 0 the value, i the state buffer i - 1 of `STATES`."""
    def parts(self) -> list[int]: ...
    def select(self, positions: Sequence[int]) -> SliceTable: ...

@final
class Frame:
    """One message. A frame with a payload is seen twice: first `complete=False`, then `True`."""

    op: int
    flags: int
    request: int
    round: int
    rank: int
    incarnation: int
    sequence: int
    shared: bool
    """Its payload lies in shared memory, where the table says; of a PULL: that of its answer may."""
    payload_bytes: int
    table: SliceTable
    body: bytes
    carry: bytes
    """The body but for the ids of rows that a PULL_ROWS asks for. Raises BadBody if it is too short for them."""
    complete: bool
    payload: Buffer | None
    """What the payload was received into, if `accept` was given a Buffer."""

def encode_frame(
    op: int,
    *,
    flags: int = 0,
    request: int = 0,
    round: int = 0,
    rank: int = 0,
    incarnation: int = 0,
    sequence: int = 0,
    table: SliceTable | None = None,
    body: bytes = b"",
    payload_bytes: int = 0,
    payload_crc: int | None = None,
) -> bytes:
    """Header, table and body, with their checksums, as one bytes object; the payload follows it on the stream."""

class FrameDecoder:
    """Bytes in, frames out; no socket, no clock. Raises ProtocolError once, then stays broken.

    >>> decoder.get_buffer(-1)      # where the kernel shall write next
    >>> decoder.buffer_updated(n)   # it wrote n bytes there
    >>> decoder.next_frame()        # a Frame, or None: more bytes are needed
    A frame that returns incomplete must be answered by `accept` or `discard` before anything else.
    """

    def __init__(self, *, max_body_bytes: int = ..., max_payload_bytes: int = ...) -> None: ...
    def set_limits(self, *, max_body_bytes: int, max_payload_bytes: int) -> None:
        """Applies from the next header on (limits rise when the handshake is over)."""
    def get_buffer(self, sizehint: int, /) -> memoryview: ...
    def buffer_updated(self, num_bytes: int, /) -> None: ...
    def feed(self, data: _HasBuffer, /) -> None:
        """Copies `data` through get_buffer/buffer_updated while it can: for tests and transports that
        own their bytes. Raises ValueError if a frame waits for accept/discard with bytes left over."""
    def next_frame(self) -> Frame | None: ...
    def accept(self, destination: Buffer | Segments, /) -> None:
        """Receive the pending payload into `destination`; sizes are checked against the frame's table.

        Segments: entry i of the table goes to range i, or nowhere if its num_bytes is 0."""
    def discard(self) -> None: ...
    @property
    def mid_frame(self) -> bool:
        """Bytes of an unfinished frame have arrived (EOF now is a truncated frame)."""

@final
class ServerProtocol(FrameDecoder):
    """One connection of a shard: answers requests for data, and hands out every other frame, an announced one and the
    complete one both. Made by `DataService.connect`. Call `take_replies` after each `next_frame`, before anything else
    is sent, and then again `next_frame`: None may also mean that many replies are to be taken first."""

    def open(self, *, writer: str, wants_checksum: bool) -> None:
        """Requests for data are answered from now on. `writer`: who numbers the plain writes. `wants_checksum`:
        payloads carry one."""
    def attach(self, rank: int, incarnation: int) -> None:
        """The client is that worker, too; older lives of the rank may not push any more, over any connection."""
    def share(self, arena: PushArena) -> None:
        """The client pushes through that memory."""
    def see(self, memory: SeenMemory) -> None:
        """Payloads of records may lie there. After `lead`."""
    def see_no_more(self, address: int) -> None:
        """Nothing more will lie in the memory that begins there."""
    def allow(self, ops: Sequence[int]) -> None:
        """Of requests for data the client may make these only. As long as nobody says so: all."""
    def follow(self) -> None:
        """A standby is at the other end, which is sent every change of the shard from now on. After `open`."""
    def ungate(self) -> None:
        """What the peer is told waits for no standby: it is one of the store's own processes, or an operator."""
    def freeze_with_shard(self) -> None:
        """From now on a shard that is frozen does not hear the peer."""
    def lead(self) -> None:
        """At the other end is the shard that this one is a standby of: what it sends is repeated here."""
    def is_in_process(self) -> None:
        """The client is in this process: it knows where a device's values lie, and has the device wait for them."""
    def next_frame(self, now: float | None = None) -> Frame | None:
        """A request for data comes out if it brings a decision that is new to the shard: apply that, then call `again`,
        or answer it otherwise. `now`: on the clock of all of the service's connections (default: time.monotonic's).
        Raises ProtocolError."""
    def again(self, frame: Frame) -> None:
        """The request for data that came out last is to be answered now."""
    def reply(self, pieces: Sequence[bytes | memoryview]) -> None:
        """Adds what others answer, in order with what is answered here."""
    def take_replies(self) -> list[bytes | memoryview]:
        """What may be sent now, as pieces to write; some may wait for the shard's standbys."""
    @property
    def has_asked(self) -> bool:
        """A request has come since `open`."""

@final
class DataService:
    """A shard's answers to requests for data, of all its connections. Made by `Shard.make_data_service`."""

    def connect(self, connection: int, *, max_body_bytes: int = ..., max_payload_bytes: int = ...) -> ServerProtocol:
        """`connection`: its number with whoever drives it."""
    def close(self) -> None:
        """No request is answered any more: all come out of their connections."""
    def freeze(self, frozen: bool) -> None:
        """While it is frozen it hears nobody of whom `freeze_with_shard` was said. What had come may never be heard:
        end these connections when it is not frozen any more."""
    def record(self, body: bytes) -> None:
        """Sends all standbys something that has changed, as psstore.wire.records says it."""
    def record_beat(self, body: bytes, now: float) -> None:
        """Sends all standbys what says only that this shard leads at that time."""
    def set_lease(self, seconds: float) -> None:
        """Standbys may lead so long after a beat that they have answered: then nobody is told anything here."""
    def record_to(self, connection: int, body: bytes) -> None:
        """Sends a standby something that was so when it began to follow."""
    def fill(self, connection: int) -> bool:
        """Sends a standby all slots as they are, and what waits in them. False: some are not settled."""
    def count(self, connection: int) -> None:
        """Nobody is told any more what that standby does not have."""
    def forget_follower(self, connection: int) -> None:
        """That standby is done without."""
    def followers(self) -> list[tuple[int, bool, int]]:
        """(connection, whether it counts, the last record that it has) of each standby."""
    def sees(self, connection: int, *, owner: int, address: int) -> None:
        """That standby has mapped, from `address` on, what the client at connection `owner` pushes through; 0: what the
        shard keeps what it receives in."""
    def take_ready(self) -> set[int]:
        """Connections that have more to send than they had by themselves: standbys, and those whose replies waited for
        standbys and may go."""
    @property
    def is_followed(self) -> bool:
        """There are standbys."""
    @property
    def last_record(self) -> int:
        """Number of the last change that standbys were sent."""
    def attached(self, rank: int, incarnation: int) -> None:
        """That life of the rank may push; older ones may not."""
    def newest_incarnation(self, rank: int) -> int:
        """Newest life of the rank that attached to one of its connections; 0: none did."""
    @property
    def newest_incarnations(self) -> dict[int, int]:
        """Of all ranks of which a life attached."""
    def traffic(self, now: float) -> dict[int, tuple[int, int, float, float, float]]:
        """Rank -> (bytes that its workers have pushed, and pulled; for how many seconds its gradients were arriving,
        else values were on their way to it, else a read waited for others), of those that have attached."""
    def schema_changed(self) -> None:
        """Tensors were dropped: reads that wait for them are looked at again."""
    def advanced(self, needs_scale: bool) -> None:
        """The shard has applied a decision."""
    def could_not_apply(self, decision: Decision, record: bytes) -> None:
        """There was no room for the next decision. Reads that wait for it try again. `record`: what standbys are sent
        once one of them has been lucky."""
    @property
    def applied(self) -> int:
        """The last decision that the shard has applied, and whose scale it has if that needs one."""
    def forget(self, connection: int) -> None:
        """The connection is gone: nothing is read there, and nothing waits."""
    def reading_since(self, before: float) -> list[int]:
        """Connections that read a value in shared memory since then, or longer."""
    def wake(
        self, now: float
    ) -> tuple[list[tuple[int, list[bytes | memoryview]]], list[tuple[int, int, PsstoreError]]]:
        """Looks at the reads whose wait may be over, and at those that a device has filled in. Returns replies to be
        sent, (connection, pieces), and requests that failed, (connection, request, error)."""
    def next_wake(self) -> float | None:
        """When `wake` may next give something: 0 if it has something already."""
    @property
    def is_filling(self) -> bool:
        """A device is at work on replies: `wake` soon has something."""
    @property
    def num_holds(self) -> int:
        """Readers that hold decisions."""
    @property
    def num_leases(self) -> int:
        """Answers that clients read in shared memory."""

@final
class LocalLink:
    """A client and a shard of one process: what the one sends the other hears at once, and answers as far as it is
    data. One thread at a time drives both."""

    def __init__(self, protocol: ServerProtocol) -> None: ...
    def take_event(self) -> Frame | None:
        """What came that is not for data alone: to be dealt with before the shard hears more. Raises what the client
        did wrong."""
    @property
    def has_answers(self) -> bool:
        """The client has something to receive."""
    def reply(self, pieces: Sequence[bytes | memoryview]) -> None:
        """After what the protocol has answered."""

@final
class Poller:
    """The sockets of all of a shard's connections: receives for their protocols, and sends their replies. One thread at
    a time.

    An event loop watches `fileno` for reading, and calls `turn` then, until it returns None."""

    def __init__(self, service: DataService, *, wakeup_fd: int, busy_s: float = 0.0) -> None:
        """`service`: of all connections. `busy_s`: how long after a request a turn that lingers asks for the next one
        before it sleeps, or `wakeup_fd` is readable: when the event loop has something to do, because of the poller or
        of anything else; -1: there is none."""
    def fileno(self) -> int: ...
    def add(self, connection: int, *, socket: int, protocol: ServerProtocol, tls: TlsSession | None = None) -> None:
        """Serves a socket, which is the poller's from now on. `tls`: None: bytes go as they are. Raises OSError."""
    def send(self, connection: int, pieces: Sequence[bytes | memoryview]) -> None:
        """Sends them after what is on its way; what the socket does not take stays referenced until it is out."""
    def deliver(self) -> None:
        """Sends what others' requests, or the service, have for connections. A turn does so by itself."""
    def close(self, connection: int) -> None:
        """Ends it once all is sent; what still comes is dropped. Its end is an event, when the peer has closed, too."""
    def drop(self, connection: int) -> None:
        """Cuts it off, if it is there; no event follows."""
    def stalled(self, limit_s: float) -> list[int]:
        """Connections whose peers have sent nothing for so long in the middle of a frame."""
    def unread(self, limit_s: float) -> list[int]:
        """Connections whose peers have read nothing for so long of what they are owed."""
    def turn(self, linger_s: float) -> tuple[int, Frame | Exception | None] | None:
        """Serves the connections until one has something for others: a frame; what was wrong with its bytes, or with
        us, and then it is to be closed; None, or an OSError, when it is gone. Returns None when there is nothing to do,
        `linger_s` after it began, or earlier if a request has failed. Releases the GIL."""

def break_rules(names: Sequence[str]) -> None:
    """Rules of csrc/core/breakable_rules.h that do not hold from now on, for the simulator's tests; all others do."""

# ---- the client's sessions and calls ---------------------------------------------------------------

@final
class CarriedDecisions:
    """What a client's sessions carry from the coordinator to their shards."""

    last: int
    """Number of the last decision known."""
    is_scaled: bool
    """The scale of that one is known, too."""
    def __init__(self, news: weakref.WeakMethod[Callable[[int], tuple[int, bytes, int, float | None]]]) -> None:
        """`news`: what a shard is to hear that was told every decision up to the one given: the number of the last of
        the others, or 0, and their encoding; the decision whose scale is known, or 0, and that scale."""

@final
class ClientRequest:
    """A request that is not answered."""

    @property
    def number(self) -> int: ...
    @property
    def op(self) -> int: ...
    @property
    def sequence(self) -> int:
        """Of an ASSIGN, ADD or RESTORE; else 0."""
    @property
    def began(self) -> float: ...
    @property
    def deadline(self) -> float: ...
    @property
    def scaled(self) -> int:
        """The decision whose scale it told when it was last sent; 0: none."""
    @property
    def forgotten(self) -> bool:
        """Nobody waits for its answer any more."""
    @property
    def memory(self) -> Any:
        """Where its payload comes from, or its answer's goes, as `ask` was given it."""

@final
class ClientSession:
    """One client's link to one shard: what is asked, until it is answered, in the order in which it was asked.

    Plain answers go where they belong; all other frames are `next_frame`'s. Who has no socket takes the
    output and feeds what comes. Methods that take bytes or frames raise what is wrong with them, again and again."""

    def __init__(
        self,
        decisions: CarriedDecisions,
        *,
        answer: Callable[[SliceTable, int], object],
        understand: Callable[[int, bytes], object],
        encode: Callable[[Any, float], bytes],
    ) -> None:
        """`answer`: what a future gets of a table and the shard's version. `understand`: what it gets of a control
        message, by its operation and body; what that raises ends the connection, too. `encode`: makes the body of a
        message that has waited for so many seconds."""
    def speaks_as(self, *, rank: int, incarnation: int, checksum: bool, keeps_releases: bool) -> None:
        """Who sends from now on. `checksum`: of payloads. `keeps_releases`: the words that shared memory was read wait
        for the next request."""
    @property
    def version(self) -> int:
        """The shard's, as last heard."""
    @property
    def scaled(self) -> int:
        """The last decision whose scale the shard is known to have from here."""
    last_heard: float
    looks_at: float
    """Who drives it looks at deadlines then at the latest."""
    near: Any
    """The device memory that this connection shares with the shard, or None."""
    def connected(self) -> None:
        """A connection stands."""
    def open(self, fd: int, tls: TlsSession | None = None) -> None:
        """`fd`: its socket, which does not block, and is in the loop's epoll. `tls`: None: bytes go as they are."""
    def open_local(self, link: LocalLink) -> None:
        """The shard is of this process."""
    def welcomed(self, version: int, last_sequence: int, now: float) -> None:
        """The handshake is over. Sends what was not answered again. `last_sequence`: of the last write that the shard
        has taken. Releases the GIL."""
    def disconnected(self) -> None: ...
    def share(self, memory: ClientMemory, from_bytes: int) -> None:
        """Payloads of so many bytes go through `memory` from now on, until it is disconnected."""
    @property
    def memory(self) -> ClientMemory | None: ...
    def ask(
        self,
        op: int,
        future: object,
        now: float,
        timeout_s: float,
        table: SliceTable | None = None,
        carry: tuple[int, float] | None = None,
        message: object = None,
        memory: object = None,
        may_land: bool = False,
        round: int = 0,
        sequence: int = 0,
    ) -> None:
        """Makes a request. `carry`: it carries decisions, waits for the shard to have that version, and so long.
        `message`: its body otherwise. `memory`: where its payload comes from, or its answer's goes: Segments; another
        object says where on a device its payload lies, or takes its answer by hand. `may_land`: its values may be lent
        on a device. Raises BadArgument; then nothing was asked."""
    def request(self, number: int) -> ClientRequest | None: ...
    @property
    def next_request(self) -> int: ...
    @property
    def num_requests(self) -> int: ...
    def numbers(self, *, reads_only: bool = False) -> list[int]:
        """Those of the requests that are not answered, in order."""
    def expired(self, now: float) -> list[int]: ...
    def next_deadline(self) -> float | None: ...
    def finish(self, number: int, result: object) -> bool:
        """Its future gets that. False: there is no such request any more."""
    def fail(self, number: int, error: BaseException) -> bool: ...
    def keep_cancelled(self) -> None:
        """Copies what is to be sent, or sent again, of requests whose futures are cancelled: the memory that it lies in
        is its owner's again."""
    def heard(self, version: int, scaled: int) -> None:
        """A request that told the scale of decision `scaled`, or none: 0, was answered by the shard at that version."""
    def say(self, frame: bytes) -> None:
        """Sends a frame as it is."""
    def send(self) -> bool:
        """Writes what the kernel takes. True: that was all. Releases the GIL."""
    @property
    def has_output(self) -> bool: ...
    @property
    def is_hung_up(self) -> bool:
        """The shard has closed the connection, whether what it sent before has been received or not."""
    @property
    def holds_bytes(self) -> bool:
        """There is something to receive that the socket does not tell of."""
    def receive(self, now: float) -> bool:
        """Reads as much as a turn of the loop may. False: the connection is lost. Releases the GIL."""
    def feed(self, data: bytes | memoryview | bytearray) -> None: ...
    def next_frame(self) -> Frame | None:
        """The next frame that is no plain answer, whole or announced; an announced one is to be accepted or
        discarded."""
    def accept(self, destination: Segments) -> None: ...
    def discard(self) -> None: ...
    def take_output(self) -> list[list[memoryview]]:
        """The frames to send, in pieces, of which small ones are copied together."""
    def add_release(self, request: int) -> None:
        """The answer to that request was read in shared memory. The shard is told with the next request."""
    @property
    def num_releases(self) -> int: ...
    def release(self) -> None:
        """Has the shard be told now."""
    def release_if_due(self) -> bool:
        """The same, if it is not to wait. True: there is something to send."""
    release_is_due: bool
    """Whoever drives the session will tell in a while."""

@final
class FramePlan:
    """The frames of a list of tensors: the map of their arrays, and of each frame its way and its table."""

    def __init__(self, arrays: FrameMap, ways: Sequence[int], tables: Sequence[SliceTable]) -> None: ...

@final
class CallPlan:
    """What a call came to: an operation, a layout (layout.py) and its frames."""

    @property
    def op(self) -> str: ...
    @property
    def layout(self) -> Any: ...
    def __init__(self, op: str, layout: object, frames: FramePlan) -> None: ...

@final
class CallTerms:
    """What the frames of a call say besides their slices."""

    def __init__(
        self,
        op: int,
        timeout_s: float,
        round: int = 0,
        carries: bool = False,
        at_least: int = 0,
        wait_s: float = 0.0,
    ) -> None:
        """`carries`: decisions that their shards were not told yet; `at_least` and `wait_s` go with them."""

@final
class Call:
    """The requests of one call."""

    @property
    def over(self) -> bool:
        """All of them have ended."""
    def answers(self) -> list[Frame]:
        """Of each frame, in order; None for one that failed."""
    def take_error(self) -> BaseException | None:
        """What the first of them was failed with that was; the call lets go of it."""
    def wait(self, future: object) -> None:
        """The future is told when the call is over."""
    def forget(self) -> None:
        """Nobody waits for it any more: what comes goes nowhere."""

@final
class CallDriver:
    """Requests and their answers without a turn of the event loop, while there is nothing else for the loop to do."""

    def __init__(
        self,
        *,
        loop: object,
        mutex: object,
        queue: object,
        callers: list[int],
        ready: object,
        corked: list[ClientSession],
        wakeup_fd: int,
        sockets: int,
        idle: int,
        busy_s: float = 0.0,
    ) -> None:
        """Who has the `loop` holds `mutex`, who wants it next holds `queue`, `callers` wait for something, and
        `ready` has something in it if a turn is due. Who takes the loop while a session is in `corked` calls
        `uncork` first. `wakeup_fd`: the event descriptor that wakes the loop. `sockets`: its epoll, which `idle`,
        another one, has in it. `busy_s`: how long a call asks for each answer before it sleeps."""
    @property
    def busy(self) -> bool:
        """A call is under way, and holds the mutex. What is written to `wakeup_fd` ends it."""
    def ask(self, timeout_s: float) -> None:
        """Waits, without sleeping, until the loop's sockets have something or the time is over. Releases the GIL."""
    def await_answer(self, session: ClientSession) -> bool | None:
        """Sends the one request of that session, and waits for its answer, as long as it may be near and nobody else
        wants the loop, which is the caller's. True: its future has it, and that was all. False: whoever drives the
        session goes on. None: nothing was done. Releases the GIL."""
    def disarm(self) -> None:
        """The thread that sleeps on `idle` no longer wakes for the loop's sockets. Whoever has the loop may call it."""
    def arm(self) -> None:
        """It wakes for them again."""
    def uncork(self) -> None:
        """What waits on `corked`, which is empty then. Whoever has the loop may call it."""
    def woken(self) -> None:
        """The own thread is awake, and its caller."""
    def arm_now(self) -> None:
        """The own thread is to look after what was started now, or what else there is. From any thread."""

@final
class StartingParts:
    """What calls that are started ask of Python."""

    def __init__(
        self,
        *,
        make: Callable[[], object],
        ended: Callable[[Any, str, Any, list[Any], BaseException | None, Any], object],
        look_after: Callable[[Any], object],
        catch_up: Callable[[], object],
        paced: Callable[[], bool],
        under_way: set[object],
    ) -> None:
        """`make`: what the caller has of a call. `ended`: told of it, its operation, layout, answers (none of a write
        that went well), the error that a request of it failed with, and results (of a read). `look_after`: given a
        layout; whoever drives its sessions has something to see to. `catch_up`: has begin what was asked of the loop
        before. `paced`: whether calls wait for their turns. `under_way`: pushes are added to it."""

@final
class DirectCalls:
    """A store's pushes and pulls, as far as they go as such a call went before.

    The methods take what the store's take, and return what those return. Blocking ones send everything and wait for the
    answers, with the GIL released: as long as they keep coming, and nobody writes to `wakeup_fd`. What is started is
    sent, or waits for the next answer if one is near. NotImplemented: it can't be done this way, or not now, and
    nothing was done. A signal's handler may raise; what was not answered is forgotten then."""

    def __init__(
        self,
        driver: CallDriver,
        sessions: list[ClientSession],
        *,
        plans: Sequence[Mapping[Hashable, CallPlan]],
        terms: list[dict[object, dict[str, CallTerms]]],
        whose: object,
        renew: Callable[[str, Any, float | None], CallTerms | None],
        sent: Callable[[str, Any], object],
        received: Callable[[Any, list[Any]], object],
        newer: Callable[[Any, list[Any], Sequence[Any]], Sequence[Any]],
        conclude: Callable[[Any, Call], Sequence[Any]],
        reads_consistently: bool,
        starting: StartingParts,
    ) -> None:
        """`sessions`: by way. `plans`: by the call's cache key (client/layout.py), in rounds like the present one.
        `terms`: those that are good now, by store and operation; this one is `whose`. `renew`: what they are for an
        operation, a layout and a time to wait; None: this way is closed. `sent`, `received`: told of what was
        acknowledged, and of the answers. `newer`: the same of a pull of what is newer than a version; given are also
        the arrays, and it returns the results. `conclude`: waits for what is missing of a call, and raises what failed
        of it; returns the answers. `reads_consistently`: whether pulls that do not say are to be of one version."""
    def start_push_many(self, *args: object, **kwargs: object) -> object: ...
    def start_pull_many(self, *args: object, **kwargs: object) -> object: ...
    def push(self, *args: object, **kwargs: object) -> object: ...
    def push_many(self, *args: object, **kwargs: object) -> object: ...
    def pull(self, *args: object, **kwargs: object) -> object: ...
    def pull_many(self, *args: object, **kwargs: object) -> object: ...

# ---- table ----------------------------------------------------------------------------------------

def row_record_bytes(rule: int, dim: int, dtype: int, evicts: bool) -> int:
    """Bytes of a row of a table as a partition keeps it: id, value in that dtype, state, and what eviction goes by."""

def counted_bytes(admit_after: int, max_rows: int) -> int:
    """Bytes in which a partition of at most so many rows (0: any number) counts contributions to ids without a row."""

def overlay_rows(
    base: memoryview | bytes, changes: memoryview | bytes, record_bytes: int, records: memoryview | bytearray
) -> None:
    """Fills `records` with those of a partition of a table: out of what it had once, and the ids of the rows that it
    has now (u64) with the records of those that changed, as `read_image` brings them. Raises BAD_ARGUMENT if a row is
    in neither."""

@final
class RowResiduals:
    """What codecs lost of the gradients of rows, by id, of so many rows at most: those that were written last."""

    def __init__(self, dim: int, max_rows: int) -> None: ...
    @property
    def num_rows(self) -> int: ...
    def read(self, ids: _HasBuffer, residuals: _HasBuffer) -> None:
        """`ids`: u64; `residuals`: float32, (ids, dim); zeros of ids that have none."""
    def write(self, ids: _HasBuffer, residuals: _HasBuffer) -> None:
        """What is kept of these ids from now on, none of which may come twice. Raises OUT_OF_MEMORY."""
    def copy(self, ids: _HasBuffer, residuals: _HasBuffer, ages: _HasBuffer) -> None:
        """Writes all of them, `num_rows`. `ages`: u32, how many writes ago each was written."""
    def load(self, ids: _HasBuffer, residuals: _HasBuffer, ages: _HasBuffer) -> None:
        """Takes over what `copy` gave. REQUIRES: there are none yet. Raises BAD_ARGUMENT for ids that come twice, or
        for more than there may be; OUT_OF_MEMORY."""

@final
class RowCache:
    """Rows that a client has read, in what they travel in, so many at most: those that were read last. Used by one
    thread at a time."""

    def __init__(self, row_bytes: int, max_rows: int, num_partitions: int) -> None: ...
    @staticmethod
    def record_bytes(row_bytes: int) -> int:
        """Bytes of memory that such a row takes, but for its place in the index."""
    @property
    def row_bytes(self) -> int: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def num_taken(self) -> int:
        """Rows that `take` has completed since this one was made."""
    @property
    def num_unchanged(self) -> int:
        """Rows that did not come when `take` was to complete them, since they were here and had not changed."""
    def read(self, grouped: GroupedIds, rows: _HasBuffer, changes: _HasBuffer) -> None:
        """Copies those that are here to `rows`, (ids, row_bytes), and writes to `changes`, u32, as of which change each
        is, or 0."""
    def question(self, grouped: GroupedIds, pieces: Sequence[tuple[int, int, int, int]], changes: _HasBuffer) -> bytes:
        """What a PULL_ROWS says behind its Carry to ask for what has changed. `pieces`: (partition, begin, end, …) of
        grouped ids."""
    def take(
        self,
        grouped: GroupedIds,
        pieces: Sequence[tuple[int, int, int, int]],
        rows: _HasBuffer,
        changes: _HasBuffer,
        came: _HasBuffer,
    ) -> bool:
        """Completes what `read` began by what came for these pieces, (partition, begin, end, bytes that came), and
        keeps it. False, with some kept at most: no shard that was asked so answers so. Raises OUT_OF_MEMORY."""

@final
class GroupedIds:
    """A client's ids in the order in which they travel: by partition, ascending within each, every id once."""

    def __init__(self, ids: _HasBuffer, partition_bits: int) -> None:
        """`ids`: u64, in any order."""
    def are(self, ids: _HasBuffer) -> bool:
        """Whether these were given, in this order."""
    @property
    def begins(self) -> list[int]:
        """Partition p has ids [begins[p], begins[p + 1])."""
    def ids(self, begin: int, end: int) -> bytes:
        """These of them, u64 each."""
    def packed_bytes(self, dim: int, dtype: int) -> int:
        """Bytes of contributions to all partitions, one after the other: ids, then rows in that dtype."""
    def pack(
        self,
        gradients: _HasBuffer,
        dim: int,
        packed: _HasBuffer,
        dtype: int,
        residuals: _HasBuffer | None = None,
    ) -> None:
        """Writes them. `gradients`: float32, (ids that were given, dim); those of one id are summed in order.
        `residuals`: float32, (ids, dim): is added to what is encoded, and becomes what that lost."""
    def scatter(self, rows: _HasBuffer, dim: int, out: _HasBuffer, dtype: int, out_dtype: int) -> None:
        """Gives each id that was given its row. `rows`: of each id, in that dtype; `out`: (ids given, dim), float32 or
        bfloat16."""

@final
class Decision:
    """What `Shard.advance` applies. Values are checked here, before any lock."""

    def __init__(
        self,
        number: int,
        skip: bool,
        divisor: float,
        members: Sequence[tuple[int, int, int, float]],
        hypers: Mapping[int, Mapping[str, float]],
        present: Mapping[int, Sequence[tuple[int, int]]],
        early: bool = False,
        needs_scale: bool = False,
        averages: bool = True,
        loss_scales: Sequence[float] = ...,
    ) -> None:
        """`members`: (rank, incarnation, round, weight), in rank order.
        `hypers`: parameter group -> hyper-parameters by name (all that the rule needs).
        `present`: rank -> ids of the tensors that it has a gradient for, as ascending ranges (first, last).
        `early`: contributions may come after it; each slice takes the step when its last one is there.
        `needs_scale`: slices take the step once `Shard.set_scale` was called.
        `averages`: the divisor makes a mean of the sum. `loss_scales`: of the members; none: 1 of each."""
    number: int

@final
class TableImage:
    """All slots of a shard as they were at one decision."""

    @property
    def at(self) -> int:
        """The decision."""
    @property
    def slots(self) -> bytes:
        """Four u64 of each slot, by key: key, version, steps, and bit by bit which parts have bytes; bit 8: zeros."""

@final
class Shard:
    """All slices that one server process owns. Thread-safe: striped locks, shared decision lock."""

    def __init__(
        self,
        *,
        index: int,
        num_stripes: int = 64,
        refuse_non_finite: bool = False,
        arena: ValueArena | None = None,
        device: str = "cpu",
        num_sharing: int = 1,
        max_memory_bytes: int = ...,
        max_kept_bytes: int = ...,
        notes_row_decisions: bool = False,
    ) -> None:
        """`arena`: where values of 64 KiB and more lie, and payloads. `device`: where values, rule state and
        contributions are: 'cpu', or 'cuda:0' and so on, without an arena; `num_sharing` shards share its memory.
        `max_memory_bytes`: what all of it may take of main memory (default: no limit); calls that would take more
        raise OutOfMemory. `max_kept_bytes`: what may be kept for those who read as of a decision (default: no limit);
        beyond it they are told VersionGone. `notes_row_decisions`: keeps at which decision rows change, for
        `choose_changed`, 4 to 8 bytes a row. Raises BadArgument for a device that is not there."""
    @property
    def device(self) -> str:
        """As given."""
    @property
    def version(self) -> int:
        """Number of the last decision applied (possibly still lazily, slice by slice)."""
    def set_version(self, version: int) -> None:
        """Only for a shard that has no slots yet."""

    # schema
    def define(
        self,
        tensor_id: int,
        *,
        dtype: int,
        rule: int,
        group: int,
        zeros: bool,
        slices: Sequence[tuple[int, int]],
        rows: tuple[int, int, float, float, int, tuple[int, int, int, int, int, float]] | None = None,
        reduction: tuple[int, int] = (0, 0),
        compensation: float = 0.0,
    ) -> None:
        """Creates the slots of this shard's slices: (key, num_elems) each. Idempotent.
        `rows`: of a table, whose slices are partitions: dim; of first values their kind, a, b and seed; bounds: most
        rows of a partition, eviction and its ttl, admission, its contributions and its probability.
        `reduction`: of `REDUCTIONS`, and how many a trimmed mean drops at either end.
        `compensation`: how far contributions are made up for what has become of the value since their workers were
        sent it.
        `zeros`: the value is zero at once; else pulls say NOT_INITIALISED until `initialise`."""
    def drop(self, tensor_id: int) -> None: ...

    # writes: admit at the header, then one of stage / initialise / write when the payload is there
    def admit(self, frame: Frame) -> Buffer | None:
        """Checks every entry (key, dtype, size, rule) before allocating; None: nothing is acceptable,
        discard the payload. Raises BAD_HEADER if sizes don't add up to payload_bytes."""
    def stage(self, frame: Frame) -> SliceTable:
        """A PUSH: stages the contribution of (rank, incarnation, round). Returns the reply's table."""
    def initialise(self, frame: Frame) -> SliceTable:
        """An INIT: sets value where there is none yet; acknowledged and ignored elsewhere."""
    def write(self, frame: Frame, client: str) -> SliceTable:
        """An ASSIGN or ADD on tensors of that rule, once per (client, frame.sequence). Call it after a
        discarded payload too: the sequence counts. Raises UNEXPECTED_MESSAGE if one before it is missing."""
    def restore(self, frame: Frame, client: str) -> SliceTable:
        """A RESTORE on tensors with a training rule: sets the value (part 0) or a state buffer and the number of
        steps (part > 0; no bytes: the buffer is as if it had never been made), once per (client, frame.sequence),
        as `write`. A slot whose decision still waits for contributions or scale answers NOT_APPLIED, unchanged.
        A value's version becomes one more than the shard's or than it was, and later steps go on from there: whoever
        pulled before sees that it is newer."""
    def last_sequence(self, client: str) -> int:
        """Last write of that client applied here; 0 if none is remembered."""

    # decisions
    def advance(self, decision: Decision) -> None:
        """Applies a decision; a number already applied is ignored, a gap raises DECISION_GAP.
        A contribution that it names and that was not staged counts as absent, and is `missing`."""
    def missing(self) -> list[tuple[int, int, int]]:
        """(rank, incarnation, round) of the last contribution that a decision named in vain, of each rank's latest
        life. A worker that committed what it had not pushed."""
    def seal(self, rank: int, incarnation: int, round: int) -> None:
        """What was staged by that life of the rank in that round stays as it is: slices of it that are pushed again
        are acknowledged and ignored."""
    def staged_squares(
        self, rank: int, incarnation: int, round: int, *, tensors: Sequence[tuple[int, int]]
    ) -> float | None:
        """The sum of squares of what was staged so of these tensors, ranges (first, last) of ids, added in the order of
        keys; None: a slice of them lacks it. Waits for a device."""
    def set_scale(self, number: int, factor: float | None) -> None:
        """The scale that decision `number` waits for; None makes it a skip. Ignored if that decision is not the last,
        does not need one or has one."""
    def settle(self, max_slots: int = -1, max_bytes: int = -1) -> bool:
        """Carries out the lazy part of the last decision on up to `max_slots` slots, until that has changed `max_bytes`
        of values; -1: without that bound. True: nothing is left to do, but for slices that wait for contributions or
        the scale."""

    # reads
    def read(
        self, frame: Frame, *, share: bool = False, whole: bool = False
    ) -> tuple[SliceTable, list[memoryview], bool, Fence | None]:
        """Answers a PULL: (table of the reply, pieces to write, shared, ready). The pieces are not to be looked at or
        sent before `ready`, of a shard on a device, is done; what then does not `say_changes` is to be read again, as
        a `whole`. `share`: whoever asks maps the arena; True
        comes back if it is worth it, and the table then says where in it the values lie. Pieces hold references:
        a later update goes out of place until they are gone. A slice that the last decision waits on answers
        NOT_APPLIED. Parts > 0 are rule state, as stored: version is the number of steps, NO_STATE if there is none."""
    def norms(self, frame: Frame) -> tuple[SliceTable, list[memoryview], Fence | None]:
        """Answers a NORM about the last decision, which `needs_scale`: (table of the reply, pieces, ready) as of
        `read`, with one float64 per entry that is OK: the sum of squares of the reduced gradient, before any scale;
        the same however often and whenever it is asked, until the next decision. Slices in which no member has a
        gradient, and all for a decision without scale, answer NOT_MODIFIED with no bytes."""
    def flush(self) -> None:
        """Takes note of what its device has done by now."""
    def free_unused(self, max_bytes: int) -> None:
        """Gives the system back main memory that was kept for reuse and was not needed since the last call, about
        `max_bytes` at most. For every few seconds."""
    def work_after(self, fence: Fence) -> None:
        """What its device is given from here on, it does after that. Raises BAD_ARGUMENT if it is on none, as do
        `work_so_far`, `device_identity` and `make_push_arena`."""
    def work_so_far(self) -> Fence:
        """What its device was given by now: values are what `read` said when this is done, and what was pushed before
        is free after the next `flush`."""
    @property
    def device_identity(self) -> bytes:
        """`Device.identity` of its device."""
    def shared_blocks(self, after: int) -> list[SharedBlock]:
        """Those of larger numbers, in their order; none if it is on no device."""
    def make_push_arena(self, num_bytes: int) -> tuple[PushArena, int]:
        """On its device, and where it begins. Raises OUT_OF_MEMORY."""
    def image(self, reader: int, at: int) -> TableImage | None:
        """All slots as of a decision that the reader holds with rule state, and settles on; None: one of them lacks
        contributions to it still. Raises VERSION_GONE."""
    def choose_changed(self, image: TableImage, key: int, since: int) -> int:
        """Has the image keep of a partition of a table those rows alone that may have changed since that decision, and
        returns how many; all, where that is not known. `read_image` then brings the ids of all of its rows (u64), and
        the records of those, in one order. Raises VERSION_GONE."""
    def read_image(self, image: TableImage, wanted: Sequence[tuple[int, int]]) -> list[memoryview]:
        """The bytes of (key, part), one after the other; small ones share a view. Raises VERSION_GONE."""
    def allocate(self, num_bytes: int) -> Buffer:
        """Memory to `load` from."""
    def load(self, key: int, version: int, num_steps: int, parts: Sequence[Buffer | None], num_rows: int = 0) -> None:
        """Gives a new slot its value, and its rule state, if it has any. Raises BAD_ARGUMENT, OUT_OF_MEMORY.
        `num_rows`: of a partition of a table, whose records are part 0; it may come in several calls."""
    def is_settled(self) -> bool:
        """Carries the last decision out where that can be. Whether that is on all slots."""
    def own_staged(self) -> None:
        """From now on no contribution that waits lies in memory that somebody shares, as far as there is memory for a
        copy."""
    def history(
        self,
    ) -> tuple[list[tuple[int, int, int, bool, int, int]], list[tuple[str, int]], list[tuple[int, int]], bool]:
        """What it knows beside its slots: of each rank its latest life (rank, incarnation, decided round, whether that
        was decided early, round of which something was missing, round that is sealed; -1: none), of each writer the
        last sequence number, the tensors that were dropped, as ranges of ids, and whether values were restored since
        the last decision."""
    def resume(self, history: Sequence[object], last: Decision | None) -> None:
        """Goes on from another shard's history, whose last decision was that. Only `set_version` may come before it."""
    def refusals(self) -> list[tuple[str, int, list[tuple[int, int, int, int]]]]:
        """What was refused of writers' plain writes: of each writer its name, the last write of which that is not known
        any more (0: none), and runs of slices (sequence, begin, end, error code)."""
    def resume_refusals(self, writer: str, forgotten: int, runs: Sequence[tuple[int, int, int, int]]) -> None:
        """Goes on from one of another shard's `refusals`, after `resume`. Raises BAD_BODY if they can't be the
        writer's."""
    def state(self, key: int) -> dict[str, bytes]:
        """Value and rule state of one slice as raw bytes by name ('value', 'momentum_buffer',
        'exp_avg', ..., 'step' as 8-byte int): for tests and tools."""
    def stats(self) -> dict[str, int]:
        """Counters: slots, value_bytes, state_bytes, staged_bytes, pool_bytes, pushes, pulls, writes,
        duplicates, applied_in_place, applied_out_of_place, ..."""
    def row_stats(self) -> dict[int, dict[str, int]]:
        """Counters of each table by tensor id: rows, row_bytes, rows_evicted, rows_refused."""
    def make_data_service(
        self, *, max_leased_bytes: int, describe_blocks: Callable[[list[SharedBlock]], bytes]
    ) -> DataService:
        """`max_leased_bytes`: of values that one connection may read in shared memory at a time. `describe_blocks`:
        makes the frame that tells a client of a device's blocks."""

def say_changes(table: SliceTable, payload: _HasBuffer) -> bool:
    """Whether all the changes in an answer to a PULL that had a `ready` say what they are to: one that is not finite
    can't be said. Raises BAD_ARGUMENT if it is no payload of the table."""

# ---- shared memory --------------------------------------------------------------------------------

def machine_memory_bytes() -> int:
    """All there is on this machine."""

@final
class ValueArena:
    """A shard's memory that clients may read. Raises OSError where the system has no such thing."""

    def __init__(self) -> None: ...
    def fileno(self) -> int:
        """The file that clients map; a mapping of it can't be written to."""

@final
class PushArena:
    """The shard's side of the memory that one connection pushes through. Has no memory before it is used."""

    def __init__(self, num_bytes: int) -> None: ...
    def filenos(self) -> tuple[int, int]:
        """The files that the client maps: for its values, and for what the shard says of them."""
    def seal(self) -> None:
        """The client has mapped them: it can't change anything else about them from now on."""
    @property
    def nbytes(self) -> int: ...

@final
class SeenMemory:
    """What a standby sees of memory that its shard reads contributions from."""

    def __init__(self, file: int, *, address: int) -> None:
        """`file`: of a `PushArena` or `ValueArena`; it may be closed afterwards. `address`: where offsets begin. Raises
        OSError, ValueError."""

@final
class ClientMemory:
    """A client's side of what it shares with one shard, on one connection. Not thread-safe."""

    def __init__(self, *, values: int, pushes: int, control: int) -> None:
        """Open files, which may be closed afterwards. Raises OSError, ValueError."""
    def read(self, table: SliceTable, destination: Segments) -> None:
        """Copies the values of a `shared` answer. Raises BAD_HEADER, and then has copied nothing."""
    def write(self, table: SliceTable, payload: Segments, request: int) -> SliceTable | None:
        """Copies what a write brings to where the shard can read it; returns the table that says so. None: it has to
        go over the stream, since it is of indices, or there is no room."""
    @property
    def num_reads(self) -> int:
        """Payloads that were read so far."""
    @property
    def num_writes(self) -> int: ...

@final
class ValueView:
    """Shards' values in one piece, for reading where they lie: what is whole pages is mapped, the rest copied. Its
    bytes stay readable as long as it lives, and are what they were while the shard lends them. Not thread-safe."""

    def __init__(self, parts: Sequence[tuple[int, int]]) -> None:
        """Where each begins, and its bytes; in any order. Zeros until then. Raises ValueError, OSError."""
    def __buffer__(self, flags: int, /) -> memoryview: ...
    @property
    def num_mappings(self) -> int:
        """What lies together there and here has one."""
    def shown(self, memory: ClientMemory, table: SliceTable, first: int) -> int:
        """How many of these slices are where `show` would have them."""
    def show(self, memory: ClientMemory, table: SliceTable, first: int) -> None:
        """The parts from `first` on are what a `shared` answer says. Raises BAD_HEADER, and has then shown nothing;
        OSError."""
    def own(self, first: int, count: int) -> Segments:
        """Memory of its own for these parts, to receive into. Raises OSError."""

@final
class SharedBlock:
    """Memory of a shard's device that other processes can import. Stays the shard's while this object lives."""

    @property
    def number(self) -> int:
        """From 1 on."""
    @property
    def address(self) -> int:
        """Where it begins, as the shard's answers have it."""
    @property
    def nbytes(self) -> int: ...
    @property
    def handle(self) -> bytes:
        """For `BorrowedDevice.add_block` in another process. Raises BAD_ARGUMENT if it can't be exported."""

@final
class BorrowedDevice:
    """A client's side of the memory of a device that one shard shares. Thread-safe, but for queues."""

    def __init__(self, device: Device) -> None: ...
    def add_block(self, address: int, num_bytes: int, handle: bytes) -> None:
        """Raises BAD_ARGUMENT if it can't be imported."""
    def add_own_block(self, block: SharedBlock) -> None:
        """Of a shard of this very process."""
    def read(self, queue: Queue, table: SliceTable, targets: Sequence[tuple[int, int]]) -> None:
        """Queues copies of the values of a `shared` answer to (pointer, bytes) of each slice. Raises BAD_HEADER, and
        then has queued nothing. Keep this object until they are done."""

@final
class DevicePushes:
    """The arena of a device that one connection pushes through, as its client sees it. Thread-safe."""

    def __init__(self, blocks: BorrowedDevice, *, control: int, address: int, num_bytes: int) -> None:
        """`control`: an open file, which may be closed afterwards. Raises BAD_HEADER, OSError, ValueError."""
    @property
    def nbytes(self) -> int: ...
    def take(self, num_bytes: int) -> PushRoom | None:
        """Room for one frame's payload; None: there is none now."""

@final
class PushRoom:
    """Where a frame's payload lies on a device: free again with this object, if it was not sent."""

    @property
    def nbytes(self) -> int: ...
    def write(self, queue: Queue, sources: Sequence[tuple[int, int]]) -> None:
        """Queues copies of (pointer, bytes), one after the other. Keep this object until they are done."""
    def send(self, table: SliceTable, request: int) -> SliceTable:
        """The table that says where the slices lie, for the frame `request`: from now on the shard says when the
        room is free again."""

# ---- liveness -------------------------------------------------------------------------------------

@final
class TlsSession:
    """TLS 1.3 on one connection, which goes on as bytes are sent and received."""

@final
class TlsContext:
    """Certificates of one side, as they were when their files were read. Of a server with a CA: only clients whose
    certificates are of it may connect."""

    def __init__(self, *, server: bool, cert: str = "", key: str = "", ca: str = "") -> None:
        """PEM files; without a `ca` a client believes the system's CAs. Raises TlsFailed that names the file."""
    def session(self, host: str = "") -> TlsSession:
        """`host`: of a client, the name or IP address that the peer's certificate has to have."""

@final
class Heartbeat:
    """Writes `frame` to `fd` every `interval_s` from a native thread, GIL or not, until stopped or broken.
    Owns a duplicate of `fd`. `tls`: of that socket; None: bytes go as they are."""

    def __init__(self, fd: int, frame: bytes, interval_s: float, tls: TlsSession | None = None) -> None: ...
    @property
    def alive(self) -> bool: ...
    def stop(self) -> None: ...

# ---- kernels (for tests, benches and the parity table) --------------------------------------------

def instruction_sets() -> list[str]:
    """What this machine can run, best first: of 'avx512', 'avx2', 'plain'."""

def check_hyper(rule: int, hyper: Mapping[str, float], dtype: int) -> None:
    """Raises BadHyper unless a shard would apply a decision with these hyper-parameters to tensors of this dtype, and
    with finite ones."""

def reduce_update(
    rule: int,
    hyper: Mapping[str, float],
    *,
    step: int,
    value: _HasBuffer,
    state: Mapping[str, _HasBuffer],
    contributions: Sequence[tuple[_HasBuffer, int, float]],
    divisor: float,
    dtype: int,
    first: Mapping[str, bool] = ...,
    scale: float = 1.0,
    sorts: tuple[int, int] | None = None,
    base: _HasBuffer | None = None,
    compensation: float = 0.0,
    instruction_set: str | None = None,
) -> None:
    """The fused pass over one slice, in place. `contributions`: (data, dtype number, weight). `scale`: multiplies
    the reduced gradient, with a rounding of its own. `sorts`: each element is sorted over the contributions and so
    many zeros, and without so many at either end summed. `base`: the value that the gradient was taken at, from where
    it is compensated so far."""

def reduced_squares(
    *,
    num_elems: int,
    contributions: Sequence[tuple[_HasBuffer, int, float]],
    divisor: float,
    dtype: int,
    sorts: tuple[int, int] | None = None,
    instruction_set: str | None = None,
) -> float:
    """Sum of squares of the reduced gradient in float64: the same bits on every instruction set."""

def convert(
    source: _HasBuffer,
    from_dtype: int,
    destination: _HasBuffer,
    to_dtype: int,
    *,
    instruction_set: str | None = None,
) -> None:
    """Elements of one dtype to another, rounded to nearest even as torch's Tensor.to."""

def all_finite(data: _HasBuffer, dtype: int, *, instruction_set: str | None = None) -> bool:
    """Whether no element is NaN or an infinity."""

# ---- encodings of float32 payloads (csrc/kernels/codec.h draws them) --------------------------------

def encoded_bytes(encoding: int, num_elems: int, k: int = 0) -> int:
    """Bytes of a payload of that many elements. `k`: of "topk", how many of them it holds; else not read."""

def encode_slice(
    encoding: int,
    source: _HasBuffer,
    residual: _HasBuffer | None,
    out: _HasBuffer,
    k: int = 0,
    *,
    instruction_set: str | None = None,
) -> int:
    """Encodes x = source + residual (float32, of one size) into the first bytes of `out`, and returns how many; also as
    a half precision.

    `residual` becomes x minus what the payload says. Where x is NaN or infinite (of "int8" and "sign": anywhere in the
    block of 256) the payload says NaN (of "topk": what x is, if it is kept) and the residual stays."""

def encode_changes(item_bytes: int, before: _HasBuffer, after: _HasBuffer) -> bytes | None:
    """What has changed from one to the other, bit for bit, of elements of 2, 4 or 8 bytes (csrc/changes/changes.h).
    None: that is more than all of it. Raises SizeMismatch."""

def are_changes(item_bytes: int, payload: _HasBuffer, num_elems: int) -> bool:
    """Whether the payload says changes of so many elements."""

def apply_changes(item_bytes: int, payload: _HasBuffer, elements: _HasBuffer) -> None:
    """Makes the elements what they are after the changes. Raises BadArgument for what are none, and changes nothing."""

def decode_slice(encoding: int, payload: _HasBuffer, out: _HasBuffer, *, instruction_set: str | None = None) -> None:
    """Fills `out` with float32. Raises SizeMismatch, and BadArgument for indices that do not ascend or are out of
    range; then `out` is untouched."""

# ---- devices ----------------------------------------------------------------------------------------

@final
class Fence:
    """A place in a queue: when a device has done what was given to it before. Thread-safe."""

    def done(self) -> bool:
        """Whether all that was queued before it is done. Does not wait. Raises DeviceFailed."""

    def wait(self) -> None:
        """Waits until it is, without the GIL. Raises DeviceFailed."""

@final
class Queue:
    """Work of a device, in order. By one thread at a time."""

    @property
    def stream(self) -> int:
        """Its number, as __cuda_array_interface__ and DLPack name streams."""

    def record(self) -> Fence: ...
    def wait_for(self, fence: Fence) -> None:
        """What is queued from here on runs after `fence`, which may be of another queue of any device."""

    def copy_out(self, to: Buffer, pieces: Sequence[tuple[int, int, int]]) -> None:
        """`pieces`: (offset in the buffer, address on the device, bytes). The buffer and the memory have to stay until
        a fence after the call is done. Raises ValueError for a piece beyond the buffer's end, DeviceFailed."""

    def copy_in(self, source: Buffer, pieces: Sequence[tuple[int, int, int]]) -> None:
        """The other way."""

    def encode_out(self, to: Buffer, slices: Sequence[tuple[int, int, int, int, int, int, float, int]]) -> None:
        """Encodes slices on the device, and copies the payloads into the buffer, one after the other. A slice: (dtype
        number of the payload, elements, k of topk, source, its dtype's number, what was lacking before or 0, times
        what, what is lacking then); all but the numbers are addresses. The same has to stay as of `copy_out`. Raises
        OutOfMemory, ValueError if the payloads are too long, DeviceFailed."""

    def decode_in(self, source: Buffer, num_bytes: int, slices: Sequence[tuple[int, int, int, int, int]]) -> None:
        """The other way, of what has come to the first bytes of the buffer: a change in int8 or sign is added to the
        float32 value, float32 and half precision take its place. A slice: (dtype number, elements, offset in the
        buffer, address of the value, its dtype number: float32, half precision where the other one comes, or the
        same). That payloads are well formed is believed."""

    def give_out(self, arrays: Sequence[tuple[int, int, int, int]]) -> None:
        """Copies of float32 on the device, also in half precision: (address, elements, to which address, dtype number
        there)."""

@final
class Device:
    """Thread-safe."""

    @property
    def name(self) -> str:
        """As it was opened: 'cuda:0'."""
    @property
    def identity(self) -> bytes:
        """Which piece of hardware it is: the same in every process."""

    def make_queue(self) -> Queue: ...
    def borrow_queue(self, stream: int) -> Queue:
        """Stands for a stream of somebody else: what is queued here goes there."""

def open_device(name: str) -> Device:
    """'cuda:N', or 'fake:N' for tests (csrc/device/fake_device.h). Raises BadArgument that says what there is."""

@final
class PinnedPool:
    """Host memory that a device copies from and to by itself. Thread-safe."""

    def __init__(self, device: Device, *, max_idle_bytes: int) -> None:
        """`max_idle_bytes`: kept for reuse; more goes back to the system."""

    def allocate(self, num_bytes: int) -> Buffer:
        """At least so many, writable."""

    @property
    def nbytes(self) -> int:
        """What it has of the system."""

@final
class DeviceMemory:
    """Uninitialised memory of a device, freed with this object. Raises OutOfMemory."""

    def __init__(self, device: Device, num_bytes: int) -> None: ...
    @property
    def pointer(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

def cuda_device_of(pointer: int) -> int:
    """Index of the CUDA device whose memory it is. Raises BadArgument."""

def dlpack_array(capsule: object) -> tuple[int, list[int], str, bool]:
    """Address, shape, dtype, and whether it is row-major without gaps. Raises ValueError if it is no such capsule."""

@final
class SliceBatch:
    """Slices that are updated together, of any rules and dtypes, for tests and benches of devices. Memory is named by
    its address, which is believed: a wrong one is a wrong pointer. It must stay until the work is done."""

    def __init__(self) -> None: ...
    def __len__(self) -> int: ...
    def add(
        self,
        rule: int,
        hyper: Mapping[str, float],
        *,
        step: int,
        dtype: int,
        num_elems: int,
        value: int,
        state: Mapping[str, int],
        contributions: Sequence[tuple[int, int, float, int]],
        divisor: float,
        first: Mapping[str, bool] = {},
        scale: float = 1.0,
        value_in: int = 0,
        shadow: int = 0,
    ) -> None:
        """As `reduce_update`, but for `contributions`: (address, dtype, weight, bytes), of which those of "topk" alone
        have their bytes read; `value_in`: where the value is read (0: where it is written); `shadow`: where it is also
        written, as bfloat16 (0: nowhere)."""
    def reduce_update(self, *, instruction_set: str | None = None) -> None:
        """By the processor, now: all addresses are the host's."""
    def reduced_squares(self, *, instruction_set: str | None = None) -> list[float]:
        """By the processor, now: of each slice."""
    def queue_reduce_update(self, queue: Queue) -> None:
        """By the queue's device."""
    def queue_reduced_squares(self, queue: Queue, sums: int) -> None:
        """By the queue's device. `sums`: float64 there, one for each slice."""

def queue_convert(
    queue: Queue, *, from_dtype: int, to_dtype: int, source: int, destination: int, num_elems: int
) -> None:
    """`convert` by the queue's device; the same for its memory as for a `SliceBatch`'s."""

def queue_encode(
    queue: Queue, encoding: int, *, source: int, residual: int, payload: int, num_elems: int, k: int = 0
) -> None:
    """`encode_slice` likewise. `residual`: 0 for none; `payload`: of `encoded_bytes()`."""

def queue_encode_changes(queue: Queue, changes: Sequence[tuple[int, int, int, int, int]]) -> None:
    """Of each (encoding, source, base, payload, elements): the payload of source - base, which is added to the base; or
    the base becomes the source, where that is not finite."""

def queue_decode(
    queue: Queue, encoding: int, *, payload: int, num_bytes: int, destination: int, num_elems: int
) -> None:
    """`decode_slice` likewise; that the payload is well formed is believed."""

# ---- CUDA -----------------------------------------------------------------------------------------

CUDA_VERSION: str | None

def cuda_device_count() -> int:
    """0 where there is no device, no driver or no CUDA in the build; never raises for those."""
