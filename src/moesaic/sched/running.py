"""The admitted sequences: who decodes, which prompts are part-way, and whose turn it is."""

from dataclasses import dataclass, field
from typing import NamedTuple

from moesaic.sched.plan import StepPlan
from moesaic.sched.queues import PrefillRotation, Service
from moesaic.sequence import SeqId, Sequence, SequenceStatus


class RunningMark(NamedTuple):
    """What ``RunningSet.reset`` needs to come back to a point."""

    decoding: dict[SeqId, Sequence]
    lanes: dict[SeqId, Sequence]
    rotation: PrefillRotation
    num_decode_gap_steps: int

    def without(self, seq: Sequence) -> "RunningMark":
        """Return the mark as if ``seq`` had not been there."""
        rest = RunningSet(dict(self.decoding), dict(self.lanes), self.rotation, self.num_decode_gap_steps)
        rest.discard(seq)
        return rest.mark()


@dataclass(slots=True)
class RunningSet:
    """Sequences with KV, by phase, in order of entry; each is in ``decoding`` or in ``lanes``."""

    decoding: dict[SeqId, Sequence] = field(default_factory=dict)
    lanes: dict[SeqId, Sequence] = field(default_factory=dict)
    rotation: PrefillRotation = field(default_factory=PrefillRotation)
    num_decode_gap_steps: int = 0
    """Steps in a row that left out the decode rows."""

    def __len__(self) -> int:
        return len(self.decoding) + len(self.lanes)

    def all(self) -> list[Sequence]:
        return [*self.decoding.values(), *self.lanes.values()]

    def get(self, seq_id: SeqId) -> Sequence | None:
        return self.decoding.get(seq_id) or self.lanes.get(seq_id)

    def discard(self, seq: Sequence) -> None:
        """Take ``seq`` out of its phase and of the rotation; one that is not there is a no-op."""
        self.decoding.pop(seq.seq_id, None)
        if self.lanes.pop(seq.seq_id, None) is not None:
            self.rotation = self.rotation.without(seq.seq_id)

    def regroup(
        self,
        plan: StepPlan,
        moved: list[Sequence],
        services: tuple[Service, ...],
        finished: list[Sequence],
    ) -> None:
        """After a step: turn the rotation and put those whose prefill ``moved`` where their status says."""
        if plan.decode_rows:
            self.num_decode_gap_steps = 0
        elif plan.chunks and self.decoding:
            self.num_decode_gap_steps += 1
        self.rotation = self.rotation.after(services)
        for seq in moved:
            self._place(seq)
        for seq in finished:
            self.discard(seq)

    def _place(self, seq: Sequence) -> None:
        if seq.status is SequenceStatus.PREFILL:
            if seq.seq_id not in self.lanes:
                self.lanes[seq.seq_id] = seq
                self.rotation = self.rotation.with_lane(seq.seq_id)
            return
        self.discard(seq)
        if seq.status is SequenceStatus.DECODE:
            self.decoding[seq.seq_id] = seq

    def begin(self, seq: Sequence) -> None:
        """Take in a sequence that begins behind KV of another: it is part-way."""
        self._place(seq)

    def enter(self, seq: Sequence) -> None:
        """Take in a sequence whose KV came back: it goes on in the phase that its counts say."""
        seq.move_to(SequenceStatus.PREFILL if seq.num_prefill_tokens_left else SequenceStatus.DECODE)
        self._place(seq)

    def mark(self) -> RunningMark:
        """Return what ``reset`` needs to come back to this point."""
        return RunningMark(dict(self.decoding), dict(self.lanes), self.rotation, self.num_decode_gap_steps)

    def reset(self, mark: RunningMark) -> None:
        """Undo everything since ``mark``."""
        self.decoding, self.lanes, self.rotation, self.num_decode_gap_steps = mark
