"""Asks the other shards of a store for their words on a standby (protocol/words.py). All of it blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from psstore.config import Credentials
from psstore.errors import BadArgument, PsstoreError
from psstore.net import loops
from psstore.net.asking import ask, greeted
from psstore.net.client import Reconnector
from psstore.protocol.election import Succession, succession
from psstore.server.other_member import visit
from psstore.wire import messages as m

ANSWERS_S = 1.0
"""How long words are waited for: who has them and is reached says so in a moment, and is asked again."""

Places = Sequence[Sequence[str]]
"""The addresses of each of several shards: at one of them it is led."""


def other_shards(addresses: Places, shard: int) -> Places:
    """`addresses`: of all shards."""
    return [*addresses[:shard], *addresses[shard + 1 :]]


def vote(others: Places, client: str, *, leads: bool, credentials: Credentials) -> Succession:
    """Whether the standby which is that client leads, or its shard is to do without it; for whom that is asked is
    `leads`."""
    answers = loops.run(_ask_all(others, m.AskWord(client=client, leads=leads), credentials), "asyncio")
    return succession([next((word for word in words if word.leads is not None), None) for words in answers])


def vote_for(others: Places, standby: str, credentials: Credentials) -> Succession:
    """As `vote`, on the standby at that address, for it."""
    own = loops.run(_ask(standby, m.AskWord(), credentials), "asyncio")
    return Succession.OPEN if own is None else vote(others, own.standby, leads=True, credentials=credentials)


def check_never_gone(others: Places, standby: str, credentials: Credentials) -> None:
    """Raises BadArgument unless the shard of the standby at that address can't have gone on without it, as far as one
    process of each other shard knows that has all that was told there. REQUIRES: who led there is dead."""
    if not others:
        return  # nobody has a word in it
    (answers, *of_others) = loops.run(_ask_all([[standby], *others], m.AskWord(), credentials), "asyncio")
    relied_on = [*answers]
    for places, words in zip(others, of_others, strict=True):
        found = next((word for word in words if word.may_lead), None)
        if found is None:
            raise BadArgument(f"nobody answers at {' or '.join(places)} who knows whether {standby} was done without")
        relied_on.append(found)
    gone = {client for word in relied_on for client in word.gone}
    if gone & {word.standby for word in relied_on if word.standby}:
        raise BadArgument(f"the shard of the standby at {standby} has gone on without it: what it has is old")


async def _ask_all(groups: Places, asked: m.AskWord, credentials: Credentials) -> list[list[m.Word]]:
    """What is answered at the places of each group."""
    places = [place for group in groups for place in group]
    words = dict(zip(places, await asyncio.gather(*(_ask(place, asked, credentials) for place in places)), strict=True))
    return [[word for place in group if (word := words[place]) is not None] for group in groups]


async def _ask(address: str, asked: m.AskWord, credentials: Credentials) -> m.Word | None:
    async def say(reconnector: Reconnector) -> m.Word:
        await greeted(reconnector)
        word = await ask(reconnector, "ASK_WORD", asked, timeout_s=ANSWERS_S)
        assert isinstance(word, m.Word)
        return word

    try:
        return await visit(address, credentials, ANSWERS_S, say, role="elector")
    except PsstoreError:
        return None
