"""LearnerProcesses: the processes that are one learner together, by DistributedDataParallel or by fully_shard.

To the store they are one worker, with one connection: the first process, the leader, has it, and asks for all. What the
others have of a contribution it gathers, and what comes back it hands out. So learners of one process, of DDP and of
fully_shard train together in whole tensors, a quorum counts learners, and no other process needs a way to the store.

They talk by a gloo group of their own, in order: its collectives may be under way on a thread beside those of the
model's. Whatever goes wrong in one is raised in all, so that none waits for what another one does not do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from psstore import errors
from psstore.errors import PsstoreError, UsageError, WorkerLost
from psstore.torch.parameters import STORED_AS, Trained
from psstore.torch.parts import Box, box_of, is_dtensor, is_first_of_copies
from psstore.types import TensorSpec

T = TypeVar("T")

PATIENCE_S = 600.0
"""How long a process waits for the others to come as far as it has, as torch has it for NCCL's groups. One that is gone
is noticed at once, but for the first time."""

BEAT_S = 10.0
"""How often the leader says that it waits for the store, which may take longer than that."""


class LearnerProcesses:
    """One process of a learner's; a learner of one process is its own leader."""

    def __init__(self, group: Any = None) -> None:
        """`group`: of gloo, these processes' alone; None: there is one."""
        self._group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.place = 0 if group is None else dist.get_rank(group)
        """Among these processes."""

    @classmethod
    def of(cls, model: nn.Module) -> LearnerProcesses:
        """The processes that the model is trained by. Blocks until all are here. Raises WorkerLost, UsageError."""
        members = _members(model)
        if len(members) < 2:
            return cls()
        with _Lost():
            patience = timedelta(seconds=PATIENCE_S)
            group = dist.new_group(members, timeout=patience, backend="gloo", use_local_synchronization=True)
        return cls(group)

    @property
    def leads(self) -> bool:
        """Whether this process has the store."""
        return self.place == 0

    # ---- what is said ----

    def ask(self, question: Callable[[], T]) -> T:
        """The leader's answer, plain data, on all; so is its error. Only the leader calls `question`."""
        if self.size == 1:
            return question()
        if not self.leads:
            while (told := self._hear()) is None:
                pass
            return cast(T, _opened(told))
        with ThreadPoolExecutor(1, "psstore asks") as thread:
            asked = thread.submit(question)
            while not wait([asked], BEAT_S).done:
                self._say(None)
        error = asked.exception()
        self._say({"value": asked.result()} if error is None else _told(error))
        return asked.result()

    def together(self, work: Callable[[], T]) -> T:
        """What `work` has come to here, if it went well on all. Else the first error is raised on all."""
        if self.size == 1:
            return work()
        kept: list[T] = []
        for told in self._exchange(_outcome(lambda: kept.append(work()))):
            _opened(told)
        return kept[0]

    def agree(self, settings: Mapping[str, object]) -> None:
        """Returns if all have the same. Raises UsageError that names what differs, on all."""
        if self.size == 1:
            return
        first, *others = self._exchange(dict(settings))
        for place, other in enumerate(others, 1):
            differing = [
                f"{name}={first.get(name)} on its first process and {other.get(name)} on its process {place}"
                for name in dict.fromkeys([*first, *other])
                if first.get(name) != other.get(name)
            ]
            if differing:
                raise UsageError(f"the processes of one learner have to be alike, and are not: {'; '.join(differing)}")

    def total(self, number: float) -> float:
        """The sum over all processes."""
        return sum(self._exchange(number)) if self.size > 1 else number

    # ---- what is handed over ----

    def wholes(self, trained: Sequence[Trained]) -> list[SharedTensor]:
        """What the parameters are to the store, whose names are the whole tensors'. Every process calls it."""
        here: list[Any] = [
            [box_of(one.owner), one.dtensor is None or is_first_of_copies(one.dtensor)] for one in trained
        ]
        told = self._exchange(here) if self.size > 1 else [here]
        return [
            SharedTensor(
                one.name,
                getattr(torch, STORED_AS[one.parameter.dtype]),
                [Box(*map(tuple, each[number][0])) for each in told],
                {place for place, each in enumerate(told) if each[number][1]},
            )
            for number, one in enumerate(trained)
        ]

    def gather(self, whole: Sequence[SharedTensor], parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors, whole, on the leader; nothing on the others. `parts`: those that are here, in main memory."""
        if self.size == 1:
            return list(parts)
        found = []
        with _Lost():
            for one, part in zip(whole, parts, strict=True):
                if self.leads:
                    found.append(self._assemble(one, part))
                elif one.counts(self.place):
                    dist.send(part.contiguous(), self._rank(0), self._group)
        return found

    def hand_out(self, whole: Sequence[SharedTensor], values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Each process's parts of the tensors, of which the leader has the `values`."""
        if self.size == 1:
            return list(values)
        with _Lost():
            if self.leads:
                return [self._deal(one, value) for one, value in zip(whole, values, strict=True)]
            return [self._take(one) for one in whole]

    # ---- how ----

    def _assemble(self, one: SharedTensor, part: torch.Tensor) -> torch.Tensor:
        if one.boxes[0].is_whole:
            return part
        value = torch.empty(one.shape, dtype=one.dtype, device="cpu")
        for place, box in enumerate(one.boxes):
            if one.counts(place):
                value[box.of(one.all)] = part if place == 0 else self._receive(one.empty(place), place)
        return value

    def _deal(self, one: SharedTensor, value: torch.Tensor) -> torch.Tensor:
        if one.is_everywhere:
            dist.broadcast(value, self._rank(0), self._group)
            return value
        for place, box in enumerate(one.boxes[1:], 1):
            if box.num_elems:
                dist.send(value[box.of(one.all)].contiguous(), self._rank(place), self._group)
        return value if one.boxes[0].is_whole else value[one.boxes[0].of(one.all)].contiguous()

    def _take(self, one: SharedTensor) -> torch.Tensor:
        out = one.empty(self.place)
        if one.is_everywhere:
            dist.broadcast(out, self._rank(0), self._group)
            return out
        return self._receive(out, 0)

    def _receive(self, out: torch.Tensor, place: int) -> torch.Tensor:
        if out.numel():
            dist.recv(out, self._rank(place), self._group)
        return out

    def _rank(self, place: int) -> int:
        return dist.get_global_rank(self._group, place)

    def _say(self, told: object) -> None:
        self._broadcast(_encoded(told))

    def _hear(self) -> Any:
        return _decoded(self._broadcast(None))

    def _broadcast(self, text: torch.Tensor | None) -> torch.Tensor:
        size = torch.tensor([0 if text is None else text.numel()], device="cpu")
        with _Lost():
            dist.broadcast(size, self._rank(0), self._group)
            text = torch.empty(int(size), dtype=torch.uint8, device="cpu") if text is None else text
            dist.broadcast(text, self._rank(0), self._group)
        return text

    def _exchange(self, told: object) -> list[Any]:
        """What each process has told, in the order of their places."""
        text = _encoded(told)
        sizes = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(self.size)]
        with _Lost():
            dist.all_gather(sizes, torch.tensor([text.numel()], device="cpu"), self._group)
            longest = int(max(sizes))
            texts = [torch.zeros(longest, dtype=torch.uint8, device="cpu") for _ in sizes]
            dist.all_gather(texts, nn.functional.pad(text, (0, longest - text.numel())), self._group)
        return [_decoded(one[: int(size)]) for one, size in zip(texts, sizes, strict=True)]


