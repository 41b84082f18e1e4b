"""What can happen to a checkpoint's files: one damage at a time, drawn with a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path

Damage = Callable[[random.Random, Path, Path], set[str]]
"""Damages a folder, given that of another run; returns the names of the files one of which must be blamed."""


def flip_bit(rng: random.Random, folder: Path, _: Path) -> set[str]:
    file = _any(rng, folder)
    content = bytearray(file.read_bytes())
    bit = rng.randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)
    return {file.name}


def flip_bit_in_front(rng: random.Random, folder: Path, _: Path) -> set[str]:
    """Where lengths and names are."""
    file = _any(rng, folder)
    content = bytearray(file.read_bytes())
    bit = rng.randrange(8 * min(len(content), 200))
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)
    return {file.name}


def truncate(rng: random.Random, folder: Path, _: Path) -> set[str]:
    file = _any(rng, folder)
    content = file.read_bytes()
    file.write_bytes(content[: rng.choice([0, 1, 7, 8, len(content) - 1, rng.randrange(len(content))])])
    return {file.name}


def extend(rng: random.Random, folder: Path, _: Path) -> set[str]:
    file = _any(rng, folder)
    file.write_bytes(file.read_bytes() + rng.randbytes(rng.randint(1, 100)))
    return {file.name}


def lose(rng: random.Random, folder: Path, _: Path) -> set[str]:
    file = _any(rng, folder)
    file.unlink()
    return {file.name}


def swap(rng: random.Random, folder: Path, _: Path) -> set[str]:
    first, second = rng.sample(sorted(folder.iterdir()), 2)
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)
    return {first.name, second.name}


def take_from_another_run(rng: random.Random, folder: Path, other: Path) -> set[str]:
    """Of one length and one layout, with other values."""
    file = _any(rng, folder)
    file.write_bytes((other / file.name).read_bytes())
    if file.name == "manifest.json":  # right in itself: the files are another run's then
        return {one.name for one in folder.iterdir()} - {file.name}
    return {file.name}


def zero_a_block(rng: random.Random, folder: Path, _: Path) -> set[str]:
    """As a disk does that lost a sector."""
    file = _any(rng, folder)
    content = bytearray(file.read_bytes())
    while True:
        begin = rng.randrange(len(content))
        block = content[begin : begin + 512]
        if any(block):
            content[begin : begin + 512] = bytes(len(block))
            file.write_bytes(content)
            return {file.name}


def move_a_block(rng: random.Random, folder: Path, _: Path) -> set[str]:
    """Bytes that are right, in the wrong place."""
    file = _any(rng, folder)
    content = bytearray(file.read_bytes())
    size = min(64, len(content) // 4)
    while True:
        source, target = rng.randrange(len(content) - size), rng.randrange(len(content) - size)
        if content[source : source + size] != content[target : target + size]:
            content[target : target + size] = content[source : source + size]
            file.write_bytes(content)
            return {file.name}


DAMAGES: Mapping[str, Damage] = {
    damage.__name__: damage
    for damage in (
        flip_bit,
        flip_bit_in_front,
        truncate,
        extend,
        lose,
        swap,
        take_from_another_run,
        zero_a_block,
        move_a_block,
    )
}


def _any(rng: random.Random, folder: Path) -> Path:
    return rng.choice(sorted(folder.iterdir()))
