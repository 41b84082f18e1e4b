"""What leaves a device encoded and what comes encoded, many slices at once: checked as gpu_support.py does."""

from __future__ import annotations

from typing import Any

import numpy as np

from psstore import _core
from tests.gpu.support import ENCODED, ITEM_BYTES, OFFSETS, Engine, Place, first_difference, fresh_seed

SOURCES = ("float32", "bfloat16", "float16")

HALVES = ("bfloat16", "float16")

CONVERSIONS = (("float32", "float32"), *((half, to) for half in HALVES for to in SOURCES))
"""Of what comes in a dtype, to that of the array it is for."""

Floats = np.ndarray[Any, np.dtype[np.float32]]


def check_leaving(engine: Engine, num_slices: int, *, most_elems: int) -> None:
    """Slices in every encoding, from every dtype: payloads and what they lack are the processor's, and nothing else was
    written."""
    seed = fresh_seed()
    random = np.random.default_rng(seed)
    kept: list[tuple[Place, Floats]] = []
    slices, payloads, places = [], [], []
    for index in range(num_slices):
        size, dtype = int(random.integers(0, most_elems + 1)), SOURCES[index % 3]
        encoding = (*ENCODED, *HALVES)[index % 5]
        offset, scale = OFFSETS[index % 4], float(np.float32(random.choice([1.0, 0.3])))
        given = converted(_numbers(random, size).view(np.uint8), "float32", dtype)
        lacked = _numbers(random, size)
        begins_at_zero = bool(random.integers(0, 2))
        lacking = np.zeros(size, np.float32) if begins_at_zero else lacked * np.float32(scale)
        num_kept = -(-size // 10) if encoding == "topk" else 0
        payload = np.empty(_core.encoded_bytes(_core.DTYPES[encoding], size, num_kept), np.uint8)
        floats = converted(given, dtype, "float32")
        _core.encode_slice(_core.DTYPES[encoding], floats.data, lacking.data, payload.data, num_kept)
        payloads.append(payload)
        source = Place(engine, given.size, offset=offset).put(given)
        before = Place(engine, 4 * size, offset=offset, item_bytes=4).put(lacked.view(np.uint8))
        after = Place(engine, 4 * size, offset=offset, item_bytes=4)
        places += [source, before]
        kept.append((after, lacking))
        address = 0 if begins_at_zero else before.address
        numbers = (_core.DTYPES[encoding], size, num_kept, source.address, _core.DTYPES[dtype])
        slices.append((*numbers, address, scale, after.address))
    expected = np.concatenate(payloads)
    buffer = engine.pinned(expected.size)
    engine.finish_torch()
    engine.queue.encode_out(buffer, slices)
    engine.finish()
    assert (np.asarray(memoryview(buffer))[: expected.size] == expected).all(), f"payloads, seed {seed}"
    for after, lacking in kept:
        assert first_difference(after.get(), lacking.view(np.uint8), "float32") is None, f"lacking, seed {seed}"
    for place in places:
        place.get()


def check_arriving(engine: Engine, num_slices: int, *, most_elems: int) -> None:
    """Changes are added, all else is written, and values are given out, as the processor does it."""
    seed = fresh_seed()
    random = np.random.default_rng(seed)
    steps, payloads, values = [], [], []
    offset = 0
    for index in range(num_slices):
        size, dtype = int(random.integers(0, most_elems + 1)), ("int8", "sign", *SOURCES)[index % 5]
        before, came = _numbers(random, size), _numbers(random, size)
        if dtype in ITEM_BYTES:
            payload = converted(came.view(np.uint8), "float32", dtype)
            wanted = converted(payload, dtype, "float32").view(np.float32)
        else:
            payload = np.empty(_core.encoded_bytes(_core.DTYPES[dtype], size), np.uint8)
            _core.encode_slice(_core.DTYPES[dtype], came.data, None, payload.data)
            wanted = np.empty(size, np.float32)
            _core.decode_slice(_core.DTYPES[dtype], payload.data, wanted.data)
            wanted += before
        value = Place(engine, 4 * size, offset=OFFSETS[index % 4], item_bytes=4).put(before.view(np.uint8))
        steps.append((_core.DTYPES[dtype], size, offset, value.address, _core.DTYPES["float32"]))
        values.append((value, wanted))
        payloads.append(payload)
        offset += payload.size
    buffer = engine.pinned(offset)
    np.asarray(memoryview(buffer))[:offset] = np.concatenate(payloads)
    outs = [
        (value, Place(engine, wanted.size * ITEM_BYTES[dtype], offset=OFFSETS[index % 4]), wanted, dtype)
        for index, (value, wanted) in enumerate(values)
        for dtype in SOURCES
    ]
    engine.finish_torch()
    engine.queue.decode_in(buffer, offset, steps)
    engine.queue.give_out(
        [(value.address, wanted.size, out.address, _core.DTYPES[dtype]) for value, out, wanted, dtype in outs]
    )
    engine.finish()
    for value, wanted in values:
        assert first_difference(value.get(), wanted.view(np.uint8), "float32") is None, f"values, seed {seed}"
    for _, out, wanted, dtype in outs:
        given = converted(wanted.view(np.uint8), "float32", dtype)
        assert first_difference(out.get(), given, dtype) is None, f"given out in {dtype}, seed {seed}"


def check_converting(engine: Engine, num_slices: int, *, most_elems: int) -> None:
    """What comes in one dtype is written in the one of its place, as the processor converts it."""
    seed = fresh_seed()
    random = np.random.default_rng(seed)
    steps, payloads, places = [], [], []
    offset = 0
    for index in range(num_slices):
        size, dtype, to = int(random.integers(0, most_elems + 1)), *CONVERSIONS[index % len(CONVERSIONS)]
        payload = converted(_numbers(random, size).view(np.uint8), "float32", dtype)
        place = Place(engine, ITEM_BYTES[to] * size, offset=OFFSETS[index % 4], item_bytes=ITEM_BYTES[to])
        steps.append((_core.DTYPES[dtype], size, offset, place.address, _core.DTYPES[to]))
        places.append((place, converted(payload, dtype, to), to))
        payloads.append(payload)
        offset += payload.size
    buffer = engine.pinned(offset)
    np.asarray(memoryview(buffer))[:offset] = np.concatenate(payloads)
    engine.finish_torch()
    engine.queue.decode_in(buffer, offset, steps)
    engine.finish()
    for place, wanted, to in places:
        assert first_difference(place.get(), wanted, to) is None, f"in {to}, seed {seed}"


def check_changes(engine: Engine, num_slices: int, *, most_elems: int) -> None:
    """Changes are the processor's, and so is what they lead to; where one is not finite that is the source."""
    seed = fresh_seed()
    random = np.random.default_rng(seed)
    changes, expected = [], []
    for index in range(num_slices):
        size, encoding = int(random.integers(0, most_elems + 1)), ("int8", "sign")[index % 2]
        source, base = _numbers(random, size), _numbers(random, size)
        if index % 3 == 0 and size:
            source[random.integers(0, size)] = random.choice([np.inf, np.nan, 3e38])
            base[0] = -3e38
        here, there = (
            Place(engine, 4 * size, offset=OFFSETS[index % 4], item_bytes=4).put(floats.view(np.uint8))
            for floats in (source, base)
        )
        payload = Place(engine, _core.encoded_bytes(_core.DTYPES[encoding], size), offset=OFFSETS[index % 3])
        expected.append((here, there, payload, *_told(encoding, source, base)))
        changes.append((_core.DTYPES[encoding], here.address, there.address, payload.address, size))
    engine.finish_torch()
    _core.queue_encode_changes(engine.queue, changes)
    engine.finish()
    for here, there, payload, told, led_to in expected:
        here.get()
        assert first_difference(there.get(), led_to.view(np.uint8), "float32") is None, f"bases, seed {seed}"
        scales = 4 * -(-led_to.size // 256)
        assert first_difference(payload.get()[:scales], told[:scales], "float32") is None, f"scales, seed {seed}"
        if np.isfinite(told[:scales].view(np.float32)).all():
            assert (payload.get() == told).all(), f"payloads, seed {seed}"


def _told(encoding: str, source: Floats, base: Floats) -> tuple[np.ndarray[Any, np.dtype[np.uint8]], Floats]:
    """The payload of the change, and what the base becomes."""
    number = _core.DTYPES[encoding]
    payload = np.empty(_core.encoded_bytes(number, source.size), np.uint8)
    with np.errstate(over="ignore"):
        change = source - base
        _core.encode_slice(number, change.data, None, payload.data)
        said = np.empty(source.size, np.float32)
        _core.decode_slice(number, payload.data, said.data)
        return payload, base + said if _says_all(number, payload) else source


def _says_all(number: int, payload: np.ndarray[Any, np.dtype[np.uint8]]) -> bool:
    return _core.say_changes(_core.SliceTable([(0, payload.nbytes, number)]), payload)


def converted(content: np.ndarray[Any, np.dtype[np.uint8]], dtype: str, to: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    out = np.empty(content.size // ITEM_BYTES[dtype] * ITEM_BYTES[to], np.uint8)
    _core.convert(content.data, _core.DTYPES[dtype], out.data, _core.DTYPES[to])
    return out


def _numbers(random: np.random.Generator, size: int) -> Floats:
    numbers: Floats = (random.standard_normal(size) * 10.0 ** random.uniform(-4, 2, size)).astype(np.float32)
    return numbers
