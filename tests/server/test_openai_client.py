"""The unmodified ``openai`` package against a real server: what it gets equals the model used offline."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from moesaic import LLM, SamplingParams

PROMPTS = [f"Prompt number {i}: " + "ab" * i for i in range(16)]
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0.0, "extra_body": {"ignore_eos": True}}


@pytest.fixture
def client(server_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server_url}/v1", api_key="none", max_retries=0) as client:
        yield client


@asynccontextmanager
async def async_client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def expected(oracle: LLM, prompt: str | list[int], max_tokens: int, **params: Any) -> Any:
    chosen = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **params)
    return oracle.generate(prompt, chosen, use_tqdm=False)[0]


def assert_all_blocks_come_free(client: openai.OpenAI) -> None:
    """A request that its client left is freed by the engine's next round, so wait for that."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        stats = client.get("/stats", cast_to=dict[str, Any])
        if stats["num_running"] + stats["num_waiting"] == 0:
            break
        time.sleep(0.02)
    assert (stats["num_running"], stats["num_waiting"]) == (0, 0)
    assert stats["kv_blocks_free"] == stats["kv_blocks_total"]


def test_models_can_be_listed_and_retrieved(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "moesaic/tiny"]
    assert client.models.retrieve("moesaic/tiny").id == "moesaic/tiny"
    with pytest.raises(openai.NotFoundError, match="no-such-model"):
        client.models.retrieve("no-such-model")


def test_a_completion_is_the_text_of_the_model(client: openai.OpenAI, oracle: LLM) -> None:
    reply = client.completions.create(prompt="Hello", max_tokens=12, **GREEDY)
    output = expected(oracle, "Hello", 12)
    assert reply.object == "text_completion"
    assert reply.id.startswith("cmpl-")
    assert reply.model == "tiny"
    assert reply.choices[0].text == output.text
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (5, 12, 17)


@pytest.mark.parametrize("prompt", ["Hi", ["Hi", "there"], [72, 105], [[72, 105], [7]]])
def test_a_prompt_is_a_text_or_token_ids_or_a_list_of_either(
    client: openai.OpenAI, oracle: LLM, prompt: str | list[Any]
) -> None:
    is_one = isinstance(prompt, str) or isinstance(prompt[0], int)
    reply = client.completions.create(prompt=prompt, max_tokens=4, **GREEDY)
    assert [c.index for c in reply.choices] == list(range(len(reply.choices)))
    assert [c.text for c in reply.choices] == [expected(oracle, p, 4).text for p in ([prompt] if is_one else prompt)]


def test_chat_renders_the_template_and_answers(client: openai.OpenAI, oracle: LLM) -> None:
    messages: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]},
    ]
    reply = client.chat.completions.create(messages=messages, max_completion_tokens=10, **GREEDY)
    rendered = oracle.render_chat([messages[0], {"role": "user", "content": "Hi\nthere"}])
    output = expected(oracle, rendered, 10)
    assert reply.id.startswith("chatcmpl-")
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].message.content == output.text
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(rendered), 10)


def test_streamed_completions_add_up_to_the_whole_ones(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"prompt": ["Hello", "é€😀"], "n": 2, "seed": 3, "max_tokens": 24, "logprobs": 1}
    asked |= {"model": "tiny", "extra_body": {"ignore_eos": True}, "temperature": 0.8}
    whole = client.completions.create(**asked)
    texts, reasons, tokens, offsets = [""] * 4, [""] * 4, [[] for _ in range(4)], [[] for _ in range(4)]
    for chunk in client.completions.create(stream=True, **asked):
        assert chunk.usage is None
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        reasons[choice.index] += choice.finish_reason or ""
        tokens[choice.index] += choice.logprobs.tokens
        offsets[choice.index] += choice.logprobs.text_offset
    assert texts == [c.text for c in whole.choices]
    assert reasons == ["length"] * 4
    assert tokens == [c.logprobs.tokens for c in whole.choices]
    assert offsets == [c.logprobs.text_offset for c in whole.choices]


def test_a_streamed_chat_adds_up_to_the_whole_one(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 24, **GREEDY}
    whole = client.chat.completions.create(**asked)
    *chunks, last = client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **asked)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert all(chunk.usage is None for chunk in chunks)
    assert (last.choices, last.usage) == ([], whole.usage)


