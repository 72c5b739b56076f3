"""Bounded, decode-first chunked prefill: decode rows always, then prompts by round robin with deficit."""

from dataclasses import dataclass, field

from moesaic.kv.geometry import blocks_for_tokens
from moesaic.sched.plan import PrefillChunk
from moesaic.sched.policy import (
    BlockGrants,
    LaneView,
    PrefillCandidate,
    Proposal,
    StepView,
    Waiting,
    extra_blocks,
    grant_blocks,
)
from moesaic.sched.queues import ARRIVALS, Service
from moesaic.sequence import Rank, SeqId


class ChunkedPrefill:
    """Decode rows first; what is left of the step goes to prompts in chunks.

    The members of the rotation are the lanes (prompts that are part-way, at most ``max_partial_prefills``) and one
    member, ``ARRIVALS``, for all prompts still waiting, so a newcomer has its turn at once. Each step:

    1. every member that can run gets an equal share of the tokens (plus its deficit, the part of earlier shares it
       could not use), at least one token and at most ``chunk_size``, in rotation order; members passed over for
       ``starvation_threshold_steps`` steps come first;
    2. tokens nobody took extend the lanes' chunks, then admit more of the waiting.

    A newcomer needs a free lane only if it would stay part-way: a short prompt is never stuck behind long ones.
    Source: deficit round robin, Shreedhar and Varghese, SIGCOMM 1995; decode-maximal batching with chunked
    prefill, Agrawal et al., "Sarathi-Serve", OSDI 2024.
    """

    name = "chunked"
    may_run_alone = False
    bounds_waits = True

    def __init__(self, *, chunk_size: int, starvation_threshold_steps: int, max_partial_prefills: int) -> None:
        self.short_prompt_tokens = chunk_size
        self._chunk_size = chunk_size
        self.starvation_threshold_steps = starvation_threshold_steps
        self.max_lanes = max_partial_prefills

    def propose(self, view: StepView) -> Proposal:
        """Return all decode rows whose next token fits, and chunks for the rest of the step."""
        grants = grant_blocks(view)
        step = _Step.of(view, grants, self._chunk_size, self.max_lanes)
        order, num_forced = self._turns(view, step)
        shares = self._serve_shares(view, step, order)
        step.extend_lanes(order)
        step.admit(view.waiting, step.budget)
        services = tuple(
            Service(m, n := step.taken.get(m, 0), self._deficit(step, m, shares.get(m, 0), n)) for m in order
        )
        num_forced = sum(step.taken.get(m, 0) > 0 for m in order[:num_forced])
        return Proposal(
            decode_rows=grants.decode_rows, chunks=step.chunks(), services=services, num_forced_prefills=num_forced
        )

    def _turns(self, view: StepView, step: "_Step") -> tuple[list[SeqId], int]:
        """Return the members that can run, in turn order, and how many of them waited to the threshold."""
        able = [m for m in view.rotation.order if m in step.lanes or (m == ARRIVALS and step.can_admit(view.waiting))]
        waits = view.rotation.wait_steps
        forced = sorted(
            (m for m in able if waits.get(m, 0) >= self.starvation_threshold_steps), key=lambda m: -waits[m]
        )
        return forced + [m for m in able if m not in forced], len(forced)

    def _serve_shares(self, view: StepView, step: "_Step", order: list[SeqId]) -> dict[SeqId, int]:
        """Give each member its share; return the shares. One token stays for each member still to come."""
        if not order or step.budget <= 0:
            return {}
        quantum = min(self._chunk_size, max(1, step.budget // len(order)))
        shares: dict[SeqId, int] = {}
        for num_behind, member in zip(range(len(order) - 1, -1, -1), order, strict=True):
            shares[member] = quantum + view.rotation.deficits.get(member, 0)
            tokens = min(shares[member], max(1, step.budget - num_behind), step.budget)
            if member == ARRIVALS:
                step.taken[ARRIVALS] = step.admit(view.waiting, tokens)
            else:
                step.take(member, tokens)
        return shares

    def _deficit(self, step: "_Step", member: SeqId, share: int, num_tokens: int) -> int:
        """Return what is left of the share: nothing for a prompt that is done, at most one chunk."""
        is_done = member in step.lanes and step.lanes[member].num_left == num_tokens
        return 0 if is_done or member == ARRIVALS else max(0, min(share - num_tokens, self._chunk_size))


@dataclass(slots=True)
class _Step:
    """Tokens, rows and blocks of the step while they are being shared out."""

    budget: int
    chunk_size: int
    block_size: int
    num_free_rows: int
    num_free_blocks: int
    num_promised_blocks: int
    """Blocks that lanes will take (see ``_num_promised``), and the headroom: not for newcomers."""
    num_free_lanes: int
    first_waiting: PrefillCandidate | None
    lanes: dict[SeqId, LaneView]
    """Lanes that can run, then the newcomers of this step."""
    held: dict[SeqId, int]
    """Token positions that each lane may fill without taking another free block."""
    taken: dict[SeqId, int] = field(default_factory=dict)

    @classmethod
    def of(cls, view: StepView, grants: BlockGrants, chunk_size: int, max_lanes: int) -> "_Step":
        held = grants.lanes
        outstanding = sum(
            extra_blocks(_num_promised(lane, chunk_size), held.get(lane.seq_id, lane.num_spare), view.block_size)
            for lane in view.lanes
        )
        return cls(
            budget=view.max_tokens - len(grants.decode_rows),
            chunk_size=chunk_size,
            block_size=view.block_size,
            num_free_rows=view.num_free_rows,
            num_free_blocks=grants.num_free_blocks,
            num_promised_blocks=outstanding + view.num_headroom_blocks,
            num_free_lanes=max_lanes - (len(view.rotation.order) - 1),
            first_waiting=next(iter(view.waiting), None),
            lanes={lane.seq_id: lane for lane in view.lanes if lane.seq_id in grants.lanes},
            held=dict(grants.lanes),
        )

    def num_spare_blocks(self, candidate: PrefillCandidate) -> int:
        """Return the blocks that a newcomer may take.

        Those that the first of the waiting needs to come back are not for others: short prompts that keep coming
        would else take each block that becomes free, and it would wait for ever.
        """
        num_spare = self.num_free_blocks - self.num_promised_blocks
        first = self.first_waiting
        if first is None or not first.was_preempted or first.seq_id in (candidate.seq_id, *self.lanes):
            return num_spare
        return num_spare - blocks_for_tokens(first.num_prefill_tokens_left, self.block_size)

    def take(self, seq_id: SeqId, tokens: int) -> int:
        """Give a lane up to ``tokens`` more, as its prompt, chunk and blocks allow; return the tokens given."""
        lane, before = self.lanes[seq_id], self.taken.get(seq_id, 0)
        room = self.held[seq_id] + self.num_free_blocks * self.block_size
        total = min(before + tokens, self.chunk_size, lane.num_left, room)
        num_blocks = extra_blocks(total, self.held[seq_id], self.block_size)
        self.held[seq_id] += num_blocks * self.block_size
        self.num_free_blocks -= num_blocks
        self.num_promised_blocks = max(0, self.num_promised_blocks - num_blocks)
        self.num_free_lanes += before < lane.num_left == total
        self.taken[seq_id] = total
        self.budget -= total - before
        return total - before

    def extend_lanes(self, order: list[SeqId]) -> None:
        """Share out tokens that nobody took: among the lanes in turn order, then the newcomers."""
        for member in (*order, *(s for s in self.lanes if s not in order)):
            if self.budget <= 0:
                return
            if member != ARRIVALS:
                self.take(member, self.budget)

    def can_admit(self, waiting: Waiting) -> bool:
        """Return if some waiting prompt could run now."""
        if self.num_free_lanes > 0:
            head = next(iter(waiting), None)
            return head is not None and self._can_start(head)
        return any(self._can_start(c) and self._runs_whole(c, self.budget) for c in waiting.short())

    def admit(self, waiting: Waiting, tokens: int) -> int:
        """Admit waiting prompts, oldest first, for up to ``tokens`` tokens; return the tokens given.

        With no lane free only prompts that run whole; the first of them may overdraw ``tokens``, not the step.
        """
        given = 0
        for candidate in waiting:
            if given >= tokens or self.num_free_lanes <= 0 or not self._can_start(candidate):
                break
            if candidate.seq_id not in self.lanes:
                given += self._start(candidate, tokens - given)
        for candidate in waiting.short():
            if given >= tokens or not self._can_start(candidate):
                break
            limit = tokens - given if given else self.budget
            if candidate.seq_id not in self.lanes and self._runs_whole(candidate, limit):
                given += self._start(candidate, limit)
        return given

    def _can_start(self, candidate: PrefillCandidate) -> bool:
        """A preempted prompt starts again only with blocks for all of it: it must not be thrown out at once."""
        is_back = candidate.was_preempted
        needed = blocks_for_tokens(candidate.num_prefill_tokens_left, self.block_size) if is_back else 1
        return min(self.budget, self.num_free_rows) > 0 and needed <= self.num_spare_blocks(candidate)

    def _runs_whole(self, candidate: PrefillCandidate, tokens: int) -> bool:
        length = candidate.num_prefill_tokens_left
        num_blocks = blocks_for_tokens(length, self.block_size)
        return length <= min(tokens, self.chunk_size, self.budget) and num_blocks <= self.num_spare_blocks(candidate)

    def _start(self, candidate: PrefillCandidate, tokens: int) -> int:
        """Make the candidate a lane and give it its first tokens, from spare blocks only."""
        seq_id, length = candidate.seq_id, candidate.num_prefill_tokens_left
        room = self.num_spare_blocks(candidate) * self.block_size
        lane = self.lanes[seq_id] = LaneView(seq_id, 0, length, 0, Rank(0, seq_id), candidate.was_preempted)
        self.held[seq_id] = 0
        self.num_free_rows -= 1
        self.num_free_lanes -= 1
        self.num_promised_blocks += blocks_for_tokens(_num_promised(lane, self.chunk_size), self.block_size)
        return self.take(seq_id, min(tokens, self.budget, room))

    def chunks(self) -> tuple[PrefillChunk, ...]:
        """Return the chunks of the step, lanes before newcomers."""
        return tuple(
            PrefillChunk(seq_id=s, start=lane.start, num_tokens=n, is_terminal=n == lane.num_left)
            for s, lane in self.lanes.items()
            if (n := self.taken.get(s, 0))
        )


def _num_promised(lane: LaneView, chunk_size: int) -> int:
    """Return the tokens for which a lane is promised blocks: those of its chunks in this step and the next.

    One that came back after preemption is promised all of its prompt. It started because there was room for all of
    it, and the bound on preemptions (``docs/memory.md``) rests on nobody else being let into that room.
    """
    return lane.num_left if lane.was_preempted else min(lane.num_left, 2 * chunk_size)
