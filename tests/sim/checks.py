"""What must hold after a run, whatever went wrong in it. Each check raises AssertionError with what it found."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from statistics import median

import numpy as np
import pytest

from psstore.errors import InternalError, ProtocolError
from psstore.protocol.grace import KEPT, SLACK
from psstore.protocol.membership import Liveness
from psstore.types import ADAPTIVE, Tensor
from psstore.wire.ranges import Ranges, contains

from . import model
from .actors import BARRIER_WAIT_S, GIVEN, NUM_WRITES, PROMPT_S, Writer
from .archive import Archived
from .history import History, Writes
from .plan import Plan
from .row_checks import rows_are_what_the_decisions_say
from .scenario import Scenario

SLACK_S = 1e-6
WAYS = 10
"""Of a call's frames before the one whose answer it waits for, such as those to ask what shards say of a round."""

MOST_WORTH = SLACK * sum(1.0 / number for number in range(1, KEPT + 1))
"""How many times its share of the round a grace that is to pay may wait for one more, at most: for a worker that has
come, one time after the other, just so late that it was worth it to wait a little longer."""

LATE_S = 0.1
"""What a commit takes beside its way, in shards that are busy."""

NEVER = (
    *(cls.__name__ for base in (ProtocolError, InternalError) for cls in (base, *base.__subclasses__())),
    "NotInitialised",
    "RoundOutOfOrder",
    "TensorExists",
    "UnknownTensor",
)
"""Errors that no actor may end with: each would be ours."""


def everybody_comes_to_an_end(plan: Plan, history: History) -> None:
    assert not history.unfinished, f"still waiting: {history.unfinished}"
    assert history.outcomes["auditor"] == "finished", f"the auditor met {history.outcomes['auditor']}"
    for wait in history.waits:
        if wait.ended is not None:
            waited_s = wait.ended - wait.began - history.stood_still_s(wait.began, wait.ended)
            assert waited_s <= wait.limit_s + WAYS * plan.latency_s, f"{wait.who} waited too long: {wait}"


def decisions_are_told_promptly(plan: Plan, history: History) -> None:
    """In lockstep whoever committed waits for the decision and no longer, however often its connection breaks. Time in
    which the coordinator may tell nobody anything does not count."""
    if not plan.consistency.lockstep:
        return
    for cell, committed in history.commits.items():
        rank, _, round = cell
        assert committed.decision <= len(history.decisions), f"{cell} was told of a decision that nobody made"
        early = history.decisions[committed.decision - 1].early
        if early and model.manner_of(plan, rank=rank, round=round) != "early":
            continue  # it waited for the pushes of the others
        if plan.partition is None or rank != plan.partition[0]:
            asked_at, answered_at = history.asked_at[cell], history.answered_at[cell]
            since = max(asked_at, history.decided_at[committed.decision])
            waited_s = answered_at - since - history.untold_s(since, answered_at)
            assert waited_s <= PROMPT_S, f"{cell} heard of decision {committed.decision} {waited_s:.1f} s after it"


def errors_are_the_right_ones(plan: Plan, history: History) -> None:
    for who, outcome in history.outcomes.items():
        assert not outcome.startswith(NEVER), f"{who} met {outcome}"
        assert not (plan.drops_lost and outcome.startswith("WorkerLost")), (
            f"the lost are done without, and {who} met it"
        )
        if plan.consistency.mode == "sync" and plan.partition is None and not plan.mute_heartbeats:
            told = not outcome.startswith("DeadlineExceeded") or "(has not joined)" in outcome
            told |= plan.is_elastic and "to end the open round, which it would have come after" in outcome
            told |= bool(plan.silences) and "did not answer within" in outcome  # a shard, one time and again
            assert told, f"{who} was not told whom it waited for: {outcome}"
        looks_dead = plan.drops_lost and plan.mute_heartbeats  # who computes for seconds
        if not plan.disturbed and plan.partition is None and history.torn is None and not looks_dead:
            assert outcome == "finished", f"nobody died, and yet {who} met {outcome}"


