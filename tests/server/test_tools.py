"""Tools and reasoning over HTTP, with the unmodified ``openai`` package and a template of the kind that Qwen has."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from moesaic import EngineConfig
from moesaic.server.main import load_app
from moesaic.server.settings import ServerConfig
from moesaic.testing.http import running

TEMPLATE = """\
{%- if tools %}<|im_start|>system
Call functions as <tool_call>{"name": ..., "arguments": ...}</tool_call>.
{%- for tool in tools %}{{ "\\n" + (tool | tojson) }}{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{{- "<|im_start|>" + message.role + "\\n" }}
{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{{- message.content or "" }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- "}</tool_call>" }}
{%- endfor %}
{{- "<|im_end|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is false %}<think></think>{% elif enable_thinking is true %}<think>
{% endif %}{% endif %}"""

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tell the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Łódź"]}, "days": {"$ref": "#/$defs/days"}},
            "required": ["city", "days"],
            "additionalProperties": False,
            "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
        },
    },
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "get_time"}}
TOOLS: list[Any] = [WEATHER, CLOCK]
USER: Any = {"role": "user", "content": "What is the weather? " * 8}
ASKED: dict[str, Any] = {"model": "t", "messages": [USER], "max_tokens": 900, "temperature": 1.0}
NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.fixture(scope="module")
def model_dir(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``tiny`` with this template, and with ``</think>`` as the special token 256."""
    directory = tmp_path_factory.mktemp("models") / "tools"
    shutil.copytree(tiny_dir, directory)
    for file in directory.glob("tokenizer*.json"):
        file.write_text(file.read_text(encoding="utf-8").replace("<|begin|>", "</think>"), encoding="utf-8")
    (directory / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return directory


def served(directory: Path, settings: dict[str, Any], **server: Any) -> Iterator[openai.OpenAI]:
    config = EngineConfig(device="cpu", num_kv_blocks=512, **settings)
    app, _ = load_app(str(directory), config, ServerConfig(served_model_name=("t",), **server))
    with running(app) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def client(model_dir: Path) -> Iterator[openai.OpenAI]:
    yield from served(model_dir, {"enable_chunked_prefill": True, "prefill_chunk_size": 64})


@pytest.fixture(scope="module")
def whole(model_dir: Path) -> Iterator[openai.OpenAI]:
    """Chunks off, request templates trusted."""
    yield from served(model_dir, {}, trust_request_chat_template=True)


@pytest.fixture(scope="module")
def plain(tiny_dir: Path) -> Iterator[openai.OpenAI]:
    """A model whose template has no place for tools."""
    yield from served(tiny_dir, {})


def calls_of(message: Any) -> list[tuple[str, dict[str, Any]]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]


def is_valid(name: str, arguments: dict[str, Any]) -> bool:
    if name == "get_time":
        return arguments == {}
    return (
        arguments.keys() == {"city", "days"}
        and arguments["city"] in ("Paris", "Łódź")
        and arguments["days"] in range(1, 10)
    )


@pytest.mark.parametrize("seed", range(2))
def test_required_always_calls(client: openai.OpenAI, seed: int) -> None:
    asked = {**ASKED, "tools": TOOLS, "tool_choice": "required", "seed": seed, "parallel_tool_calls": False}
    (choice,) = client.chat.completions.create(extra_body=NO_THINKING, **asked).choices
    ((name, arguments),) = calls_of(choice.message)
    assert is_valid(name, arguments)
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert (choice.message.tool_calls or [])[0].id.startswith("call_")


def test_a_named_function_is_the_one_called(client: openai.OpenAI) -> None:
    for tool in TOOLS:
        name = tool["function"]["name"]
        asked = {**ASKED, "tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": name}}}
        (choice,) = client.chat.completions.create(extra_body=NO_THINKING, parallel_tool_calls=False, **asked).choices
        assert [called for called, _ in calls_of(choice.message)] == [name]


def test_calls_in_parallel_are_all_told(client: openai.OpenAI) -> None:
    """A bias for the line break makes the random model go on with another call."""
    asked = {**ASKED, "tools": [CLOCK], "tool_choice": "required", "max_tokens": 200, "logit_bias": {"10": 20}}
    (choice,) = client.chat.completions.create(extra_body=NO_THINKING, **asked).choices
    *calls, _ = choice.message.tool_calls or ()  # the last may be cut off by max_tokens
    assert calls
    assert all((call.function.name, json.loads(call.function.arguments)) == ("get_time", {}) for call in calls)


def test_a_stream_of_calls_adds_up_to_the_whole_answer(client: openai.OpenAI) -> None:
    asked = {**ASKED, "tools": TOOLS, "tool_choice": "required", "seed": 5, "extra_body": NO_THINKING}
    whole = client.chat.completions.create(**asked).choices[0]
    names, arguments, reasons = dict[int, str](), dict[int, str](), []
    for chunk in client.chat.completions.create(stream=True, **asked):
        (choice,) = chunk.choices
        assert not choice.delta.content
        for call in choice.delta.tool_calls or ():
            if call.index not in names:
                assert call.id
                assert call.type == "function"
                names[call.index], arguments[call.index] = call.function.name, ""
            else:
                assert call.function.name is None
            arguments[call.index] += call.function.arguments
        reasons.append(choice.finish_reason)
    told = [(names[i], json.loads(arguments[i])) for i in sorted(names)]
    assert told == calls_of(whole.message)
    assert reasons[-1] == "tool_calls" == whole.finish_reason
    assert set(reasons[:-1]) == {None}


def test_the_packages_stream_helper_takes_tool_calls(client: openai.OpenAI) -> None:
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    asked = {**ASKED, "tools": [strict], "tool_choice": "required", "seed": 2, "parallel_tool_calls": False}
    with client.chat.completions.stream(extra_body=NO_THINKING, **asked) as stream:
        message = stream.get_final_completion().choices[0].message
    assert [is_valid(name, arguments) for name, arguments in calls_of(message)] == [True]


def test_calls_are_the_same_without_chunks(client: openai.OpenAI, whole: openai.OpenAI) -> None:
    asked = {
        **ASKED,
        "tools": TOOLS,
        "tool_choice": "required",
        "seed": 7,
        "extra_body": NO_THINKING,
        "max_tokens": 150,
    }
    first, second = (c.chat.completions.create(**asked).choices[0].message for c in (client, whole))
    assert [call.function for call in first.tool_calls] == [call.function for call in second.tool_calls]


@pytest.mark.parametrize(("kwargs", "bias"), [({"enable_thinking": True}, {"256": 5}), ({}, {"256": 9, "104": 10})])
def test_the_call_comes_after_the_reasoning(
    client: openai.OpenAI, kwargs: dict[str, Any], bias: dict[str, int]
) -> None:
    """The prompt begins the reasoning, or a bias for "h" lets the model write <think> rather than <tool_call>.

    The tag that ends it is a special token here; a bias for that makes the random model end it soon.
    """
    asked = {**ASKED, "tools": TOOLS, "tool_choice": "required", "seed": 1, "parallel_tool_calls": False}
    (choice,) = client.chat.completions.create(
        extra_body={"chat_template_kwargs": kwargs}, logit_bias=bias, **asked
    ).choices
    ((name, arguments),) = calls_of(choice.message)
    assert is_valid(name, arguments)
    assert choice.message.reasoning_content
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)


def test_a_schema_is_kept_after_the_reasoning(client: openai.OpenAI) -> None:
    asked = {**ASKED, "seed": 1, "logit_bias": {"256": 5}}
    body = {"chat_template_kwargs": {"enable_thinking": True}, "structured_outputs": {"choice": ["yes", "no"]}}
    message = client.chat.completions.create(extra_body=body, **asked).choices[0].message
    assert message.content in ("yes", "no")
    assert message.reasoning_content


def test_a_prompt_that_begins_a_reasoning_gives_reasoning(client: openai.OpenAI) -> None:
    asked = {**ASKED, "max_tokens": 20, "seed": 1, "extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
    message = client.chat.completions.create(**asked).choices[0].message
    assert (message.content, bool(message.reasoning_content)) == ("", True)
    deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(stream=True, **asked)]
    assert "".join(getattr(d, "reasoning_content", "") for d in deltas) == message.reasoning_content
    assert not any(delta.content for delta in deltas)


def prompt_of(client: openai.OpenAI, **asked: Any) -> str:
    extra = {"return_token_ids": True, **asked.pop("extra_body", {})}
    reply = client.chat.completions.create(**{**ASKED, "max_tokens": 1, **asked}, extra_body=extra)
    # Special tokens have larger ids than bytes.
    return b"".join(b"</think>" if i == 256 else bytes([i]) for i in reply.prompt_token_ids if i <= 256).decode()


def test_the_template_gets_the_tools_and_the_history(client: openai.OpenAI) -> None:
    arguments = '{"city": "Paris", "days": 1}'
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    history: list[Any] = [
        USER,
        {"role": "assistant", "content": None, "reasoning": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "Rain."}]},
    ]
    prompt = prompt_of(client, messages=history, tools=TOOLS)
    assert '"name": "get_time"' in prompt
    assert f'<think>Hm.</think><tool_call>{{"name": "get_weather", "arguments": {arguments}}}</tool_call>' in prompt
    assert "tool\nRain." in prompt
    assert "get_time" not in prompt_of(client, messages=history, tools=TOOLS, tool_choice="none")


