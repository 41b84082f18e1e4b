"""How pulls are typed: a new numpy array, or the array that was given as `out`; None only where `if_newer_than` is
given. And keys: names, or ids of a table. What they do is in operations.py.

Protocols, since a method that is made from an operation keeps that one's single signature."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, TypeVar, overload

from psstore.codec.codecs import Codecs

if TYPE_CHECKING:
    import numpy as np
    from typing_extensions import Unpack

    from psstore.client.tables import Ids

    NumpyArray = np.ndarray[Any, np.dtype[Any]]

OutT = TypeVar("OutT")


class PullOptions(TypedDict, total=False):
    """What a pull may be told without its result being of another type."""

    dtype: str | None
    codec: Codecs | None
    wait_s: float | None
    consistent: bool | None


class Keys(Protocol):
    """`Store.keys`."""

    @overload
    def __call__(self, table: None = None, *, wait_s: float | None = None) -> list[str]: ...
    @overload
    def __call__(self, table: str, *, wait_s: float | None = None) -> Ids: ...


class AwaitedKeys(Protocol):
    """`AsyncStore.keys`."""

    @overload
    def __call__(self, table: None = None, *, wait_s: float | None = None) -> Coroutine[Any, Any, list[str]]: ...
    @overload
    def __call__(self, table: str, *, wait_s: float | None = None) -> Coroutine[Any, Any, Ids]: ...


class PullsOne(Protocol):
    """`Store.pull`."""

    @overload
    def __call__(
        self, name: str, *, out: None = None, if_newer_than: None = None, **options: Unpack[PullOptions]
    ) -> NumpyArray: ...
    @overload
    def __call__(
        self, name: str, *, out: None = None, if_newer_than: int, **options: Unpack[PullOptions]
    ) -> NumpyArray | None: ...
    @overload
    def __call__(self, name: str, *, out: OutT, if_newer_than: None = None, **options: Unpack[PullOptions]) -> OutT: ...
    @overload
    def __call__(self, name: str, *, out: OutT, if_newer_than: int, **options: Unpack[PullOptions]) -> OutT | None: ...


class PullsMany(Protocol):
    """`Store.pull_many`."""

    @overload
    def __call__(
        self, names: Sequence[str], *, out: None = None, if_newer_than: None = None, **options: Unpack[PullOptions]
    ) -> list[NumpyArray]: ...
    @overload
    def __call__(
        self, names: Sequence[str], *, out: None = None, if_newer_than: int, **options: Unpack[PullOptions]
    ) -> list[NumpyArray | None]: ...
    @overload
    def __call__(
        self, names: Sequence[str], *, out: Sequence[OutT], if_newer_than: None = None, **options: Unpack[PullOptions]
    ) -> list[OutT]: ...
    @overload
    def __call__(
        self, names: Sequence[str], *, out: Sequence[OutT], if_newer_than: int, **options: Unpack[PullOptions]
    ) -> list[OutT | None]: ...


class AwaitedPullsOne(Protocol):
    """`AsyncStore.pull`."""

    @overload
    def __call__(
        self, name: str, *, out: None = None, if_newer_than: None = None, **options: Unpack[PullOptions]
    ) -> Coroutine[Any, Any, NumpyArray]: ...
    @overload
    def __call__(
        self, name: str, *, out: None = None, if_newer_than: int, **options: Unpack[PullOptions]
    ) -> Coroutine[Any, Any, NumpyArray | None]: ...
    @overload
    def __call__(
        self, name: str, *, out: OutT, if_newer_than: None = None, **options: Unpack[PullOptions]
    ) -> Coroutine[Any, Any, OutT]: ...
    @overload
    def __call__(
        self, name: str, *, out: OutT, if_newer_than: int, **options: Unpack[PullOptions]
    ) -> Coroutine[Any, Any, OutT | None]: ...


class AwaitedPullsMany(Protocol):
    """`AsyncStore.pull_many`."""

    @overload
    def __call__(
        self, names: Sequence[str], *, out: None = None, if_newer_than: None = None, **options: Unpack[PullOptions]
    ) -> Coroutine[Any, Any, list[NumpyArray]]: ...
    @overload
    def __call__(
        self, names: Sequence[str], *, out: None = None, if_newer_than: int, **options: Unpack[PullOptions]
    ) -> Coroutine[Any, Any, list[NumpyArray | None]]: ...
    @overload
    def __call__(
        self, names: Sequence[str], *, out: Sequence[OutT], if_newer_than: None = None, **options: Unpack[PullOptions]
    ) -> Coroutine[Any, Any, list[OutT]]: ...
    @overload
    def __call__(
        self, names: Sequence[str], *, out: Sequence[OutT], if_newer_than: int, **options: Unpack[PullOptions]
    ) -> Coroutine[Any, Any, list[OutT | None]]: ...
