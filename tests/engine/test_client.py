"""The engine's thread serves every waiter or tells it why not."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from moesaic.config import EngineConfig
from moesaic.engine.client import DeltaStream, Submission
from moesaic.engine.core import EngineCore
from moesaic.engine.launched import LaunchedStep
from moesaic.engine.loop import EngineLoop
from moesaic.engine.messages import (
    AbortRequests,
    AddRequests,
    Answer,
    Command,
    EngineDied,
    Event,
    NewRequest,
    PauseRequests,
    ResumeRequests,
    StepDone,
    Stop,
)
from moesaic.engine.outputs import TextDelta
from moesaic.engine.thread_client import ThreadEngineClient
from moesaic.errors import EngineDeadError, EngineDrainingError, RequestError
from moesaic.models.hf import HFCausalLM
from moesaic.models.loader import load_model
from moesaic.request import SamplingParams, StepOutput

PROMPTS = ((72, 101, 108), (10, 20, 30, 40, 50), (7,))
CONFIG = EngineConfig(device="cpu", num_kv_blocks=512, enable_chunked_prefill=True)


class FailingCore(EngineCore):
    """A core whose device is lost for good in its fifth step with ``num_requests`` requests."""

    num_requests = 1
    num_steps = 0

    def step(self) -> list[StepOutput]:
        self.num_steps += len(self.scheduler.sequences) == self.num_requests
        if self.num_steps >= 5:
            raise RuntimeError("device lost")
        return super().step()


@pytest.fixture(scope="module")
def model(tiny_dir: Path) -> HFCausalLM:
    return load_model(tiny_dir)


def run(
    core: EngineCore, scenario: Callable[[ThreadEngineClient], Awaitable[Any]]
) -> Any:  # Any: what the scenario returns
    """Run ``scenario`` with a started client, close it, and check that no exception was lost on the way."""
    lost: list[dict[str, Any]] = []

    async def body() -> Any:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: lost.append(context))
        client = ThreadEngineClient(core, None)
        await client.start()
        try:
            return await scenario(client)
        finally:
            await client.close()

    result = asyncio.run(body())
    assert lost == []
    return result


def submission(prompt: tuple[int, ...] = PROMPTS[0], max_tokens: int = 8, **params: Any) -> Submission:
    chosen = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **params)
    return Submission(prompt_token_ids=prompt, sampling_params=chosen)


async def tokens_of(stream: DeltaStream) -> dict[str, tuple[int, ...]]:
    tokens: dict[str, tuple[int, ...]] = dict.fromkeys(stream.request_ids, ())
    async with stream:
        async for delta in stream:
            tokens[delta.request_id] += delta.token_ids
    return tokens


async def all_blocks_free(client: ThreadEngineClient) -> bool:
    stats = await client.stats()
    return bool(stats["kv_blocks_free"] == stats["kv_blocks_total"]) and stats["num_running"] == 0


async def _until_dead(stream: DeltaStream) -> AsyncIterator[int]:
    try:
        async for delta in stream:
            for token_id in delta.token_ids:
                yield token_id
    except EngineDeadError:
        return


def offline(core: EngineCore, prompts: Iterable[tuple[int, ...]], max_tokens: int = 8) -> list[tuple[int, ...]]:
    tokens: dict[str, tuple[int, ...]] = {}
    for prompt in prompts:
        one = submission(prompt, max_tokens)
        core.add_request(str(len(tokens)), prompt, one.sampling_params)
        tokens[str(len(tokens))] = ()
    while core.has_pending_requests():
        for output in core.step():
            tokens[output.request_id] += output.new_token_ids
    return list(tokens.values())


def test_streams_give_the_tokens_of_the_core(model: HFCausalLM) -> None:
    async def scenario(client: ThreadEngineClient) -> list[tuple[int, ...]]:
        streams = [await client.submit(submission(prompt)) for prompt in PROMPTS]
        found = await asyncio.gather(*map(tokens_of, streams))
        assert await all_blocks_free(client)
        return [tokens for one in found for tokens in one.values()]

    assert run(EngineCore(model, CONFIG), scenario) == offline(EngineCore(model, CONFIG), PROMPTS)


def test_one_submission_of_many_requests_is_one_stream_in_their_order(model: HFCausalLM) -> None:
    async def scenario(client: ThreadEngineClient) -> list[tuple[int, ...]]:
        return list((await tokens_of(await client.submit(*map(submission, PROMPTS)))).values())

    assert run(EngineCore(model, CONFIG), scenario) == offline(EngineCore(model, CONFIG), PROMPTS)


def test_a_bad_request_is_refused_to_its_submitter_alone(model: HFCausalLM) -> None:
    async def scenario(client: ThreadEngineClient) -> None:
        good = await client.submit(submission())
        with pytest.raises(RequestError, match="99999") as caught:
            await client.submit(submission((99999,)))
        assert caught.value.param == "prompt"
        assert len((await tokens_of(good))[good.request_ids[0]]) == 8
        assert client.is_healthy

    run(EngineCore(model, CONFIG), scenario)


def test_one_bad_request_of_a_submission_refuses_all_of_it(model: HFCausalLM) -> None:
    async def scenario(client: ThreadEngineClient) -> None:
        with pytest.raises(RequestError):
            await client.submit(submission(), submission((99999,)))
        with pytest.raises(RequestError, match="no tokenizer"):
            await client.submit(submission(), submission(stop="x"))
        assert await all_blocks_free(client)

    run(EngineCore(model, CONFIG), scenario)


def test_leaving_a_stream_early_frees_its_blocks_and_leaves_the_others_alone(model: HFCausalLM) -> None:
    async def scenario(client: ThreadEngineClient) -> list[tuple[int, ...]]:
        stays = await client.submit(submission(PROMPTS[1], 40))
        async with await client.submit(submission(max_tokens=4000)) as leaves:
            async for _ in leaves:
                break
        assert [delta async for delta in leaves] == []
        tokens = await tokens_of(stays)
        assert await all_blocks_free(client)
        return list(tokens.values())

    assert run(EngineCore(model, CONFIG), scenario) == offline(EngineCore(model, CONFIG), [PROMPTS[1]], 40)


def test_closing_a_stream_wakes_its_reader(model: HFCausalLM) -> None:
    async def scenario(client: ThreadEngineClient) -> None:
        stream = await client.submit(submission(max_tokens=4000))
        reader = asyncio.create_task(tokens_of(stream))
        await asyncio.sleep(0)
        await stream.aclose()
        await reader

    run(EngineCore(model, CONFIG), scenario)


def test_a_cancelled_submitter_leaves_nothing_behind(model: HFCausalLM) -> None:
    async def scenario(client: ThreadEngineClient) -> None:
        task = asyncio.create_task(client.submit(submission(max_tokens=4000)))
        await asyncio.sleep(0)  # the command is on its way now
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await all_blocks_free(client)

    run(EngineCore(model, CONFIG), scenario)


def test_an_aborted_request_ends_with_a_last_delta(model: HFCausalLM) -> None:
    async def scenario(client: ThreadEngineClient) -> TextDelta:
        stream = await client.submit(submission(max_tokens=4000))
        client.abort([*stream.request_ids, "unknown"])
        return [delta async for delta in stream][-1]

    last = run(EngineCore(model, CONFIG), scenario)
    assert last.finish_reason == "abort"
    assert last.output is not None


def test_a_dead_engine_tells_every_waiter_why(model: HFCausalLM) -> None:
    async def scenario(client: ThreadEngineClient) -> None:
        streams = [await client.submit(submission(prompt, 100)) for prompt in PROMPTS]
        for stream in streams:
            with pytest.raises(EngineDeadError, match="device lost") as caught:
                await tokens_of(stream)
            assert isinstance(caught.value.__cause__, RuntimeError)
        assert not client.is_healthy
        assert isinstance(client.error, EngineDeadError)
        with pytest.raises(EngineDeadError, match="device lost"):
            await client.submit(submission())
        with pytest.raises(EngineDeadError, match="device lost"):
            await client.stats()

    core = FailingCore(model, CONFIG)
    core.num_requests = len(PROMPTS)
    run(core, scenario)


def test_a_failed_step_ends_its_streams_with_an_error_and_the_engine_serves_on(model: HFCausalLM) -> None:
    class Stumbling(EngineCore):
        def _commit(self, step: LaunchedStep) -> list[StepOutput]:
            outputs = super()._commit(step)
            if self.stats()["num_steps"] == 3:
                raise OSError("bad sector")
            return outputs

    async def scenario(client: ThreadEngineClient) -> list[tuple[int, ...]]:
        stream = await client.submit(submission(max_tokens=100))
        deltas = [delta async for delta in stream]
        assert deltas[-1].finish_reason == "error"
        assert sum(len(d.token_ids) for d in deltas) == 2
        assert deltas[-1].output is not None
        assert deltas[-1].output.error == deltas[-1].error
        assert "OSError" in (deltas[-1].error or "")
        assert client.is_healthy
        stats = await client.stats()
        assert (stats["num_failed_steps"], stats["num_failed_requests"], stats["is_healthy"]) == (1, 1, True)
        assert await all_blocks_free(client)
        return list((await tokens_of(await client.submit(submission(PROMPTS[1])))).values())

    assert run(Stumbling(model, CONFIG), scenario) == offline(EngineCore(model, CONFIG), [PROMPTS[1]])


def test_an_engine_that_dies_with_a_command_tells_its_sender(model: HFCausalLM) -> None:
    class NoStats(EngineCore):
        def stats(self) -> dict[str, Any]:
            raise KeyError("lost")

    async def scenario(client: ThreadEngineClient) -> None:
        with pytest.raises(EngineDeadError, match="lost"):
            await client.stats()

    run(NoStats(model, CONFIG), scenario)


def test_what_came_before_the_death_is_still_read(model: HFCausalLM) -> None:
    async def scenario(client: ThreadEngineClient) -> list[int]:
        stream = await client.submit(submission(max_tokens=100))
        tokens = [token async for token in _until_dead(stream)]
        assert [delta async for delta in stream] == []
        return tokens

    assert len(run(FailingCore(model, CONFIG), scenario)) == 4


def test_close_ends_what_is_unfinished_and_refuses_what_comes_later(model: HFCausalLM) -> None:
    async def scenario(client: ThreadEngineClient) -> None:
        stream = await client.submit(submission(max_tokens=4000))
        await client.close()
        await client.close()
        assert [delta.finish_reason async for delta in stream][-1] == "abort"
        assert not client.is_healthy
        with pytest.raises(EngineDeadError, match="closed"):
            await client.submit(submission())

    run(EngineCore(model, CONFIG), scenario)


def test_a_client_that_was_not_started_refuses_requests(model: HFCausalLM) -> None:
    client = ThreadEngineClient(EngineCore(model, CONFIG), None)
    assert not client.is_healthy
    with pytest.raises(EngineDeadError, match="start"):
        asyncio.run(client.submit(submission()))
    asyncio.run(client.close())


def test_the_thread_ends_when_its_event_loop_is_gone(model: HFCausalLM) -> None:
    before = set(threading.enumerate())

    async def body() -> None:
        client = ThreadEngineClient(EngineCore(model, CONFIG), None)
        await client.start()
        await client.submit(submission(max_tokens=4000))

    asyncio.run(body())
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=60)
        assert not thread.is_alive()


class Commands:
    """Commands in a row, then a stop once the loop would wait."""

    def __init__(self, *commands: Command) -> None:
        self.commands = list(commands)

    def take(self, *, may_wait: bool) -> Command | None:
        return self.commands.pop(0) if self.commands else Stop() if may_wait else None


def new_requests(*prompts: tuple[int, ...]) -> tuple[NewRequest, ...]:
    params = submission().sampling_params
    return tuple(
        NewRequest(request_id=str(i), prompt_token_ids=prompt, sampling_params=params)
        for i, prompt in enumerate(prompts)
    )


def played(model: HFCausalLM, *commands: Command) -> list[list[Event]]:
    """Return the events of each round of a loop that stops once it has nothing to do."""
    rounds: list[list[Event]] = []
    EngineLoop(EngineCore(model, CONFIG), Commands(*commands), rounds.append).run()
    return rounds


def test_each_step_is_reported_in_one_piece(model: HFCausalLM) -> None:
    rounds = played(model, AddRequests(0, new_requests(*PROMPTS)))
    assert rounds[0][0] == Answer(0)
    steps = [event for events in rounds for event in events if isinstance(event, StepDone)]
    assert [len(step.outputs) for step in steps] == 8 * [len(PROMPTS)]


def test_commands_take_effect_in_the_order_they_were_given(model: HFCausalLM) -> None:
    """A cancel behind its add ends the request before its first token; one ahead of it changes nothing."""
    add = AddRequests(0, new_requests(PROMPTS[0]))
    ended = [e for r in played(model, add, AbortRequests(("0",))) for e in r if isinstance(e, StepDone)]
    assert [(o.new_token_ids, o.finish_reason) for step in ended for o in step.outputs] == [((), "abort")]
    whole = [e for r in played(model, AbortRequests(("0",)), add) for e in r if isinstance(e, StepDone)]
    assert sum(len(o.new_token_ids) for step in whole for o in step.outputs) == 8


def test_a_paused_request_gets_nothing_until_it_is_resumed(model: HFCausalLM) -> None:
    add, pause, resume = AddRequests(0, new_requests(PROMPTS[0])), PauseRequests(("0",)), ResumeRequests(("0",))
    paused = [e for r in played(model, add, pause) for e in r if isinstance(e, StepDone)]
    assert [o.finish_reason for step in paused for o in step.outputs] == ["abort"], "by the stop at the end"
    resumed = [e for r in played(model, add, pause, resume) for e in r if isinstance(e, StepDone)]
    assert sum(len(o.new_token_ids) for step in resumed for o in step.outputs) == 8


def test_pause_and_resume_change_no_token(model: HFCausalLM) -> None:
    async def scenario(client: ThreadEngineClient) -> list[tuple[int, ...]]:
        stream = await client.submit(submission(max_tokens=12))
        client.pause(stream.request_ids)
        stats = await client.stats()
        client.resume(stream.request_ids)
        assert stats["num_paused"] in (0, 1)  # it may have ended before
        return list((await tokens_of(stream)).values())

    assert run(EngineCore(model, CONFIG), scenario) == offline(EngineCore(model, CONFIG), [PROMPTS[0]], 12)


def test_a_draining_engine_refuses_newcomers_and_ends_what_runs(model: HFCausalLM) -> None:
    async def scenario(client: ThreadEngineClient) -> int:
        stream = await client.submit(submission(max_tokens=12))
        client.drain()
        assert not client.is_healthy
        with pytest.raises(EngineDrainingError, match="stopping"):
            await client.submit(submission())
        (tokens,) = (await tokens_of(stream)).values()
        assert client.num_open_streams == 0
        return len(tokens)

    assert run(EngineCore(model, CONFIG), scenario) == 12


def delta(request_id: str, text: str, *, is_last: bool = False) -> TextDelta:
    return TextDelta(
        request_id=request_id,
        text=text,
        token_ids=tuple(text.encode()),
        finish_reason="length" if is_last else None,
        time_s=float(len(text)),
    )


class Noted:
    """An observer that remembers."""

    def __init__(self) -> None:
        self.seen: list[TextDelta] = []

    def observe(self, delta: TextDelta) -> None:
        self.seen.append(delta)

    def lose(self, request_ids: tuple[str, ...], reason: str) -> None:
        raise AssertionError("nothing was lost")


def test_what_comes_while_nobody_reads_is_one_delta_per_request_and_is_observed_piece_by_piece() -> None:
    given = [delta("a", "x"), delta("b", "12"), delta("a", "yz"), delta("b", "3", is_last=True), delta("a", "")]

    async def scenario() -> None:
        stream, noted = DeltaStream(("a", "b"), lambda stream: None), Noted()
        stream.observer = noted
        for one in given:
            stream.put(one)
        first, second = await anext(stream), await anext(stream)
        assert (first.request_id, first.text, first.token_ids) == ("a", "xyz", (120, 121, 122))
        assert (second.request_id, second.text, second.finish_reason) == ("b", "123", "length")
        assert stream.unfinished_ids == ("a",)
        assert [one.text for one in noted.seen] == ["x", "yz", "", "12", "3"]
        stream.put(delta("a", "!"))
        stream.put(EngineDied("device lost"))
        assert (await anext(stream)).text == "!"
        noted.lose = lambda request_ids, reason: noted.seen.clear()  # type: ignore[method-assign]
        with pytest.raises(EngineDeadError, match="device lost"):
            await anext(stream)
        assert noted.seen == []

    asyncio.run(scenario())