def test_the_last_message_can_be_continued(client: openai.OpenAI) -> None:
    messages: list[Any] = [USER, {"role": "assistant", "content": "It is"}]
    assert prompt_of(client, messages=messages, extra_body={"continue_final_message": True}).endswith("It is")
    assert prompt_of(client, extra_body={"add_generation_prompt": False}).endswith("weather? \n")


def test_a_template_of_the_request_needs_the_servers_trust(client: openai.OpenAI, whole: openai.OpenAI) -> None:
    body = {"chat_template": "{{ messages[0].role }}/{{ mood }}", "chat_template_kwargs": {"mood": "calm"}}
    assert prompt_of(whole, extra_body=body) == "user/calm"
    with pytest.raises(openai.BadRequestError, match="--trust-request-chat-template"):
        prompt_of(client, extra_body=body)
    for bad in ("{{ messages.__class__.__mro__ }}", "{{ 1 // 0 }}", "{{ range(10**9) }}", "{% if %}", "{{ none.x.y }}"):
        with pytest.raises(openai.BadRequestError, match="chat template refuses") as caught:
            prompt_of(whole, extra_body={"chat_template": bad})
        assert caught.value.param == "chat_template"


def test_an_effort_is_for_templates_that_know_one(client: openai.OpenAI, whole: openai.OpenAI) -> None:
    body = {"chat_template": "{{ messages[0].role }}/{{ reasoning_effort }}", "reasoning_effort": "low"}
    assert prompt_of(whole, extra_body=body) == "user/low"
    named = {**body, "chat_template_kwargs": {"reasoning_effort": "high"}}
    assert prompt_of(whole, extra_body=named) == "user/high"
    with pytest.raises(openai.BadRequestError, match="knows no effort") as caught:
        prompt_of(client, extra_body={"reasoning_effort": "low"})
    assert caught.value.param == "reasoning_effort"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": TOOLS, "extra_body": {"guided_regex": "a"}}, "guided_regex", "exclude each other"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "'x'"),
        ({"tool_choice": "required"}, "tool_choice", "tools have none"),
        ({"tools": [{"type": "function", "function": {"name": "no name"}}]}, "tools", "pattern"),
        ({"tools": [{"type": "search"}]}, "tools", "function"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "nope"}}}],
                "tool_choice": "required",
            },
            "tools",
            "is refused",
        ),
        ({"extra_body": {"chat_template_kwargs": {"chat_template": "x"}}}, "chat_template_kwargs", "no variable"),
        ({"extra_body": {"chat_template_kwargs": {"tokenize": True}}}, "chat_template_kwargs", "no variable"),
        ({"extra_body": {"continue_final_message": True}}, "continue_final_message", "from 'user'"),
        (
            {"extra_body": {"continue_final_message": True, "add_generation_prompt": True}},
            "continue_final_message",
            "exclude",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [1]}]}, "messages", "no list of function calls"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    client: openai.OpenAI, fields: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        client.chat.completions.create(**{**ASKED, **fields})
    assert caught.value.param == param


def test_a_template_without_tools_refuses_them_and_says_what_to_do(plain: openai.OpenAI) -> None:
    for choice in ("auto", "required"):
        with pytest.raises(openai.BadRequestError, match="no place for tools; describe them") as caught:
            plain.chat.completions.create(**ASKED, tools=TOOLS, tool_choice=choice)
        assert caught.value.param == "tools"
    assert plain.chat.completions.create(**{**ASKED, "max_tokens": 1}, tools=TOOLS, tool_choice="none").choices


def test_the_parsers_are_told_with_their_reasons(client: openai.OpenAI, plain: openai.OpenAI) -> None:
    features = client.get("/config", cast_to=dict[str, Any])["features"]
    assert features["tool_call_parser"] == {
        "requested": "auto",
        "active": "hermes",
        "reason": "the chat template has <tool_call>",
    }
    assert features["reasoning_parser"]["active"] == "think"
    assert plain.get("/config", cast_to=dict[str, Any])["features"]["reasoning_parser"]["active"] == "none"
