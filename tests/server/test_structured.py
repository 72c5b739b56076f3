"""Grammars over HTTP, with the unmodified ``openai`` package: random weights, so only the grammar makes them valid."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest

from moesaic import EngineConfig
from moesaic.server.main import load_app
from moesaic.testing.http import running


class Shirt(pydantic.BaseModel):
    """What the schema is made from."""

    model_config = pydantic.ConfigDict(extra="forbid")

    size: Literal["small", "large"]
    in_stock: bool
    tags: list[Literal["new", "old"]] = pydantic.Field(max_length=2)


FORMAT: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {"name": "shirt", "schema": Shirt.model_json_schema(), "strict": True},
}
ASKED: dict[str, Any] = {"model": "tiny", "max_tokens": 700, "seed": 3, "temperature": 1.0}
CHAT: dict[str, Any] = {**ASKED, "messages": [{"role": "user", "content": "A shirt, please. " * 10}]}
PLATE = r"[A-Z]{2}\d{3}"


@pytest.fixture(scope="module")
def whole_url(tiny_dir: Path) -> Iterator[str]:
    """The address of a server of ``tiny``, chunked prefill off."""
    with running(load_app(str(tiny_dir), EngineConfig(device="cpu", num_kv_blocks=512))[0]) as url:
        yield url


@pytest.fixture
def client(server_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_schema_is_kept_streamed_or_not(client: openai.OpenAI) -> None:
    (choice,) = client.chat.completions.create(response_format=FORMAT, **CHAT).choices
    Shirt.model_validate_json(choice.message.content or "")
    assert choice.finish_reason == "stop"
    chunks = client.chat.completions.create(response_format=FORMAT, stream=True, **CHAT)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content


def test_the_packages_own_parsing_works(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(response_format=Shirt, **CHAT).choices[0].message.parsed
    assert isinstance(parsed, Shirt)


def test_it_is_the_same_without_chunks(client: openai.OpenAI, whole_url: str, tiny_dir: Path) -> None:
    asked = {**CHAT, "response_format": FORMAT}
    with openai.OpenAI(base_url=f"{whole_url}/v1", api_key="none", max_retries=0) as other:
        whole = other.chat.completions.create(**{**asked, "model": str(tiny_dir)})
    assert client.chat.completions.create(**asked).choices[0].message == whole.choices[0].message


@pytest.mark.parametrize(
    ("fields", "is_valid"),
    [
        ({"structured_outputs": {"regex": PLATE}}, re.compile(PLATE).fullmatch),
        ({"guided_regex": PLATE}, re.compile(PLATE).fullmatch),
        ({"structured_outputs": {"choice": ["red", "blue"]}}, ["red", "blue"].__contains__),
        ({"guided_choice": ["red", "blue"]}, ["red", "blue"].__contains__),
        ({"structured_outputs": {"grammar": 'start: "a"~3'}}, "aaa".__eq__),
        ({"guided_grammar": 'start: "a"~3'}, "aaa".__eq__),
        ({"structured_outputs": {"json": {"type": "boolean"}}}, ["true", "false"].__contains__),
        ({"structured_outputs": {"json": '{"type": "boolean"}'}}, ["true", "false"].__contains__),
        ({"guided_json": {"type": "boolean"}}, ["true", "false"].__contains__),
    ],
)
def test_other_servers_fields_work_for_completions(
    client: openai.OpenAI, fields: dict[str, Any], is_valid: Callable[[str], object]
) -> None:
    reply = client.completions.create(prompt="?", extra_body=fields, n=2, **ASKED)
    assert [choice.finish_reason for choice in reply.choices] == ["stop"] * 2
    assert all(is_valid(choice.text) for choice in reply.choices), reply.choices


def test_an_object_without_a_schema_is_json_as_far_as_it_goes(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(response_format={"type": "json_object"}, **{**CHAT, "max_tokens": 60})
    (choice,) = reply.choices
    assert (choice.message.content or "").startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content or ""), dict)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format", "has no json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nope"}}}},
            "response_format",
            "the grammar \\(json_schema\\) is refused",
        ),
        ({"structured_outputs": {"regex": "((("}}, "structured_outputs", "is refused"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs", "structural_tag"),
        ({"guided_choice": []}, "guided_choice", "at least one"),
        ({"guided_regex": "a", "guided_json": {}}, "guided_regex", "guided_json and guided_regex both"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "says where it ends"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_grammar_is_a_400_that_names_its_field(
    client: openai.OpenAI, fields: dict[str, Any], param: str, words: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        client.chat.completions.create(extra_body=fields, stream=stream, **CHAT)
    assert caught.value.param == param
    assert client.get("/stats", cast_to=dict[str, Any])["num_grammars"] == 0
