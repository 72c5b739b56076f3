"""Requests of one prompt: the first computes it, the others begin with its KV."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from moesaic.sequence import Rank, SeqId, Sequence


@dataclass(slots=True)
class _Group:
    donors: dict[SeqId, Sequence] = field(default_factory=dict)
    """Who computes the prompt or has its KV."""
    held: dict[SeqId, Sequence] = field(default_factory=dict)


class Fork(NamedTuple):
    """A held sibling begins behind ``num_blocks`` blocks of a donor."""

    donor: Sequence
    sibling: Sequence
    num_blocks: int


class SiblingGroups:
    """Siblings that are held back until a donor has the KV of their prompt; a group without any is forgotten."""

    def __init__(self) -> None:
        self._groups: dict[SeqId, _Group] = {}
        self._held: dict[SeqId, Sequence] = {}

    def hold(self, seq: Sequence, leader: Sequence) -> None:
        """Hold ``seq`` back for ``leader``, or for whoever that one is held back for."""
        group = self._groups.get(leader.seq_id)
        if group is None:
            group = self._groups[leader.seq_id] = _Group({leader.seq_id: leader})
        group.held[seq.seq_id] = self._held[seq.seq_id] = seq
        self._groups[seq.seq_id] = group

    def fork(self, seq: Sequence) -> None:
        """``seq`` has begun: it is a donor from now on."""
        group = self._groups[seq.seq_id]
        del group.held[seq.seq_id], self._held[seq.seq_id]
        group.donors[seq.seq_id] = seq
        self._dissolve(group)

    def leave(self, seq: Sequence) -> Sequence | None:
        """Forget ``seq``; return who has to compute the prompt if the last donor has left, and is a donor now."""
        group = self._groups.pop(seq.seq_id, None)
        if group is None:
            return None
        group.donors.pop(seq.seq_id, None)
        if group.held.pop(seq.seq_id, None) is not None:
            del self._held[seq.seq_id]
        heir = None
        if not group.donors and group.held:
            heir = min(group.held.values(), key=lambda s: s.rank)
            self.fork(heir)
        self._dissolve(group)
        return heir

    def _dissolve(self, group: _Group) -> None:
        if not group.held:
            for seq_id in group.donors:
                self._groups.pop(seq_id, None)

    def donors_of(self, seq: Sequence) -> Iterator[Sequence]:
        """Walk the donors of a held sibling."""
        return iter(self._groups[seq.seq_id].donors.values())

    def __iter__(self) -> Iterator[Sequence]:
        """Walk the held siblings by rank."""
        return iter(sorted(self._held.values(), key=lambda s: s.rank))

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, seq_id: object) -> bool:
        return seq_id in self._held

    def fingerprint(self) -> tuple[object, ...]:
        """Return a value that is equal exactly when the groups are."""
        return tuple((seq_id, list(g.donors), list(g.held)) for seq_id, g in self._groups.items())


class ForkRoom(NamedTuple):
    """What siblings may take that begin after a step."""

    num_rows: int
    num_lanes: int
    """So many may begin whatever the tokens."""
    num_tokens: int
    """Query tokens that the next step has for more prompts that are part-way, beside those there are."""
    num_blocks: int
    """Free blocks that the running and those who come back do not need."""
    block_size: int
    first_waiting: Rank | None
    """Nobody begins before whoever ranks first among the waiting."""


def num_head_blocks(seq: Sequence, block_size: int) -> int:
    """Return the blocks that its prompt fills and that can be shared: all tokens but the last, which gives logits."""
    return (seq.num_prompt_tokens - 1) // block_size


def plan_forks(groups: SiblingGroups, room: ForkRoom, has_head: Callable[[Sequence, int], bool]) -> Iterator[Fork]:
    """Yield who begins now, by rank: each takes a row, and its own next block and tokens in the step after.

    ``has_head`` says whether the KV of so many leading blocks of a donor can be shared.
    """
    num_rows, num_lanes, num_tokens, num_blocks, block_size, first_waiting = room
    for seq in groups:
        num_head = num_head_blocks(seq, block_size)
        num_left = seq.num_prompt_tokens - num_head * block_size
        is_first = first_waiting is None or seq.rank < first_waiting
        if min(num_rows, num_blocks) <= 0 or not is_first or (num_lanes <= 0 and num_left > num_tokens):
            return
        donor = next((d for d in groups.donors_of(seq) if has_head(d, num_head)), None)
        if donor is not None:
            num_rows, num_lanes, num_blocks = num_rows - 1, num_lanes - 1, num_blocks - 1
            num_tokens -= num_left
            yield Fork(donor, seq, num_head)
