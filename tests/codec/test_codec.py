"""The codecs by name, and the bytes they say they make."""

from __future__ import annotations

import math

import pytest

from psstore import _core
from psstore.codec.codecs import Codec, codecs_for, dtype_of, parse, payload_bytes
from psstore.errors import BadArgument

SIZES = (0, 1, 7, 8, 255, 256, 257, 1000, 1 << 18)


@pytest.mark.parametrize("name", ["int8", "sign", "topk", "topk:0.25"])
@pytest.mark.parametrize("num_elems", SIZES)
def test_codec_makes_the_bytes_that_the_core_makes(name: str, num_elems: int) -> None:
    codec = named(name)
    kept = codec.num_kept(num_elems)
    assert codec.num_bytes(num_elems) == _core.encoded_bytes(_core.DTYPES[codec.dtype], num_elems, kept)


@pytest.mark.parametrize("num_elems", SIZES)
def test_topk_keeps_its_ratio_rounded_up(num_elems: int) -> None:
    assert named("topk:0.25").num_kept(num_elems) == math.ceil(num_elems / 4)
    assert named("topk").num_kept(num_elems) == math.ceil(0.01 * num_elems)
    assert named("topk:1").num_kept(num_elems) == num_elems


@pytest.mark.parametrize(("name", "least"), [("bf16", 2.0), ("fp16", 2.0), ("int8", 3.9), ("sign", 28.0), ("topk", 50)])
def test_codec_compresses_a_full_slice(name: str, least: float) -> None:
    num_elems = 1 << 18
    assert payload_bytes("float32", num_elems) / payload_bytes(name, num_elems) >= least * 0.999


def test_half_precision_goes_by_both_its_names() -> None:
    assert payload_bytes("bf16", 10) == payload_bytes("bfloat16", 10) == 20
    assert dtype_of("bf16") == dtype_of("bfloat16") == "bfloat16"


def test_none_is_no_codec() -> None:
    assert parse("none") is None


@pytest.mark.parametrize("name", ["", "int4", "topk:0", "topk:1.5", "topk:x", "topk:nan", "int8:2", "INT8"])
def test_a_codec_that_means_nothing_is_refused(name: str) -> None:
    with pytest.raises(BadArgument, match="topk"):
        parse(name)


def test_codecs_are_chosen_for_all_or_by_name() -> None:
    assert codecs_for("int8", ["a", "b"]) == [named("int8")] * 2
    assert codecs_for({"b": "sign", "unused": "int8"}, ["a", "b"]) == [None, named("sign")]
    assert codecs_for(None, ["a"]) == [None]


def named(name: str) -> Codec:
    codec = parse(name)
    assert codec is not None
    return codec