def test_the_packages_own_stream_helper_works(client: openai.OpenAI) -> None:
    # It takes no answer that max_tokens cut short, so this one ends by itself.
    asked: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "temperature": 0.0}
    whole = client.chat.completions.create(**asked)
    with client.chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion()
    assert whole.choices[0].finish_reason == "stop"
    assert final.choices[0].message.content == whole.choices[0].message.content


def test_usage_can_come_with_every_chunk(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(client.completions.create(prompt="Hi", max_tokens=9, stream=True, stream_options=options, **GREEDY))
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage]
    assert len(counts) == len(chunks)
    assert counts == sorted(counts)
    assert counts[-1] == 9


def test_chat_logprobs_have_bytes_that_add_up_to_the_text(client: openai.OpenAI, oracle: LLM) -> None:
    messages: list[Any] = [{"role": "user", "content": "Hi"}]
    asked = {**GREEDY, "extra_body": {"ignore_eos": True, "skip_special_tokens": False}}
    reply = client.chat.completions.create(messages=messages, max_tokens=12, logprobs=True, top_logprobs=3, **asked)
    content = reply.choices[0].logprobs.content
    output = expected(oracle, oracle.render_chat(messages), 12, logprobs=3)
    assert [entry.logprob for entry in content] == pytest.approx([score.logprob for score in output.logprobs], abs=1e-4)
    assert bytes(b for e in content for b in e.bytes).decode(errors="replace") == reply.choices[0].message.content
    assert all(entry.top_logprobs[0].logprob == entry.logprob for entry in content)  # greedy: the likeliest
    assert all(len(entry.top_logprobs) == 3 for entry in content)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_an_echo_scores_the_prompt_as_the_model_does(client: openai.OpenAI, oracle: LLM, max_tokens: int) -> None:
    prompt = list(b"To score.")
    reply = client.completions.create(prompt=prompt, max_tokens=max_tokens, logprobs=1, echo=True, **GREEDY)
    logprobs = reply.choices[0].logprobs
    output = expected(oracle, prompt, max_tokens, prompt_logprobs=1)
    assert reply.choices[0].text == "To score." + output.text
    assert len(logprobs.tokens) == len(logprobs.text_offset) == len(prompt) + max_tokens
    assert (logprobs.token_logprobs[0], logprobs.top_logprobs[0]) == (None, None)
    scores = [score.logprob for score in output.prompt_logprobs[1:]]
    assert logprobs.token_logprobs[1 : len(prompt)] == pytest.approx(scores, abs=1e-4)
    rows = zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True)
    for token, value, top in list(rows)[1:]:
        assert top[token] == value
        assert max(top.values()) >= value


def test_an_echo_streams_its_prompt_first(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"prompt": "Echo", "max_tokens": 3, "logprobs": 0, "echo": True, **GREEDY}
    whole = client.completions.create(**asked)
    chunks = list(client.completions.create(stream=True, **asked))
    assert chunks[0].choices[0].text.startswith("Echo")
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert [t for c in chunks for t in c.choices[0].logprobs.tokens] == whole.choices[0].logprobs.tokens


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI, oracle: LLM) -> None:
    text = expected(oracle, "stop me", 30).text
    stop = text[6:8]
    for stream in (False, True):
        reply: Any = client.completions.create(prompt="stop me", max_tokens=30, stop=[stop], stream=stream, **GREEDY)
        choices = [chunk.choices[0] for chunk in reply] if stream else reply.choices
        assert "".join(choice.text for choice in choices) == text[: text.index(stop)]
        assert (choices[-1].finish_reason, choices[-1].stop_reason) == ("stop", stop)
    assert_all_blocks_come_free(client)


def test_choices_with_a_seed_differ_and_can_be_had_again(client: openai.OpenAI) -> None:
    def texts(**asked: Any) -> list[str]:
        reply = client.completions.create(model="tiny", prompt="x", max_tokens=8, temperature=1.0, **asked)
        return [choice.text for choice in reply.choices]

    first = texts(n=2, seed=41)
    assert first[0] != first[1]
    assert texts(n=2, seed=41) == first
    assert texts(seed=42) == first[1:]


