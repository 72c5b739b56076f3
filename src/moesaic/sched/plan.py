"""One step's metadata: frozen, self-checking, free of torch."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import accumulate
from operator import add
from typing import NamedTuple

from moesaic.errors import InvariantError
from moesaic.sequence import SeqId


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChunk:
    """Prompt tokens ``[start, start + num_tokens)`` of one sequence, computed in one step."""

    seq_id: SeqId
    start: int
    num_tokens: int
    is_terminal: bool

    def __post_init__(self) -> None:
        if self.start < 0 or self.num_tokens <= 0:
            raise InvariantError(f"chunk [{self.start}, +{self.num_tokens}) of sequence {self.seq_id} is empty")


class DecodeRow(NamedTuple):
    """The last token of one sequence, at position ``start``, computed in one step.

    A named tuple, not a dataclass: 256 of them are built in each step.
    """

    seq_id: SeqId
    start: int

    @property
    def num_tokens(self) -> int:
        return 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedBatchLengths:
    """Query and KV lengths of the rows of a step (``R`` rows).

    ``query_lengths`` [R], ``query_offsets`` [R + 1] (FlashInfer's ``qo_indptr``), ``context_lengths`` [R]
    (tokens committed before the step), ``kv_seq_lengths`` [R] (context + query: page metadata comes from here).
    """

    query_lengths: tuple[int, ...]
    query_offsets: tuple[int, ...]
    context_lengths: tuple[int, ...]
    kv_seq_lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        if tuple(accumulate(self.query_lengths, initial=0)) != self.query_offsets:
            raise InvariantError(f"query offsets {self.query_offsets} do not sum {self.query_lengths}")
        if tuple(map(add, self.context_lengths, self.query_lengths)) != self.kv_seq_lengths:
            raise InvariantError(f"KV lengths {self.kv_seq_lengths} are not context + query")
        if self.query_lengths and (min(self.query_lengths) <= 0 or min(self.context_lengths) < 0):
            raise InvariantError("a row has no query token or a negative context")

    @classmethod
    def of(cls, query_lengths: SequenceOf[int], context_lengths: SequenceOf[int]) -> "PagedBatchLengths":
        """Return the lengths of rows with these query and context lengths."""
        if len(query_lengths) != len(context_lengths):
            raise InvariantError(f"{len(query_lengths)} query lengths but {len(context_lengths)} contexts")
        return cls(
            query_lengths=tuple(query_lengths),
            query_offsets=tuple(accumulate(query_lengths, initial=0)),
            context_lengths=tuple(context_lengths),
            kv_seq_lengths=tuple(map(add, context_lengths, query_lengths)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The rows of one step, decode rows first."""

    decode_rows: tuple[DecodeRow, ...]
    chunks: tuple[PrefillChunk, ...]

    @property
    def num_rows(self) -> int:
        return len(self.decode_rows) + len(self.chunks)

    @property
    def num_tokens(self) -> int:
        return len(self.decode_rows) + sum(c.num_tokens for c in self.chunks)

    @property
    def rows(self) -> tuple[DecodeRow | PrefillChunk, ...]:
        return self.decode_rows + self.chunks

    @property
    def sampling_row_ids(self) -> tuple[SeqId, ...]:
        """Sequences that sample in this step, in row order: decode rows and terminal chunks."""
        return tuple(r.seq_id for r in self.decode_rows) + tuple(c.seq_id for c in self.chunks if c.is_terminal)

    @property
    def is_progress_only(self) -> bool:
        """True if the step computes tokens but samples none."""
        return bool(self.chunks) and not self.decode_rows and not any(c.is_terminal for c in self.chunks)

    def lengths(self) -> PagedBatchLengths:
        """Return the query and context lengths of the rows, in row order."""
        decode, chunks = self.decode_rows, self.chunks
        return PagedBatchLengths.of(
            [1] * len(decode) + [c.num_tokens for c in chunks],
            [r.start for r in decode] + [c.start for c in chunks],
        )
