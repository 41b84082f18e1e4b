"""Tables whose rows are kept in bfloat16: steps are computed in float32 and rounded by lot, the same in any number of
shards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal

import psstore
from psstore.client.store import Store
from psstore.client.tables import table_seed
from psstore.errors import BadArgument, DTypeMismatch
from psstore.types import complete_hyper
from tests.support.row_model import TableModel
from tests.support.row_rounding import nearest, rounded

pytestmark = pytest.mark.one_loop

F32 = np.float32
DIM = 21
IDS = np.arange(0, 400, 3, dtype=np.uint64)
RATE = {"lr": 0.01}
RULES = ("sgd", "adagrad", "rowwise_adagrad", "adam", "momentum", "ftrl")


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    with psstore.connect("local://?shards=3", rank=0, num_workers=1) as store:
        yield store


def drawn(seed: int, num_rows: int = len(IDS)) -> Any:
    return np.random.default_rng(seed).standard_normal((num_rows, DIM), dtype=F32)


def create(store: Store, name: str, rule: str = "sgd", **options: Any) -> None:
    """A table beside those of other tests, with the parameter group of its rule."""
    store.create_table(name, dim=DIM, rule=rule, dtype="bfloat16", group=1 + RULES.index(rule), **options)


def step(store: Store, name: str, ids: Any, gradients: Any, **options: Any) -> int:
    """Returns the decision's number."""
    group = store.describe(name).spec.group
    store.push_rows(name, ids, gradients, **options)
    return store.commit({group: RATE}).decision


@pytest.mark.parametrize("rule", RULES)
def test_steps_are_float32s_rounded_by_the_lots_that_the_docs_name(store: Store, rule: str) -> None:
    create(store, rule, rule, init="constant(0.3)", seed=9)
    spec = store.describe(rule).spec
    assert spec.rows is not None
    model = TableModel(spec.rows, dtype="bfloat16", rule=spec.rule, hyper=complete_hyper(spec.rule, RATE))
    for number in range(3):
        gradients = drawn(number)
        model.decision = step(store, rule, IDS, gradients) - 1
        model.step([dict(zip(IDS.tolist(), gradients, strict=True))])
        assert_array_equal(store.pull_rows(rule, IDS), model.pull(IDS.tolist()))


def test_any_number_of_shards_and_what_is_pushed_beside_a_row_give_the_same_bits() -> None:
    found = []
    for shards, ids in ((1, IDS), (3, IDS), (2, IDS[::-7])):
        with psstore.connect(f"local://?shards={shards}", rank=0, num_workers=1) as other:
            create(other, "t", "adagrad", init="normal(0, 1)")
            for number in range(3):
                step(other, "t", ids, drawn(number)[np.isin(IDS, ids)][:: -1 if len(ids) < len(IDS) else 1])
            found.append(other.pull_rows("t", IDS[::-7]))
    assert_array_equal(found[0], found[1])
    assert_array_equal(found[0], found[2])


def test_steps_far_below_bfloat16s_move_the_mean(store: Store) -> None:
    create(store, "small", init="constant(1)")
    for _ in range(20):
        step(store, "small", IDS, np.full((len(IDS), DIM), 0.01, F32))  # times lr: 1e-4, and bfloat16 has 2^-8 there
    rows = store.pull_rows("small", IDS)
    deviation = 2**-8 * np.sqrt(20 * (1e-4 * 2**8) / rows.size)
    assert abs(rows.mean(dtype=np.float64) - (1 - 20 * 1e-4)) < 5 * deviation
    assert set(np.unique(rows)) <= {F32(1 - place * 2**-8) for place in range(21)}


def test_first_values_are_the_nearest_of_float32s(store: Store) -> None:
    create(store, "first", init="normal(0, 1)", seed=4)
    with psstore.connect("local://", rank=0, num_workers=1) as other:
        other.create_table("first", dim=DIM, rule="sgd", init="normal(0, 1)", seed=4)
        wide = other.pull_rows("first", IDS)
    assert_array_equal(store.pull_rows("first", IDS), nearest(wide))
    assert store.keys("first").size == 0


def test_a_pull_gives_float32_or_bfloat16_and_sends_two_bytes_an_element(store: Store) -> None:
    create(store, "pulled", init="normal(0, 1)")
    step(store, "pulled", IDS, drawn(1))
    ids = np.concatenate([IDS, IDS[::-1]]).reshape(2, -1)
    before = sum(int(one["sent_bytes"]) for one in store.stats())
    wide = store.pull_rows("pulled", ids)
    assert sum(int(one["sent_bytes"]) for one in store.stats()) - before == len(IDS) * 2 * DIM
    narrow = torch.empty((*ids.shape, DIM), dtype=torch.bfloat16)
    assert store.pull_rows("pulled", ids, out=narrow) is narrow
    assert_array_equal(narrow.float().numpy(), wide)
    assert_array_equal(store.pull_rows("pulled", ids, codec="bf16"), wide)
    with store.snapshot() as view:
        assert_array_equal(view.pull_rows("pulled", ids), wide)
    with pytest.raises(DTypeMismatch, match="float32 or bfloat16, got float16"):
        store.pull_rows("pulled", ids, out=torch.empty((*ids.shape, DIM), dtype=torch.float16))


