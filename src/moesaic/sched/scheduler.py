"""Queues and leases: plans each step, and is the only one to move a sequence's progress."""

from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import Literal

from moesaic.errors import DuplicateRequestError, InvariantError, QueueFullError
from moesaic.kv.geometry import blocks_for_tokens, check_servable, resolve_max_tokens
from moesaic.kv.table import PagedKVCache
from moesaic.request import FinishReason, Request, StepOutput, TokenLogprobs
from moesaic.sched.advance import Advance, UndoPoint
from moesaic.sched.blocked import blocked_by
from moesaic.sched.counts import SchedulerCounts
from moesaic.sched.forker import Forker
from moesaic.sched.invariants import check_plan, check_progress, check_waits, checks_enabled
from moesaic.sched.ordering import Ordering
from moesaic.sched.plan import DecodeRow
from moesaic.sched.policy import LaneView, PrefillPolicy, StepView
from moesaic.sched.preempt import Holder, VictimOrder, cheapest_last, choose_victims
from moesaic.sched.queues import WaitingQueue
from moesaic.sched.running import RunningSet
from moesaic.sched.siblings import Fork, ForkRoom, SiblingGroups, num_head_blocks
from moesaic.sched.swap import SwapLedger, SwapTransfer
from moesaic.sched.swapper import Swapper
from moesaic.sched.transaction import StepTransaction
from moesaic.sequence import Rank, SeqId, Sequence, SequenceMark, SequenceStatus

REMEMBERED_STEPS = 1024
"""How many steps that were rolled back are remembered, so that a late commit of one is known for what it is."""


PreemptionKind = Literal["recompute", "swap"]


