"""Who waits for admission, and whose turn it is among the prompts that are part-way."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from moesaic.sequence import Rank, SeqId, Sequence

ARRIVALS = SeqId(-1)
"""The member of the rotation that stands for all prompts not yet admitted."""


class WaitingQueue:
    """Sequences without KV, by rank; a preempted one comes back to its old place.

    Prompts of at most ``short_tokens`` can also be walked alone: they need no partial-prefill lane.
    """

    def __init__(self, short_tokens: int) -> None:
        self._short_tokens = short_tokens
        self._order: list[Rank] = []
        self._short: list[Rank] = []
        self._sequences: dict[SeqId, Sequence] = {}

    def push(self, seq: Sequence) -> None:
        """Add ``seq`` at its place by rank."""
        self._sequences[seq.seq_id] = seq
        insort(self._order, seq.rank)
        if seq.num_prefill_tokens_left <= self._short_tokens:
            insort(self._short, seq.rank)

    def remove(self, seq_id: SeqId) -> None:
        """Take the sequence out; one that is not there is a no-op."""
        seq = self._sequences.pop(seq_id, None)
        if seq is not None:
            for queue in (self._order, self._short):
                index = bisect_left(queue, seq.rank)
                if queue[index : index + 1] == [seq.rank]:
                    del queue[index]

    def get(self, seq_id: SeqId) -> Sequence:
        """Return the waiting sequence.

        Raises: ``KeyError`` if it does not wait.
        """
        return self._sequences[seq_id]

    def short(self) -> Iterator[Sequence]:
        """Walk the short prompts by rank."""
        return (self._sequences[rank.seq_id] for rank in self._short)

    def __iter__(self) -> Iterator[Sequence]:
        return (self._sequences[rank.seq_id] for rank in self._order)

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, seq_id: object) -> bool:
        return seq_id in self._sequences


class Service(NamedTuple):
    """What one step would give one member of the rotation that could have run."""

    member: SeqId
    num_tokens: int
    deficit: int
    """Tokens of its share it could not use, kept for its next turns."""


@dataclass(frozen=True, slots=True)
class PrefillRotation:
    """Turn order, waits in steps and deficits in tokens of the lanes and of ``ARRIVALS``.

    A wait grows when its member could run and was passed over, and resets when it is *served*, never when tried.
    """

    order: tuple[SeqId, ...] = (ARRIVALS,)
    wait_steps: dict[SeqId, int] = field(default_factory=dict)
    deficits: dict[SeqId, int] = field(default_factory=dict)

    def with_lane(self, seq_id: SeqId) -> "PrefillRotation":
        """Return the rotation with one more lane, last in turn."""
        return replace(self, order=(*self.order, seq_id))

    def without(self, seq_id: SeqId) -> "PrefillRotation":
        """Return the rotation without that lane and its counters."""
        return PrefillRotation(
            tuple(s for s in self.order if s != seq_id),
            {k: v for k, v in self.wait_steps.items() if k != seq_id},
            {k: v for k, v in self.deficits.items() if k != seq_id},
        )

    def after(self, services: tuple[Service, ...]) -> "PrefillRotation":
        """Return the rotation after a committed step: the passed-over come first, the served behind them."""
        if not services:
            return self
        waits, deficits = dict(self.wait_steps), dict(self.deficits)
        for member, num_tokens, deficit in services:
            waits[member] = 0 if num_tokens else waits.get(member, 0) + 1
            deficits[member] = deficit
        served = [s.member for s in services if s.num_tokens and s.member in self.order]
        turned = served[1:] + served[:1]
        rest = tuple(s for s in self.order if s not in served)
        return PrefillRotation((*rest, *turned), waits, deficits)