class SharedTensor:
    """A parameter as the store has it, and which part of it each process of the learner has."""

    def __init__(self, name: str, dtype: torch.dtype, boxes: Sequence[Box], counting: set[int]) -> None:
        """`counting`: places of processes whose copy counts, where several have the same part."""
        self.name = name
        self.dtype = dtype
        self.boxes = boxes
        self._counting = counting

    @property
    def shape(self) -> tuple[int, ...]:
        return self.boxes[0].shape

    @property
    def all(self) -> Box:
        return Box(self.shape, (0,) * len(self.shape), self.shape)

    @property
    def is_everywhere(self) -> bool:
        """Whether each process has the whole of it."""
        return all(box.is_whole for box in self.boxes)

    @property
    def num_bytes(self) -> int:
        return self.all.num_elems * self.dtype.itemsize

    def spec(self, rule: str, *, group: int) -> TensorSpec:
        """Spec of the tensor that keeps it in the store."""
        dtype = str(self.dtype).removeprefix("torch.")
        return TensorSpec(name=self.name, shape=self.shape, dtype=dtype, rule=rule, group=group, zeros=False)

    def counts(self, place: int) -> bool:
        """Whether that process's part is handed to the leader: of a tensor that all have whole, the leader's is."""
        is_copy = place > 0 and self.boxes[0].is_whole
        return place in self._counting and self.boxes[place].num_elems > 0 and not is_copy

    def empty(self, place: int) -> torch.Tensor:
        return torch.empty(self.boxes[place].size, dtype=self.dtype, device="cpu")


class _Lost:
    """Within it, what torch says of a process that is gone is said in psstore's words."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError):
            raise WorkerLost(
                "a process of this learner is gone, or does something else than the others: each makes a DiLoCo of its"
                f" part of the model, and takes the same steps. torch says: {error}"
            ) from error


def _members(model: nn.Module) -> list[int]:
    """Ranks, in torch's default group, of the processes that the model is trained by; none: this one."""
    if isinstance(model, DistributedDataParallel):
        return sorted(dist.get_process_group_ranks(model.process_group))
    meshes: list[Any] = [one.device_mesh for one in model.parameters() if is_dtensor(type(one))]  # type: ignore[attr-defined]
    found = {tuple(mesh.mesh.flatten().tolist()) for mesh in meshes}
    if len(found) > 1:
        raise UsageError(f"parameters are DTensors of several meshes, {sorted(found)}; a learner's are of one")
    return sorted(found.pop()) if found else []


def _encoded(told: object) -> torch.Tensor:
    """As bytes, which is what travels."""
    return torch.frombuffer(bytearray(json.dumps(told).encode()), dtype=torch.uint8)


def _decoded(text: torch.Tensor) -> Any:
    return json.loads(bytes(text.tolist()))


def _outcome(work: Callable[[], object]) -> dict[str, object]:
    """What `work` has come to, as data."""
    try:
        return {"value": work()}
    except Exception as error:
        return _told(error)


def _told(error: BaseException) -> dict[str, object]:
    if isinstance(error, PsstoreError):
        return {"error": type(error).__name__, "message": error.message}
    return {"error": WorkerLost.__name__, "message": f"a process of this learner failed by {error!r}"}


def _opened(outcome: Any) -> object:
    if "error" in outcome:
        raise getattr(errors, outcome["error"])(outcome["message"])
    return outcome["value"]
