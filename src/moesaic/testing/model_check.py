"""Every interleaving of a small scheduler, breadth first: the real classes, only the forward is a fake.

A state is a pickled world, so that each action starts from a copy of it. Two states are one if no later behaviour can
tell them apart: ids that only grow are renamed by their order, block ids are counted (no decision reads them), waits
stop at the threshold and the monotone counters are left out.
"""

import hashlib
import pickle
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from moesaic.errors import InvariantError
from moesaic.kv.pool import BlockId
from moesaic.request import StepOutput
from moesaic.sched.invariants import CHECK_VARIABLE, checks_enabled
from moesaic.sched.swap import SwapTransfer
from moesaic.sched.transaction import StepTransaction
from moesaic.sequence import SeqId, Sequence
from moesaic.testing.scheduling import FakeRunner, create_request, create_scheduler

Command = Literal["abort", "preempt", "swap out", "pause"]
Action = tuple[str, int]
"""A verb and the index of the request, step in flight or copy that it is about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A bounded world. Its requests arrive in order, each at any time; a step takes rows + block_size tokens."""

    requests: tuple[tuple[int, int], ...] = ((3, 2), (2, 2), (4, 1))
    """Prompt tokens and ``max_tokens`` of each."""
    siblings: tuple[int, ...] = ()
    """Requests that share the prompt of the first."""
    chunked: bool = True
    num_blocks: int = 4
    block_size: int = 1
    chunk_size: int = 2
    max_batch_size: int = 2
    max_partial_prefills: int = 1
    threshold: int = 2
    num_swap_blocks: int = 0
    max_steps_in_flight: int = 1
    advances: bool = False
    """Whether steps may advance before their tokens are known."""
    commands: tuple[Command, ...] = ("abort",)
    max_drain_steps: int = 40
    """Everything must end in so many steps once nobody interferes."""


class Exploration(NamedTuple):
    """What was seen; a broken rule raises instead."""

    num_states: int
    num_transitions: int
    longest_drain_steps: int
    """Steps from the worst state until nothing is left, if nobody interferes."""
    verbs: frozenset[str]
    """Actions that were possible somewhere."""
    most_preemptions: int
    """Of one path, by the scheduler or by command."""


def explore(model: Model, *, max_states: int = 10_000_000) -> Exploration:
    """Visit every reachable state of ``model`` once and return what was seen; needs ``MOESAIC_CHECK=1``.

    Raises: ``AssertionError`` with the shortest list of actions that leads to a broken rule; its cause says which.
    """
    if not checks_enabled():
        raise ValueError(f"{CHECK_VARIABLE} is not set; plans are checked only with {CHECK_VARIABLE}=1")
    search = _Search(World(model))
    while search.frontier:
        search.expand(*search.frontier.popleft())
        if len(search.parents) > max_states:
            raise ValueError(f"more than {max_states} states (max_states); make the model smaller")
    return Exploration(
        len(search.parents), search.num_transitions, search.longest_drain(), frozenset(search.verbs), search.preemptions
    )


class _Search:
    """The breadth-first search: what was seen, how it was reached, and where each state goes if left alone."""

    def __init__(self, start: "World") -> None:
        self.model = start.model
        self.parents: dict[bytes, tuple[bytes, Action] | None] = {start.digest(): None}
        self.frontier: deque[tuple[bytes, bytes]] = deque([(start.digest(), pickle.dumps(start, protocol=5))])
        self.drained: dict[bytes, bytes] = {}
        """The state after one undisturbed step; idle states have none."""
        self.num_transitions = self.preemptions = 0
        self.verbs: set[str] = set()

    def expand(self, here: bytes, blob: bytes) -> None:
        """Take every action that the state allows."""
        for action in (world := pickle.loads(blob)).actions():
            world = pickle.loads(blob)
            try:
                world.do(action)
                world.check()
            except Exception as error:  # whatever broke, the way there is the finding
                raise AssertionError(f"{self.model}: {[*self.path(here), action]}") from error
            there = world.digest()
            self.num_transitions += 1
            self.verbs.add(action[0])
            self.preemptions = max(self.preemptions, world.scheduler.counts.num_preemptions)
            if action[0] == "settle":
                self.drained[here] = there
            if there not in self.parents:
                self.parents[there] = (here, action)
                self.frontier.append((there, pickle.dumps(world, protocol=5)))

    def path(self, state: bytes) -> list[Action]:
        """Return the actions that first led to ``state``."""
        actions: list[Action] = []
        while (step := self.parents[state]) is not None:
            state, action = step
            actions.append(action)
        return actions[::-1]

    def longest_drain(self) -> int:
        """Return the most undisturbed steps until idle, over all states.

        Raises: ``AssertionError`` with the way to a state that is not idle after ``max_drain_steps``.
        """
        longest = 0
        for start in self.drained:
            state, steps = start, 0
            while state in self.drained:
                state, steps = self.drained[state], steps + 1
                if steps > self.model.max_drain_steps:
                    raise AssertionError(f"{self.model}: no end after {self.path(start)}")
            longest = max(longest, steps)
        return longest