def losses_are_told_in_time(plan: Plan, history: History) -> None:
    """Not before another worker had the time to take the lost one's place; then at once."""
    soonest_s = Liveness().detached_s + plan.rejoin_s
    latest_s = Liveness().silence_s + plan.rejoin_s + PROMPT_S
    for loss in history.losses:
        if loss.waited_s is None:
            patience = f"workers have {plan.rejoin_s:g} s to come back"
            assert loss.last_seen_s >= plan.rejoin_s - SLACK_S, f"{loss}, and {patience}"
        elif loss.last_seen_s - loss.waited_s < soonest_s and not plan.mute_heartbeats:
            # It waited already when the other was given up.
            assert loss.last_seen_s <= latest_s, f"{loss} was not told when it was known"


def graces_are_kept(plan: Plan, history: History) -> None:
    """A quorum waits for those who are there, so long and no longer, and not once it has everybody. Held against runs
    in which it is known from outside who is there, and where nothing that was sent comes late."""
    if plan.mode != "backup" or plan.is_restless:
        return
    terms, latest_s = plan.consistency, LATE_S + 40 * plan.latency_s
    for decision in history.decisions:
        took_part = history.refused_in(decision.number)
        took_part |= {(member.rank, member.incarnation, member.round) for member in decision.members}
        asked = sorted(history.asked_at[cell] for cell in took_part)
        decided, quorum_at = history.decided_at[decision.number], asked[min(terms.quorum, len(asked)) - 1]
        missing = history.training_at(decided) - {rank for rank, _, _ in took_part}
        if plan.grace_s == ADAPTIVE:
            begun = history.decided_at.get(decision.number - 1, 0.0)
            for count in range(terms.quorum, len(asked) + 1):
                since, until = asked[count - 1], asked[count] if count < len(asked) else decided
                most_s = MOST_WORTH * max(0.0, since - begun + latest_s) / count + latest_s
                said = f"decision {decision.number} waited {until - since:.3f} s for one more than {count}"
                assert plan.break_chance or until - since <= most_s, f"{said}, and may {most_s:.3f} s"
            continue
        if missing:
            said = f"decision {decision.number} is without {missing}, {decided - quorum_at:.3f} s after its quorum"
            assert decided >= quorum_at + plan.grace_s - SLACK_S, said
        elif not plan.break_chance and len(asked) == plan.num_workers:
            waited_s = decided - asked[-1]
            assert waited_s <= latest_s, f"decision {decision.number} has everybody, and waited {waited_s:.3f} s"
        if not plan.break_chance:
            waited_s = decided - quorum_at
            assert waited_s <= plan.grace_s + latest_s, f"decision {decision.number} waited {waited_s:.3f} s"


def torn_rounds_are_told_to_everybody(plan: Plan, history: History) -> None:
    """Whoever trains on hears of it, and of nothing else; and there was reason to."""
    outcomes = {who: outcome for who, outcome in history.outcomes.items() if who.startswith("worker")}
    if history.torn is None:
        assert not any(outcome.startswith("TornRound") for outcome in outcomes.values()), f"not torn: {outcomes}"
        return
    content = {f"worker {rank}." for rank, _ in plan.leaves}
    for who, outcome in outcomes.items():
        if outcome.startswith("MissingContribution") and history.lied:
            continue
        left = outcome == "finished" and who.startswith(tuple(content))
        if plan.is_elastic and plan.partition is not None:  # the others went on without the one that was cut off
            is_replaced = outcome.startswith(("StaleIncarnation", "NotAWorker", "DeadlineExceeded"))  # or reads in vain
            left |= who.startswith(f"worker {plan.partition[0]}.") and is_replaced
        assert left or outcome.startswith("TornRound"), f"{history.torn}, and {who} met {outcome}"
    rank, round = history.torn.details["rank"], history.torn.details["round"]
    decision = history.decisions[-1]
    assert decision.early
    assert (rank, round) in {(member.rank, member.round) for member in decision.members}
    cut_off = None if plan.partition is None else plan.partition[0]
    disturbed = {*(death.rank for death in plan.deaths), *(rank for rank, _ in plan.leaves), cut_off, plan.liar}
    assert rank in disturbed or plan.mute_heartbeats or plan.break_chance, f"nothing befell rank {rank}"


def slices_wait_only_for_a_torn_decision(plan: Plan, history: History) -> None:
    for name, index in history.unapplied:
        assert history.torn is not None
        present = [member.present for member in history.decisions[-1].members]
        waited_for = any(contains(ranges, history.tensors[name].id) for ranges in present)
        assert waited_for, f"slice {index} of {name} waits, and the torn decision does not name it"


