"""Tensors come to be, get their first value, and go: the schema registry, and pulls that wait for it."""

from __future__ import annotations

import math

import pytest

from psstore import _core, errors
from psstore.protocol.barriers import MAX_NAMES
from psstore.protocol.schema_registry import SchemaRegistry
from psstore.protocol.signing import Signer
from psstore.types import UNBOUNDED, Consistency, RowsSpec, Tensor, TensorSpec, applies_by_decision
from psstore.wire import messages as m
from tests.protocol.support import LIVENESS, FakeStore, Peer, carrying, failure_of, sgd, table_of, tensor_of

CLIENT = "c" * 32


def initialise(peer: Peer, tensor: Tensor) -> None:
    size = tensor.spec.num_elems
    peer.ask("INIT", values=[1.0] * size, table=table_of(tensor, num_bytes=4 * size))
    peer.ask("READY", m.Ready(ids=(tensor.id,)))


def test_same_tensor_created_twice_is_one() -> None:
    store = FakeStore()
    first, second = (store.connect().create(sgd("w")) for _ in range(2))
    assert first.tensors == second.tensors


@pytest.mark.parametrize(
    ("asked", "error", "words"),
    [
        (TensorSpec(name="w", shape=(5,), rule="sgd"), errors.ShapeMismatch, r"shape \(4,\) in the store, not \(5,\)"),
        (sgd("w", dtype="float64"), errors.DTypeMismatch, "dtype float32 in the store, not float64"),
        (TensorSpec(name="w", shape=(4,), rule="add"), errors.RuleMismatch, "rule 'sgd' and group 0 in the store"),
        (sgd("w", group=1), errors.RuleMismatch, "not 'sgd' and 1"),
        (sgd("w", reduction="median"), errors.RuleMismatch, "reduction 'mean' with trim 0 in the store, not 'median'"),
    ],
    ids=["shape", "dtype", "rule", "group", "reduction"],
)
def test_tensor_that_does_not_match_is_refused(asked: TensorSpec, error: type[errors.PsstoreError], words: str) -> None:
    peer = FakeStore().connect()
    peer.create(sgd("w"))
    with pytest.raises(error, match=words):
        peer.create(asked)


def test_another_models_shapes_are_named_all_at_once() -> None:
    peer = FakeStore().connect()
    peer.create(*(sgd(f"layer{number}") for number in range(10)))
    others = [TensorSpec(name=f"layer{number}", shape=(4 + number,), rule="sgd") for number in range(10)]
    words = (
        r"'layer1' has shape \(4,\) in the store, not \(5,\), tensor 'layer2' .* 'layer8' .*, and 1 more differ; use"
    )
    with pytest.raises(errors.ShapeMismatch, match=words):
        peer.create(*others)


def test_name_that_exists_is_an_error_if_asked_to_be_one() -> None:
    peer = FakeStore().connect()
    peer.create(sgd("w"))
    with pytest.raises(errors.TensorExists, match="'w' exists already"):
        peer.create(sgd("w"), exist="error")


def test_name_twice_in_one_request_is_refused_and_nothing_is_created() -> None:
    peer = FakeStore().connect()
    with pytest.raises(errors.BadArgument, match="'w' is named twice"):
        peer.create(sgd("v"), sgd("w"), sgd("w"))
    assert peer.control("DESCRIBE", m.Describe(names_only=True), m.Described).names == ()


def test_one_bad_tensor_among_many_creates_none() -> None:
    peer = FakeStore().connect()
    with pytest.raises(errors.BadArgument, match="'bad'"):
        peer.create(sgd("good"), TensorSpec(name="bad", shape=(-1,)))
    assert peer.control("DESCRIBE", m.Describe(), m.Described).tensors == ()


def test_a_group_ends_with_its_last_tensor() -> None:
    peer = FakeStore().connect()
    peer.create(sgd("w"), sgd("v"), TensorSpec(name="buffer", shape=(4,)))
    peer.ask("DROP", m.Drop(names=("w", "buffer")))
    with pytest.raises(errors.RuleMismatch, match="parameter group 0 has rule 'sgd'"):
        peer.create(TensorSpec(name="u", shape=(4,), rule="adam"))
    peer.create(sgd("v"), exist="overwrite")
    peer.ask("DROP", m.Drop(names=("v",)))
    peer.create(TensorSpec(name="u", shape=(4,), rule="adam"))


