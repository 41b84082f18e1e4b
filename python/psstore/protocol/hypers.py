"""Which hyper-parameters the next decision names, for each parameter group. Part of the coordinator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from psstore import _core
from psstore.errors import BadArgument
from psstore.protocol.schema_registry import Group
from psstore.types import complete_hyper, rule_number


class Chosen(NamedTuple):
    """All hyper-parameters of one group, and the rule that they are for."""

    rule: str
    values: dict[str, float]


class Hypers:
    """What a commit does not name keeps its last value, or the rule's default."""

    def __init__(self, groups: Callable[[], Mapping[int, Group]]) -> None:
        """`groups`: those that have tensors."""
        self._groups = groups
        self._last: dict[int, Chosen] = {}
        self._decided: tuple[Mapping[int, Group], dict[int, dict[str, float]]] = {}, {}
        """The groups that there were at the last decision, and what that said of them."""

    @property
    def last(self) -> Mapping[int, Chosen]:
        """As the last decision named them, by group."""
        return self._last

    def restore(self, last: Mapping[int, Chosen]) -> None:
        """Goes on from these."""
        self._last = dict(last)

    def complete(self, given: Mapping[int, Mapping[str, float]]) -> dict[int, Chosen]:
        """What the groups in `given` would have next. Raises BadArgument, BadHyper: everything that a shard would
        refuse is refused here, while the round can still be committed with something better."""
        groups = self._groups()
        chosen = {}
        for group, hyper in given.items():
            if group not in groups:
                raise BadArgument(f"commit names parameter group {group}, and no tensor belongs to it")
            (rule, dtype), last = groups[group], self._last.get(group)
            if last is not None and last.rule == rule and hyper.items() <= last.values.items():
                chosen[group] = last  # as most commits have it, all of one round at the latest
                continue
            values = complete_hyper(rule, {**self._kept(group, rule), **hyper})
            _core.check_hyper(rule_number(rule), values, _core.DTYPES[dtype])
            chosen[group] = Chosen(rule, values)
        return chosen

    def decide(self, chosen: Mapping[int, Chosen]) -> dict[int, dict[str, float]]:
        """The hyper-parameters of every group, for a decision. The caller must not change them; they are the last ones
        from now on.

        `chosen`: what `complete` returned. If a group has got another rule since, what was chosen for it is void.
        """
        groups = self._groups()
        if groups == self._decided[0] and chosen.items() <= self._last.items():
            return self._decided[1]
        self._last = {
            group: self._next(rule, chosen.get(group), self._last.get(group)) for group, (rule, _) in groups.items()
        }
        self._decided = dict(groups), {group: last.values for group, last in self._last.items()}
        return self._decided[1]

    def _next(self, rule: str, chosen: Chosen | None, last: Chosen | None) -> Chosen:
        if chosen is not None and chosen.rule == rule:
            return chosen
        return last if last is not None and last.rule == rule else Chosen(rule, complete_hyper(rule, {}))

    def _kept(self, group: int, rule: str) -> Mapping[str, float]:
        last = self._last.get(group)
        return last.values if last is not None and last.rule == rule else {}
