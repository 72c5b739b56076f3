"""What clients may send: the OpenAI request bodies with the extensions that other servers have as well.

Ranges are judged by ``SamplingParams``, which the offline API shares; here are names, types and what is refused.
"""

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr

from moesaic.engine.client import Submission
from moesaic.errors import RequestError
from moesaic.request import SamplingParams
from moesaic.server.chat_format import Rendering
from moesaic.server.structured import StructuredFields
from moesaic.server.tools.protocol import Tool, ToolChoice

MAX_CHOICES = 128
"""Largest ``n``: as many requests come from one body, and OpenAI's own limit is the same."""

Defaults = Mapping[str, float | int]
"""Sampling parameters that the model itself proposes, by their name in ``SamplingParams``."""

UNSUPPORTED: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "audio": (None,),
        "bad_words": (None, []),
        "best_of": (None, 1),
        "documents": (None, []),
        "function_call": (None, "none"),
        "functions": (None, []),
        "grammar": (None,),
        "json_schema": (None,),
        "length_penalty": (None, 1.0),
        "modalities": (None, ["text"]),
        "prompt_embeds": (None,),
        "reasoning_effort": (None,),
        "regex": (None,),
        "suffix": (None, ""),
        "use_beam_search": (None, False),
        "web_search_options": (None,),
    }
)
"""Fields that change the answer and are not supported, with the values that ask for nothing."""


def _checked_prompt(value: Any) -> Any:
    """One message instead of pydantic's one per alternative (Any: what the client sent)."""
    entries = value if isinstance(value, list) else [value]
    kinds = {type(entry) for entry in entries}
    if len(kinds) != 1 or (kinds == {list} and not all(type(i) is int for entry in entries for i in entry)):
        raise ValueError(_PROMPT_SHAPES)
    if not isinstance(value, str) and kinds not in ({str}, {int}, {list}):
        raise ValueError(_PROMPT_SHAPES)
    return value


_PROMPT_SHAPES = "must be a text, a list of texts, a list of token ids or a list of such lists, and not empty"


class StreamOptions(BaseModel):
    """What a stream tells besides its text."""

    include_usage: StrictBool | None = None
    continuous_usage_stats: StrictBool | None = None
    include_prompt_progress: StrictBool | None = None


