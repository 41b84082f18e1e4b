"""One list of error codes: the core's, `psstore.errors` and docs/wire.md say the same."""

from __future__ import annotations

import pytest

from psstore import _core, errors

INFORMATION = {"OK", "NOT_MODIFIED", "NOT_APPLIED", "NO_STATE"}
"""Statuses of a slice that are no exception."""

FAMILIES = {
    range(1, 20): errors.ProtocolError,
    range(20, 40): errors.UsageError,
    range(50, 70): errors.AvailabilityError,
    range(70, 90): errors.StorageError,
    range(90, 100): errors.InternalError,
}
"""Whose fault it is, by number; a client in another language may rely on it."""


def plain(name: str) -> str:
    return name.replace("_", "").lower().removesuffix("error")


def test_every_code_has_one_exception_class_and_no_class_is_without_a_code() -> None:
    assert set(errors.BY_CODE) == {code for name, code in _core.ERROR_CODES.items() if name not in INFORMATION}
    assert {name: _core.ERROR_CODES[name] for name in INFORMATION} == {
        "OK": errors.OK,
        "NOT_MODIFIED": errors.NOT_MODIFIED,
        "NOT_APPLIED": errors.NOT_APPLIED,
        "NO_STATE": errors.NO_STATE,
    }
    assert len(set(_core.ERROR_CODES.values())) == len(_core.ERROR_CODES)


@pytest.mark.parametrize("name", sorted(set(_core.ERROR_CODES) - INFORMATION))
def test_class_has_the_name_and_the_family_of_its_code(name: str) -> None:
    code = _core.ERROR_CODES[name]
    cls = errors.BY_CODE[code]
    assert cls.code == code
    assert plain(cls.__name__) == plain(name)
    (family,) = [family for codes, family in FAMILIES.items() if code in codes]
    assert issubclass(cls, family)


def test_the_core_raises_the_class_of_its_code() -> None:
    decoder = _core.FrameDecoder()
    decoder.feed(b"GET ")
    with pytest.raises(errors.BadMagic) as caught:
        decoder.next_frame()
    assert caught.value.code == _core.ERROR_CODES["BAD_MAGIC"]
    assert caught.value.message == str(caught.value)
    assert "'PSS1'" in caught.value.message


def test_constants_are_read_only() -> None:
    for numbers in (_core.OPS, _core.ERROR_CODES, _core.DTYPES, _core.RULES):
        with pytest.raises(TypeError):
            numbers["NEW"] = 1  # type: ignore[index]