class Scheduler:
    """Who runs in each step, within tokens, rows and blocks.

    ``step()`` changes nothing about any sequence; ``commit`` is the only place where progress moves, and the only
    one that preempts: it makes room for the *next* step, so planning has no side effects and a rollback is exact.
    Not thread-safe: one owner calls it.
    """

    def __init__(
        self,
        *,
        kv: PagedKVCache,
        policy: PrefillPolicy,
        max_tokens_per_step: int,
        max_batch_size: int,
        max_model_len: int,
        eos_token_ids: tuple[int, ...] = (),
        seed: int = 0,
        ordering: Ordering | None = None,
        max_waiting_requests: int | None = None,
        num_swap_blocks: int = 0,
        victim_order: VictimOrder = cheapest_last,
    ) -> None:
        self.kv = kv
        self.policy = policy
        self.max_tokens_per_step = max_tokens_per_step
        self.max_tokens_beside_decode: int | None = None
        """Prompt tokens that a step with decode rows may have; None leaves them all that the rows leave."""
        self.max_batch_size = max_batch_size
        self.max_model_len = max_model_len
        self.counts = SchedulerCounts()
        self.running = RunningSet()
        self.waiting = WaitingQueue(policy.short_prompt_tokens)
        self.siblings = SiblingGroups()
        self.paused: dict[SeqId, Sequence] = {}
        self.swap = SwapLedger(num_swap_blocks)
        self._swapper = Swapper(self.swap, kv, self.running)
        self._forker = Forker(self.siblings, kv, self.running, self.swap)
        self.in_flight: dict[SeqId, int] = {}
        self._advance: Advance | None = None
        self._ordering = Ordering() if ordering is None else ordering
        self._max_waiting = max_waiting_requests
        self._victim_order = victim_order
        self._has_checks = checks_enabled()
        self._eos_token_ids = eos_token_ids
        self._seed = seed
        self._sequences: dict[str, Sequence] = {}
        self._events: list[StepOutput] = []
        self._next_seq_id = 0
        self._next_step_id = 0
        self._last_step_limit = max_tokens_per_step
        self._rolled_back_steps: deque[int] = deque(maxlen=REMEMBERED_STEPS)

    # Requests

    def add(self, request: Request) -> Sequence:
        """Queue a request and return its sequence.

        One whose ``sibling_of`` is unfinished is held back until that one's prompt is computed, and begins with its KV.
        Raises: ``DuplicateRequestError``; ``RequestTooLargeError`` if the context or the pool can never hold it;
        ``QueueFullError`` if too many wait already.
        """
        if request.request_id in self._sequences:
            raise DuplicateRequestError(
                f"request id {request.request_id!r} is in use by an unfinished request; choose another",
                param="request_id",
            )
        if self._max_waiting is not None and self.num_waiting >= self._max_waiting:
            raise QueueFullError(
                f"{self.num_waiting} requests wait, the most that may (max_waiting_requests); try again later"
            )
        num_prompt = len(request.prompt_token_ids)
        max_tokens = resolve_max_tokens(num_prompt, request.sampling_params.max_tokens, self.max_model_len)
        check_servable(num_prompt, max_tokens, self.kv.block_size, self.kv.pool.num_blocks)
        seq_id = SeqId(self._next_seq_id)
        seed = _mixed(self._seed, seq_id)
        rank = self._ordering.rank(
            seq_id, priority=request.priority, num_prompt_tokens=num_prompt, step=self.counts.num_steps
        )
        seq = Sequence(seq_id, request, max_tokens=max_tokens, eos_token_ids=self._eos_token_ids, seed=seed, rank=rank)
        self._next_seq_id += 1
        self._sequences[request.request_id] = seq
        leader = self._leader_of(seq)
        if leader is None:
            self.waiting.push(seq)
        else:
            self.siblings.hold(seq, leader)
        return seq

    def _leader_of(self, seq: Sequence) -> Sequence | None:
        """Return the sequence whose prompt ``seq`` can share; what is told of a prompt needs all of it computed."""
        request = seq.request
        leader = None if request.sibling_of is None else self._sequences.get(request.sibling_of)
        if leader is None or leader.seq_id in self.paused or request.sampling_params.tells_of_prompt:
            return None
        is_same = leader.request.prompt_token_ids == request.prompt_token_ids
        return leader if is_same and num_head_blocks(seq, self.kv.block_size) else None

    @property
    def num_waiting(self) -> int:
        """How many requests wait to begin, those held back for a sibling included."""
        return len(self.waiting) + len(self.siblings)

    def abort(self, request_id: str) -> bool:
        """End a request now; return False if it is unknown or already over.

        Its terminal event comes from ``take_events``. Blocks that a step in flight may still write are fenced until
        that step is over.
        """
        return self._end(request_id, SequenceStatus.CANCELLED, StepOutput(request_id, (), "abort"))

    def fail(self, request_id: str, error: str) -> bool:
        """End a request with ``error``, as ``abort`` does; return False if it is unknown or already over."""
        return self._end(request_id, SequenceStatus.FAILED, StepOutput(request_id, (), "error", error=error))

    def _end(self, request_id: str, status: SequenceStatus, event: StepOutput) -> bool:
        seq = self._sequences.pop(request_id, None)
        if seq is None:
            return False
        self._evict(seq)
        self._leave_siblings(seq)
        seq.move_to(status)
        self._events.append(event)
        return True

    def preempt(self, request_id: str, by: PreemptionKind = "recompute") -> bool:
        """Take a running request's KV away: it is computed again later or, by swap, copied to host memory and back.

        By recompute, a token that a step in flight would sample for it is dropped, and sampled again later.
        Returns False, and nothing changes, if it holds no KV here; by swap also if a step in flight has it (that step
        still writes its blocks) or has advanced, or the host pool has too little room.
        """
        seq = self._sequences.get(request_id)
        if seq is None or self.running.get(seq.seq_id) is None:
            return False
        return self._swap_out(seq) if by == "swap" else self._restart(seq)

    def _swap_out(self, seq: Sequence) -> bool:
        if self._advance is not None or seq.seq_id in self.in_flight or not self._swapper.has_room_for(seq):
            return False
        self.counts = self.counts.after_preemption(num_victims=1, num_lost_tokens=0)
        self._swapper.begin_out(seq)
        return True

    def _restart(self, seq: Sequence) -> bool:
        self._count_lost(seq)
        self._evict(seq)
        seq.restart()
        self.waiting.push(seq)
        return True

    def pause(self, request_id: str) -> bool:
        """Set a request aside until ``resume``; it holds no KV meanwhile. False if unknown, over or paused."""
        seq = self._sequences.get(request_id)
        if seq is None or seq.seq_id in self.paused:
            return False
        if seq.committed_kv_tokens:
            self._count_lost(seq)
        self._evict(seq)
        self._leave_siblings(seq)
        if seq.status is not SequenceStatus.WAITING:
            seq.restart()
        self.paused[seq.seq_id] = seq
        return True

    def resume(self, request_id: str) -> bool:
        """Let a paused request wait for admission again, at its old place; False if it is not paused."""
        seq = self._sequences.get(request_id)
        if seq is None or self.paused.pop(seq.seq_id, None) is None:
            return False
        self.waiting.push(seq)
        return True

    def _evict(self, seq: Sequence) -> None:
        """Take ``seq`` out of every queue and of its step in flight, and give its blocks back."""
        self.waiting.remove(seq.seq_id)
        self.paused.pop(seq.seq_id, None)
        self.running.discard(seq)
        step_id = self.in_flight.pop(seq.seq_id, None)
        advance = self._advance
        if advance is not None and advance.forget(seq) and step_id is None:
            step_id = advance.step_id
        self._swapper.drop(seq)
        if step_id is not None:
            self.kv.fence_sequence(seq, step_id)
        self.kv.free_sequences([seq])

    def _leave_siblings(self, seq: Sequence) -> None:
        """Forget ``seq`` among its siblings; if nobody else computes their prompt, the first of them will."""
        heir = self.siblings.leave(seq)
        if heir is not None:
            self.waiting.push(heir)

    def _count_lost(self, seq: Sequence) -> None:
        self.counts = self.counts.after_preemption(num_victims=1, num_lost_tokens=seq.committed_kv_tokens)

    def get(self, request_id: str) -> Sequence | None:
        """Return the sequence of an unfinished request, or None."""
        return self._sequences.get(request_id)

    def take_events(self) -> list[StepOutput]:
        """Return terminal events that no step produced (aborts), each once."""
        events, self._events = self._events, []
        return events

    @property
    def has_unfinished(self) -> bool:
        """True while a request that is not paused is unfinished, or a terminal event is untold."""
        return len(self._sequences) > len(self.paused) or bool(self._events)

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """All unfinished sequences."""
        return tuple(self._sequences.values())

    # One step

    def step(self) -> StepTransaction:
        """Plan a step and lease its blocks; nothing about any sequence has changed yet.

        Sequences in flight are left out. The plan is empty if nothing can run.
        """
        view = self.view()
        self._last_step_limit = view.max_tokens
        proposal = self.policy.propose(view)
        decoding = self.running.decoding
        sequences = {i: decoding[i] for i, _ in proposal.decode_rows}
        sequences.update((c.seq_id, self._find(c.seq_id)) for c in proposal.chunks)
        tx = StepTransaction(self, self._next_step_id, proposal, sequences, view.max_tokens)
        tx.blocked_by = blocked_by(view, proposal, is_chunked=not self.policy.may_run_alone)
        self._next_step_id += 1
        if self._has_checks:
            self._check_step(view, tx)
        self._lease(tx, view.decode_needs_block)
        return tx

    def _check_step(self, view: StepView, tx: StepTransaction) -> None:
        may_run_alone = self.policy.may_run_alone
        check_plan(view, tx.plan, tx.sequences, max_rows=self.max_batch_size, may_run_alone=may_run_alone)
        is_copying = self.kv.pool.num_fenced > 0 or "in" in self.swap.states.values()
        check_progress(view, tx.plan, is_idle=not self.in_flight and not is_copying)
        if self.policy.bounds_waits:
            check_waits(view, self.policy.starvation_threshold_steps)

    def _find(self, seq_id: SeqId) -> Sequence:
        return self.running.get(seq_id) or self.waiting.get(seq_id)

    def view(self) -> StepView:
        """Return what the policy may know now."""
        busy, block_size, running = self.in_flight, self.kv.block_size, self.running
        rows = [DecodeRow(i, s.committed_kv_tokens) for i, s in running.decoding.items() if i not in busy]
        lanes = (running.lanes[i] for i in running.rotation.order if i in running.lanes and i not in busy)
        return StepView(
            max_tokens=self._step_limit(len(rows)),
            num_free_rows=self.max_batch_size - self._num_admitted(),
            block_size=block_size,
            num_free_blocks=self.kv.pool.num_free,
            num_headroom_blocks=self._headroom(),
            decode_rows=tuple(rows),
            decode_needs_block={
                i: running.decoding[i].rank for i, start in rows if not start % block_size and self._is_full(i, start)
            },
            lanes=tuple(map(self._lane_view, lanes)),
            waiting=self.waiting,
            rotation=running.rotation,
            num_decode_gap_steps=running.num_decode_gap_steps,
        )

    def _step_limit(self, num_decode_rows: int) -> int:
        """Return the query tokens of a step with so many decode rows; without any it has its whole budget."""
        beside = self.max_tokens_beside_decode
        if beside is None or not num_decode_rows:
            return self.max_tokens_per_step
        return min(self.max_tokens_per_step, num_decode_rows + beside)

    def _num_admitted(self) -> int:
        """Return how many rows are spoken for: the running, newcomers in flight, and those swapped out."""
        newcomers = sum(self.running.get(i) is None for i in self.in_flight)
        return len(self.running) + newcomers + len(self.swap.states)

    def _headroom(self) -> int:
        """Return the blocks that newcomers must leave: for the running to grow, and for the first to come back.

        Exactly what ``begin_swap_ins`` asks for: newcomers that keep coming cannot keep it from coming back.
        """
        num_blocks = self._swapper.num_blocks_to_return()
        return num_blocks + self._growth() + 1 if num_blocks else self._growth()

    def _growth(self) -> int:
        """Return the blocks kept for the running to grow: one each, but little more than 1 % of the pool."""
        return min(len(self.running), 1 + self.kv.pool.num_blocks // 100)

    def _num_claimed_blocks(self) -> int:
        """Return the blocks that the running will take next: one if full, and all of its prompt if it came back.

        The bound on preemptions in ``docs/memory.md`` rests on it.
        """
        return sum(self._num_claimed_by(s) for s in self.running.all())

    def _num_claimed_by(self, seq: Sequence) -> int:
        end = seq.prefill_target if seq.was_preempted and seq.num_prefill_tokens_left else seq.committed_kv_tokens + 1
        return max(0, blocks_for_tokens(end, self.kv.block_size) - self.kv.num_blocks(seq.seq_id))

    def _lane_view(self, seq: Sequence) -> LaneView:
        spare = self.kv.num_reserved_tokens(seq.seq_id) - seq.committed_kv_tokens
        num_left = seq.num_prefill_tokens_left
        return LaneView(seq.seq_id, seq.committed_kv_tokens, num_left, spare, seq.rank, seq.was_preempted)

    def _is_full(self, seq_id: SeqId, num_committed: int) -> bool:
        return self.kv.num_reserved_tokens(seq_id) == num_committed

    def _lease(self, tx: StepTransaction, needs_block: Mapping[SeqId, Rank]) -> None:
        """Reserve blocks for the rows of ``tx``: one for each decode row that needs one, and those of the chunks."""
        self.in_flight.update(dict.fromkeys(tx.sequences, tx.step_id))
        try:
            for row in tx.plan.decode_rows if needs_block else ():
                if row.seq_id in needs_block:
                    tx.lease(self.kv, row.seq_id, row.start + 1)
            for chunk in tx.plan.chunks:
                tx.lease(self.kv, chunk.seq_id, chunk.start + chunk.num_tokens)
        except BaseException:
            tx.return_leases(self.kv)
            self._land(tx)
            raise
        for chunk in tx.plan.chunks:
            self.waiting.remove(chunk.seq_id)

    def rollback(self, tx: StepTransaction) -> None:
        """Give every lease of ``tx`` back; of a step that is over a no-op."""
        if not tx.is_open:
            return
        if self.is_advanced(tx):
            self._retreat(tx)
        tx.is_open = False
        tx.return_leases(self.kv)
        for seq in tx.sequences.values():
            if seq.status is SequenceStatus.WAITING and self.is_live(tx, seq):
                self.waiting.push(seq)
        self._land(tx)
        self._rolled_back_steps.append(tx.step_id)
        if tx.sequences:
            self.counts = self.counts.after_rollback()
        if self._has_checks:
            self.check()

    def was_rolled_back(self, step_id: int) -> bool:
        """Return whether the step is remembered as rolled back."""
        return step_id in self._rolled_back_steps

    def is_live(self, tx: StepTransaction, seq: Sequence) -> bool:
        """Return whether the row still belongs to the step: aborted and preempted ones do not."""
        return self.in_flight.get(seq.seq_id) == tx.step_id

    def _land(self, tx: StepTransaction) -> None:
        """The step is over: its rows may be leased again and its fenced blocks are free."""
        in_flight = self.in_flight
        for seq_id in tx.sequences:
            if in_flight.get(seq_id) == tx.step_id:
                del in_flight[seq_id]
        if self._advance is None:
            self.kv.pool.lift(tx.step_id)
        else:  # an advanced step is not over: its rows may have been in this one too
            self.kv.pool.pass_on(tx.step_id, self._advance.step_id)

    # Commit

    def commit(
        self,
        tx: StepTransaction,
        token_ids: SequenceOf[int],
        logprobs: SequenceOf[TokenLogprobs | None] | None,
    ) -> list[StepOutput]:
        """Apply ``tx``: see ``StepTransaction.commit``. All or nothing: freeing blocks is the last act."""
        sampling = tx.plan.sampling_row_ids
        logprobs = [None] * len(sampling) if logprobs is None else logprobs
        if len(token_ids) != len(sampling) or len(logprobs) != len(sampling):
            raise InvariantError(f"step {tx.step_id} samples {len(sampling)} rows but got {len(token_ids)} tokens")
        samples = dict(zip(sampling, zip(token_ids, logprobs, strict=True), strict=True))
        if self._advance is not None:
            return self._commit_advanced(tx, self._advance, samples)
        undo = self._undo_point(tx)
        restarted: list[tuple[Sequence, SequenceMark]] = []
        forks: list[Fork] = []
        try:
            outputs, finished = self._move(tx, samples)
            swapped, lost = self._victims(tx, finished)
            for seq in lost:
                restarted.append((seq, seq.mark()))
                self.running.discard(seq)
                seq.restart()
            if self.siblings and not swapped and not lost:
                self._forker.begin(self._fork_room(finished), forks)
            self.kv.free_sequences([*finished, *lost])
        except BaseException:
            self._forker.undo(forks)
            self._undo(tx, undo, restarted)
            raise
        self._settle(tx, finished, swapped, lost, forks)
        self._count(tx, outputs, len(swapped) + len(lost), sum(mark[1] for _, mark in restarted))
        if self._has_checks:
            self.check()
        return outputs

    def _undo_point(self, tx: StepTransaction) -> UndoPoint:
        chunks = (tx.sequences[c.seq_id] for c in tx.plan.chunks)
        return UndoPoint([(s, s.mark()) for s in chunks if self.is_live(tx, s)], self.running.mark())

    def _move(
        self, tx: StepTransaction, samples: dict[SeqId, tuple[int, TokenLogprobs | None]]
    ) -> tuple[list[StepOutput], list[Sequence]]:
        """Move every row that still belongs to the step, keep its lease; return what the rows yield and who is done."""
        outputs, finished = [], []
        num_tokens = {c.seq_id: c.num_tokens for c in tx.plan.chunks}
        in_flight, step_id = self.in_flight, tx.step_id
        for seq_id, seq in tx.sequences.items():
            if in_flight.get(seq_id) != step_id:
                continue
            if seq_id in num_tokens:
                seq.advance_prefill(num_tokens[seq_id])
                if seq_id not in samples:
                    continue
            else:
                seq.advance_decode()
            output = _sampled(seq, *samples[seq_id])
            outputs.append(output)
            if output.finish_reason is not None:
                finished.append(seq)
        self._keep(tx, finished)
        return outputs, finished

    def _keep(self, tx: StepTransaction, finished: list[Sequence]) -> None:
        """Make the leases of ``tx`` its rows' own, and put each row where its status says."""
        tx.keep_leases(self.kv)
        live = [tx.sequences[c.seq_id] for c in tx.plan.chunks if self.is_live(tx, tx.sequences[c.seq_id])]
        self.running.regroup(tx.plan, live, tx.proposal.services, finished)

    def _victims(self, tx: StepTransaction, finished: list[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """Return whom to preempt so that in the next step the first have their next block: by swap, by recompute."""
        num_free = self.kv.pool.num_free
        if len(self.running) <= num_free:
            return [], []
        num_free += self.kv.num_freed_by(finished) + self.kv.pool.num_behind(tx.step_id)
        running = self.running.all()
        needy = {s.seq_id for s in running if self._is_full(s.seq_id, s.committed_kv_tokens)}
        if len(needy) <= num_free:
            return [], []
        holders = [self._holder(s, s.seq_id in needy, tx.step_id) for s in running]
        by_id = {s.seq_id: s for s in running}
        return self._swapper.split([by_id[i] for i in choose_victims(holders, num_free, self._victim_order)])

    def _holder(self, seq: Sequence, needs_block: bool, step_id: int) -> Holder:
        shared_head = self.kv.shared_head(seq)
        return Holder(
            rank=seq.rank,
            needs_block=needs_block,
            num_blocks=self.kv.num_blocks(seq.seq_id) - len(shared_head),
            recompute_tokens=seq.committed_kv_tokens,
            is_movable=self.in_flight.get(seq.seq_id, step_id) == step_id,
            shared_head=shared_head,
        )

    def _undo(self, tx: StepTransaction, undo: UndoPoint, restarted: list[tuple[Sequence, SequenceMark]]) -> None:
        for seq, mark in restarted:
            seq.reset(mark)
        for seq, mark in undo.chunks:
            seq.reset(mark)
        for row in tx.plan.decode_rows:
            if self.is_live(tx, tx.sequences[row.seq_id]):
                tx.sequences[row.seq_id].reset_decode(row.start)
        tx.reopen_leases(self.kv)
        self.running.reset(undo.running)

    def _settle(
        self,
        tx: StepTransaction,
        finished: list[Sequence],
        swapped: list[Sequence],
        lost: list[Sequence],
        forks: list[Fork],
    ) -> None:
        """After the last act: the step is over, victims wait or go to host memory, finished requests are forgotten."""
        tx.is_open = False
        self._land(tx)
        if forks:
            self.counts = self.counts.after_forks(self._forker.settle(forks))
        for seq in finished:
            del self._sequences[seq.request.request_id]
            self._leave_siblings(seq)
        for seq in lost:
            self.waiting.push(seq)
        for seq in swapped:
            self._swapper.begin_out(seq)

    def _count(self, tx: StepTransaction, outputs: list[StepOutput], num_victims: int, num_lost_tokens: int) -> None:
        self.counts = self.counts.after_step(
            tx.plan,
            num_forced_prefills=tx.proposal.num_forced_prefills,
            num_new_tokens=sum(len(o.new_token_ids) for o in outputs),
        ).after_preemption(num_victims=num_victims, num_lost_tokens=num_lost_tokens)

    def _fork_room(self, finished: list[Sequence]) -> ForkRoom:
        """Return the room for siblings to begin, before the blocks of ``finished`` are given back."""
        first, num_lanes = next(iter(self.waiting), None), len(self.running.lanes)
        return ForkRoom(
            num_rows=self.max_batch_size - self._num_admitted() + len(finished),
            num_lanes=self.policy.max_lanes - num_lanes,
            num_tokens=self._last_step_limit - len(self.running.decoding) - num_lanes - 1,
            num_blocks=self.kv.pool.num_free - max(self._headroom(), self._num_claimed_blocks()),
            block_size=self.kv.block_size,
            first_waiting=None if first is None else first.rank,
        )

    # Ahead of the tokens

    def advance(self, tx: StepTransaction) -> bool:
        """Move the progress of a step before its tokens are known: see ``StepTransaction.advance``."""
        if not tx.is_open or self._advance is not None:
            raise InvariantError(f"step {tx.step_id} cannot advance: it is over, or another step has advanced")
        if not self._can_advance(tx):
            return False
        undo = self._undo_point(tx)
        try:
            self._advance = self._advanced(tx, undo)
        except BaseException:
            self._undo(tx, undo, [])
            raise
        if self._has_checks:
            self.check()
        return True

    def _can_advance(self, tx: StepTransaction) -> bool:
        """Return whether the commit of ``tx`` can only append tokens and end requests: it preempts nobody."""
        if self.swap.states:
            return False
        if any(seq.max_tokens == 0 for seq in tx.sequences.values()):
            return False
        return len(self.running) + len(tx.plan.chunks) <= self.kv.pool.num_free

    def _advanced(self, tx: StepTransaction, undo: UndoPoint) -> Advance:
        """Move every row that belongs to the step; those that go on may be planned again."""
        rows = {i: s for i, s in tx.sequences.items() if self.is_live(tx, s)}
        chunks = {c.seq_id: c for c in tx.plan.chunks}
        awaiting, last = {}, set()
        for seq_id, seq in rows.items():
            chunk = chunks.get(seq_id)
            if chunk is None:
                seq.advance_decode()
            else:
                seq.advance_prefill(chunk.num_tokens)
                if not chunk.is_terminal:
                    continue
            awaiting[seq_id] = seq
            if seq.append_placeholder():
                last.add(seq_id)
        self._keep(tx, [])
        for seq_id in rows.keys() - last:
            del self.in_flight[seq_id]
        return Advance(tx.step_id, undo, rows, awaiting)

    def is_advanced(self, tx: StepTransaction) -> bool:
        """Return whether the step has advanced and is not over."""
        return self._advance is not None and self._advance.step_id == tx.step_id

    def _retreat(self, tx: StepTransaction) -> None:
        """Undo ``advance``: the rows are in flight with ``tx`` alone again."""
        advance = self._advance
        assert advance is not None
        if any(self.in_flight.get(i, tx.step_id) != tx.step_id for i in advance.rows):
            raise InvariantError(f"rows of step {tx.step_id} are in a later step; roll that back first")
        self._advance = None
        self.in_flight.update(dict.fromkeys(advance.rows, tx.step_id))
        self._undo(tx, advance.undo, [])

    def _commit_advanced(
        self, tx: StepTransaction, advance: Advance, samples: dict[SeqId, tuple[int, TokenLogprobs | None]]
    ) -> list[StepOutput]:
        """Put the tokens where the placeholders are; rows that end leave the step that was planned meanwhile."""
        if advance.step_id != tx.step_id:
            raise InvariantError(f"step {advance.step_id} has advanced and is to be committed before step {tx.step_id}")
        outputs, finished = [], []
        for seq_id, seq in advance.awaiting.items():
            token_id, logprobs = samples[seq_id]
            output = _output(seq, token_id, seq.fill_placeholder(token_id), logprobs)
            outputs.append(output)
            if output.finish_reason is not None:
                finished.append(seq)
        self._advance = None
        forks: list[Fork] = []
        if self.siblings:
            self._forker.begin(self._fork_room(finished), forks)
        for seq in finished:
            self._retire(seq, tx)
        self._settle(tx, finished, [], [], forks)
        self._count(tx, outputs, 0, 0)
        if self._has_checks:
            self.check()
        return outputs

    def _retire(self, seq: Sequence, tx: StepTransaction) -> None:
        """Give back the KV of a request that ended with ``tx``; a later step may still write there until it is over."""
        self.running.discard(seq)
        step_id = self.in_flight.pop(seq.seq_id, tx.step_id)
        if step_id != tx.step_id:
            self.kv.fence_sequence(seq, step_id)
        self.kv.free_sequences([seq])

    # Swap

    def begin_swap_ins(self) -> None:
        """Lease blocks for swapped sequences that can come back, by rank, and ask for the copies.

        One comes back only if the running keep what they need next, so that it is not thrown out at once.
        """
        if not self.swap.sequences:
            return
        if self._advance is not None:
            raise InvariantError(f"step {self._advance.step_id} has advanced; nothing may come back before its commit")
        is_alone = not self.running and not self.in_flight
        self._swapper.begin_ins(0 if is_alone else max(self._growth() + 1, self._num_claimed_blocks()))

    def take_swap_transfers(self) -> list[SwapTransfer]:
        """Return the copies to make before the next step, in order, each once; each must be ended or failed."""
        return self.swap.take_transfers()

    def end_swap(self, transfer: SwapTransfer) -> None:
        """A copy is made: ``out`` frees the device blocks, ``in`` lets the sequence run on at its old offset."""
        self._swapper.end(transfer)

    def fail_swap(self, transfer: SwapTransfer) -> None:
        """A copy failed: the sequence is computed again from its tokens."""
        seq = self.swap.owner(transfer)
        if seq is not None:
            num_lost_tokens = seq.committed_kv_tokens
            self.counts = self.counts.after_preemption(num_victims=0, num_lost_tokens=num_lost_tokens)
            self._evict(seq)
            seq.restart()
            self.waiting.push(seq)
        self.kv.pool.lift(transfer.fence_id)

    # Proof

    def fingerprint(self) -> tuple[object, ...]:
        """Return a value that is equal exactly when queues, sequences and cache are (counters left out)."""
        sequences = {
            key: (s.seq_id, s.mark(), s.tokens(0, s.num_tokens).tolist()) for key, s in self._sequences.items()
        }
        running = self.running
        return (
            sequences,
            list(running.decoding),
            list(running.lanes),
            running.rotation,
            running.num_decode_gap_steps,
            [s.seq_id for s in self.waiting],
            self.siblings.fingerprint(),
            list(self.paused),
            self.swap.fingerprint(),
            dict(self.in_flight),
            None if self._advance is None else (self._advance.step_id, list(self._advance.rows)),
            list(self._events),
            self.kv.fingerprint(),
        )

    def check(self) -> None:
        """Return if every sequence, the queues and the pool are consistent.

        Raises: ``InvariantError`` naming the broken rule.
        """
        self.kv.check()
        self.swap.check()
        for seq in self._sequences.values():
            seq.check()
            reserved = self.kv.num_reserved_tokens(seq.seq_id)
            if seq.committed_kv_tokens > reserved and seq.status is not SequenceStatus.SWAPPED:
                raise InvariantError(f"sequence {seq.seq_id} committed {seq.committed_kv_tokens} of {reserved} tokens")
            places = (
                (seq.seq_id in self.waiting)
                + (seq.seq_id in self.siblings)
                + (seq.seq_id in self.paused)
                + (seq.seq_id in self.swap.states)
                + (self.running.get(seq.seq_id) is not None)
            )
            is_newcomer_in_flight = seq.status is SequenceStatus.WAITING and seq.seq_id in self.in_flight
            if places != (0 if is_newcomer_in_flight else 1):
                raise InvariantError(f"sequence {seq.seq_id} ({seq.status.value}) stands in {places} queues")
        if not self._sequences and self.kv.pool.num_free + self.kv.pool.num_fenced != self.kv.pool.num_blocks:
            raise InvariantError(f"no request is left but only {self.kv.pool.num_free} KV blocks are free")


def _sampled(seq: Sequence, token_id: int, logprobs: TokenLogprobs | None) -> StepOutput:
    """Append the token and return the output; a request for no tokens ends without one."""
    request = seq.request
    if seq.max_tokens == 0:
        seq.move_to(SequenceStatus.FINISHED)
        return StepOutput(request.request_id, (), "length")
    return _output(seq, token_id, seq.append_token(token_id), logprobs)


def _output(seq: Sequence, token_id: int, reason: FinishReason | None, logprobs: TokenLogprobs | None) -> StepOutput:
    """Return what a row yields that has got ``token_id``, which ends it for ``reason``."""
    request = seq.request
    if reason is None and logprobs is None:
        return StepOutput(request.request_id, (token_id,))
    if reason is not None:
        seq.move_to(SequenceStatus.FINISHED)
    stop_reason = token_id if reason == "stop" and token_id in request.sampling_params.stop_token_ids else None
    return StepOutput(request.request_id, (token_id,), reason, stop_reason, None if logprobs is None else (logprobs,))


def _mixed(seed: int, seq_id: SeqId) -> int:
    """Return a 63-bit seed per sequence. Source: the finalizer of splitmix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    z = (seed + (seq_id + 1) * 0x9E3779B97F4A7C15) & (2**64 - 1)
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (z ^ (z >> 31)) >> 1
