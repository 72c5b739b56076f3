"""Whom to preempt when blocks run out: a pure choice."""

from collections.abc import Iterable
from typing import NamedTuple

from moesaic.sequence import SeqId


class Holder(NamedTuple):
    """A running sequence as the choice sees it."""

    seq_id: SeqId
    needs_block: bool
    """Its next token opens a new block."""
    num_blocks: int
    recompute_tokens: int
    """Tokens to compute again if it is the victim."""
    is_movable: bool
    """Not part of a step in flight."""


def choose_victims(holders: Iterable[Holder], num_free_blocks: int) -> tuple[SeqId, ...]:
    """Return whom to preempt so that each holder, oldest first, has its next block where that is possible.

    A victim is always younger than the one in need, and the cheapest to recompute goes first. So the oldest always
    progresses, and two partial prefills cannot hold blocks against each other.
    """
    alive = {h.seq_id: h for h in sorted(holders)}
    victims: list[SeqId] = []
    for seq_id in list(alive):
        holder = alive.get(seq_id)
        if holder is None or not holder.needs_block:
            continue
        younger = sorted(
            (h for h in alive.values() if h.seq_id > seq_id and h.is_movable and h.num_blocks),
            key=lambda h: (h.recompute_tokens, -h.seq_id),
        )
        while num_free_blocks < 1 and younger:
            victim = younger.pop(0)
            del alive[victim.seq_id]
            victims.append(victim.seq_id)
            num_free_blocks += victim.num_blocks
        num_free_blocks = max(0, num_free_blocks - 1)
    return tuple(victims)