def test_a_tensor_is_dropped_without_a_look_at_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is heard meanwhile: for four seconds, where ten thousand were overwritten."""
    num_asked = 0

    def counted(rule: str) -> bool:
        nonlocal num_asked
        num_asked += 1
        return applies_by_decision(rule)

    monkeypatch.setattr("psstore.protocol.schema_registry.applies_by_decision", counted)
    peer, specs = FakeStore().connect(), [TensorSpec(name=f"buffer {number}", shape=(4,)) for number in range(100)]
    for _ in range(2):
        peer.create(*specs, exist="overwrite")
    assert num_asked < 10 * len(specs)


def test_group_has_one_rule() -> None:
    peer = FakeStore().connect()
    with pytest.raises(errors.RuleMismatch, match="parameter group 0 has rule 'sgd'; use another group"):
        peer.create(sgd("v"), TensorSpec(name="w", shape=(4,), rule="adam"))


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (sgd("w", reduction="mode"), "reduction 'mode' is not one of mean, median, trimmed_mean"),
        (sgd("w", reduction="trimmed_mean"), "'trimmed_mean' with trim 0; expected 'trimmed_mean' with 1 to"),
        (sgd("w", reduction="median", trim=1), "'median' with trim 1; expected"),
        (sgd("w", reduction="trimmed_mean", trim=2), "trim 2 drops 4 of 4: use a trim of at most 1"),
        (TensorSpec(name="w", shape=(4,), reduction="median"), "what rule 'assign' takes is not sorted"),
        (TensorSpec(name="w", shape=(4,), rule="add", reduction="median"), "what rule 'add' takes is not sorted"),
    ],
)
def test_reduction_that_has_no_meaning_is_refused(asked: TensorSpec, words: str) -> None:
    peer = FakeStore(num_workers=4).connect()
    with pytest.raises(errors.BadArgument, match=words):
        peer.create(asked)
    assert peer.control("DESCRIBE", m.Describe(), m.Described).tensors == ()


@pytest.mark.parametrize(("staleness", "mode"), [(UNBOUNDED, "async"), (1, "ssp")])
def test_reduction_over_the_workers_needs_rounds_of_several(staleness: int, mode: str) -> None:
    peer = FakeStore(num_workers=4, quorum=1, staleness=staleness).connect()
    with pytest.raises(errors.BadArgument, match=f"in mode '{mode}' .* --mode sync or backup"):
        peer.create(sgd("w", reduction="median"))


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (sgd("w", compensation=-1.0), "compensation -1.0; expected a finite number from 0 on"),
        (sgd("w", compensation=math.nan), "compensation nan; expected a finite number"),
        (sgd("w", compensation=math.inf), "compensation inf; expected a finite number"),
        (sgd("w", compensation=1e39), r"compensation 1e\+39; expected a finite number .* also in float32"),
        (TensorSpec(name="w", shape=(4,), rule="assign", compensation=0.5), "not of what rule 'assign' takes"),
        (TensorSpec(name="w", shape=(4,), rule="reduce", compensation=0.5), "not of what rule 'reduce' takes"),
    ],
)
def test_compensation_that_has_no_meaning_is_refused(asked: TensorSpec, words: str) -> None:
    peer = FakeStore(num_workers=2, quorum=1, staleness=UNBOUNDED).connect()
    with pytest.raises(errors.BadArgument, match=words):
        peer.create(asked)


def test_compensation_where_nobody_steps_meanwhile_is_refused() -> None:
    peer = FakeStore(num_workers=2).connect()
    with pytest.raises(errors.BadArgument, match=r"compensation 0.5 .* in mode 'sync' there are none: .* --mode async"):
        peer.create(sgd("w", compensation=0.5))


@pytest.mark.parametrize(
    "first_values",
    [("constant", 1e39, 0.0), ("constant", math.nan, 0.0), ("uniform", -1.0, 3.4e38), ("normal", 0.0, 1e38)],
)
def test_first_values_that_rows_can_not_hold_are_refused(first_values: tuple[str, float, float]) -> None:
    init, a, b = first_values
    rows = RowsSpec(dim=4, init=init, a=a, b=b)
    with pytest.raises(errors.BadArgument, match=r"init has .* finite in bfloat16 and float32"):
        TensorSpec(name="t", shape=rows.shape, rule="sparse_sgd", rows=rows).check()


def test_tables_of_rows_are_not_compensated() -> None:
    rows = RowsSpec(dim=4, init="constant")
    spec = TensorSpec(name="t", shape=rows.shape, rule="sparse_sgd", rows=rows, compensation=0.5)
    with pytest.raises(errors.BadArgument, match="not of a table's rows"):
        spec.check()


def test_reduction_over_more_workers_than_can_be_sorted_is_refused() -> None:
    peer = FakeStore(num_workers=_core.MAX_SORTED + 1).connect()
    with pytest.raises(errors.BadArgument, match=f"sorts at most {_core.MAX_SORTED} of them"):
        peer.create(sgd("w", reduction="median"))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (sgd("w", reduction="trimmed_mean", trim=1), "trim 1 drops 2 of 2"),
        (sgd("w", compensation=0.5), "in mode 'sync' there are none"),
    ],
)
def test_catalogue_that_these_workers_can_not_train_is_not_restored(spec: TensorSpec, words: str) -> None:
    registry = SchemaRegistry(num_shards=1, signer=Signer(bytes(32)), consistency=Consistency(num_workers=2, quorum=2))
    tensor = Tensor(id=1, spec=spec, slice_elems=4, shards=(0,))
    with pytest.raises(errors.BadArgument, match=words):
        registry.restore([tensor], next_id=2, without_value=[])


def test_overwritten_tensor_has_a_new_id_and_the_old_one_is_unknown() -> None:
    store = FakeStore()
    peer = store.worker(0)
    old = tensor_of(peer.create(sgd("w")).tensors[0])
    new = tensor_of(peer.create(sgd("w", size=6), exist="overwrite").tensors[0])
    assert new.id > old.id
    assert peer.push(old, [1.0] * 4, round=1).first_failure() == (0, errors.UnknownKey.code)
    assert peer.push(new, [1.0] * 6, round=1).first_failure() is None


@pytest.mark.parametrize("exist", ["error", "overwrite"])
def test_create_that_is_asked_again_is_carried_out_once(exist: m.Exist) -> None:
    store = FakeStore()
    if exist == "overwrite":
        store.connect().create(sgd("w"))
    ask = m.Create(specs=(sgd("w"),), exist=exist)
    first = store.connect(client=CLIENT)
    created = m.decode_body(m.Created, first.ask("CREATE", ask, request=7).body)
    again = store.connect(client=CLIENT)
    assert m.decode_body(m.Created, again.ask("CREATE", ask, request=7).body) == created


def test_drop_that_is_asked_again_is_carried_out_once() -> None:
    store = FakeStore()
    first = store.connect(client=CLIENT)
    first.create(sgd("w"))
    dropped = first.ask("DROP", m.Drop(names=("w",)), request=7).body
    assert store.connect(client=CLIENT).ask("DROP", m.Drop(names=("w",)), request=7).body == dropped


def test_drop_of_what_is_not_there_drops_nothing() -> None:
    peer = FakeStore().connect()
    peer.create(sgd("w"))
    with pytest.raises(errors.UnknownTensor, match="'v'"):
        peer.ask("DROP", m.Drop(names=("w", "v")))
    assert peer.control("DESCRIBE", m.Describe(names_only=True), m.Described).names == ("w",)


def test_late_definition_of_a_dropped_tensor_brings_nothing_back() -> None:
    store = FakeStore()
    peer = store.connect()
    created = peer.create(sgd("w"))
    dropped = peer.control("DROP", m.Drop(names=("w",)), m.Dropped)
    peer.ask("DEFINE", m.Define(facts=dropped.facts))
    peer.ask("DEFINE", m.Define(facts=created.tensors))
    assert store.shards[0].stats()["slots"] == 0


def test_describe_leaves_out_what_does_not_exist() -> None:
    peer = FakeStore().connect()
    peer.create(sgd("v"), sgd("w"))
    described = peer.control("DESCRIBE", m.Describe(names=("w", "x")), m.Described)
    assert described.names == ("w",)


def test_describe_tells_what_is_named_twice_once() -> None:
    peer = FakeStore().connect()
    peer.create(sgd("w"))
    described = peer.control("DESCRIBE", m.Describe(names=("w",) * 1000), m.Described)
    assert described.names == ("w",)
    assert len(described.tensors) == 1


@pytest.mark.parametrize(
    ("op", "body"),
    [
        ("DESCRIBE", m.Describe(names=("w",) * (m.MAX_ITEMS + 1))),
        ("DROP", m.Drop(names=("w",) * (m.MAX_ITEMS + 1))),
        ("READY", m.Ready(ids=(1,) * (m.MAX_ITEMS + 1))),
    ],
)
def test_request_that_names_too_many_is_refused_before_it_is_decoded(op: str, body: m.Message) -> None:
    peer = FakeStore().connect()
    with pytest.raises(errors.BadBody, match="length <= 131072"):
        peer.ask(op, body)


def test_reply_that_no_frame_holds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = FakeStore().connect()
    peer.create(sgd("v"), sgd("w"))
    monkeypatch.setattr(_core, "MAX_BODY_BYTES", 200)
    with pytest.raises(errors.BadArgument, match="ask for fewer tensors at a time"):
        peer.ask("DESCRIBE", m.Describe())
    assert peer.control("DESCRIBE", m.Describe(names_only=True), m.Described).names == ("v", "w")


def test_tensors_that_no_reply_holds_are_refused_and_none_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    store = FakeStore()
    peer = store.connect()
    peer.create(sgd("v"))
    registry = store.coordinator.schemas
    before = registry.tensors, list(registry.loads_bytes), registry.next_id
    monkeypatch.setattr(_core, "MAX_BODY_BYTES", 200)
    asked: list[tuple[m.Exist, str]] = [("match", "vwx"), ("error", "wx"), ("overwrite", "vw")]
    for exist, names in asked:
        with pytest.raises(errors.BadArgument, match="create fewer tensors at a time"):
            peer.ask("CREATE", m.Create(specs=tuple(map(sgd, names)), exist=exist))
        assert (registry.tensors, list(registry.loads_bytes), registry.next_id) == before
    monkeypatch.undo()
    assert peer.ask("CREATE", m.Create(specs=(sgd("w"),), exist="error")) is not None


def test_tensor_that_can_not_fit_is_refused_before_it_is_cut() -> None:
    registry = SchemaRegistry(num_shards=2, signer=Signer(bytes(32)), consistency=Consistency(), max_bytes=1 << 20)
    huge = TensorSpec(name="huge", shape=(1 << 36,), rule="assign")
    small = TensorSpec(name="small", shape=(1 << 17,), rule="assign")
    for specs in ((huge,), (small, huge)):
        with pytest.raises(errors.OutOfMemory, match="raise --max-memory"):
            registry.create("client", m.Create(specs=specs), is_gone=lambda _: False)
    assert registry.names().names == ()
    registry.create("client", m.Create(specs=(small,)), is_gone=lambda _: False)
    registry.create("client", m.Create(specs=(small,), exist="overwrite"), is_gone=lambda _: False)
    assert sum(registry.loads_bytes) == 1 << 19


# ---- first values ----


def test_first_who_offers_is_to_initialise() -> None:
    store = FakeStore()
    first = store.connect().create(sgd("w", zeros=False))
    second = store.connect().create(sgd("w", zeros=False))
    assert (len(first.initialise), second.initialise) == (1, ())


def test_tensor_of_zeros_needs_nobody() -> None:
    assert FakeStore().connect().create(sgd("w", zeros=True)).initialise == ()


def test_client_that_does_not_offer_is_not_asked() -> None:
    assert FakeStore().connect().create(sgd("w", zeros=False), offer=False).initialise == ()


def test_initialiser_that_dies_before_ready_is_succeeded() -> None:
    store = FakeStore()
    dead, heir = store.connect(), store.connect()
    tensor = tensor_of(dead.create(sgd("w", zeros=False)).tensors[0])
    dead.hang_up()
    assert heir.create(sgd("w", zeros=False)).initialise == ()  # it may be reconnecting
    store.pass_time(LIVENESS.detached_s + 1)
    assert heir.create(sgd("w", zeros=False)).initialise == (tensor.id,)
    initialise(heir, tensor)
    assert store.connect().create(sgd("w", zeros=False)).initialise == ()


def test_initialiser_that_comes_back_goes_on() -> None:
    store = FakeStore()
    first = store.connect(client=CLIENT)
    tensor = tensor_of(first.create(sgd("w", zeros=False)).tensors[0])
    first.hang_up()
    assert store.connect(client=CLIENT).create(sgd("w", zeros=False)).initialise == (tensor.id,)


def test_pull_waits_for_the_first_value() -> None:
    store = FakeStore()
    writer, reader = store.connect(), store.connect()
    tensor = tensor_of(writer.create(sgd("w", zeros=False)).tensors[0])
    waiting = reader.send("PULL", m.Carry(wait_s=10.0), table=table_of(tensor))
    assert not reader.is_answered(waiting)
    initialise(writer, tensor)
    assert reader.answer(waiting).table.first_failure() is None


def test_gradient_for_a_tensor_without_a_value_is_refused() -> None:
    """Once committed it would be in a decision that no shard can carry out."""
    worker = FakeStore().worker(0)
    tensor = tensor_of(worker.create(sgd("w", zeros=False)).tensors[0])
    assert worker.push(tensor, [1.0] * 4, round=1).first_failure() == (0, errors.NotInitialised.code)
    initialise(worker, tensor)
    assert worker.push(tensor, [1.0] * 4, round=1).first_failure() is None


def test_pull_that_waited_in_vain_says_not_initialised() -> None:
    store = FakeStore()
    peer = store.connect()
    tensor = tensor_of(peer.create(sgd("w", zeros=False)).tensors[0])
    waiting = peer.send("PULL", m.Carry(wait_s=10.0), table=table_of(tensor))
    store.pass_time(11.0)
    assert peer.answer(waiting).table.first_failure() == (0, errors.NotInitialised.code)


def test_pull_of_a_tensor_that_is_dropped_meanwhile_waits_no_longer() -> None:
    store = FakeStore()
    writer, reader = store.connect(), store.connect()
    tensor = tensor_of(writer.create(sgd("w", zeros=False)).tensors[0])
    waiting = reader.send("PULL", m.Carry(wait_s=10.0), table=table_of(tensor))
    dropped = writer.control("DROP", m.Drop(names=("w",)), m.Dropped)
    writer.ask("DEFINE", m.Define(facts=dropped.facts))
    assert reader.answer(waiting).table.first_failure() == (0, errors.UnknownKey.code)


def test_pull_of_a_version_that_does_not_come_says_which_one_is_there() -> None:
    store = FakeStore()
    peer = store.connect()
    waiting = peer.send("PULL", m.Carry(at_least=3, wait_s=2.0))
    store.pass_time(2.5)
    error = failure_of(peer, waiting)
    assert isinstance(error, errors.DeadlineExceeded)
    assert "shard 0 is at version 0; version 3 did not come within 2 s" in str(error)


def test_decision_on_a_push_whose_payload_stalls_wakes_who_waits_for_it() -> None:
    """The header applies what it carries; the payload may never come."""
    store = FakeStore(num_workers=1)
    worker, reader = store.worker(0), store.connect()
    tensor = tensor_of(worker.create(sgd("w")).tensors[0])
    worker.push(tensor, [1.0] * 4, round=1)
    decided = worker.committed(worker.commit(1, [tensor.id])).decisions
    waiting = reader.send("PULL", m.Carry(at_least=1, wait_s=60.0), table=table_of(tensor))
    worker.feed(
        _core.encode_frame(
            _core.OPS["PUSH"],
            request=99,
            round=2,
            rank=0,
            incarnation=1,
            table=table_of(tensor, num_bytes=16),
            body=m.encode_body(carrying(decisions=decided)),
            payload_bytes=16,
        )
    )
    store.pass_time(0.0)
    assert reader.answer(waiting).table.versions() == [1]


def test_plain_write_is_applied_once_whoever_repeats_it() -> None:
    store = FakeStore()
    first = store.connect(client=CLIENT)
    tensor = tensor_of(first.create(TensorSpec(name="n", shape=(1,), rule="add")).tensors[0])
    table = table_of(tensor, num_bytes=4)
    first.ask("ADD", values=[5.0], table=table, sequence=1)
    again = store.connect(client=CLIENT)
    again.ask("ADD", values=[5.0], table=table, sequence=1)
    again.ask("ADD", values=[2.0], table=table, sequence=2)
    assert store.shards[0].state(tensor.key(0))["value"] == b"\x00\x00\xe0\x40"  # 7.0


# ---- barriers ----


def test_barrier_opens_when_the_last_one_comes() -> None:
    store = FakeStore(num_workers=2)
    first, second = store.worker(0), store.worker(1)
    waiting = first.send("BARRIER", m.Barrier(name="b", count=1))
    assert not first.is_answered(waiting)
    second.ask("BARRIER", m.Barrier(name="b", count=1))
    first.answer(waiting)


def test_barrier_that_was_passed_is_passed_again_by_who_asks_again() -> None:
    store = FakeStore(num_workers=2)
    first, second = store.worker(0), store.worker(1)
    first.send("BARRIER", m.Barrier(name="b", count=1))
    second.ask("BARRIER", m.Barrier(name="b", count=1))
    first.ask("BARRIER", m.Barrier(name="b", count=1))
    assert not first.is_answered(first.send("BARRIER", m.Barrier(name="b", count=2)))


def test_barrier_names_that_were_passed_are_forgotten_in_the_end() -> None:
    store = FakeStore(num_workers=1)
    worker = store.worker(0)
    for count in range(1, 1001):
        worker.ask("BARRIER", m.Barrier(name=f"step {count}", count=count))
    assert store.coordinator._barriers._passed.keys() == {0}
    assert len(store.coordinator._barriers._passed[0]) == MAX_NAMES
    worker.ask("BARRIER", m.Barrier(name="step 1000", count=1000))
    worker.ask("BARRIER", m.Barrier(name="step 1", count=1))


def test_barrier_counts_start_anew_with_a_new_life() -> None:
    store = FakeStore(num_workers=2)
    first, second = store.worker(0), store.worker(1)
    first.send("BARRIER", m.Barrier(name="b", count=5))
    second.ask("BARRIER", m.Barrier(name="b", count=5))
    second.hang_up()
    reborn = store.worker(1)
    assert not reborn.is_answered(reborn.send("BARRIER", m.Barrier(name="b", count=1)))


def test_barrier_does_not_wait_for_who_left_and_names_who_is_lost() -> None:
    store = FakeStore(num_workers=3)
    first, leaver, dead = (store.worker(rank) for rank in range(3))
    waiting = first.send("BARRIER", m.Barrier(name="b", count=1))
    leaver.ask("LEAVE")
    dead.hang_up()
    store.pass_time(LIVENESS.detached_s + 1)
    error = failure_of(first, waiting)
    assert isinstance(error, errors.WorkerLost)
    assert "barrier 'b' needs rank 2 (in round 1, last seen 3.0 s ago), which is lost" in str(error)


def test_barrier_that_is_entered_again_waits_for_the_next_life_of_who_was_lost() -> None:
    store = FakeStore(num_workers=2)
    first, dead = store.worker(0), store.worker(1)
    dead.hang_up()
    store.pass_time(LIVENESS.detached_s + 1)
    told = first.send("BARRIER", m.Barrier(name="b", count=1))
    assert isinstance(failure_of(first, told), errors.WorkerLost)
    late = first.send("BARRIER", m.Barrier(name="b", count=2, wait_s=3.0))
    store.pass_time(4.0)
    error = failure_of(first, late)
    assert isinstance(error, errors.WorkerLost)
    assert "rank 0 waited 3 s for a replacement: barrier 'b' needs rank 1" in str(error)
    waiting = first.send("BARRIER", m.Barrier(name="b", count=3))
    heir = store.worker(1)
    assert not first.is_answered(waiting)
    heir.ask("BARRIER", m.Barrier(name="b", count=1))
    first.answer(waiting)


def test_barrier_deadline_names_who_is_awaited() -> None:
    store = FakeStore(num_workers=2)
    first = store.worker(0)
    waiting = first.send("BARRIER", m.Barrier(name="b", count=1, wait_s=3.0))
    store.pass_time(4.0)
    error = failure_of(first, waiting)
    assert "rank 0 waited 3 s at barrier 'b' for rank 1 (has not joined)" in str(error)


def test_new_life_comes_to_a_barrier_itself() -> None:
    store = FakeStore(num_workers=2)
    first, dead = store.worker(0), store.worker(1)
    dead.send("BARRIER", m.Barrier(name="b", count=1))
    dead.hang_up()
    reborn = store.worker(1)
    waiting = first.send("BARRIER", m.Barrier(name="b", count=1))
    assert not first.is_answered(waiting)
    reborn.ask("BARRIER", m.Barrier(name="b", count=1))
    first.answer(waiting)
