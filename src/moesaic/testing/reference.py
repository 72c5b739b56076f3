"""What a scheduler must do, said again over integers alone; it knows nothing of the scheduler's own code."""

from collections.abc import Iterable
from dataclasses import dataclass, field


def expected_token(number: int, position: int) -> int:
    """Return the token that the fake runner yields at ``position`` of the request that arrived as ``number``."""
    return (31 * number + 17 * position) % 1000


@dataclass(slots=True)
class Expected:
    """One admitted request: what it asked, what it got, and how it ended."""

    number: int
    num_prompt: int
    max_tokens: int
    key: int = 0
    """Place in the order of service: the lower first, then the earlier arrival."""
    tokens: list[int] = field(default_factory=list)
    end: str | None = None
    end_asked: str | None = None
    """"abort" or "error", asked for by the client and not yet told."""
    num_committed: int = 0
    num_passed_over: int = 0
    """Committed steps in a row that left this prompt out though it held a slot for its next token."""

    @property
    def rank(self) -> tuple[int, int]:
        return self.key, self.number

    @property
    def num_to_compute(self) -> int:
        """Tokens to compute before the next one can be sampled, if it holds no KV."""
        return self.num_prompt + len(self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of a step, in integers."""

    number: int
    num_tokens: int
    is_chunk: bool


@dataclass(slots=True, kw_only=True)
class Reference:
    """Predicts admission, tokens and ends, and judges each step; every broken prediction is an ``AssertionError``."""

    num_blocks: int
    block_size: int
    max_tokens_per_step: int
    max_batch_size: int
    chunk_size: int | None
    """None if prompts run whole."""
    threshold: int
    policy: str = "fcfs"
    aging_steps: int = 1
    max_waiting: int | None = None
    num_committed_steps: int = 0
    requests: dict[str, Expected] = field(default_factory=dict)

    def admits(self, name: str, num_prompt: int, max_tokens: int, *, priority: int = 0, num_waiting: int = 0) -> bool:
        """Return whether the door must open beside ``num_waiting`` who wait, and remember the request if so."""
        known = self.requests.get(name)
        is_known = known is not None and known.end is None and known.end_asked is None
        num_slots = num_prompt + max(max_tokens, 1) - 1
        is_full = self.max_waiting is not None and num_waiting >= self.max_waiting
        if is_known or is_full or num_slots > self.num_blocks * self.block_size:
            return False
        key = self._key(num_prompt, priority)
        self.requests[name] = Expected(self.num_admitted(), num_prompt, max_tokens, key)
        return True

    def _key(self, num_prompt: int, priority: int) -> int:
        if self.policy == "priority":
            return priority * self.aging_steps + self.num_committed_steps
        if self.policy == "shortest-prefill-first":
            return num_prompt * self.aging_steps // self.max_tokens_per_step + self.num_committed_steps
        return 0

    def num_admitted(self) -> int:
        """Return how many requests the door let in so far."""
        return len(self.requests)

    def live(self) -> list[str]:
        """Return the names of the unfinished requests, in order of arrival."""
        return [n for n, r in self.requests.items() if r.end is None and r.end_asked is None]

    def ask_end(self, name: str, reason: str) -> None:
        """The client ended the request: exactly one event with this reason must follow, and no token."""
        self.requests[name].end_asked = reason

    def take(self, name: str, tokens: Iterable[int], end: str | None) -> None:
        """Judge what a request got: the next tokens in order, then at most one end."""
        request = self.requests[name]
        assert request.end is None, f"{name} got something after its end"
        for token in tokens:
            assert request.end_asked is None, f"{name} got a token after it was ended"
            assert token == expected_token(request.number, request.num_prompt + len(request.tokens))
            request.tokens.append(token)
        is_full = len(request.tokens) == request.max_tokens
        assert len(request.tokens) <= request.max_tokens
        expected = request.end_asked or ("length" if is_full and (request.max_tokens or end) else None)
        assert end == expected, f"{name} ended with {end}, expected {expected}"
        request.end = end

    def judge_plan(self, rows: list[Row], *, decoding: dict[int, int], part_way: dict[int, int], num_free: int) -> None:
        """Judge a plan: budgets, chunk sizes, decode first.

        ``decoding`` and ``part_way`` map the numbers of the free running requests to their committed tokens.
        """
        total = sum(r.num_tokens for r in rows)
        assert len(rows) == len({r.number for r in rows}) <= self.max_batch_size
        assert total <= self.max_tokens_per_step or (self.chunk_size is None and len(rows) == 1)
        if self.chunk_size is None:
            return
        assert all(r.num_tokens <= self.chunk_size for r in rows if r.is_chunk)
        has_slot = {n for n, c in decoding.items() if c % self.block_size}
        num_needy = sum(c % self.block_size == 0 for c in (*decoding.values(), *part_way.values()))
        must = set(decoding) if num_needy <= num_free else has_slot
        assert must <= {r.number for r in rows if not r.is_chunk}, "a feasible decode row is left out"

    def judge_waits(self, rows: list[Row], part_way: dict[int, int]) -> None:
        """After a committed step: no prompt that held a slot is passed over more often than the threshold."""
        served = {r.number for r in rows}
        for request in self.requests.values():
            waited = part_way.get(request.number, 0) % self.block_size and request.number not in served
            request.num_passed_over = request.num_passed_over + 1 if waited else 0
            assert self.chunk_size is None or request.num_passed_over <= self.threshold

    def judge_admissions(self, rows: list[Row], waiting: Iterable[int]) -> None:
        """Nobody is admitted while one who comes first and needs no more tokens is left waiting."""
        by_number = {r.number: r for r in self.requests.values()}
        served = {r.number for r in rows}
        waits = [by_number[n] for n in waiting]
        admitted = [r for r in waits if r.number in served]
        for left_out in (r for r in waits if r.number not in served):
            for request in admitted:
                is_passed = left_out.rank < request.rank and left_out.num_to_compute <= request.num_to_compute
                assert not is_passed, f"request {request.number} passed {left_out.number}"

    def judge_victims(self, before: set[int], after: set[int]) -> None:
        """Of those who held KV before a commit or got some in its step, the first in rank that did not end has it."""
        holders = before | after
        unfinished = [r for r in self.requests.values() if r.number in holders and r.end is None and not r.end_asked]
        if unfinished:
            assert min(unfinished, key=lambda r: r.rank).number in after, "the first in rank was preempted"

    def judge_progress(self, name: str, num_committed: int, *, may_restart: bool) -> None:
        """Committed tokens never go back, except to nothing when the KV was given up."""
        request = self.requests[name]
        assert num_committed >= request.num_committed or (may_restart and num_committed == 0)
        assert num_committed <= request.num_prompt + max(len(request.tokens), 1)
        request.num_committed = num_committed

    def undo_progress(self, name: str, num_committed: int) -> None:
        """An advanced step was undone; the row is where it was, unless it ended or lost its KV meanwhile."""
        request = self.requests[name]
        request.num_committed = min(request.num_committed, num_committed)

    def judge_blocks(self, num_free: int, resident: Iterable[int]) -> None:
        """Free blocks and those that committed tokens must fill never exceed the pool."""
        filled = sum(-(-c // self.block_size) for c in resident)
        assert 0 <= num_free <= self.num_blocks - filled