def scales_are_the_same_everywhere(plan: Plan, history: History) -> None:
    """Of what is clipped; nobody has to come to one where no gradient counts: nothing waits for it."""
    clipping = {decision.number: decision for decision in history.decisions if decision.max_norm is not None}
    counting = {number for number, decision in clipping.items() if any(one.present for one in decision.members)}
    found = set(history.scales)
    assert counting <= found <= set(clipping), f"decisions {set(clipping)} clip, scales are {history.scales}"
    for number, factors in history.scales.items():
        assert len(factors) == 1, f"factors of decision {number}: {factors}"


def shards_apply_the_same_decisions_in_order(plan: Plan, history: History) -> None:
    numbers = [decision.number for decision in history.decisions]
    assert numbers == list(range(1, len(numbers) + 1)), f"decisions are numbered {numbers}"
    for shard, applied in enumerate(history.applied):
        known = numbers if history.torn is None else numbers[: len(applied)]  # nobody could carry the rest
        assert applied == known, f"shard {shard} applied {applied} of {numbers}"


def decisions_count_each_round_once(plan: Plan, history: History) -> None:
    cells = [(m.rank, m.incarnation, m.round) for decision in history.decisions for m in decision.members]
    assert len(cells) == len(set(cells)), "a contribution is in two decisions"
    assert set(cells) <= history.pushed | history.lied, "a decision counts on a round that was never pushed"
    for decision in history.decisions:
        ranks = [member.rank for member in decision.members]
        assert ranks == sorted(set(ranks)), f"decision {decision.number} has members {ranks}"


def rounds_are_shared_out(plan: Plan, history: History) -> None:
    """Where workers come and go: all of a round know who is in it, and an epoch has each sample once."""
    if not plan.is_elastic:
        return
    taken: dict[int, list[int]] = {}
    for decision in history.decisions:
        told = set()
        for member in decision.members:
            members, epoch, samples = history.shares[member.rank, member.incarnation, member.round]
            told.add(members)
            taken.setdefault(epoch, []).extend(samples)
        assert len(told) == 1, f"in round {decision.number} workers believe in {told}"
    assert sorted(taken) == list(range(len(taken))), f"epochs {sorted(taken)}"
    for epoch, samples in taken.items():
        assert len(samples) == len(set(samples)), f"epoch {epoch} has samples twice: {sorted(samples)}"
        assert epoch == len(taken) - 1 or len(samples) == model.NUM_SAMPLES, f"epoch {epoch} lacks samples: {samples}"


def who_comes_back_is_waited_for(plan: Plan, history: History) -> None:
    """Where workers come and go, and the store has gone on as of a version: its next round is of all who were to take
    part in it. Nobody is lost in these runs."""
    for version, ranks in history.there_before.items():
        for decision in history.decisions[version : version + 1]:
            took = {member.rank for member in decision.members}
            assert set(ranks) <= took, (
                f"{ranks} were there at version {version}, and decision {version + 1} is of {took}"
            )


def liars_stop_nobody(plan: Plan, history: History) -> None:
    """One shard tells its own coordinator at once who committed what is not there: that life has no other round. Others
    tell it with the next attestation. Either way nobody else has more trouble than by a death."""
    if plan.num_shards == 1:
        found_out: set[tuple[int, int]] = set()
        for decision in history.decisions:
            for member in decision.members:
                life = (member.rank, member.incarnation)
                assert life not in found_out, f"rank {member.rank} lied, and went on in round {member.round}"
                if (*life, member.round) in history.lied and member.present and not decision.skip:
                    found_out.add(life)
    if plan.liar is None or plan.deaths or plan.leaves or plan.partition or plan.mute_heartbeats or history.torn:
        return
    for who, outcome in history.outcomes.items():
        lied = who == f"worker {plan.liar}.1" and outcome.startswith("MissingContribution")
        assert lied or outcome == "finished", f"rank {plan.liar} lied, and {who} met {outcome}"


def workers_are_told_the_truth(plan: Plan, history: History) -> None:
    """An answered commit is in the decision that the answer names, or in none if it says late."""
    decision_of = {
        (m.rank, m.incarnation, m.round): decision.number for decision in history.decisions for m in decision.members
    }
    for cell, committed in history.commits.items():
        told = None if committed.late else committed.decision
        if committed.refused is not None and not committed.skip:
            told = None
        is_left_out = committed.refused is not None and decision_of.get(cell) is None
        assert is_left_out or decision_of.get(cell) == told, f"{cell} was told {committed}: {decision_of.get(cell)}"
        stopped = committed.late and committed.stop
        assert stopped or committed.next_round > cell[2], f"{cell} was told to do round {committed.next_round} next"
        assert stopped or not committed.late or plan.mode == "backup", f"{cell} was late in mode {plan.mode}"


