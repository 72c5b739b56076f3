"""Whom to preempt when blocks run out: a pure choice."""

from collections.abc import Iterable
from typing import NamedTuple

from moesaic.sequence import Rank, SeqId


class Holder(NamedTuple):
    """A running sequence as the choice sees it."""

    rank: Rank
    needs_block: bool
    """Its next token opens a new block."""
    num_blocks: int
    recompute_tokens: int
    """Tokens to compute again if it is the victim."""
    is_movable: bool
    """Not part of a step in flight."""


def choose_victims(holders: Iterable[Holder], num_free_blocks: int) -> tuple[SeqId, ...]:
    """Return whom to preempt so that each holder, by rank, has its next block where that is possible.

    A victim always ranks behind the one in need, and the cheapest to recompute goes first. So the first always
    progresses, and two partial prefills cannot hold blocks against each other.
    """
    alive = {h.rank: h for h in sorted(holders)}
    victims: list[SeqId] = []
    for rank in list(alive):
        holder = alive.get(rank)
        if holder is None or not holder.needs_block:
            continue
        younger = sorted(
            (h for h in alive.values() if h.rank > rank and h.is_movable and h.num_blocks),
            key=lambda h: (-h.recompute_tokens, h.rank),
        )
        while num_free_blocks < 1 and younger:
            victim = younger.pop()
            del alive[victim.rank]
            victims.append(victim.rank.seq_id)
            num_free_blocks += victim.num_blocks
        num_free_blocks = max(0, num_free_blocks - 1)
    return tuple(victims)
