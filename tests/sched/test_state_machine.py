"""Random commands against the integer reference, counted; hypothesis shrinks what it finds.

``test_random_commands`` does 100,000 with fixed seeds; hypothesis adds a few thousand here and, with ``make fuzz``,
as many as there is time for.
"""

import os
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moesaic.config import SchedulingPolicy
from moesaic.errors import DuplicateRequestError, QueueFullError, RequestTooLargeError
from moesaic.request import StepOutput
from moesaic.sched.plan import PrefillChunk
from moesaic.sched.transaction import StepTransaction
from moesaic.sequence import SequenceStatus
from moesaic.testing.reference import Reference, Row
from moesaic.testing.scheduling import FakeRunner, create_request, create_scheduler

IS_FUZZ = os.environ.get("HYPOTHESIS_PROFILE") == "fuzz"
PICK = st.integers(0, 10**6)
NUM_COMMANDS, NUM_SEEDS = 100_000, 8


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
        max_waiting=st.sampled_from([None, 4]),
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
        max_waiting: int | None,
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
            scheduling_policy=policy,
            aging_steps=4,
            max_waiting_requests=max_waiting,
        )
        self.num_commands = 0
        self.reference = Reference(
            num_blocks=num_blocks,
            block_size=block_size,
            max_tokens_per_step=budget,
            max_batch_size=rows,
            chunk_size=chunk_size,
            threshold=3,
            policy=policy,
            aging_steps=4,
            max_waiting=max_waiting,
        )
        self.flights: list[tuple[StepTransaction, list[int], list[Row], dict[int, int]]] = []
        self.copies: list[Any] = []
        self.preemptions: dict[str, int] = {}
        self.prompts: dict[str, tuple[int, ...]] = {}

    # Requests

    @rule(num_prompt=st.integers(1, 60), max_tokens=st.integers(0, 6), priority=st.integers(-2, 2))
    def add_any(self, num_prompt: int, max_tokens: int, priority: int) -> None:
        self.add(f"r{self.reference.num_admitted()}", num_prompt, max_tokens, priority)

    @rule(num_prompt=st.integers(1, 8), max_tokens=st.integers(0, 6))
    def add_small(self, num_prompt: int, max_tokens: int) -> None:
        self.add(f"r{self.reference.num_admitted()}", num_prompt, max_tokens, 0)

    @precondition(lambda self: self.reference.live())
    @rule(pick=PICK, max_tokens=st.integers(0, 6), priority=st.integers(-2, 2))
    def add_sibling(self, pick: int, max_tokens: int, priority: int) -> None:
        leader = self.live(pick)
        self.add(
            f"r{self.reference.num_admitted()}",
            self.reference.requests[leader].num_prompt,
            max_tokens,
            priority,
            leader,
        )

    @precondition(lambda self: self.reference.live())
    @rule(pick=PICK)
    def add_twice(self, pick: int) -> None:
        self.add(self.live(pick), 1, 1, 0)

    def add(self, name: str, num_prompt: int, max_tokens: int, priority: int, leader: str | None = None) -> None:
        num_waiting = len(self.waiting())
        is_admitted = self.reference.admits(name, num_prompt, max_tokens, priority=priority, num_waiting=num_waiting)
        try:
            request = create_request(name, num_prompt, max_tokens, priority=priority, sibling_of=leader)
            prompt = request.prompt_token_ids if leader is None else self.prompts[leader]
            self.scheduler.add(replace(request, prompt_token_ids=prompt))
            self.prompts[name] = prompt
            assert is_admitted
        except (RequestTooLargeError, DuplicateRequestError, QueueFullError):
            assert not is_admitted

    def waiting(self) -> list[int]:
        """Who waits for admission, as their own states tell it."""
        scheduler = self.scheduler
        aside = scheduler.paused.keys() | scheduler.in_flight.keys()
        return [s.seq_id for s in scheduler.sequences if s.status is SequenceStatus.WAITING and s.seq_id not in aside]

    def resident(self) -> set[int]:
        holding = (SequenceStatus.PREFILL, SequenceStatus.DECODE)
        return {s.seq_id for s in self.scheduler.sequences if s.status in holding}

    def resident_tokens(self) -> list[int]:
        """Committed tokens of each who holds KV; those in shared blocks are of the first of their holders."""
        kv, heads, tokens = self.scheduler.kv, set(), []
        for seq in self.scheduler.sequences:
            head = kv.shared_head(seq)
            num_counted = len(head) * kv.block_size if head in heads else 0
            heads.add(head)
            if seq.status is not SequenceStatus.SWAPPED:
                tokens.append(seq.committed_kv_tokens - num_counted)
        return tokens

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
    @rule(pick=PICK, verb=st.sampled_from(["preempt", "swap out", "pause", "resume", "resume"]))
    def set_aside(self, pick: int, verb: str) -> None:
        if verb == "swap out":
            self.scheduler.preempt(self.live(pick), by="swap")
        else:
            getattr(self.scheduler, verb)(self.live(pick))

    # Steps

    @rule()
    def step(self) -> None:
        self.begin()
        self.commit(len(self.flights) - 1)

    @precondition(lambda self: len(self.flights) < 2)
    @rule()
    def step_ahead(self) -> None:
        """As the engine does: the next step is planned before the tokens of this one are known."""
        if not self.flights:
            self.begin()
        self.advance(0)
        if self.flights[0][0].is_advanced and len(self.flights) < 2:
            self.begin()
        self.commit(0)

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
        num_free, waiting = scheduler.kv.pool.num_free, self.waiting()
        tx = scheduler.step()
        rows = [
            Row(number=r.seq_id, num_tokens=r.num_tokens, is_chunk=isinstance(r, PrefillChunk)) for r in tx.plan.rows
        ]
        self.reference.judge_plan(rows, decoding=decoding, part_way=part_way, num_free=num_free)
        self.reference.judge_admissions(rows, [i for i in waiting if i not in scheduler.siblings])
        self.flights.append((tx, FakeRunner().run(tx.plan, tx.sequences), rows, part_way))

    @precondition(lambda self: self.flights)
    @rule(pick=PICK)
    def commit(self, pick: int) -> None:
        tx, tokens, rows, part_way = self.flights.pop(self.first_to_commit(pick))
        resident = self.resident()
        outputs = tx.commit(tokens)
        self.reference.num_committed_steps += 1
        self.take(outputs)
        self.reference.judge_victims(resident, self.resident())
        self.reference.judge_waits(rows, part_way)
        assert tx.commit(tokens) == []
        tx.rollback()

    @precondition(lambda self: self.flights)
    @rule(pick=PICK)
    def roll_back(self, pick: int) -> None:
        may_end = [i for i, flight in enumerate(self.flights) if not flight[0].is_advanced] or [0]
        tx, *_ = self.flights.pop(may_end[pick % len(may_end)])
        was_advanced = tx.is_advanced
        tx.rollback()
        tx.rollback()
        if was_advanced:
            for seq in tx.sequences.values():
                self.reference.undo_progress(seq.request.request_id, seq.committed_kv_tokens)

    def first_to_commit(self, pick: int) -> int:
        """Return a step that may be committed next: one that has advanced comes first."""
        advanced = [i for i, flight in enumerate(self.flights) if flight[0].is_advanced]
        return advanced[0] if advanced else pick % len(self.flights)

    @precondition(lambda self: self.flights)
    @rule(pick=PICK)
    def advance(self, pick: int) -> None:
        """Move a step before its tokens are known, if none has."""
        if not any(tx.is_advanced for tx, *_ in self.flights):
            self.flights[pick % len(self.flights)][0].advance()

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
        self.num_commands += 1
        scheduler.check()
        self.take(scheduler.take_events())
        assert [s.request.request_id for s in scheduler.sequences] == self.reference.live()
        for seq in scheduler.sequences:
            name = seq.request.request_id
            may_restart = seq.num_preemptions > self.preemptions.get(name, 0)
            self.reference.judge_progress(name, seq.committed_kv_tokens, may_restart=may_restart)
            self.preemptions[name] = seq.num_preemptions
        self.reference.judge_blocks(scheduler.kv.pool.num_free, self.resident_tokens())

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
    max_examples=20_000 if IS_FUZZ else 60,
    stateful_step_count=200 if IS_FUZZ else 50,
    derandomize=not IS_FUZZ,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def random_machine(rng: random.Random) -> SchedulerMachine:
    """Return a machine that ``rng`` has given settings."""
    machine = SchedulerMachine()
    machine.start(
        block_size=rng.choice([1, 2, 4]),
        num_blocks=rng.choice([4, 7, 12]),
        chunk_size=rng.choice([None, 1, 2, 5]),
        rows=rng.choice([1, 3, 5]),
        spare=rng.choice([0, 1, 6]),
        num_swap_blocks=rng.choice([0, 3, 30]),
        policy=rng.choice(get_args(SchedulingPolicy)),
        max_waiting=rng.choice([None, 4]),
    )
    return machine