def test_a_prompt_counts_once_for_all_its_choices(client: openai.OpenAI) -> None:
    usage = client.completions.create(prompt=["Hello", "Hi"], n=3, max_tokens=2, **GREEDY).usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (7, 12)


def test_token_ids_can_be_had(client: openai.OpenAI, oracle: LLM) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": "Hi", "max_tokens": 4, "temperature": 0.0}
    asked["extra_body"] = {"ignore_eos": True, "return_token_ids": True}
    token_ids = list(expected(oracle, "Hi", 4).token_ids)
    (choice,) = client.completions.create(**asked).choices
    assert (choice.prompt_token_ids, choice.token_ids) == ([72, 105], token_ids)
    chunks = [chunk.choices[0] for chunk in client.completions.create(stream=True, **asked)]
    assert chunks[0].prompt_token_ids == [72, 105]
    assert [i for chunk in chunks for i in chunk.token_ids] == token_ids


def test_refusals_are_the_packages_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no-such-model"):
        client.completions.create(model="no-such-model", prompt="x")
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="top_p") as caught:
            client.completions.create(model="tiny", prompt="x", top_p=1.5, stream=stream)
        assert (caught.value.param, caught.value.type) == ("top_p", "BadRequestError")
    with pytest.raises(openai.BadRequestError, match="max_model_len"):
        client.completions.create(model="tiny", prompt=[1] * 9000)


@pytest.mark.slow
def test_streams_equal_the_model_while_a_long_prompt_arrives(
    server_url: str, client: openai.OpenAI, oracle: LLM
) -> None:
    long = [i % 250 for i in range(4000)]
    begun = asyncio.Event()
    chunks_before = client.get("/stats", cast_to=dict[str, Any])["num_prefill_chunks"]

    async def stream(client: openai.AsyncOpenAI, prompt: str) -> list[int]:
        tokens: list[int] = []
        extra = {"ignore_eos": True, "return_token_ids": True}
        async for chunk in await client.completions.create(
            model="tiny", prompt=prompt, max_tokens=48, temperature=0.0, stream=True, extra_body=extra
        ):
            begun.set()
            tokens += chunk.choices[0].token_ids
        return tokens

    async def body() -> tuple[list[list[int]], str]:
        async with async_client(server_url) as client:
            streams = [asyncio.create_task(stream(client, prompt)) for prompt in PROMPTS]
            await begun.wait()
            answer = await client.completions.create(prompt=long, max_tokens=8, **GREEDY)
            return await asyncio.gather(*streams), answer.choices[0].text

    tokens, answer = asyncio.run(body())
    assert tokens == [list(expected(oracle, prompt, 48).token_ids) for prompt in PROMPTS]
    assert answer == expected(oracle, long, 8).text
    num_chunks = client.get("/stats", cast_to=dict[str, Any])["num_prefill_chunks"] - chunks_before
    assert num_chunks >= len(PROMPTS) + len(long) // 256
    assert_all_blocks_come_free(client)


def test_streams_that_are_left_change_nothing_for_the_others(
    server_url: str, client: openai.OpenAI, oracle: LLM
) -> None:
    async def stream(client: openai.AsyncOpenAI, index: int) -> str:
        is_leaving = index % 2 == 1
        text = ""
        chunks = await client.completions.create(
            prompt=PROMPTS[index], max_tokens=4000 if is_leaving else 32, stream=True, **GREEDY
        )
        async with chunks:
            async for chunk in chunks:
                text += chunk.choices[0].text
                if is_leaving and len(text) > 4:
                    break
        return text

    async def body() -> list[str]:
        async with async_client(server_url) as client:
            return await asyncio.gather(*(stream(client, index) for index in range(8)))

    texts = asyncio.run(body())
    assert texts[::2] == [expected(oracle, prompt, 32).text for prompt in PROMPTS[:8:2]]
    assert_all_blocks_come_free(client)


def test_a_client_that_leaves_before_its_whole_reply_frees_its_blocks(server_url: str, client: openai.OpenAI) -> None:
    async def body() -> None:
        async with async_client(server_url) as client:
            task = asyncio.create_task(client.completions.create(prompt="x", n=4, max_tokens=8000, **GREEDY))
            while (await client.get("/stats", cast_to=dict[str, Any]))["num_running"] < 4:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(body())
    assert_all_blocks_come_free(client)
