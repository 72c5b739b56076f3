"""Queues and leases: plans each step, and is the only one to move a sequence's progress."""

from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import NamedTuple

from moesaic.errors import DuplicateRequestError, InvariantError, QueueFullError
from moesaic.kv.geometry import blocks_for_tokens, check_servable, resolve_max_tokens
from moesaic.kv.table import PagedKVCache
from moesaic.request import Request, StepOutput, TokenLogprobs
from moesaic.sched.invariants import check_plan, check_progress, check_waits, checks_enabled
from moesaic.sched.ordering import Ordering
from moesaic.sched.plan import DecodeRow
from moesaic.sched.policy import LaneView, PrefillPolicy, StepView
from moesaic.sched.preempt import Holder, VictimOrder, cheapest_last, choose_victims
from moesaic.sched.queues import WaitingQueue
from moesaic.sched.running import RunningMark, RunningSet
from moesaic.sched.swap import SwapLedger, SwapTransfer
from moesaic.sched.transaction import StepTransaction
from moesaic.sequence import Rank, SeqId, Sequence, SequenceMark, SequenceStatus

REMEMBERED_STEPS = 1024
"""How many steps that were rolled back are remembered, so that a late commit of one is known for what it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerCounts:
    """What the scheduler has done so far; all monotonic."""

    num_steps: int = 0
    num_progress_only_steps: int = 0
    num_rolled_back_steps: int = 0
    num_prefill_chunks: int = 0
    num_forced_prefills: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    """Committed tokens that preemption threw away."""
    num_prompt_tokens: int = 0
    """Prompt tokens computed, recomputed ones included."""
    num_generation_tokens: int = 0


class _UndoPoint(NamedTuple):
    """What a commit changes before its last, indivisible act; decode rows are undone from the plan itself."""

    chunks: list[tuple[Sequence, SequenceMark]]
    running: RunningMark


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
        self.max_batch_size = max_batch_size
        self.max_model_len = max_model_len
        self.counts = SchedulerCounts()
        self.running = RunningSet()
        self.waiting = WaitingQueue(policy.short_prompt_tokens)
        self.paused: dict[SeqId, Sequence] = {}
        self.swap = SwapLedger(num_swap_blocks)
        self.in_flight: dict[SeqId, int] = {}
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
        self._rolled_back_steps: deque[int] = deque(maxlen=REMEMBERED_STEPS)

    # Requests

    def add(self, request: Request) -> Sequence:
        """Queue a request and return its sequence.

        Raises: ``DuplicateRequestError``; ``RequestTooLargeError`` if the context or the pool can never hold it;
        ``QueueFullError`` if too many wait already.
        """
        if request.request_id in self._sequences:
            raise DuplicateRequestError(
                f"request id {request.request_id!r} is in use by an unfinished request; choose another",
                param="request_id",
            )
        if self._max_waiting is not None and len(self.waiting) >= self._max_waiting:
            raise QueueFullError(
                f"{len(self.waiting)} requests wait, the most that may (max_waiting_requests); try again later"
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
        self.waiting.push(seq)
        return seq

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
        seq.move_to(status)
        self._events.append(event)
        return True

    def preempt(self, request_id: str) -> bool:
        """Take a running request's KV away, to be computed again later; False if it holds none here.

        A token that a step in flight would sample for it is dropped, and sampled again later.
        """
        seq = self._sequences.get(request_id)
        if seq is None or self.running.get(seq.seq_id) is None:
            return False
        self._count_lost(seq)
        self._evict(seq)
        seq.restart()
        self.waiting.push(seq)
        return True

    def swap_out(self, request_id: str) -> bool:
        """Move a running request's KV to host memory, whence it comes back as if it had been a victim.

        False if it holds no KV here, a step in flight may write it, or the host pool has no room for it.
        """
        seq = self._sequences.get(request_id)
        if seq is None or self.running.get(seq.seq_id) is None or seq.seq_id in self.in_flight:
            return False
        if self.kv.num_blocks(seq.seq_id) > self.swap.num_free_blocks:
            return False
        self.counts = replace(self.counts, num_preemptions=self.counts.num_preemptions + 1)
        self._begin_swap_out(seq)
        return True

    def pause(self, request_id: str) -> bool:
        """Set a request aside until ``resume``; it holds no KV meanwhile. False if unknown, over or paused."""
        seq = self._sequences.get(request_id)
        if seq is None or seq.seq_id in self.paused:
            return False
        if seq.committed_kv_tokens:
            self._count_lost(seq)
        self._evict(seq)
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
        copy = self.swap.current.get(seq.seq_id)
        unbegun = self.swap.remove(seq.seq_id)
        if unbegun is not None:
            self.kv.pool.lift(unbegun.fence_id)
        elif copy is not None:
            self.kv.fence_sequence(seq, copy.fence_id)
        if step_id is not None:
            self.kv.fence_sequence(seq, step_id)
        self.kv.free_sequences([seq])

    def _count_lost(self, seq: Sequence) -> None:
        self.counts = replace(
            self.counts,
            num_preemptions=self.counts.num_preemptions + 1,
            num_recomputed_tokens=self.counts.num_recomputed_tokens + seq.committed_kv_tokens,
        )

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
        proposal = self.policy.propose(view)
        decoding = self.running.decoding
        sequences = {i: decoding[i] for i, _ in proposal.decode_rows}
        sequences.update((c.seq_id, self._find(c.seq_id)) for c in proposal.chunks)
        tx = StepTransaction(self, self._next_step_id, proposal, sequences)
        self._next_step_id += 1
        if self._has_checks:
            self._check_step(view, tx)
        self._lease(tx, view.decode_needs_block)
        return tx

    def _check_step(self, view: StepView, tx: StepTransaction) -> None:
        is_chunked = self.policy.splits_prompts
        check_plan(view, tx.plan, tx.sequences, max_rows=self.max_batch_size, is_chunked=is_chunked)
        is_copying = self.kv.pool.num_fenced > 0 or "in" in self.swap.states.values()
        check_progress(view, tx.plan, is_idle=not self.in_flight and not is_copying)
        if is_chunked:
            check_waits(view, self.policy.starvation_threshold_steps)

    def _find(self, seq_id: SeqId) -> Sequence:
        return self.running.get(seq_id) or self.waiting.get(seq_id)

    def view(self) -> StepView:
        """Return what the policy may know now."""
        busy, block_size, running = self.in_flight, self.kv.block_size, self.running
        rows = [DecodeRow(i, s.committed_kv_tokens) for i, s in running.decoding.items() if i not in busy]
        lanes = (running.lanes[i] for i in running.rotation.order if i in running.lanes and i not in busy)
        return StepView(
            max_tokens=self.max_tokens_per_step,
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

    def _num_admitted(self) -> int:
        """Return how many rows are spoken for: the running, newcomers in flight, and those swapped out."""
        newcomers = sum(self.running.get(i) is None for i in self.in_flight)
        return len(self.running) + newcomers + len(self.swap.states)

    def _headroom(self) -> int:
        """Return the blocks that newcomers must leave: for the running to grow, and for the first to come back."""
        resting = self.swap.resting()
        return self._growth() + (self.swap.sizes[resting[0].seq_id] if resting else 0)

    def _growth(self) -> int:
        """Return the blocks kept for the running to grow: one each, but little more than 1 % of the pool."""
        return min(len(self.running), 1 + self.kv.pool.num_blocks // 100)

    def _lane_view(self, seq: Sequence) -> LaneView:
        spare = self.kv.num_reserved_tokens(seq.seq_id) - seq.committed_kv_tokens
        return LaneView(seq.seq_id, seq.committed_kv_tokens, seq.num_prefill_tokens_left, spare, seq.rank)

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
        tx.is_open = False
        tx.return_leases(self.kv)
        for seq in tx.sequences.values():
            if seq.status is SequenceStatus.WAITING and self.is_live(tx, seq):
                self.waiting.push(seq)
        self._land(tx)
        self._rolled_back_steps.append(tx.step_id)
        num_rolled_back = self.counts.num_rolled_back_steps + bool(tx.sequences)
        self.counts = replace(self.counts, num_rolled_back_steps=num_rolled_back)
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
        self.kv.pool.lift(tx.step_id)

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
        chunks = [tx.sequences[c.seq_id] for c in tx.plan.chunks]
        undo = _UndoPoint([(s, s.mark()) for s in chunks if self.is_live(tx, s)], self.running.mark())
        restarted: list[tuple[Sequence, SequenceMark]] = []
        try:
            outputs, finished = self._advance(tx, samples)
            swapped, lost = self._victims(tx, finished)
            for seq in lost:
                restarted.append((seq, seq.mark()))
                self.running.discard(seq)
                seq.restart()
            self.kv.free_sequences([*finished, *lost])
        except BaseException:
            self._undo(tx, undo, restarted)
            raise
        self._settle(tx, finished, swapped, lost)
        self._count(tx, outputs, len(swapped) + len(lost), sum(mark[1] for _, mark in restarted))
        if self._has_checks:
            self.check()
        return outputs

    def _advance(
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
        tx.keep_leases(self.kv)
        live = [tx.sequences[c.seq_id] for c in tx.plan.chunks if self.is_live(tx, tx.sequences[c.seq_id])]
        self.running.regroup(tx.plan, live, tx.proposal.services, finished)
        return outputs, finished

    def _victims(self, tx: StepTransaction, finished: list[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """Return whom to preempt so that in the next step the first have their next block: by swap, by recompute."""
        num_free = self.kv.pool.num_free
        if len(self.running) <= num_free:
            return [], []
        num_free += sum(self.kv.num_blocks(s.seq_id) for s in finished) + self.kv.pool.num_behind(tx.step_id)
        running = self.running.all()
        needy = {s.seq_id for s in running if self._is_full(s.seq_id, s.committed_kv_tokens)}
        if len(needy) <= num_free:
            return [], []
        holders = [
            Holder(
                rank=s.rank,
                needs_block=s.seq_id in needy,
                num_blocks=self.kv.num_blocks(s.seq_id),
                recompute_tokens=s.committed_kv_tokens,
                is_movable=self.in_flight.get(s.seq_id, tx.step_id) == tx.step_id,
            )
            for s in running
        ]
        by_id = {s.seq_id: s for s in running}
        return self._split_victims([by_id[i] for i in choose_victims(holders, num_free, self._victim_order)])

    def _split_victims(self, victims: list[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """Return who fits the host pool, in the order chosen, and who must be computed again."""
        room, swapped, lost = self.swap.num_free_blocks, [], []
        for seq in victims:
            num_blocks = self.kv.num_blocks(seq.seq_id)
            if num_blocks <= room:
                room -= num_blocks
                swapped.append(seq)
            else:
                lost.append(seq)
        return swapped, lost

    def _undo(self, tx: StepTransaction, undo: _UndoPoint, restarted: list[tuple[Sequence, SequenceMark]]) -> None:
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
        self, tx: StepTransaction, finished: list[Sequence], swapped: list[Sequence], lost: list[Sequence]
    ) -> None:
        """After the last act: the step is over, victims wait or go to host memory, finished requests are forgotten."""
        tx.is_open = False
        self._land(tx)
        for seq in finished:
            del self._sequences[seq.request.request_id]
        for seq in lost:
            self.waiting.push(seq)
        for seq in swapped:
            self._begin_swap_out(seq)

    # Swap

    def _begin_swap_out(self, seq: Sequence) -> None:
        """Ask for the copy to host memory; the blocks stay fenced until ``end_swap_out``."""
        self.running.discard(seq)
        seq.move_to(SequenceStatus.SWAPPED)
        seq.num_preemptions += 1
        transfer = self.swap.begin_out(seq, self.kv.block_ids(seq))
        self.kv.fence_sequence(seq, transfer.fence_id)

    def begin_swap_ins(self) -> None:
        """Lease blocks for swapped sequences that can come back, by rank, and ask for the copies.

        One comes back only if the running keep their headroom, so that it is not thrown out at once, and with the
        block of its next token: two that came back together could else fill the pool, and neither could move.
        """
        for seq in self.swap.resting():
            size = self.swap.sizes[seq.seq_id]
            num_blocks = max(size, blocks_for_tokens(seq.committed_kv_tokens + 1, self.kv.block_size))
            headroom = self._growth() + 1
            is_alone = not self.running and not self.in_flight
            if num_blocks + (0 if is_alone else headroom) > self.kv.pool.num_free:
                return
            self.kv.ensure_sequence_capacity(seq, num_blocks * self.kv.block_size)
            self.kv.commit_sequence_reservation(seq)
            self.swap.begin_in(seq.seq_id, self.kv.block_ids(seq)[:size])

    def take_swap_transfers(self) -> list[SwapTransfer]:
        """Return the copies to make before the next step, in order, each once; each must be ended or failed."""
        return self.swap.take_transfers()

    def end_swap(self, transfer: SwapTransfer) -> None:
        """A copy is made: ``out`` frees the device blocks, ``in`` lets the sequence run on at its old offset."""
        seq = self.swap.owner(transfer)
        self.kv.pool.lift(transfer.fence_id)
        if seq is None:
            return
        if transfer.direction == "out":
            self.swap.end_out(transfer.seq_id)
        else:
            self.swap.remove(transfer.seq_id)
            self.running.enter(seq)

    def fail_swap(self, transfer: SwapTransfer) -> None:
        """A copy failed: the sequence is computed again from its tokens."""
        seq = self.swap.owner(transfer)
        if seq is not None:
            num_lost = self.counts.num_recomputed_tokens + seq.committed_kv_tokens
            self.counts = replace(self.counts, num_recomputed_tokens=num_lost)
            self._evict(seq)
            seq.restart()
            self.waiting.push(seq)
        self.kv.pool.lift(transfer.fence_id)

    def _count(self, tx: StepTransaction, outputs: list[StepOutput], num_victims: int, num_lost_tokens: int) -> None:
        counts, plan = self.counts, tx.plan
        self.counts = replace(
            counts,
            num_steps=counts.num_steps + 1,
            num_progress_only_steps=counts.num_progress_only_steps + plan.is_progress_only,
            num_prefill_chunks=counts.num_prefill_chunks + len(plan.chunks),
            num_forced_prefills=counts.num_forced_prefills + tx.proposal.num_forced_prefills,
            num_preemptions=counts.num_preemptions + num_victims,
            num_recomputed_tokens=counts.num_recomputed_tokens + num_lost_tokens,
            num_prompt_tokens=counts.num_prompt_tokens + sum(c.num_tokens for c in plan.chunks),
            num_generation_tokens=counts.num_generation_tokens + sum(len(o.new_token_ids) for o in outputs),
        )

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
            list(self.paused),
            self.swap.fingerprint(),
            dict(self.in_flight),
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
    reason = seq.append_token(token_id)
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
