"""Random commands against the integer reference: about 35,000 here (under a minute), more with ``make fuzz``."""

import os
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moesaic.config import SchedulingPolicy
from moesaic.errors import DuplicateRequestError, RequestTooLargeError
from moesaic.request import StepOutput
from moesaic.sched.ordering import Ordering
from moesaic.sched.plan import PrefillChunk
from moesaic.sched.transaction import StepTransaction
from moesaic.sequence import SequenceStatus
from moesaic.testing.reference import Reference, Row
from moesaic.testing.scheduling import FakeRunner, create_request, create_scheduler

IS_FUZZ = os.environ.get("HYPOTHESIS_PROFILE") == "fuzz"
PICK = st.integers(0, 10**6)


class SchedulerMachine(RuleBasedStateMachine):
    """One scheduler, at most two steps in flight, copies that end late or fail."""

    @initialize(
        block_size=st.sampled_from([1, 2, 4]),
        num_blocks=st.sampled_from([4, 7, 12]),
        chunk_size=st.sampled_from([None, 1, 2, 5]),
        rows=st.sampled_from([1, 3, 5]),
        spare=st.sampled_from([0, 1, 6]),
        num_swap_blocks=st.sampled_from([0, 3, 30]),
        policy=st.sampled_from(["fcfs", "priority", "shortest-prefill-first"]),
    )
    def start(
        self,
        block_size: int,
        num_blocks: int,
        chunk_size: int | None,
        rows: int,
        spare: int,
        num_swap_blocks: int,
        policy: SchedulingPolicy,
    ) -> None:
        budget = rows + block_size + spare
        self.scheduler = create_scheduler(
            num_blocks=num_blocks,
            block_size=block_size,
            chunked=chunk_size is not None,
            chunk_size=chunk_size or 1,
            max_batch_size=rows,
            max_tokens_per_step=budget,
            max_partial_prefills=2,
            threshold=3,
            num_swap_blocks=num_swap_blocks,
            ordering=Ordering(policy, aging_steps=4, max_tokens_per_step=budget),
        )
        self.reference = Reference(
            num_blocks=num_blocks,
            block_size=block_size,
            max_tokens_per_step=budget,
            max_batch_size=rows,
            chunk_size=chunk_size,
            threshold=3,
        )
        self.flights: list[tuple[StepTransaction, list[int], list[Row], dict[int, int]]] = []
        self.copies: list[Any] = []
        self.preemptions: dict[str, int] = {}

    # Requests

    @rule(num_prompt=st.integers(1, 60), max_tokens=st.integers(0, 6), priority=st.integers(-2, 2))
    def add_any(self, num_prompt: int, max_tokens: int, priority: int) -> None:
        self.add(f"r{self.reference.num_admitted()}", num_prompt, max_tokens, priority)

    @rule(num_prompt=st.integers(1, 8), max_tokens=st.integers(0, 6))
    def add_small(self, num_prompt: int, max_tokens: int) -> None:
        self.add(f"r{self.reference.num_admitted()}", num_prompt, max_tokens, 0)

    @precondition(lambda self: self.reference.live())
    @rule(pick=PICK)
    def add_twice(self, pick: int) -> None:
        self.add(self.live(pick), 1, 1, 0)

    def add(self, name: str, num_prompt: int, max_tokens: int, priority: int) -> None:
        is_admitted = self.reference.admits(name, num_prompt, max_tokens)
        try:
            self.scheduler.add(create_request(name, num_prompt, max_tokens, priority=priority))
            assert is_admitted
        except (RequestTooLargeError, DuplicateRequestError):
            assert not is_admitted

    def live(self, pick: int) -> str:
        names = self.reference.live()
        return names[pick % len(names)]

    @precondition(lambda self: self.reference.live())
    @rule(pick=PICK, fails=st.booleans())
    def end(self, pick: int, fails: bool) -> None:
        name = self.live(pick)
        self.reference.ask_end(name, "error" if fails else "abort")
        assert self.scheduler.fail(name, "told to") if fails else self.scheduler.abort(name)
        assert not self.scheduler.abort(name)

    @precondition(lambda self: self.reference.live())
    @rule(pick=PICK, verb=st.sampled_from(["preempt", "pause", "resume", "resume"]))
    def set_aside(self, pick: int, verb: str) -> None:
        getattr(self.scheduler, verb)(self.live(pick))

    # Steps

    @rule()
    def step(self) -> None:
        self.begin()
        self.commit(len(self.flights) - 1)

    @rule()
    def step_again(self) -> None:
        self.step()

    @rule()
    def failing_step(self) -> None:
        self.scheduler.begin_swap_ins()
        before = self.scheduler.fingerprint()
        with self.scheduler.step():
            pass
        assert self.scheduler.fingerprint() == before

    @precondition(lambda self: len(self.flights) < 2)
    @rule()
    def begin(self) -> None:
        scheduler = self.scheduler
        scheduler.begin_swap_ins()
        free = [s for s in scheduler.sequences if s.seq_id not in scheduler.in_flight]
        decoding = {s.seq_id: s.committed_kv_tokens for s in free if s.status is SequenceStatus.DECODE}
        part_way = {s.seq_id: s.committed_kv_tokens for s in free if s.status is SequenceStatus.PREFILL}
        num_free = scheduler.kv.pool.num_free
        tx = scheduler.step()
        rows = [
            Row(number=r.seq_id, num_tokens=r.num_tokens, is_chunk=isinstance(r, PrefillChunk)) for r in tx.plan.rows
        ]
        self.reference.judge_plan(rows, decoding=decoding, part_way=part_way, num_free=num_free)
        self.flights.append((tx, FakeRunner().run(tx.plan, tx.sequences), rows, part_way))

    @precondition(lambda self: self.flights)
    @rule(pick=PICK)
    def commit(self, pick: int) -> None:
        tx, tokens, rows, part_way = self.flights.pop(pick % len(self.flights))
        outputs = tx.commit(tokens)
        self.take(outputs)
        self.reference.judge_waits(rows, part_way)
        assert tx.commit(tokens) == []
        tx.rollback()

    @precondition(lambda self: self.flights)
    @rule(pick=PICK)
    def roll_back(self, pick: int) -> None:
        tx, *_ = self.flights.pop(pick % len(self.flights))
        tx.rollback()
        tx.rollback()

    # Copies

    @rule()
    def take_copies(self) -> None:
        self.copies += self.scheduler.take_swap_transfers()

    @precondition(lambda self: self.copies)
    @rule(pick=PICK, fails=st.sampled_from([False, False, True]))
    def end_copy(self, pick: int, fails: bool) -> None:
        copy = self.copies.pop(pick % len(self.copies))
        end = self.scheduler.fail_swap if fails else self.scheduler.end_swap
        end(copy)
        end(copy)

    # Judgement

    def take(self, outputs: list[StepOutput]) -> None:
        for output in outputs:
            self.reference.take(output.request_id, output.new_token_ids, output.finish_reason)

    @invariant()
    def what_must_always_hold(self) -> None:
        scheduler = self.scheduler
        scheduler.check()
        self.take(scheduler.take_events())
        assert [s.request.request_id for s in scheduler.sequences] == self.reference.live()
        for seq in scheduler.sequences:
            name = seq.request.request_id
            may_restart = seq.num_preemptions > self.preemptions.get(name, 0)
            self.reference.judge_progress(name, seq.committed_kv_tokens, may_restart=may_restart)
            self.preemptions[name] = seq.num_preemptions
        resident = [s.committed_kv_tokens for s in scheduler.sequences if s.status is not SequenceStatus.SWAPPED]
        self.reference.judge_blocks(scheduler.kv.pool.num_free, resident)

    def teardown(self) -> None:
        """Nobody interferes any more: everything ends, and every block comes back."""
        if not hasattr(self, "scheduler"):
            return
        while self.flights:
            self.commit(0)
        for name in self.reference.live():
            self.scheduler.resume(name)
        for _ in range(2000):
            if not self.scheduler.has_unfinished and not self.copies and not self.scheduler.swap.transfers:
                break
            self.take_copies()
            while self.copies:
                self.end_copy(0, False)
            self.step()
            self.what_must_always_hold()
        assert all(r.end is not None for r in self.reference.requests.values())
        assert self.scheduler.kv.pool.num_free == self.scheduler.kv.pool.num_blocks
        assert self.scheduler.swap.num_free_blocks == self.scheduler.swap.num_blocks


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=20_000 if IS_FUZZ else 400,
    stateful_step_count=200 if IS_FUZZ else 100,
    derandomize=not IS_FUZZ,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
