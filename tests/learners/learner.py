"""A learner whose steps can be told apart in the store's values, as a process: it notes what it contributes."""

from __future__ import annotations

import time
from pathlib import Path

import torch

import psstore
from psstore.torch import DiLoCo
from tests.learners.ledger import UNIT, Notes

STEPS = 2
"""From one round to the next."""

STEP_S = 0.02
"""Slept in each step."""


class Sums(torch.nn.ParameterList):
    """In each fragment an element for each learner, to which each of its steps adds a unit."""

    def __init__(self, num_learners: int, fragments: int) -> None:
        super().__init__(torch.zeros(num_learners) for _ in range(fragments))


def learn(url: str, rank: int, num_learners: int, fragments: int, folder: Path) -> None:
    """Takes steps until it is killed. Every other learner takes one while its round is under way."""
    torch.set_num_threads(1)
    store = psstore.connect(url, rank=rank, transport="tcp")
    notes = Notes(folder, rank)
    _note_rounds(store, notes)
    model = Sums(num_learners, fragments)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    outer = torch.optim.SGD(model.parameters(), lr=1.0)
    every = STEPS * fragments
    optimizer = DiLoCo(model, inner, store, every=every, fragments=fragments, outer=outer, delay=rank % 2)
    while True:
        optimizer.zero_grad()
        torch.autograd.backward([-UNIT * sums[rank] for sums in model])
        time.sleep(STEP_S)
        optimizer.step()


def _note_rounds(store: psstore.Store, notes: Notes) -> None:
    """Has each commit of a contribution noted before it is sent, and after it is answered."""
    push_many, commit = store.push_many, store.commit
    amounts: list[float] = []

    def push_and_keep(items, **options):  # type: ignore[no-untyped-def]
        pushed = list(items)
        amounts[:] = [-float(gradient.sum()) for _, gradient in pushed]
        push_many(pushed, **options)

    def commit_and_note(*arguments, present=None, **options):  # type: ignore[no-untyped-def]
        amount = sum(amounts) if present else 0.0
        notes.commits(store.round, amount)
        result = commit(*arguments, present=present, **options)
        notes.decided(result.round, result.decision, result.counts)
        return result

    store.push_many, store.commit = push_and_keep, commit_and_note  # type: ignore[method-assign]
