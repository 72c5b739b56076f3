"""Streams that tell how far a long prompt is, and streams that do not ask."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from moesaic.config import EngineConfig
from moesaic.server.main import load_app
from moesaic.server.settings import ServerConfig

CHUNK = 16
PROMPT = [40 + i % 100 for i in range(2000)]
"""In so many chunks that the client hears of some: those that come while it is not reading become one."""
ASKED = {"include_prompt_progress": True}


@pytest.fixture(scope="module")
def client(tiny_dir: Path) -> Iterator[TestClient]:
    config = EngineConfig(enable_chunked_prefill=True, prefill_chunk_size=CHUNK, num_kv_blocks=256)
    with TestClient(load_app(str(tiny_dir), config, ServerConfig(served_model_name=("tiny",)))[0]) as client:
        yield client


def events_of(client: TestClient, route: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
    body = {"model": "tiny", "max_tokens": 3, "temperature": 0, "ignore_eos": True, "stream": True, **body}
    lines = client.post(route, json=body).text.split("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


def test_parts_come_before_the_first_token_and_say_how_far(client: TestClient) -> None:
    events = events_of(client, prompt=PROMPT, stream_options={**ASKED, "include_usage": True})
    parts = [event for event in events if "prompt_progress" in event]
    told = [part["prompt_progress"] for part in parts]
    assert {(t["index"], t["total"]) for t in told} == {(0, len(PROMPT))}
    computed = [t["processed"] for t in told]
    assert computed == sorted(set(computed))
    assert all(n % CHUNK == 0 and 0 < n < len(PROMPT) for n in computed)
    assert events[: len(parts)] == parts
    assert all(part["choices"] == [] and part["usage"] is None for part in parts)
    assert events[-1]["usage"]["prompt_tokens"] == len(PROMPT)


def test_a_chat_opens_with_its_first_token_all_the_same(client: TestClient) -> None:
    messages = [{"role": "user", "content": "word " * 300}]
    events = events_of(client, "/v1/chat/completions", messages=messages, stream_options=ASKED)
    kinds = ["part" if "prompt_progress" in e else e["choices"][0]["delta"].get("role", "more") for e in events]
    num_parts = kinds.count("part")
    assert num_parts > 0
    assert kinds[: num_parts + 1] == ["part"] * num_parts + ["assistant"]


def test_choices_tell_once_of_the_prompt_they_share_and_the_tokens_are_the_same(client: TestClient) -> None:
    plain = [e for e in events_of(client, prompt=PROMPT, n=2) if e["choices"]]
    events = events_of(client, prompt=PROMPT, n=2, stream_options=ASKED)
    assert {e["prompt_progress"]["index"] for e in events if "prompt_progress" in e} == {0}

    def text(events: list[dict[str, Any]], index: int) -> str:
        return "".join(c["text"] for e in events for c in e["choices"] if c["index"] == index)

    assert [text(events, i) for i in range(2)] == [text(plain, i) for i in range(2)]


def test_who_does_not_ask_and_short_prompts_get_none(client: TestClient) -> None:
    assert not any("prompt_progress" in event for event in events_of(client, prompt=PROMPT))
    assert not any("prompt_progress" in event for event in events_of(client, prompt=PROMPT[:9], stream_options=ASKED))
