"""A step whose progress has moved before its tokens are known, so that the next one can be planned meanwhile."""

from dataclasses import dataclass
from typing import NamedTuple

from moesaic.sched.running import RunningMark
from moesaic.sequence import SeqId, Sequence, SequenceMark


class UndoPoint(NamedTuple):
    """What a commit changes before its last, indivisible act; decode rows are undone from the plan itself."""

    chunks: list[tuple[Sequence, SequenceMark]]
    running: RunningMark

    def without(self, seq: Sequence) -> "UndoPoint":
        """Return the point as if ``seq`` had not been there."""
        return UndoPoint([(s, mark) for s, mark in self.chunks if s is not seq], self.running.without(seq))


@dataclass(slots=True)
class Advance:
    """The rows of an advanced step that still belong to it, and the way back.

    Its sampling rows end with a placeholder until the tokens come. The last by length are not to be planned again.
    """

    step_id: int
    undo: UndoPoint
    rows: dict[SeqId, Sequence]
    awaiting: dict[SeqId, Sequence]
    """The rows that sample: their last token is a placeholder."""

    def forget(self, seq: Sequence) -> bool:
        """Take a row that ended or lost its KV out of the step, with its placeholder; False if it is not in it."""
        self.undo = self.undo.without(seq)
        if self.awaiting.pop(seq.seq_id, None) is not None:
            seq.drop_placeholder()
        return self.rows.pop(seq.seq_id, None) is not None
