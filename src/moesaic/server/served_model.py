"""The model as clients know it: its names, its tokenizer and template, and what it proposes for sampling."""

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from moesaic.errors import ModelLoadError, RequestError
from moesaic.request import SamplingParams
from moesaic.server.chat_format import ChatFormat, Rendering
from moesaic.server.errors import UnknownModelError
from moesaic.server.protocol import Defaults
from moesaic.server.replies import ModelCard
from moesaic.server.settings import ReasoningParser, ToolCallParser
from moesaic.server.vocabulary import Vocabulary

T = TypeVar("T")

LONG_TEXT_CHARACTERS = 4096
"""Longer texts are tokenised off the event loop.

This many, 1106 tokens of ``smol``, take 2 to 3.5 ms (one core of a shared x86 machine, 2026-12-01); a thread costs
a hop that short prompts need not pay.
"""

_PROPOSED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class EncodedPrompt(NamedTuple):
    """A prompt as the engine takes it; ``text`` is what it was made from, if that was a text."""

    token_ids: tuple[int, ...]
    text: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model under the names that clients send."""

    names: tuple[str, ...]
    """The first is the one in replies."""
    root: str
    """Where it was loaded from."""
    max_model_len: int
    tokenizer: Any = None
    """transformers' tokenizer (Any: untyped), or None for a model of token ids only. Not the engine's own."""
    defaults: Defaults = field(default_factory=dict)
    created_s: int = field(default_factory=lambda: int(time.time()))
    tool_call_parser: ToolCallParser = "auto"
    reasoning_parser: ReasoningParser = "auto"
    trust_request_chat_template: bool = False
    vocabulary: Vocabulary = field(init=False)
    chat: ChatFormat = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "vocabulary", Vocabulary(self.tokenizer))
        chat = ChatFormat(
            self.tokenizer, tool_call_parser=self.tool_call_parser, reasoning_parser=self.reasoning_parser
        )
        object.__setattr__(self, "chat", chat)

    def check_name(self, name: str | None) -> None:
        """Return if ``name`` is served; none at all means the one there is.

        Raises: ``UnknownModelError``.
        """
        if name is not None and name not in self.names:
            known = ", ".join(map(repr, self.names))
            raise UnknownModelError(f"model {name!r} does not exist here; this server has {known}", param="model")

    def card(self, name: str) -> ModelCard:
        """Return what ``/v1/models`` says. Raises: ``UnknownModelError``."""
        self.check_name(name)
        return ModelCard(
            id=name,
            object="model",
            created=self.created_s,
            owned_by="moesaic",
            root=self.root,
            max_model_len=self.max_model_len,
        )

    async def encode(self, prompt: str | Sequence[int], *, add_special_tokens: bool = True) -> EncodedPrompt:
        """Return the prompt's token ids; token ids stay as they are.

        Raises: ``RequestError`` for a text that this model cannot take.
        """
        if not isinstance(prompt, str):
            return EncodedPrompt(tuple(prompt))
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer; send lists of token ids", param="prompt")
        ids = await _off_loop_if(
            len(prompt) > LONG_TEXT_CHARACTERS, lambda: self._tokenize(prompt, add_special_tokens, "prompt")
        )
        return EncodedPrompt(ids, prompt)

    async def encode_chat(self, messages: list[dict[str, Any]], how: Rendering | None = None) -> EncodedPrompt:
        """Return the conversation rendered, by default for the assistant to answer.

        Raises: ``RequestError`` if the model has no chat template or the template refuses the messages.
        """
        how = Rendering() if how is None else how
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer and so no chats; use /v1/completions", param="messages")
        num_characters = sum(len(message["content"] or "") for message in messages)
        is_long = num_characters > LONG_TEXT_CHARACTERS or how.tools or how.chat_template is not None
        return await _off_loop_if(bool(is_long), lambda: self._render(messages, how))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of a prompt that came as token ids; empty without a tokenizer."""
        if self.tokenizer is None:
            return ""
        text: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def _render(self, messages: list[dict[str, Any]], how: Rendering) -> EncodedPrompt:
        text = self.chat.render(messages, how)
        return EncodedPrompt(self._tokenize(text, False, "messages"), text)

    def _tokenize(self, text: str, add_special_tokens: bool, param: str) -> tuple[int, ...]:
        try:
            text.encode()  # JSON can write half a surrogate pair, which tokenizers take for a wrong type
        except UnicodeEncodeError as error:
            raise RequestError(f"{param} is no Unicode text: {error}", param=param) from error
        # Not verbose: the engine judges the length, and the tokenizer's own warning is about another limit.
        return tuple(self.tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])


def read_defaults(path: Path) -> Mapping[str, float | int]:
    """Return the sampling parameters that ``generation_config.json`` in ``path`` proposes; none if it does not sample.

    Raises: ``ModelLoadError`` if the file is broken or a value is out of its range.
    """
    file = path / "generation_config.json"
    if not file.exists():
        return {}
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
        if fields.get("do_sample") is False:
            return {}
        defaults = {name: fields[name] for name in _PROPOSED if fields.get(name) is not None}
        SamplingParams(**defaults)
    except (OSError, ValueError, AttributeError) as error:  # RequestError and bad JSON are ValueErrors
        raise ModelLoadError(f"{file} proposes no valid sampling parameters: {error}") from error
    return defaults


async def _off_loop_if(is_long: bool, work: Callable[[], T]) -> T:
    return await asyncio.to_thread(work) if is_long else work()