def refusals_are_the_right_ones(plan: Plan, history: History) -> None:
    """Nothing counts that is not finite or far beyond what counted before, and nothing else is refused: by the norms
    of what workers pushed, and the order of decisions alone."""
    kept: dict[Ranges, list[float]] = {}
    ratio = math.inf if plan.refuse_norm is None else plan.refuse_norm
    for decision in history.decisions:
        for cell in history.refused_in(decision.number):
            present, norm = history.norms[cell]
            before = kept.get(present, [])
            usual = median(before) if len(before) >= model.FEWEST_NORMS else None
            told = history.commits[cell].refused
            assert told is not None
            assert told.rank == cell[0], f"{cell} was told {told}"
            assert told.norm == pytest.approx(norm, nan_ok=True), f"{cell} was told {told}, and the norm is {norm}"
            assert told.median == (None if usual is None else pytest.approx(usual)), f"{cell}: {told}, and not {usual}"
            is_too_large = usual is not None and norm > ratio * usual
            assert is_too_large or not math.isfinite(norm), f"{cell} was refused: {told}"
        for member in decision.members if plan.refuse_norm is not None and not decision.skip else ():
            present, norm = history.norms[member.rank, member.incarnation, member.round]
            before = kept.get(present, [])
            limit = ratio * median(before) if len(before) >= model.FEWEST_NORMS else math.inf
            counted = f"rank {member.rank} counts in decision {decision.number} with a norm of {norm}: {limit}"
            assert not present or (math.isfinite(norm) and norm <= limit), counted
        for member in decision.members if not decision.skip else ():
            present, norm = history.norms[member.rank, member.incarnation, member.round]
            if present:
                kept[present] = [*kept.get(present, []), norm][-model.NORMS_KEPT :]


def values_are_what_the_decisions_say(plan: Plan, history: History) -> None:
    if history.torn is not None:
        return  # the last decision is applied here and there; what was read is checked
    expected = model.counters_after(plan, history.tensors, history.decisions, history.factors, history.lied)
    for name, value in expected.items():
        found = np.frombuffer(history.values[name], np.float32)
        assert np.array_equal(found, value), f"{name} is {found}, the decisions say {value}"


def compensation_is_from_what_was_sent(plan: Plan, history: History) -> None:
    """To the bit, though workers go on with older values now and then. With another number of shards, workers who go on
    have no base until they pull again. Where nobody has come to take a gradient, there may be no value: whoever was to
    send the first one is dead."""
    if not model.compensation_of(plan) or plan.reshards or not history.taken:
        return
    tensor = history.tensors["first"]
    expected = model.compensated_after(plan, tensor, history.decisions, history.taken, history.lied)
    found = np.frombuffer(history.values["first"], np.float32)
    assert found.tobytes() == expected.tobytes(), f"first is {found}, the decisions say {expected}"


def reads_are_never_torn(plan: Plan, history: History) -> None:
    by_version: dict[int, dict[str, model.Array]] = {}
    for read in history.reads:
        if read.version not in by_version:
            decided = history.decisions[: read.version]
            by_version[read.version] = model.counters_after(
                plan, history.tensors, decided, history.factors, history.lied
            )
        expected = by_version[read.version][read.tensor][read.begin : read.end]
        found = np.frombuffer(read.data, np.float32)
        assert np.array_equal(found, expected), f"{read.reader} read {found} as version {read.version}: {expected}"


def readers_see_what_was_acknowledged(plan: Plan, history: History) -> None:
    """A slice that is older than what somebody had been told of lacks no step of it."""
    for seen in history.seen:
        for decision in history.decisions[seen.version : seen.acknowledged]:
            skipped = decision.skip or history.factors.get(decision.number, 1.0) is None
            there = [m for m in decision.members if (m.rank, m.incarnation, m.round) not in history.lied]
            concerns = any(contains(member.present, history.tensors[seen.tensor].id) for member in there)
            assert skipped or not concerns, f"decision {decision.number} was told to somebody, and then came {seen}"


