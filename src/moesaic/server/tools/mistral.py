"""Mistral's two formats: ``[TOOL_CALLS][{...}, ...]``, and ``[TOOL_CALLS]name[ARGS]{...}`` once per call."""

import re

from moesaic.server.tools.base import EventLog, Marker, ToolEvent
from moesaic.server.tools.call_object import ArgumentsObject, CallObject

OPEN = "[TOOL_CALLS]"
ARGUMENTS = "[ARGS]"
CALL_ID = "[CALL_ID]"

_MOST_NAME_CHARACTERS = 256
_NAME = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\w*\s*)?(?:\[ARGS\])?\s*\{")
_NAME_SO_FAR = re.compile(r"\s*(?:[\w.-]+\s*(?:\[[A-Z_]*(?:\]\w*\s*(?:\[[A-Z]*\]?)?)?)?\s*)?")
"""Whatever can yet become a name, and a little more: that is found out with the next brace."""


class MistralParser:
    """A ``ToolParser`` for either format; what comes first after the marker tells which.

    ======== ============================================ ======================================
    state    what is read                                 what ends it
    ======== ============================================ ======================================
    content  anything                                     the marker
    first    white space                                  ``[``: list, else name
    name     a name, an id perhaps, ``[ARGS]``            ``{``, or what no name has: no call
    object   arguments, or an object of the list          its closing brace
    list     white space, ``,``                           ``{`` or ``]``, else content
    ======== ============================================ ======================================
    """

    def __init__(self) -> None:
        self._log = EventLog()
        self._state = self._content
        self._marker = Marker(OPEN)
        self._pending = ""
        """What content gets if this turns out to be no call."""
        self._object: CallObject | ArgumentsObject = CallObject(self._log)
        self._is_list = False

    def feed(self, text: str) -> list[ToolEvent]:
        self._run(text)
        return self._log.take()

    def finish(self) -> list[ToolEvent]:
        if self._state == self._in_object:
            self._end_object()
        elif self._state == self._in_list and not self._pending.startswith(OPEN):
            self._pending = ""  # what stands between the calls of a list that was cut off
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
        self._pending, self._state = OPEN, self._first
        return after

    def _first(self, text: str) -> str:
        rest = text.lstrip()
        self._pending += text[: len(text) - len(rest)]
        if rest.startswith("["):
            self._pending += "["
            self._is_list, self._state = True, self._in_list
            return rest[1:]
        if rest:
            self._is_list, self._state = False, self._in_name
        return rest

    def _in_name(self, text: str) -> str:
        for i, character in enumerate(text):
            self._pending += character
            name = self._pending[len(OPEN) :]
            if found := _NAME.fullmatch(name):
                self._begin_arguments(found[1])
                return "{" + text[i + 1 :]
            if len(name) > _MOST_NAME_CHARACTERS or not _NAME_SO_FAR.fullmatch(name):
                return self._no_call() + text[i + 1 :]
        return ""

    def _begin_arguments(self, name: str) -> None:
        self._object = ArgumentsObject(self._log, name)
        self._pending, self._state = "", self._in_object

    def _in_list(self, text: str) -> str:
        for i, character in enumerate(text):
            if character == "{":
                self._object, self._state = CallObject(self._log), self._in_object
                return text[i:]
            self._pending += character
            if character == "]":
                if self._pending.startswith(OPEN):
                    self._log.content(self._pending)  # an empty list
                self._pending, self._state = "", self._content
                return text[i + 1 :]
            if not character.isspace() and character != ",":
                return self._no_call() + text[i + 1 :]
        return ""

    def _in_object(self, text: str) -> str:
        for i, character in enumerate(text):
            if not self._object.feed(character):
                self._end_object()
                return text[i:]
        return ""

    def _end_object(self) -> None:
        if not self._object.finish():
            self._log.content(self._pending + self._object.text)
            self._state = self._content
        else:
            self._state = self._in_list if self._is_list else self._content
        self._pending = ""

    def _no_call(self) -> str:
        """Let the marker be content; return what came after it, to be read again."""
        opening = OPEN if self._pending.startswith(OPEN) else ""
        self._log.content(opening)
        rest = self._pending[len(opening) :]
        self._pending, self._state = "", self._content
        return rest
