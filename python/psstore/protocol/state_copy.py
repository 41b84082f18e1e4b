"""Carries the state of one coordinator over into another one that was made alike: what it knows, as MessagePack.

Objects are written field by field, each once, and read into those that the other one has in the same places, so that
what is joined stays joined. What both have been given when they were made, signers and functions, stays theirs. Names
of classes are looked up in psstore alone; what comes has to be from a process of the same store.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any

import msgspec

from psstore.errors import BadBody, PsstoreError
from psstore.protocol.signing import Signer
from psstore.types import Consistency, Tensor, TensorSpec
from psstore.wire.messages import Message

Tree = Any
"""MessagePack of it: a scalar as it is, everything else an array that begins with one of the letters below."""

SEQUENCES: dict[type, str] = {list: "l", tuple: "t", set: "s", frozenset: "f", deque: "q"}
MAPPINGS: dict[type, str] = {dict: "d", OrderedDict: "o"}
KEPT = ["k"]
VALUES = (Message, Tensor, TensorSpec, Consistency)
"""What is MessagePack of its own."""


def dump(root: object) -> bytes:
    """All that hangs on it."""
    return msgspec.msgpack.encode(_Writer().tree(root))


def load(root: object, state: bytes) -> None:
    """Makes it what the dumped one was. Raises BadBody for what is no such state."""
    try:
        _Reader().value(msgspec.msgpack.decode(state, strict=False), into=root)
    except (msgspec.DecodeError, msgspec.ValidationError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise BadBody(f"the state of a coordinator does not decode: {error!r}") from None


class _Writer:
    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._alive: list[object] = []
        """Whose addresses are in use as long as they are written."""

    def tree(self, value: Any) -> Tree:
        if value is None or isinstance(value, (bool, int, float, str, bytes)):
            return value
        if isinstance(value, Signer) or callable(value):
            return KEPT
        if isinstance(value, Enum):
            return ["e", _name(type(value)), value.name]
        if isinstance(value, PsstoreError):
            return ["x", _name(type(value)), value.message, self.tree(value.details)]
        if isinstance(value, VALUES):
            return self._once(value, _value)
        if isinstance(value, bytearray):
            return ["b", bytes(value)]
        if isinstance(value, MappingProxyType):
            return ["m", self.tree(dict(value))]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return ["n", _name(type(value)), [self.tree(one) for one in value]]
        if type(value) in SEQUENCES:
            return [SEQUENCES[type(value)], [self.tree(one) for one in value]]
        if isinstance(value, dict):
            letter = MAPPINGS.get(type(value), "d")
            return [letter, [[self.tree(key), self.tree(one)] for key, one in value.items()]]
        return self._once(value, self._object)

    def _once(self, value: Any, write: Callable[[Any, int], Tree]) -> Tree:
        if id(value) in self._numbers:
            return ["r", self._numbers[id(value)]]
        number = self._numbers[id(value)] = len(self._numbers)
        self._alive.append(value)
        return write(value, number)

    def _object(self, value: Any, number: int) -> Tree:
        named = {name: self.tree(getattr(value, name)) for name in _fields(value)}
        return ["i", number, _name(type(value)), named]


class _Reader:
    def __init__(self) -> None:
        self._objects: dict[int, Any] = {}

    def value(self, tree: Tree, *, into: Any = None) -> Any:
        """`into`: what is in its place already."""
        if not isinstance(tree, list):
            return tree
        letter, *rest = tree
        match letter:
            case "k":
                return into
            case "e":
                return _class(rest[0])[rest[1]]
            case "x":
                return _class(rest[0])(rest[1], **self.value(rest[2]))
            case "v":
                self._objects[rest[0]] = made = msgspec.msgpack.decode(rest[2], type=_class(rest[1]))
                return made
            case "b":
                return bytearray(rest[0])
            case "m":
                return MappingProxyType(self.value(rest[0]))
            case "n":
                return _class(rest[0])(*[self.value(one) for one in rest[1]])
            case "r":
                return self._objects[rest[0]]
            case "i":
                return self._object(*rest, into=into)
        if letter in MAPPINGS.values():
            return self._mapping(rest[0], into if isinstance(into, dict) else _kind(MAPPINGS, letter)())
        return _kind(SEQUENCES, letter)(self.value(one) for one in rest[0])

    def _mapping(self, pairs: Tree, into: dict[Any, Any]) -> dict[Any, Any]:
        into.clear()
        for key, one in pairs:
            into[self.value(key)] = self.value(one)
        return into

    def _object(self, number: int, name: str, named: Tree, *, into: Any) -> Any:
        kind = _class(name)
        if issubclass(kind, msgspec.Struct):
            self._objects[number] = made = kind(**{key: self.value(one) for key, one in named.items()})
            return made
        made = into if type(into) is kind else object.__new__(kind)
        self._objects[number] = made
        for key, one in named.items():
            object.__setattr__(made, key, self.value(one, into=getattr(made, key, None)))
        return made


def _value(value: Any, number: int) -> Tree:
    return ["v", number, _name(type(value)), msgspec.msgpack.encode(value)]


def _fields(value: Any) -> list[str]:
    if isinstance(value, msgspec.Struct):
        return list(value.__struct_fields__)
    if is_dataclass(value):
        return [field.name for field in fields(value)]
    return list(value.__dict__)


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _class(name: str) -> Any:
    module, _, qualname = name.partition(":")
    if not module.startswith("psstore."):
        raise LookupError(f"{name} is no class of psstore")
    found = getattr(sys.modules[module], qualname)
    if not isinstance(found, type):
        raise LookupError(f"{name} is no class")
    return found


def _kind(letters: dict[type, str], letter: str) -> Any:
    return {one: kind for kind, one in letters.items()}[letter]