def versions_are_whole(plan: Plan, history: History) -> None:
    """All that is read as of one decision is what the decisions up to that one say, and they are all that anybody had
    been told of."""
    for version in history.versions:
        decided = history.decisions[: version.number]
        assert version.number >= version.acknowledged, f"{version.acknowledged} was told to somebody before {version}"
        expected = model.counters_after(plan, history.tensors, decided, history.factors, history.lied)
        for name, data in version.values.items():
            found = np.frombuffer(data, version.dtype)
            assert np.array_equal(found, expected[name].astype(version.dtype)), (
                f"{version.reader} read {name} of version {version.number} as {found}: {expected[name]}"
            )


def standbys_are_what_their_shards_are(plan: Plan, history: History) -> None:
    assert not history.standby_differences, history.standby_differences


def held_versions_stay(plan: Plan, history: History) -> None:
    """Only who has lost a connection, or reads while tensors are restored, is told that a version is gone: nobody here
    reads for long, or is short of memory."""
    may_go = plan.break_chance or plan.partition or plan.num_writers or plan.loses_holds
    assert may_go or not history.gone, f"{history.gone}"


def checkpoints_are_of_their_decision(plan: Plan, history: History) -> None:
    """What is written is what the decisions up to that one say, on every shard and of the coordinator, and they are all
    that anybody had been told of. What workers hand in is there, and where each round has all of them, of the same."""
    versions = [one.store.decision for one in history.archived]
    for told in history.checkpoints:
        assert told.version in versions, f"{told} is not there: {versions}"
        assert told.version >= told.acknowledged, f"{told.acknowledged} was told to somebody before {told}"
    for one in history.archived:
        values_are_of_their_decision(plan, history, one)
        # Who waits for one that is gone for good has no next decision, with which it would be asked.
        is_stuck = one.store.decision == len(history.decisions) and plan.is_missed
        hands_in = plan.mode == "sync" and plan.hands_in and plan.gather_s > 0.0 and one.store.decision > 0
        if hands_in and not is_stuck and not history.torn:
            members = {member.rank for member in history.decisions[one.store.decision - 1].members}
            missing = members - {part.rank for part in one.workers} - plan.unsteady
            assert plan.mute_heartbeats or not missing, f"version {one.store.decision} lacks what {missing} hand in"
        for worker in one.store.workers:
            if worker.closed is not None:
                assert worker.closed.decision <= one.store.decision, f"version {one.store.decision} knows of {worker}"
        for part in one.workers:
            assert part.handed == part.version, f"version {one.store.decision} has {part}"
            assert plan.mode != "sync" or part.version == one.store.decision, f"{one.store.decision} has {part}"


def values_are_of_their_decision(plan: Plan, history: History, one: Archived) -> None:
    decided = history.decisions[: one.store.decision]
    expected = model.counters_after(plan, history.tensors, decided, history.factors, history.lied)
    known = {tensor.id for tensor in one.store.tensors}
    for name, value in expected.items():
        tensor = history.tensors[name]
        for index in range(len(tensor.shards) if tensor.id in known else 0):
            data = one.value(tensor.key(index))  # None: the shard had not heard of the tensor
            begin, end = tensor.bounds(index)
            found = np.frombuffer(data, np.float32) if data else np.zeros(end - begin, np.float32)
            assert np.array_equal(found, value[begin:end]), (
                f"version {one.store.decision} has {name}[{begin}:{end}] as {found}: {value[begin:end]}"
            )


def training_ends_at_its_version(plan: Plan, history: History) -> None:
    if plan.stop_at is None or plan.leaves:  # the auditor may complete what dead workers have begun
        return
    lives = 1 + max((m.incarnation for d in history.decisions for m in d.members), default=1)
    bound = plan.stop_at if lives == 2 else plan.stop_at + 1
    assert len(history.decisions) <= bound, f"{len(history.decisions)} decisions, and workers stop at {plan.stop_at}"
    for cell, committed in history.commits.items():
        since = max(history.asked_at[cell], history.decided_at.get(committed.last, 0.0))
        waited_s = history.answered_at[cell] - since - history.untold_s(since, history.answered_at[cell])
        cut_off = plan.silences or (plan.partition is not None and cell[0] == plan.partition[0])
        assert cut_off or not committed.stop or waited_s <= PROMPT_S, f"{cell} waited {waited_s:.1f} s after the end"
        over = committed.decision >= plan.stop_at
        assert committed.stop == over or committed.last >= plan.stop_at, f"{cell} was told {committed}"


