"""Random schedules, chunking off and on: invariants hold after every step (MOESAIC_CHECK), nothing is lost or stuck."""

from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.errors import ConfigError, RequestTooLargeError
from moesaic.kv.geometry import blocks_needed
from moesaic.request import StepOutput
from moesaic.sched.scheduler import Scheduler
from moesaic.testing.scheduling import FakeRunner, create_request, create_scheduler

ACTIONS = st.sampled_from(["step", "step", "step", "step", "fail", "abort", "abort in flight", "overlap"])


@st.composite
def schedulers(draw: st.DrawFn) -> Scheduler:
    block_size, rows = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 4, 8]))
    try:
        return create_scheduler(
            num_blocks=draw(st.sampled_from([4, 8, 16, 64])),
            block_size=block_size,
            chunked=draw(st.booleans()),
            chunk_size=draw(st.sampled_from([1, 2, 3, 8, 64])),
            max_batch_size=rows,
            max_tokens_per_step=rows + block_size + draw(st.sampled_from([0, 1, 5, 30])),
            threshold=draw(st.sampled_from([1, 3, 8])),
            max_partial_prefills=draw(st.sampled_from([1, 2, 4])),
        )
    except ConfigError:
        return create_scheduler()


class Client:
    """Adds requests, watches what comes back, and keeps score."""

    def __init__(self, scheduler: Scheduler, requests: list[tuple[int, int]]) -> None:
        self.scheduler = scheduler
        self.runner = FakeRunner()
        self.todo = list(requests)
        self.wanted: dict[str, int] = {}
        self.tokens: dict[str, int] = {}
        self.ends: dict[str, str] = {}

    def add_one(self) -> None:
        if not self.todo:
            return
        (num_prompt, max_tokens), name = self.todo.pop(), f"r{len(self.todo)}"
        cache = self.scheduler.kv
        is_servable = blocks_needed(num_prompt, max_tokens, cache.block_size) <= cache.pool.num_blocks
        try:
            self.scheduler.add(create_request(name, num_prompt, max_tokens))
            self.wanted[name] = max_tokens
            assert is_servable
        except RequestTooLargeError:
            assert not is_servable

    def take(self, outputs: list[StepOutput]) -> None:
        for output in [*self.scheduler.take_events(), *outputs]:
            assert output.request_id not in self.ends
            self.tokens[output.request_id] = self.tokens.get(output.request_id, 0) + len(output.new_token_ids)
            if output.finish_reason is not None:
                self.ends[output.request_id] = output.finish_reason

    def abort_one(self, choice: int) -> None:
        live = sorted(s.request.request_id for s in self.scheduler.sequences)
        if live:
            assert self.scheduler.abort(live[choice % len(live)])

    def act(self, action: str, choice: int) -> None:
        if action == "abort":
            self.abort_one(choice)
            return
        before = self.scheduler.fingerprint()
        tx = self.scheduler.step()
        tokens = self.runner.run(tx.plan, tx.sequences)
        if action == "fail":
            tx.rollback()
            assert self.scheduler.fingerprint() == before
            return
        if action == "abort in flight":
            self.abort_one(choice)
        if action == "overlap":
            with self.scheduler.step() as second:
                assert not set(tx.sequences) & set(second.sequences)
                self.take(second.commit(self.runner.run(second.plan, second.sequences)))
        self.take(tx.commit(tokens))
        assert tx.commit(tokens) == []


@settings(max_examples=150)
@given(
    schedulers(),
    st.lists(st.tuples(st.integers(1, 70), st.integers(0, 8)), min_size=1, max_size=20),
    st.lists(st.tuples(ACTIONS, st.integers(0, 20), st.booleans()), max_size=60),
)
def test_every_request_ends_exactly_once_and_every_block_comes_back(
    scheduler: Scheduler, requests: list[tuple[int, int]], actions: list[tuple[str, int, bool]]
) -> None:
    client = Client(scheduler, requests)
    for action, choice, adds in actions:
        if adds:
            client.add_one()
        client.act(action, choice)
    while client.todo:
        client.add_one()
    for _ in range(3000):
        if not scheduler.has_unfinished:
            break
        client.act("step", 0)
    assert set(client.ends) == set(client.wanted)
    for name, max_tokens in client.wanted.items():
        if client.ends[name] != "abort":
            assert client.tokens[name] == max_tokens
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_blocks
    scheduler.check()