class _Flight(NamedTuple):
    """A step in flight: its tokens are sampled, and the blocks of its tokens may be written until it is over."""

    tx: StepTransaction
    token_ids: list[int]
    blocks: dict[SeqId, tuple[BlockId, ...]]


class World:
    """One state: the scheduler, the steps and copies under way, and what each request got so far."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.scheduler = create_scheduler(
            num_blocks=model.num_blocks,
            block_size=model.block_size,
            chunked=model.chunked,
            chunk_size=model.chunk_size,
            max_batch_size=model.max_batch_size,
            max_tokens_per_step=model.max_batch_size + model.block_size,
            max_partial_prefills=model.max_partial_prefills,
            threshold=model.threshold,
            num_swap_blocks=model.num_swap_blocks,
        )
        self.flights: list[_Flight] = []
        self.copies: list[SwapTransfer] = []
        self.received: list[int] = []
        self.ends: dict[int, str] = {}

    # Actions

    def actions(self) -> Iterator[Action]:
        """Yield what can happen now; "settle" is one undisturbed step and ends what is under way first."""
        scheduler = self.scheduler
        if len(self.received) < len(self.model.requests):
            yield "add", len(self.received)
        for index in self._live():
            yield from ((verb, index) for verb in self.model.commands if self._is_possible(verb, index))
            if SeqId(index) in scheduler.paused:
                yield "resume", index
        if len(self.flights) < self.model.max_steps_in_flight:
            yield "begin", 0
        yield from self._endings()
        if scheduler.swap.resting():
            yield "swap in", 0
        if scheduler.swap.transfers:
            yield "take copies", 0
        for verb in ("end copy", "fail copy"):
            yield from ((verb, i) for i in range(len(self.copies)))
        if scheduler.has_unfinished or self.flights or self.copies:
            yield "settle", 0

    def _endings(self) -> Iterator[Action]:
        """Yield what may become of the steps in flight: one that has advanced is committed first, undone last."""
        advanced = [i for i, flight in enumerate(self.flights) if flight.tx.is_advanced]
        if self.model.advances and not advanced:
            yield from (("advance", i) for i in range(len(self.flights)))
        yield from (("commit", i) for i in advanced or range(len(self.flights)))
        later = [i for i in range(len(self.flights)) if i not in advanced]
        yield from (("rollback", i) for i in later or advanced)

    def _is_possible(self, verb: Command, index: int) -> bool:
        is_running = self.scheduler.running.get(SeqId(index)) is not None
        if verb == "preempt":
            return is_running
        if verb == "swap out":  # may be refused for want of room, which changes nothing
            return is_running and SeqId(index) not in self.scheduler.in_flight
        return verb == "abort" or SeqId(index) not in self.scheduler.paused

    def do(self, action: Action) -> None:
        """Take one action and keep score of what came out."""
        verb, index = action
        match verb:
            case "add":
                self.received.append(0)
                leader = "r0" if index in self.model.siblings else None
                self.scheduler.add(create_request(f"r{index}", *self.model.requests[index], sibling_of=leader))
            case "begin":
                self._begin()
            case "commit":
                self._commit(self.flights.pop(index))
            case "rollback":
                self._rollback(self.flights.pop(index))
            case "advance":
                self._advance(self.flights[index].tx)
            case "swap in":
                self.scheduler.begin_swap_ins()
            case "take copies":
                self.copies += self.scheduler.take_swap_transfers()
            case "end copy":
                self._end_copy(self.copies.pop(index))
            case "fail copy":
                self.scheduler.fail_swap(self.copies.pop(index))
            case "swap out":
                self._swap_out(index)
            case "settle":
                self._settle()
            case _:
                assert getattr(self.scheduler, verb)(f"r{index}")
        self._take(self.scheduler.take_events())

    def _advance(self, tx: StepTransaction) -> None:
        """Advance; before it, that a step which advances and fails leaves no trace is tried on a copy."""
        copy = pickle.loads(pickle.dumps(tx, protocol=5))
        if not copy.advance():
            return
        copy.rollback()
        tx_again = pickle.loads(pickle.dumps(tx, protocol=5))
        tx_again.rollback()
        assert copy._scheduler.fingerprint() == tx_again._scheduler.fingerprint(), "an undone advance leaves a trace"
        assert tx.advance()

    def _swap_out(self, index: int) -> None:
        before = self.scheduler.fingerprint()
        if not self.scheduler.preempt(f"r{index}", by="swap"):
            assert self.scheduler.fingerprint() == before, "a swap that is refused leaves a trace"

    def _begin(self) -> None:
        """Plan a step that fails at once, which must leave no trace, then the same step in earnest.

        As in the engine, whoever can come back from host memory is asked for before every step.
        """
        self.scheduler.begin_swap_ins()
        before = self.scheduler.fingerprint()
        self.scheduler.step().rollback()
        assert self.scheduler.fingerprint() == before, "a step that fails leaves a trace"
        tx = self.scheduler.step()
        first = {row.seq_id: row.start // self.model.block_size for row in tx.plan.rows}
        blocks = {i: self.scheduler.kv.block_ids(s)[first[i] :] for i, s in tx.sequences.items()}
        flight = _Flight(tx, FakeRunner().run(tx.plan, tx.sequences), blocks)
        if tx.plan.num_rows:
            self.flights.append(flight)
        elif any(earlier.tx.is_advanced for earlier in self.flights):
            self._rollback(flight)
        else:
            self._commit(flight)

    def _commit(self, flight: _Flight) -> None:
        self._take(flight.tx.commit(flight.token_ids))
        self._finish_again(flight)

    def _rollback(self, flight: _Flight) -> None:
        flight.tx.rollback()
        self._finish_again(flight)

    def _finish_again(self, flight: _Flight) -> None:
        """A step that is over stays over, and saying so twice changes nothing."""
        before = self.scheduler.fingerprint()
        flight.tx.rollback()
        if not self.scheduler.was_rolled_back(flight.tx.step_id):
            assert flight.tx.commit(flight.token_ids) == [], "a second commit yields something"
        assert self.scheduler.fingerprint() == before, "ending a step twice changes something"

    def _end_copy(self, copy: SwapTransfer) -> None:
        self.scheduler.end_swap(copy)
        before = self.scheduler.fingerprint()
        self.scheduler.end_swap(copy)
        assert self.scheduler.fingerprint() == before, "ending a copy twice changes something"

    def _settle(self) -> None:
        for index in self._live():
            self.scheduler.resume(f"r{index}")
        for flight in sorted(self.flights, key=lambda f: not f.tx.is_advanced):
            self._commit(flight)
        self.flights.clear()
        self.scheduler.begin_swap_ins()
        self.copies += self.scheduler.take_swap_transfers()
        while self.copies:
            self._end_copy(self.copies.pop(0))
        self._begin()
        while self.flights:
            self._commit(self.flights.pop())

    def _take(self, outputs: Iterable[StepOutput]) -> None:
        """Check each token against its position, and that nothing follows the one end."""
        for output in outputs:
            index = int(output.request_id[1:])
            num_prompt, max_tokens = self.model.requests[index]
            assert index not in self.ends, f"{output} after the end"
            for token in output.new_token_ids:
                # Requests arrive in order, so the index is the sequence id; see FakeRunner.token.
                position = num_prompt + self.received[index]
                assert token == (31 * index + 17 * position) % 1000, f"{output} is no token of position {position}"
                self.received[index] += 1
            if output.finish_reason is not None:
                self.ends[index] = output.finish_reason
                assert output.finish_reason == "abort" or self.received[index] == max_tokens, f"{output} is short"

    def _live(self) -> list[int]:
        return [i for i in range(len(self.received)) if i not in self.ends]

    # Rules

    def check(self) -> None:
        """Return if every rule holds in this state.

        Raises: ``InvariantError`` or ``AssertionError`` naming the broken rule.
        """
        scheduler, pool = self.scheduler, self.scheduler.kv.pool
        scheduler.check()
        live = [f"r{i}" for i in self._live()]
        assert [s.request.request_id for s in scheduler.sequences] == live, "a request is lost, or lives on"
        for flight in self.flights:
            for seq_id, blocks in flight.blocks.items():
                self._check_written(flight.tx, seq_id, blocks)
        for copy in (*self.copies, *scheduler.swap.transfers):
            is_in = copy.direction == "in" and scheduler.swap.owner(copy) is not None
            self._check_blocks(copy.seq_id, copy.block_ids, copy.fence_id, copy.fence_id if is_in else None)
        if not live and not self.flights and not self.copies:
            assert (pool.num_free, scheduler.swap.num_free_blocks) == (pool.num_blocks, scheduler.swap.num_blocks)

    def _check_written(self, tx: StepTransaction, seq_id: SeqId, blocks: tuple[BlockId, ...]) -> None:
        scheduler = self.scheduler
        advance = scheduler._advance
        if advance is None or advance.step_id != tx.step_id:
            self._check_blocks(seq_id, blocks, tx.step_id, scheduler.in_flight.get(seq_id))
        elif seq_id in advance.rows:
            self._check_blocks(seq_id, blocks, tx.step_id, tx.step_id)
        elif not set(blocks) <= self._fenced_by_any():
            raise InvariantError(f"blocks {blocks} of sequence {seq_id} are given away before {tx.step_id} is over")

    def _fenced_by_any(self) -> set[BlockId]:
        """Return the blocks behind any step: a later one's fence is passed on to an advanced one if it ends first."""
        fences = _fences(self)
        return {b for flight in self.flights for b in fences.get(flight.tx.step_id, ())}

    def _check_blocks(self, seq_id: SeqId, blocks: tuple[BlockId, ...], writer: int, owner: int | None) -> None:
        """Blocks that may still be written belong to the writer's sequence, or are fenced until it is done."""
        _, tables = _kv_state(self)
        held = tables.get(seq_id, ((), 0))[0] if owner == writer else _fences(self).get(writer, ())
        if not set(blocks) <= set(held):
            raise InvariantError(f"blocks {blocks} of sequence {seq_id} are given away before {writer} is over")

    # Identity

    def digest(self) -> bytes:
        """Return 16 bytes that are equal for states that no later behaviour can tell apart."""
        return hashlib.blake2b(repr(self._key()).encode(), digest_size=16).digest()

    def _key(self) -> tuple[object, ...]:
        scheduler, running = self.scheduler, self.scheduler.running
        steps = {flight.tx.step_id: i for i, flight in enumerate(self.flights)}
        copies = (*self.copies, *scheduler.swap.transfers)
        names = {copy.fence_id: -1 - i for i, copy in enumerate(copies)} | steps
        current = {i: names.get(c.fence_id) for i, c in scheduler.swap.current.items()}
        return (
            self.received,
            sorted(self.ends.items()),
            [self._sequence_key(s) for s in scheduler.sequences],
            list(running.decoding),
            list(running.lanes),
            running.rotation.order,
            sorted((m, min(w, self.model.threshold)) for m, w in running.rotation.wait_steps.items()),
            sorted(running.rotation.deficits.items()),
            min(running.num_decode_gap_steps, 1),
            [s.seq_id for s in scheduler.waiting],
            scheduler.siblings.fingerprint(),
            sorted(scheduler.paused),
            sorted((i, state, scheduler.swap.sizes[i], current[i]) for i, state in scheduler.swap.states.items()),
            [(c.seq_id, c.direction, len(c.block_ids)) for c in copies],
            len(self.copies),
            sorted((i, names[step]) for i, step in scheduler.in_flight.items()),
            sorted((names[fence], len(blocks)) for fence, blocks in _fences(self).items() if fence in names),
            [(f.tx.plan.rows, f.tx.proposal.services, self._leases(f)) for f in self.flights],
            None if (advance := scheduler._advance) is None else (names[advance.step_id], sorted(advance.rows)),
        )

    def _sequence_key(self, seq: Sequence) -> tuple[object, ...]:
        status, *counts, num_preemptions = seq.mark()
        blocks, num_kept = _kv_state(self)[1].get(seq.seq_id, ((), 0))
        num_shared = len(self.scheduler.kv.shared_head(seq))
        return seq.seq_id, status.value, counts, num_preemptions > 0, len(blocks), num_kept, num_shared

    def _leases(self, flight: _Flight) -> list[tuple[SeqId, int]]:
        return [(seq.seq_id, num_blocks) for seq, num_blocks in flight.tx._leases]


_Tables = dict[SeqId, tuple[tuple[BlockId, ...], int]]


def _kv_state(world: World) -> tuple[object, _Tables]:
    """Return the fingerprints of the pool and of the tables."""
    pool, tables = world.scheduler.kv.fingerprint()
    return pool, tables  # type: ignore[return-value]  # a fingerprint is opaque to everybody else


def _fences(world: World) -> dict[int, list[BlockId]]:
    return world.scheduler.kv.pool.fingerprint()[2]