def plain_writes_count_once(plan: Plan, history: History) -> None:
    if plan.reshards:
        return  # writers end with that: see no_write_is_lost
    for index in range(plan.num_writers):
        adds, assigns = history.writes[f"ADD {index}"], history.writes[f"ASSIGN {index}"]
        assert adds.begun == assigns.begun == NUM_WRITES, f"writer {index} stopped early: {adds}"
        tally = np.frombuffer(history.values["tally"], np.float32).reshape(plan.num_writers, Writer.ELEMS)[index]
        assert adds.acknowledged <= tally.min(), f"writer {index}: {adds}, and the store has {tally}"
        assert tally.max() <= adds.begun, f"writer {index}: {adds}, and the store has {tally}"
        note = np.frombuffer(history.values[f"note{index}"], np.float32)
        assert assigns.last <= note.min(), f"writer {index}: {assigns}, and the store has {note}"
        assert plan.hasty_writers or adds.acknowledged == NUM_WRITES, f"writer {index} gave up: {adds}"
        restored(history, index)


def refused_writes_do_not_count(plan: Plan, history: History) -> None:
    """Whoever adds is told of each slice whether it was added to, however often the answer was lost."""
    if not plan.num_forerunners:
        return
    tensor = history.tensors[GIVEN.name]
    assert sorted(history.additions) == list(range(len(tensor.shards)))
    value = np.frombuffer(history.values[GIVEN.name], np.float32)
    for index, told in history.additions.items():
        begin, end = tensor.bounds(index)
        assert told.applied + told.refused == told.begun == NUM_WRITES * plan.num_forerunners
        assert (value[begin:end] == told.applied).all(), f"slice {index}: {told}, and it is {value[begin:end]}"


def no_write_is_lost(plan: Plan, history: History, cut: Archived, tensors: Mapping[str, Tensor]) -> None:
    """What is written of a store that stands still has every plain write that was acknowledged to anybody."""
    for index in range(plan.num_writers):
        for op, name in (("ADD", "tally"), ("ASSIGN", f"note{index}"), ("RESTORE", f"mark{index}")):
            writes = history.writes.get(f"{op} {index}", Writes())
            told = writes.acknowledged if op == "ADD" else writes.last
            if not told:
                continue
            tensor = tensors[name]
            parts = [cut.value(tensor.key(part)) for part in range(len(tensor.shards))]
            assert None not in parts, f"{op} {index} was acknowledged, and {name} has no value"
            found = np.frombuffer(b"".join(part or b"" for part in parts), np.float32)
            if op == "ADD":
                found = found.reshape(plan.num_writers, Writer.ELEMS)[index]
            assert told <= found.min(), f"{op} {index}: {told} were acknowledged, and {found} is written"


def restored(history: History, index: int) -> None:
    """What was restored last is there, of the value and of the state: none came a second time."""
    values, momenta = history.writes[f"RESTORE {index}"], history.writes[f"momentum {index}"]
    value = np.frombuffer(history.values[f"mark{index}"], np.float32)
    assert values.last <= value.min(), f"writer {index}: {values}, and the store has {value}"
    momentum, *steps = (history.states[f"mark{index}"][i::2] for i in (0, 1))
    found = np.frombuffer(b"".join(momentum), np.float32)
    assert not momenta.last or momenta.last <= found.min(), f"writer {index}: {momenta}, and the store has {found}"
    counts = [int.from_bytes(step, "little") for step in steps[0]]
    assert momenta.last <= min(counts), f"writer {index}: {momenta}, and steps are {counts}"


def shards_hold_what_the_schema_registry_says(plan: Plan, history: History) -> None:
    """Nothing leaks when tensors are overwritten and dropped, and nothing is missing."""
    expected = sum(len(tensor.shards) for tensor in history.tensors.values())
    assert history.num_slots == expected, f"shards hold {history.num_slots} slices, the schema registry has {expected}"


def staleness_keeps_its_bound(plan: Plan, history: History) -> None:
    if plan.mode != "ssp" or plan.num_workers == 1:
        return
    for cell, committed in history.commits.items():
        lead = committed.next_round - 1 - committed.slowest
        done = committed.stop
        assert done or lead <= plan.staleness, f"{cell} was let go {lead} rounds ahead, the bound is {plan.staleness}"
    assert all(lead <= plan.staleness for lead in history.leads), f"leads {history.leads}, bound {plan.staleness}"