class GenerationRequest(StructuredFields):
    """The fields that completions and chat share. None means the model's own default."""

    model_config = ConfigDict(extra="allow")  # unknown fields are named in the log, not refused

    model: StrictStr | None = None
    max_tokens: StrictInt | None = None
    min_tokens: StrictInt | None = None
    temperature: StrictFloat | None = None
    top_p: StrictFloat | None = None
    top_k: StrictInt | None = None
    min_p: StrictFloat | None = None
    presence_penalty: StrictFloat | None = None
    frequency_penalty: StrictFloat | None = None
    repetition_penalty: StrictFloat | None = None
    logit_bias: dict[str, StrictFloat] | None = None
    seed: StrictInt | None = None
    stop: StrictStr | list[StrictStr] | None = None
    stop_token_ids: list[StrictInt] | None = None
    ignore_eos: StrictBool | None = None
    include_stop_str_in_output: StrictBool | None = None
    skip_special_tokens: StrictBool | None = None
    prompt_logprobs: StrictInt | None = None
    n: Annotated[StrictInt, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: StrictBool | None = None
    return_routed_experts: StrictBool | None = None
    truncate_prompt_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    allowed_token_ids: Annotated[list[StrictInt], Field(min_length=1)] | None = None
    priority: StrictInt | None = None
    timeout_s: StrictFloat | None = None
    user: StrictStr | None = None

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def includes_usage(self) -> bool:
        """Whether the stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def includes_running_usage(self) -> bool:
        """Whether each chunk has the usage so far."""
        options = self.stream_options
        return bool(options and options.include_usage and options.continuous_usage_stats)

    @property
    def includes_prompt_progress(self) -> bool:
        """Whether the stream tells how far a long prompt is, before the first token."""
        return bool(self.stream_options and self.stream_options.include_prompt_progress)

    def unknown_fields(self) -> tuple[str, ...]:
        """Return the names of fields that no one here reads."""
        return tuple(name for name in self.model_extra or {} if name not in UNSUPPORTED)

    def check(self) -> None:
        """Return if nothing is asked for that would be left out of the answer.

        Raises: ``RequestError`` naming the field.
        """
        for name, value in (self.model_extra or {}).items():
            if name in UNSUPPORTED and value not in UNSUPPORTED[name]:
                raise RequestError(f"{name} is not supported; leave it out", param=name)
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError("prompt_logprobs has no place in a stream; set stream to false", param="prompt_logprobs")
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is set but stream is not true; leave one out", param="stream_options")

    def submission(self, token_ids: tuple[int, ...], text: str | None, params: SamplingParams) -> Submission:
        """Return one request to the engine, its prompt encoded; of one too long the last tokens."""
        if self.truncate_prompt_tokens is not None and len(token_ids) > self.truncate_prompt_tokens:
            token_ids, text = token_ids[-self.truncate_prompt_tokens :], None
        return Submission(
            prompt_token_ids=token_ids,
            sampling_params=params,
            prompt=text,
            priority=self.priority or 0,
            timeout_s=self.timeout_s,
        )

    def params_per_choice(self, defaults: Defaults) -> list[SamplingParams]:
        """Return the parameters of the ``n`` requests for one prompt; they differ in their seeds alone.

        Raises: ``RequestError`` in the words of the client.
        """
        asked = {name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        fields = {**defaults, **asked, **self.special_params()}
        if self.logit_bias is not None:
            fields["logit_bias"] = {_token_id(key): value for key, value in self.logit_bias.items()}
        fields["structured_output"] = self.structured_output()
        fields["routed_experts"] = bool(self.return_routed_experts)
        fields["prompt_progress"] = self.includes_prompt_progress
        seeds = [None if self.seed is None else self.seed + i for i in range(self.num_choices)]
        try:
            return [SamplingParams(**fields, seed=seed) for seed in seeds]
        except RequestError as error:
            raise RequestError(str(error), param=self.client_name(error.param)) from error

    def special_params(self) -> dict[str, Any]:
        """Return sampling parameters whose fields the endpoints spell differently (Any: of several types)."""
        return {}

    def client_name(self, param: str | None) -> str | None:
        """Return what the client called ``param``, a name in ``SamplingParams``."""
        if param == "structured_output":
            return self.grammar_field or param
        if param == "routed_experts":
            return "return_routed_experts"
        return self.client_names().get(param or "", param)

    def client_names(self) -> dict[str, str]:
        """Return what this endpoint calls the parameters that have another name in ``SamplingParams``."""
        return {}


_SAMPLING_FIELDS = (
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "prompt_logprobs",
    "allowed_token_ids",
)


class CompletionRequest(GenerationRequest):
    """The body of ``POST /v1/completions``."""

    prompt: Annotated[str | list[str] | list[int] | list[list[int]], BeforeValidator(_checked_prompt)]
    echo: StrictBool | None = None
    logprobs: StrictInt | None = None
    add_special_tokens: StrictBool = True

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """The prompts one by one."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt

    def special_params(self) -> dict[str, Any]:
        params: dict[str, Any] = {"max_tokens": 16 if self.max_tokens is None else self.max_tokens}
        if self.logprobs is not None:
            params["logprobs"] = self.logprobs
            if self.echo and self.prompt_logprobs is None:
                params["prompt_logprobs"] = self.logprobs
        return params


class TextPart(BaseModel):
    """One part of a message; only text is known here."""

    type: StrictStr
    text: StrictStr | None = None


class ChatMessage(BaseModel):
    """One message. Further fields (name, tool_calls, ...) go to the template as they are."""

    model_config = ConfigDict(extra="allow")

    role: StrictStr
    content: StrictStr | list[TextPart] | None = None


class ChatCompletionRequest(GenerationRequest):
    """The body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: StrictInt | None = None
    logprobs: StrictBool | None = None
    top_logprobs: StrictInt | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: StrictBool | None = None
    chat_template: StrictStr | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: StrictStr | None = None
    add_generation_prompt: StrictBool | None = None
    continue_final_message: StrictBool | None = None

    @property
    def uses_tools(self) -> bool:
        """Whether the model is told of tools and its calls are read."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def must_call(self) -> bool:
        """Whether the answer is to be one or more tool calls and nothing else."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, ToolChoice)

    def callable_tools(self) -> list[Tool]:
        """Return the tools that an answer may call."""
        choice = self.tool_choice
        if not isinstance(choice, ToolChoice):
            return self.tools or []
        return [tool for tool in self.tools or [] if tool.function.name == choice.function.name]

    def client_name(self, param: str | None) -> str | None:
        if param == "structured_output" and self.must_call:
            return "tools"
        return super().client_name(param)

    def rendering(self) -> Rendering:
        """Return how the messages are to be rendered."""
        continues = bool(self.continue_final_message)
        adds = self.add_generation_prompt
        return Rendering(
            tools=[tool.for_template() for tool in self.tools or ()] if self.uses_tools else None,
            add_generation_prompt=not continues if adds is None else adds,
            continue_final_message=continues,
            chat_template=self.chat_template,
            template_kwargs=self.chat_template_kwargs or {},
            reasoning_effort=self.reasoning_effort,
        )

    def check(self) -> None:
        super().check()
        self._check_tools()
        if self.continue_final_message and self.add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other; leave one out",
                param="continue_final_message",
            )
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise RequestError(
                f"continue_final_message is true but the last message is from {self.messages[-1].role!r}; "
                "end with one from the assistant",
                param="continue_final_message",
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs is set but logprobs is not true; set it", param="top_logprobs")

    def _check_tools(self) -> None:
        if self.must_call and not self.callable_tools():
            choice = self.tool_choice
            asked = f"the function {choice.function.name!r}" if isinstance(choice, ToolChoice) else "a call"
            raise RequestError(f"tool_choice asks for {asked} but tools have none; add it", param="tool_choice")
        if self.uses_tools and (field := self.grammar_field) is not None:
            raise RequestError(
                f'{field} and tools exclude each other; leave one out or set tool_choice to "none"', param=field
            )

    def special_params(self) -> dict[str, Any]:
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        params: dict[str, Any] = {"max_tokens": limit}
        if self.logprobs:
            params["logprobs"] = self.top_logprobs or 0
        return params

    def client_names(self) -> dict[str, str]:
        limit = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return {"logprobs": "top_logprobs", "max_tokens": limit}

    def template_messages(self) -> list[dict[str, Any]]:
        """Return the messages as chat templates take them: content is one text, the parts on lines of their own.

        Raises: ``RequestError`` for a part that is no text and for a message without content.
        """
        return [_template_message(i, message) for i, message in enumerate(self.messages)]


def _template_message(index: int, message: ChatMessage) -> dict[str, Any]:
    fields = message.model_dump(exclude={"content"}, exclude_none=True)
    content = message.content
    if isinstance(content, list):
        for part in content:
            if part.type != "text" or part.text is None:
                raise RequestError(
                    f"messages[{index}] has a part of type {part.type!r}; this model takes text only", param="messages"
                )
        content = "\n".join(part.text or "" for part in content)
    if content is None and not fields.get("tool_calls"):
        raise RequestError(f"messages[{index}] ({message.role}) has no content; give it a text", param="messages")
    if "reasoning" in fields:  # vLLM's name for what templates call reasoning_content
        fields.setdefault("reasoning_content", fields.pop("reasoning"))
    if calls := fields.get("tool_calls"):
        fields["tool_calls"] = _template_calls(index, calls)
    return {**fields, "content": content}


def _template_calls(index: int, calls: Any) -> list[Any]:
    """Return a message's tool calls with their arguments as objects, which templates write as JSON of their own.

    Arguments that are no object, of a call that was cut off perhaps, stay the text they are.
    Raises: ``RequestError`` for what has not the shape of tool calls.
    """
    if not isinstance(calls, list) or not all(
        isinstance(call, dict) and isinstance(call.get("function"), dict) for call in calls
    ):
        raise RequestError(f"messages[{index}] has tool_calls that are no list of function calls", param="messages")
    return [{**call, "function": _template_function(call["function"])} for call in calls]


def _template_function(function: dict[str, Any]) -> dict[str, Any]:
    try:
        arguments = json.loads(function["arguments"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return function
    return {**function, "arguments": arguments} if isinstance(arguments, dict) else function


def _token_id(key: str) -> int:
    if not key.isdecimal():
        raise RequestError(f"logit_bias has the key {key!r}; its keys are token ids", param="logit_bias")
    return int(key)
