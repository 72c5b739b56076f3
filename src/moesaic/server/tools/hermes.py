"""``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen and those taught the same."""

from moesaic.server.tools.base import EventLog, Marker, ToolEvent
from moesaic.server.tools.call_object import CallObject

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


class HermesParser:
    """A ``ToolParser``. A call whose closing tag is missing counts too.

    ======== ==================================== =====================================
    state    what is read                         what ends it
    ======== ==================================== =====================================
    content  anything                             the opening tag
    before   white space                          ``{``, or something else: no call
    object   one JSON object                      its closing brace: a call or none
    after    white space, then the closing tag    the tag, or something else: content
    ======== ==================================== =====================================
    """

    def __init__(self) -> None:
        self._log = EventLog()
        self._state = self._content
        self._marker = Marker(OPEN)
        self._pending = ""
        """What content gets if this turns out to be no call (before) or no tag (after)."""
        self._object = CallObject(self._log)

    def feed(self, text: str) -> list[ToolEvent]:
        self._run(text)
        return self._log.take()

    def finish(self) -> list[ToolEvent]:
        if self._state == self._in_object:
            self._end_object()
            self._pending = ""
        elif self._state == self._after and CLOSE.startswith(self._pending.lstrip()):
            self._pending = ""  # the beginning of the tag, cut off
        self._log.content(self._pending + self._marker.take())
        self._log.end()
        return self._log.take()

    def _run(self, text: str) -> None:
        while text:
            text = self._state(text)

    def _content(self, text: str) -> str:
        before, after = self._marker.feed(text)
        self._log.content(before)
        if after is None:
            return ""
        self._pending, self._state = OPEN, self._before
        return after

    def _before(self, text: str) -> str:
        rest = text.lstrip()
        self._pending += text[: len(text) - len(rest)]
        if rest.startswith("{"):
            self._object, self._state = CallObject(self._log), self._in_object
        elif rest:
            return self._no_call() + rest
        return rest

    def _in_object(self, text: str) -> str:
        for i, character in enumerate(text):
            if not self._object.feed(character):
                self._end_object()
                return text[i:]
        return ""

    def _end_object(self) -> None:
        if self._object.finish():
            self._pending, self._state = "", self._after
        else:
            self._log.content(self._pending + self._object.text)
            self._pending, self._state = "", self._content

    def _after(self, text: str) -> str:
        for i, character in enumerate(text):
            self._pending += character
            tag = self._pending.lstrip()
            if tag == CLOSE or not CLOSE.startswith(tag):
                rest = text[i + 1 :] if tag == CLOSE else self._pending + text[i + 1 :]
                self._pending, self._state = "", self._content
                return rest
        return ""

    def _no_call(self) -> str:
        """Let the opening tag be content; return the white space after it, to be read again."""
        self._log.content(OPEN)
        white_space = self._pending[len(OPEN) :]
        self._pending, self._state = "", self._content
        return white_space