def barriers_let_nobody_through_early(plan: Plan, history: History) -> None:
    if plan.disturbed or plan.partition or plan.silences or plan.mute_heartbeats or history.torn is not None:
        return  # somebody may be missing, or be taken for lost
    if max(history.barriers_entered.values()) - min(history.barriers_entered.values()) >= BARRIER_WAIT_S:
        return  # one has computed for so long that another one waited in vain
    assert len(history.barriers_passed) == plan.num_workers, f"only {history.barriers_passed} passed"
    last_in, first_out = max(history.barriers_entered.values()), min(history.barriers_passed.values())
    assert first_out >= last_in, f"somebody passed at {first_out}, the last one came at {last_in}"


def synchronous_bytes_are_the_undisturbed_ones(plan: Plan, history: History) -> None:
    if plan.consistency.mode != "sync" or plan.disturbed:
        return
    if any(outcome != "finished" for outcome in history.outcomes.values()):
        return  # cut off for so long that the others gave up
    judges_norms = plan.clipped or plan.refuse_norm is not None
    if history.falls and (judges_norms or not model.pulls_after(plan, 1)):
        return  # what tells the life counts in norms, of rows too; who begins anew has newer values
    expected = undisturbed(plan.undisturbed())
    calm = {number: expected.scales.get(number) for number in history.scales}
    assert history.scales == calm, f"factors are {history.scales}, the calm run's {expected.scales}"
    for spec in model.specs(plan):
        if history.falls and model.is_counter(spec):
            continue  # it tells the life
        assert history.values[spec.name] == expected.values[spec.name], f"{spec.name} differs from the calm run's"
        assert history.states[spec.name] == expected.states[spec.name], f"{spec.name}'s state differs"


@lru_cache(maxsize=512)
def undisturbed(plan: Plan) -> History:
    """The calm run to compare with; many seeds share one."""
    return Scenario(plan).run()


CHECKS: tuple[Callable[[Plan, History], None], ...] = (
    everybody_comes_to_an_end,
    decisions_are_told_promptly,
    errors_are_the_right_ones,
    losses_are_told_in_time,
    graces_are_kept,
    torn_rounds_are_told_to_everybody,
    slices_wait_only_for_a_torn_decision,
    scales_are_the_same_everywhere,
    shards_apply_the_same_decisions_in_order,
    decisions_count_each_round_once,
    rounds_are_shared_out,
    who_comes_back_is_waited_for,
    liars_stop_nobody,
    workers_are_told_the_truth,
    refusals_are_the_right_ones,
    values_are_what_the_decisions_say,
    compensation_is_from_what_was_sent,
    rows_are_what_the_decisions_say,
    reads_are_never_torn,
    readers_see_what_was_acknowledged,
    versions_are_whole,
    standbys_are_what_their_shards_are,
    held_versions_stay,
    checkpoints_are_of_their_decision,
    training_ends_at_its_version,
    plain_writes_count_once,
    refused_writes_do_not_count,
    shards_hold_what_the_schema_registry_says,
    staleness_keeps_its_bound,
    barriers_let_nobody_through_early,
    synchronous_bytes_are_the_undisturbed_ones,
)


SO_FAR = (
    rows_are_what_the_decisions_say,
    reads_are_never_torn,
    readers_see_what_was_acknowledged,
    versions_are_whole,
    decisions_count_each_round_once,
    workers_are_told_the_truth,
)
"""What holds at any time, of what was done until then."""


def check(plan: Plan, history: History, checks: Sequence[Callable[[Plan, History], None]] = CHECKS) -> None:
    """Raises AssertionError that names the check and what it found."""
    for one in checks:
        try:
            one(plan, history)
        except AssertionError as error:
            raise AssertionError(f"{one.__name__}: {error}") from error


def watched(plan: Plan, trace: Callable[[str], None] | None = None) -> Scenario:
    """A run that is looked at wherever the store goes on from a checkpoint."""
    scenario = Scenario(plan, trace=trace)
    scenario.on_fall = lambda: check(plan, scenario.history, SO_FAR)
    scenario.on_reshard = lambda cut, tensors: no_write_is_lost(plan, scenario.history, cut, tensors)
    return scenario


def run_and_check(plan: Plan, trace: Callable[[str], None] | None = None) -> History:
    history = watched(plan, trace).run()
    check(plan, history)
    return history
