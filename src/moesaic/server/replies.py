"""What the server sends. In JSON a field that was left out is absent, and one that is None is null."""

from typing import Any, Literal

from pydantic import BaseModel, Field


class Reply(BaseModel):
    """Base of everything that is sent."""

    def json_bytes(self) -> bytes:
        """Return the JSON text as UTF-8."""
        return self.model_dump_json(exclude_unset=True).encode()


class Usage(Reply):
    """Tokens of all choices of one reply; a prompt counts once however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, num_prompt: int, num_completion: int) -> "Usage":
        """Return the usage with its total."""
        return cls(prompt_tokens=num_prompt, completion_tokens=num_completion, total_tokens=num_prompt + num_completion)


class CompletionLogprobs(Reply):
    """One entry per token in each list; the first prompt token of an echo has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]
    """Characters before the token in the text of the choice."""


class CompletionChoice(Reply):
    """One choice, or in a stream what is new of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] = Field(default_factory=list)
    routed_experts: str = ""
    prompt_token_ids: list[int] = Field(default_factory=list)
    prompt_logprobs: list[dict[str, Any] | None] = Field(default_factory=list)


class PromptProgress(Reply):
    """How far the prompt of one choice is, in tokens."""

    index: int
    processed: int
    total: int


class Completion(Reply):
    """The reply to a completion, or one chunk of its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    prompt_progress: PromptProgress | None = None


class TokenLogprob(Reply):
    """One token; ``bytes`` are its UTF-8 bytes, of which a character may need several tokens."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TokenLogprob):
    """One chosen token and the likeliest ones at its place."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Reply):
    """One entry per output token."""

    content: list[ChatTokenLogprob]


class FunctionCall(Reply):
    """What a tool call calls; ``arguments`` are JSON as the model wrote it, which may be invalid."""

    name: str
    arguments: str


class ToolCall(Reply):
    """One whole tool call."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatReplyMessage(Reply):
    """The whole answer; ``content`` is None if there are tool calls and nothing else."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str = ""
    tool_calls: list[ToolCall] = Field(default_factory=list)


class ChatChoice(Reply):
    """One whole choice."""

    index: int
    message: ChatReplyMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] = Field(default_factory=list)
    routed_experts: str = ""


class ChatCompletion(Reply):
    """The reply to a chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] = Field(default_factory=list)
    prompt_logprobs: list[dict[str, Any] | None] = Field(default_factory=list)


class FunctionDelta(Reply):
    """The name of a call, in its first delta, and the next piece of its arguments."""

    name: str = ""
    arguments: str


class ToolCallDelta(Reply):
    """What is new of one tool call; id, type and name come with its first delta."""

    index: int
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionDelta


class ChatDelta(Reply):
    """What is new of an answer."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str = ""
    tool_calls: list[ToolCallDelta] = Field(default_factory=list)


class ChatChunkChoice(Reply):
    """What is new of one choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] = Field(default_factory=list)
    routed_experts: str = ""


class ChatChunk(Reply):
    """One chunk of a chat's stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] = Field(default_factory=list)
    prompt_progress: PromptProgress | None = None


class ModelCard(Reply):
    """One name that clients can send as ``model``."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(Reply):
    """All names that clients can send as ``model``."""

    object: Literal["list"]
    data: list[ModelCard]


class ErrorDetail(Reply):
    """What went wrong, in OpenAI's shape; ``code`` is the HTTP status, or OpenAI's word for a missing key."""

    message: str
    type: str
    param: str | None
    code: int | str


class ErrorReply(Reply):
    """The body of every error, of unknown routes too."""

    error: ErrorDetail
