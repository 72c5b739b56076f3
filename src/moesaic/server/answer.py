"""One answer of a chat, from its text: reasoning, content and tool calls, whole or piece by piece."""

from moesaic.server.chat_format import ChatFormat
from moesaic.server.reasoning import Parted, ThinkSplitter
from moesaic.server.replies import ChatDelta, FunctionDelta, ToolCallDelta
from moesaic.server.tools.base import CallArguments, CallBegin, Content, ToolEvent


class AnswerReader:
    """Reads the text of one answer, which may come in any pieces."""

    def __init__(self, format: ChatFormat, *, reasoning_begun: bool | None, parses_tools: bool) -> None:
        """``reasoning_begun`` is that of ``ChatFormat``."""
        self.num_calls = 0
        self._format = format.tools if parses_tools else None
        self._splitter = ThinkSplitter(has_begun=bool(reasoning_begun)) if format.has_reasoning else None
        self._tools = None if self._format is None else self._format.make_parser()

    def feed(self, text: str, *, is_last: bool) -> ChatDelta:
        """Return what ``text`` completes; with ``is_last`` also what was held back. Fields without news are unset."""
        part = Parted("", text) if self._splitter is None else self._splitter.feed(text)
        reasoning, content = part.reasoning, part.content
        if is_last and self._splitter is not None:
            rest = self._splitter.finish()
            reasoning, content = reasoning + rest.reasoning, content + rest.content
        delta = ChatDelta()
        if reasoning:
            delta.reasoning_content = reasoning
        self._add(delta, self._events(content, is_last))
        return delta

    def _events(self, content: str, is_last: bool) -> list[ToolEvent]:
        if self._tools is None:
            return [Content(content)] if content else []
        events = self._tools.feed(content) if content else []
        return [*events, *self._tools.finish()] if is_last else events

    def _add(self, delta: ChatDelta, events: list[ToolEvent]) -> None:
        calls: dict[int, ToolCallDelta] = {}
        for event in events:
            match event:
                case Content(text):
                    delta.content = (delta.content or "") + text
                case CallBegin(index, name):
                    calls[index] = self._begun(index, name)
                case CallArguments(index, text):
                    call = calls.setdefault(index, ToolCallDelta(index=index, function=FunctionDelta(arguments="")))
                    call.function.arguments += text
        if calls:
            delta.tool_calls = list(calls.values())

    def _begun(self, index: int, name: str) -> ToolCallDelta:
        assert self._format is not None  # calls come from its parser
        self.num_calls += 1
        function = FunctionDelta(name=name, arguments="")
        return ToolCallDelta(index=index, id=self._format.new_id(), type="function", function=function)
