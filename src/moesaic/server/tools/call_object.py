"""JSON objects of tool calls, read character by character: ``{"name": ..., "arguments": {...}}`` or arguments alone."""

import json
import re

from moesaic.server.tools.base import EventLog

_HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*\{')
_ARGUMENT_KEYS = ("arguments", "parameters")


class JsonObject:
    """Finds the end of an object that begins with its first character; judges nothing else."""

    def __init__(self) -> None:
        self.depth = 0
        self.in_string = False
        self._characters: list[str] = []
        self._is_escaped = False

    @property
    def text(self) -> str:
        """What was read."""
        return "".join(self._characters)

    def feed(self, character: str) -> bool:
        """Take one character; return False if the object ended before it, so that it belongs to what follows.

        It ends with its last brace, or where a tag begins: a model forgot a brace, and no JSON has ``<`` there.
        """
        if self._characters and (self.depth <= 0 or (character == "<" and not self.in_string)):
            return False
        self._characters.append(character)
        self._scan(character)
        return True

    def _scan(self, character: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif self.in_string and character == "\\":
            self._is_escaped = True
        elif character == '"':
            self.in_string = not self.in_string
        elif not self.in_string:
            self.depth += (character in "{[") - (character in "}]")


class ArgumentsObject(JsonObject):
    """The arguments of a call whose name is known; tells the log of both."""

    def __init__(self, log: EventLog, name: str) -> None:
        super().__init__()
        self._log = log
        log.begin(name)

    def feed(self, character: str) -> bool:
        is_ours = super().feed(character)
        if is_ours:
            self._log.arguments(character)
        return is_ours

    def finish(self) -> bool:
        """Return True: there is a call."""
        return True


class CallObject(JsonObject):
    """An object with the name and the arguments of one call; tells the log of it.

    If the name comes first, as models are taught, the arguments are told as they come and as they are written.
    Otherwise the whole object is read before anything is told.
    """

    def __init__(self, log: EventLog) -> None:
        super().__init__()
        self._log = log
        self._has_begun = False
        self._in_arguments = False
        self._is_searched = False

    def feed(self, character: str) -> bool:
        if not super().feed(character):
            return False
        if self._in_arguments:
            self._log.arguments(character)
            self._in_arguments = self.depth > 1
        elif character == "{" and self.depth == 2 and not self.in_string and not self._is_searched:
            self._is_searched = True  # only the first value can be the arguments after a name
            self._try_to_begin()
        return True

    def finish(self) -> bool:
        """Tell of the call if that was not done; return False if there is none, ``text`` is then no call."""
        if not self._has_begun:
            self._tell_whole()
        return self._has_begun

    def _try_to_begin(self) -> None:
        head = _HEAD.fullmatch(self.text)
        name = None if head is None else _loaded(head[1])
        if isinstance(name, str) and name:
            self._begin(name, "{")
            self._in_arguments = True

    def _tell_whole(self) -> None:
        value = _loaded(self.text)
        name = value.get("name") if isinstance(value, dict) else None
        if not isinstance(value, dict) or not isinstance(name, str) or not name:
            return
        arguments: object = next((value[key] for key in _ARGUMENT_KEYS if value.get(key) is not None), {})
        if isinstance(arguments, str):
            self._begin(name, arguments)
        elif isinstance(arguments, dict):
            self._begin(name, json.dumps(arguments, ensure_ascii=False))

    def _begin(self, name: str, arguments: str) -> None:
        self._has_begun = True
        self._log.begin(name)
        self._log.arguments(arguments)


def _loaded(text: str) -> object:
    try:
        return json.loads(text, strict=False)  # models write line breaks inside strings
    except (ValueError, RecursionError):
        return None
