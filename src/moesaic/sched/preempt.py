"""Whom to preempt when blocks run out: a pure choice."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

from moesaic.kv.pool import BlockId
from moesaic.sequence import Rank, SeqId


class Holder(NamedTuple):
    """A running sequence as the choice sees it."""

    rank: Rank
    needs_block: bool
    """Its next token opens a new block."""
    num_blocks: int
    """Blocks that only it holds."""
    recompute_tokens: int
    """Tokens to compute again if it is the victim."""
    is_movable: bool
    """Not part of a step in flight."""
    shared_head: tuple[BlockId, ...] = ()
    """Blocks that others hold too, the same for all who share them; free once the last of them is gone."""


VictimOrder = Callable[[Holder], tuple[int, Rank]]
"""Sorts possible victims; the last goes first."""


def cheapest_last(holder: Holder) -> tuple[int, Rank]:
    """Return the key by which the fewest tokens to recompute go first, among equals the last in rank."""
    return -holder.recompute_tokens, holder.rank


def youngest_last(holder: Holder) -> tuple[int, Rank]:
    """Return the key by which the last in rank goes first, whatever it costs."""
    return 0, holder.rank


def choose_victims(
    holders: Iterable[Holder], num_free_blocks: int, order: VictimOrder = cheapest_last
) -> tuple[SeqId, ...]:
    """Return whom to preempt so that each holder, by rank, has its next block where that is possible.

    A victim always ranks behind the one in need, and the last in ``order`` goes first. So the first always
    progresses, and two partial prefills cannot hold blocks against each other.
    """
    alive = {h.rank: h for h in sorted(holders)}
    sharers = Counter(h.shared_head for h in alive.values() if h.shared_head)
    victims: list[SeqId] = []
    for rank in list(alive):
        holder = alive.get(rank)
        if holder is None or not holder.needs_block:
            continue
        younger = sorted(
            (h for h in alive.values() if h.rank > rank and h.is_movable and (h.num_blocks or h.shared_head)),
            key=order,
        )
        while num_free_blocks < 1 and younger:
            victim = younger.pop()
            del alive[victim.rank]
            victims.append(victim.rank.seq_id)
            num_free_blocks += victim.num_blocks
            if victim.shared_head:
                sharers[victim.shared_head] -= 1
                num_free_blocks += 0 if sharers[victim.shared_head] else len(victim.shared_head)
        num_free_blocks = max(0, num_free_blocks - 1)
    return tuple(victims)
