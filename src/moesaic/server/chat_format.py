"""How one model writes its chats: template, tool calls, reasoning."""

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from jinja2 import TemplateError

from moesaic.errors import RequestError
from moesaic.server import reasoning
from moesaic.server.settings import ReasoningParser, ToolCallParser
from moesaic.server.tools.formats import ToolFormat, select_format
from moesaic.structured import StructuredOutput

# Any below: transformers' tokenizers have no types, and messages are JSON.

_TEMPLATE_ERRORS = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)
"""A template is a program: it trips over what it gets in any of these ways."""


_EFFORT = "reasoning_effort"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendering:
    """What a request says about the rendering of its messages."""

    tools: Sequence[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """Leave the last message open, for the model to go on with it."""
    chat_template: str | None = None
    """A template to use in place of the model's own."""
    template_kwargs: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Variables for the template."""
    reasoning_effort: str | None = None
    """A variable of some templates (gpt-oss); others have no use for it."""

    def variables(self) -> dict[str, Any]:
        """Return all variables for the template; those of ``template_kwargs`` win."""
        effort = {} if self.reasoning_effort is None else {_EFFORT: self.reasoning_effort}
        return {**effort, **self.template_kwargs}


class ChatFormat:
    """The chats of one model, as its template and the server's flags say."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        tool_call_parser: ToolCallParser = "auto",
        reasoning_parser: ReasoningParser = "auto",
    ) -> None:
        self._tokenizer = tokenizer
        self._requested = {"tool_call_parser": tool_call_parser, "reasoning_parser": reasoning_parser}
        template = _template_text(tokenizer)
        self.has_template = template is not None
        self.takes_tools = re.search(r"\btools\b", template or "") is not None
        self.tools, self._tools_reason = select_format(tool_call_parser, template or "")
        self.has_reasoning = reasoning_parser == "think"
        self._reasoning_reason = "not requested" if reasoning_parser == "none" else "as requested"
        if reasoning_parser == "auto":
            self.has_reasoning = reasoning.CLOSE in (template or "")
            self._reasoning_reason = f"the chat template has {'' if self.has_reasoning else 'no '}{reasoning.CLOSE}"
        added = _added_tokens(tokenizer)
        self.added_ids = {text: token_id for text, (token_id, _) in added.items()}
        """Added tokens, special ones among them, by their text."""
        self._special_ids = {text: token_id for text, (token_id, is_special) in added.items() if is_special}

    def features(self) -> dict[str, dict[str, str]]:
        """Return requested, active and reason of both parsers."""
        active = {
            "tool_call_parser": ("none" if self.tools is None else self.tools.name, self._tools_reason),
            "reasoning_parser": ("think" if self.has_reasoning else "none", self._reasoning_reason),
        }
        return {
            name: {"requested": self._requested[name], "active": value, "reason": reason}
            for name, (value, reason) in active.items()
        }

    def check_tools(self) -> ToolFormat:
        """Return the format of tool calls. Raises: ``RequestError`` if tools cannot be used with this model."""
        if not self.takes_tools:
            raise RequestError(
                "this model's chat template has no place for tools; describe them in a system message, "
                'set tool_choice to "none", or serve a model whose template takes tools',
                param="tools",
            )
        if self.tools is None:
            raise RequestError(
                f"tool calls of this model cannot be read: {self._tools_reason} "
                '(--tool-call-parser); set tool_choice to "none" or start with --tool-call-parser hermes or mistral',
                param="tools",
            )
        return self.tools

    def render(self, messages: list[dict[str, Any]], how: Rendering) -> str:
        """Return the text of a conversation.

        transformers renders it, a request's own template too, in jinja2's immutable sandbox.
        Raises: ``RequestError`` if there is no template or it refuses the messages.
        """
        if not self.has_template and how.chat_template is None:
            raise RequestError("this model has no chat template; use /v1/completions", param="messages")
        self._check_kwargs(how.template_kwargs)
        self._check_effort(how)
        own = {} if how.chat_template is None else {"chat_template": how.chat_template}
        param = "messages" if how.chat_template is None else "chat_template"
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages,
                tools=list(how.tools) if how.tools else None,
                tokenize=False,
                add_generation_prompt=how.add_generation_prompt,
                continue_final_message=how.continue_final_message,
                **own,
                **how.variables(),
            )
        except _TEMPLATE_ERRORS as error:
            whose = "the model's" if how.chat_template is None else "the request's"
            raise RequestError(f"{whose} chat template refuses these messages: {error}", param=param) from error
        return text

    def _check_kwargs(self, kwargs: Mapping[str, Any]) -> None:
        """Raises: ``RequestError`` for names that are transformers' own arguments: templates get in by those too."""
        taken = {"messages", *inspect.signature(self._tokenizer.apply_chat_template).parameters}
        if names := sorted(taken & kwargs.keys()):
            raise RequestError(
                f"chat_template_kwargs has {names[0]!r}, which is no variable of a template; leave it out",
                param="chat_template_kwargs",
            )

    def _check_effort(self, how: Rendering) -> None:
        """Raises: ``RequestError`` if an effort is asked of a template that does not look at it."""
        template = how.chat_template or _template_text(self._tokenizer) or ""
        if how.reasoning_effort is not None and _EFFORT not in template:
            raise RequestError(
                f"{_EFFORT} is {how.reasoning_effort!r}, but the chat template knows no effort; leave it out, or see "
                "whether the template has another switch for chat_template_kwargs",
                param=_EFFORT,
            )

    def reasoning_begun(self, prompt: str, messages: Sequence[Mapping[str, Any]], how: Rendering) -> bool | None:
        """Return whether the answer to a rendered prompt begins inside a reasoning; None if the prompt has ended it.

        Only what follows the last message is looked at, or the last message itself if the model goes on with it:
        what users write about tags is none.
        """
        if how.continue_final_message:
            last = str(messages[-1].get("content") or "")
            opened, closed = last.rfind(reasoning.OPEN), last.rfind(reasoning.CLOSE)
            return None if closed > opened or (last and opened < 0) else opened >= 0
        if prompt.rstrip().endswith(reasoning.CLOSE):
            return None
        return prompt.rstrip().endswith(reasoning.OPEN)

    def after_reasoning(self, wanted: StructuredOutput | None, begun: bool | None) -> dict[str, Any]:
        """Return the fields of ``wanted`` that let a reasoning come before it; see ``reasoning_begun``."""
        if wanted is None or not self.has_reasoning or begun is None:
            return {}
        return {"after": reasoning.CLOSE, "opening": None if begun else reasoning.OPEN}

    def visible_special_ids(self, *, parses_tools: bool) -> tuple[int, ...]:
        """Return the special tokens that the parsers must see in the text."""
        markers = (*(self.tools.markers if self.tools is not None and parses_tools else ()),)
        if self.has_reasoning:
            markers += (reasoning.OPEN, reasoning.CLOSE)
        return tuple(self._special_ids[marker] for marker in markers if marker in self._special_ids)


def _template_text(tokenizer: Any) -> str | None:
    """Return the template; of several the one that takes tools, as transformers chooses if there are any."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("tool_use") or template.get("default")
    return template or None


def _added_tokens(tokenizer: Any) -> dict[str, tuple[int, bool]]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    added = {} if backend is None else backend.get_added_tokens_decoder()
    return {token.content: (i, token.special) for i, token in added.items()}