def test_rows_of_float32_can_be_had_in_bfloat16(store: Store) -> None:
    store.create_table("wide", dim=DIM, rule="sgd", init="normal(0, 1)", group=1)
    narrow = torch.empty((len(IDS), DIM), dtype=torch.bfloat16)
    store.pull_rows("wide", IDS, out=narrow)
    assert torch.equal(narrow, torch.from_numpy(store.pull_rows("wide", IDS)).bfloat16())
    coded = torch.empty((len(IDS), DIM), dtype=torch.bfloat16)
    store.pull_rows("wide", IDS, out=coded, codec="int8")
    assert torch.equal(coded, torch.from_numpy(store.pull_rows("wide", IDS, codec="int8")).bfloat16())


@pytest.mark.parametrize("codec", ["bf16", "fp16", "int8"])
def test_codecs_of_pushes_and_pulls_are_as_of_float32(store: Store, codec: str) -> None:
    name = f"in {codec}"
    create(store, name, init="constant(1)")
    gradients = np.tile(np.linspace(-127, 127, DIM).round().astype(F32), (len(IDS), 1))  # which any codec can say
    decision = step(store, name, IDS, gradients, codec=codec)
    there = store.pull_rows(name, IDS)
    plain = np.asarray(1 - gradients[0] * np.float64(F32(RATE["lr"])), F32)  # rounded once
    for place, one in enumerate(IDS.tolist()):
        expected = rounded(plain, seed=table_seed(name, 0), number=one, decision=decision)
        assert_array_equal(there[place], expected)
    assert np.abs(store.pull_rows(name, IDS, codec=codec) - there).max() <= np.abs(there).max() / 253


def test_assigned_rows_are_the_nearest_of_what_came(store: Store) -> None:
    create(store, "assigned", rule="adagrad")
    step(store, "assigned", IDS, drawn(1))
    values = drawn(2)
    before = sum(int(one["received_bytes"]) for one in store.stats())
    store.assign_rows("assigned", IDS, values)
    assert sum(int(one["received_bytes"]) for one in store.stats()) - before == len(IDS) * (8 + 2 * DIM)
    assert_array_equal(store.pull_rows("assigned", IDS), nearest(values))
    store.assign_rows("assigned", IDS, values, codec="int8")
    assert np.abs(store.pull_rows("assigned", IDS) - values).max() < np.abs(values).max() * (1 / 254 + 2**-9)
    assert_array_equal(store.keys("assigned"), IDS)


def test_a_row_takes_two_bytes_an_element_and_its_bound_says_so(store: Store) -> None:
    create(store, "bytes", rule="adagrad")
    before = sum(int(one["row_bytes"]) for one in store.stats())
    step(store, "bytes", IDS, drawn(1))
    store.pull_rows("bytes", IDS)
    assert sum(int(one["row_bytes"]) for one in store.stats()) - before == len(IDS) * (8 + 2 * DIM + 4 * DIM)
    create(store, "bound", rule="adagrad", max_bytes=1000 * (8 + 2 * DIM + 4 * DIM + 4 + 12), evict="lru")
    rows = store.describe("bound").spec.rows
    assert rows is not None
    assert rows.max_rows == 1000


def test_a_table_that_evicts_and_is_made_anew_has_first_values_again(store: Store) -> None:
    create(store, "evicting", rule="adagrad", init="normal(0, 1)", max_rows=64, evict="lru")
    ids = np.arange(500, dtype=np.uint64)
    first = store.pull_rows("evicting", ids)
    step(store, "evicting", ids, drawn(1, 500))
    there = store.keys("evicting")
    assert 0 < there.size <= 64
    gone = np.setdiff1d(ids, there)
    assert_array_equal(store.pull_rows("evicting", gone), nearest(first[gone.astype(int)]))
    assert_array_equal(store.pull_rows("evicting", there), nearest(store.pull_rows("evicting", there)))


def test_an_export_has_bfloat16_which_torch_makes_an_embedding_of(store: Store, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    create(store, "exported", rule="adagrad", init="normal(0, 1)")
    step(store, "exported", IDS, drawn(1))
    store.export_table("exported", tmp_path / "t.safetensors")
    found = safetensors.load_file(tmp_path / "t.safetensors")
    assert found["rows/exported"].dtype is torch.bfloat16
    embedding = torch.nn.Embedding(len(IDS), DIM, _weight=found["rows/exported"])
    looked_up = embedding(torch.arange(len(IDS))).detach()
    assert_array_equal(looked_up.float().numpy(), store.pull_rows("exported", IDS))
    assert_array_equal(found["ids/exported"].numpy(), IDS)
    assert_array_equal(found["sum/exported"].numpy(), drawn(1) ** 2)


def test_what_rows_are_not_kept_in_is_refused(store: Store) -> None:
    with pytest.raises(BadArgument, match="'float16' is not one of float32, bfloat16"):
        store.create_table("t", dim=3, rule="sgd", dtype="float16")
    with pytest.raises(BadArgument, match="dtype 'bfloat16' can't be stored; use one of float32, float64"):
        store.create("w", np.zeros(3, F32), dtype="bfloat16", rule="sgd")
    create(store, "there")
    with pytest.raises(DTypeMismatch, match="has dtype bfloat16 in the store, not float32"):
        store.create_table("there", dim=DIM, rule="sgd", group=1)
    with pytest.raises(DTypeMismatch, match="expected dtype float32, got bfloat16"):
        store.push_rows("there", IDS, torch.zeros((len(IDS), DIM), dtype=torch.bfloat16))
