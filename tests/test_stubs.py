"""_core.pyi says exactly what the compiled extension has: every name, both ways, and how it is called.

pybind11 writes a signature into the first line of each docstring; its names, kinds and defaults are held
against the stub's. Types are not compared: pybind11 spells them its own way.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from psstore import _core

STUB = Path(__file__).resolve().parent.parent / "python" / "psstore" / "_core.pyi"

IMPLICIT = set(dir(object)) | {"__module__", "__dict__", "__weakref__", "__annotations__"}
"""What every Python class has without being asked."""

COMPARED_DUNDERS = {"__init__", "__len__", "__bytes__"}
"""Not __buffer__: before Python 3.12 a class with the buffer protocol has no attribute that says so."""

Functions = dict[str, ast.FunctionDef]


class Parameter(NamedTuple):
    name: str
    kind: str
    has_default: bool


def parameters(function: ast.FunctionDef) -> list[Parameter]:
    """Of a method without `self`. Positional-only or not is left out: pybind11 can't always say it."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    without_default = len(positional) - len(arguments.defaults)
    found = [Parameter(arg.arg, "positional", i >= without_default) for i, arg in enumerate(positional)]
    found += [
        Parameter(arg.arg, "keyword", default is not None)
        for arg, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    return [parameter for parameter in found if parameter.name != "self"]


def compiled_parameters(function: object) -> list[Parameter]:
    """From the signature that pybind11 writes into the docstring."""
    signature = (inspect.getdoc(function) or "").partition("\n")[0]
    defaults_named = re.sub(r"=\s*<[^>]*>", "= ...", signature)  # a repr that is no expression
    (definition,) = ast.parse(f"def {defaults_named}: ...").body
    assert isinstance(definition, ast.FunctionDef)
    return parameters(definition)


# ---- the two sides ----------------------------------------------------------------------------------


def is_public(name: str) -> bool:
    return not name.startswith("_")


def stub_body() -> list[ast.stmt]:
    return ast.parse(STUB.read_text()).body


def stub_classes() -> dict[str, ast.ClassDef]:
    return {node.name: node for node in stub_body() if isinstance(node, ast.ClassDef) and is_public(node.name)}


def stub_functions(body: list[ast.stmt]) -> Functions:
    return {node.name: node for node in body if isinstance(node, ast.FunctionDef) and not is_property(node)}


def stub_values(body: list[ast.stmt]) -> set[str]:
    """Constants of the module, or attributes and properties of a class."""
    annotated = {
        node.target.id for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    return annotated | {node.name for node in body if isinstance(node, ast.FunctionDef) and is_property(node)}


def is_property(function: ast.FunctionDef) -> bool:
    return any(isinstance(decorator, ast.Name) and decorator.id == "property" for decorator in function.decorator_list)


def compiled_members(cls: type) -> set[str]:
    return {name for name in vars(cls) if is_public(name) or name in COMPARED_DUNDERS} - IMPLICIT | (
        {"__init__"} if is_constructible(cls) else set()
    )


def is_constructible(cls: type) -> bool:
    """pybind11 gives a class that Python may not construct an __init__ without a signature."""
    return (vars(cls)["__init__"].__doc__ or "").startswith("__init__(") if "__init__" in vars(cls) else False


def stub_callables() -> Iterator[tuple[str, object, ast.FunctionDef]]:
    """(dotted name, compiled object, stub) of every function and method that both sides have."""
    for name, function in stub_functions(stub_body()).items():
        yield name, getattr(_core, name), function
    for class_name, cls in stub_classes().items():
        for name, method in stub_functions(cls.body).items():
            if is_public(name) or name == "__init__":
                yield f"{class_name}.{name}", getattr(getattr(_core, class_name), name), method


# ---- tests ------------------------------------------------------------------------------------------


def test_module_and_stub_have_the_same_names() -> None:
    body = stub_body()
    declared = set(stub_classes()) | set(stub_functions(body)) | stub_values(body)
    assert {name for name in vars(_core) if is_public(name)} == declared


@pytest.mark.parametrize("name", sorted(stub_classes()))
def test_class_and_stub_have_the_same_members(name: str) -> None:
    body = stub_classes()[name].body
    declared = set(stub_functions(body)) | stub_values(body)
    assert compiled_members(getattr(_core, name)) == declared - {"__buffer__"}


@pytest.mark.parametrize("name", sorted(stub_classes()))
def test_class_values_are_not_methods(name: str) -> None:
    cls = getattr(_core, name)
    for attribute in stub_values(stub_classes()[name].body):
        assert isinstance(vars(cls)[attribute], property), attribute


def test_callables_take_what_the_stub_says() -> None:
    wrong = []
    for name, compiled, stub in stub_callables():
        have, want = compiled_parameters(compiled), parameters(stub)
        if have != want:
            wrong.append(f"{name}:\n  compiled {have}\n  stub     {want}")
    assert not wrong, "\n".join(wrong)