def random_command(machine: SchedulerMachine, rng: random.Random) -> None:
    """Do one command that is possible, and judge what came of it."""
    pick = rng.randrange(10**6)
    commands: list[Callable[[], object]] = [
        lambda: machine.add_any(rng.randint(1, 60), rng.randint(0, 6), rng.randint(-2, 2)),
        lambda: machine.add_small(rng.randint(1, 8), rng.randint(0, 6)),
        machine.step,
        machine.step,
        machine.failing_step,
        machine.take_copies,
    ]
    if machine.reference.live():
        commands += [
            lambda: machine.add_twice(pick),
            lambda: machine.add_sibling(pick, rng.randint(0, 6), rng.randint(-2, 2)),
            lambda: machine.add_sibling(pick, rng.randint(0, 6), 0),
            lambda: machine.end(pick, rng.random() < 0.5),
            lambda: machine.set_aside(pick, rng.choice(["preempt", "swap out", "pause", "resume", "resume"])),
        ]
    if len(machine.flights) < 2:
        commands += [machine.begin, machine.step_ahead]
    if machine.flights:
        commands += [lambda: machine.commit(pick), lambda: machine.roll_back(pick), lambda: machine.advance(pick)]
    if machine.copies:
        commands += [lambda: machine.end_copy(pick, rng.random() < 0.3)] * 2
    rng.choice(commands)()
    machine.what_must_always_hold()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_random_commands(seed: int) -> None:
    """Together 100,000; a failure repeats with its seed, and hypothesis is there to look for a shorter one."""
    rng, num_commands = random.Random(seed), 0
    while num_commands < NUM_COMMANDS // NUM_SEEDS:
        machine = random_machine(rng)
        for _ in range(100):
            random_command(machine, rng)
        num_commands += machine.num_commands
        machine.teardown()
    assert num_commands * NUM_SEEDS >= NUM_COMMANDS
