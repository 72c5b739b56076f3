"""What a prefill policy sees and proposes. Policies are pure: they reserve nothing and change nothing."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from moesaic.kv.geometry import blocks_for_tokens
from moesaic.sched.plan import DecodeRow, PrefillChunk
from moesaic.sched.queues import PrefillRotation, Service
from moesaic.sequence import Rank, SeqId


class PrefillCandidate(Protocol):
    """What a policy may read of a sequence that waits for admission."""

    @property
    def seq_id(self) -> SeqId: ...
    @property
    def num_prefill_tokens_left(self) -> int: ...
    @property
    def was_preempted(self) -> bool: ...


class Waiting(Protocol):
    """The waiting queue as a policy sees it."""

    def __iter__(self) -> Iterator[PrefillCandidate]: ...
    def __len__(self) -> int: ...
    def short(self) -> Iterator[PrefillCandidate]: ...


class LaneView(NamedTuple):
    """A prompt that is part-way: committed tokens, tokens left, tokens its blocks still hold, and if it came back."""

    seq_id: SeqId
    start: int
    num_left: int
    num_spare: int
    rank: Rank
    was_preempted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepView:
    """All that a policy may know when it proposes the rows of one step."""

    max_tokens: int
    num_free_rows: int
    """Requests that may still be admitted before ``max_batch_size`` are running."""
    block_size: int
    num_free_blocks: int
    num_headroom_blocks: int
    """Blocks an admission must leave free, so that the running need not be preempted at once."""
    decode_rows: tuple[DecodeRow, ...]
    decode_needs_block: Mapping[SeqId, Rank]
    """Decoding sequences whose next token opens a new block."""
    lanes: tuple[LaneView, ...]
    """In rotation order; sequences in flight are left out."""
    waiting: Waiting
    rotation: PrefillRotation
    num_decode_gap_steps: int
    """Steps in a row that left out the decode rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """The rows a policy wants, and what becomes of the rotation if the step commits."""

    decode_rows: tuple[DecodeRow, ...]
    chunks: tuple[PrefillChunk, ...]
    services: tuple[Service, ...]
    num_forced_prefills: int = 0


class PrefillPolicy(Protocol):
    """Proposes rows from a view; keeps no state."""

    name: str
    starvation_threshold_steps: int
    short_prompt_tokens: int
    """Prompts up to this length can also be walked apart, in ``Waiting.short``."""
    may_run_alone: bool
    """A prompt may have a step of its own: longer than ``max_tokens``, or without the decode rows."""
    max_lanes: int
    """So many prompts may be part-way whatever the tokens of a step; more only if one step finishes them."""
    bounds_waits: bool
    """Nobody who could run is passed over for more than ``starvation_threshold_steps`` steps."""

    def propose(self, view: StepView) -> Proposal:
        """Return the rows for one step."""
        ...


class BlockGrants(NamedTuple):
    """Who gets the block of its next token: everyone if there are enough, else by rank."""

    decode_rows: tuple[DecodeRow, ...]
    lanes: dict[SeqId, int]
    """Feasible lanes with the tokens they can hold without taking a free block."""
    num_free_blocks: int
    """Blocks nobody was granted."""


def grant_blocks(view: StepView) -> BlockGrants:
    """Return the grants for every running sequence's next token, by rank when blocks are short.

    A lane whose blocks are full is granted one, so a younger decode row cannot starve an older prompt of it.
    """
    needy = [*view.decode_needs_block.values(), *(lane.rank for lane in view.lanes if lane.num_spare == 0)]
    num_granted = min(len(needy), view.num_free_blocks)
    refused = {rank.seq_id for rank in sorted(needy)[num_granted:]} if num_granted < len(needy) else set()
    decode_rows = view.decode_rows
    if refused:
        decode_rows = tuple(r for r in decode_rows if r.seq_id not in refused)
    lanes = {ln.seq_id: ln.num_spare or view.block_size for ln in view.lanes if ln.seq_id not in refused}
    return BlockGrants(decode_rows, lanes, view.num_free_blocks - num_granted)


def extra_blocks(num_tokens: int, num_held: int, block_size: int) -> int:
    """Return the free blocks that ``num_tokens`` take beyond ``num_held`` token positions already granted."""
    return blocks_for_tokens(max(0, num_tokens - num_held), block_size)
