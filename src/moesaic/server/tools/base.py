"""The seam between the text of a model and the tool calls in it."""

from typing import NamedTuple, Protocol


class Content(NamedTuple):
    """Text that is no tool call."""

    text: str


class CallBegin(NamedTuple):
    """A tool call begins; calls of one answer are numbered from 0."""

    call: int
    name: str


class CallArguments(NamedTuple):
    """The next piece of a call's arguments, as the model wrote them."""

    call: int
    text: str


ToolEvent = Content | CallBegin | CallArguments


class ToolParser(Protocol):
    """Reads the text of one answer, which may come in any pieces.

    What the events add up to does not depend on the pieces. Text that looks like a call and is none comes back as
    content, to the last character; white space around calls is no content.
    """

    def feed(self, text: str) -> list[ToolEvent]:
        """Return what ``text`` completes; what may yet become a call is held back."""

    def finish(self) -> list[ToolEvent]:
        """Return what was held back; call it once, at the end."""


class EventLog:
    """Events in order, neighbours of one kind joined; owns the numbering of calls and the white space around them."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._events: list[ToolEvent] = []
        self._white_space = ""
        """Held back: before and after calls it is no content."""
        self._is_after_call = False

    def content(self, text: str) -> None:
        """Add text that is no call."""
        text = self._white_space + text
        stripped = text.rstrip()
        self._white_space = text[len(stripped) :]
        if stripped:
            self._add_text(Content(stripped))
            self._is_after_call = False

    def begin(self, name: str) -> None:
        """Add a call; the white space before it is dropped."""
        self._white_space = ""
        self._is_after_call = True
        self._events.append(CallBegin(self.num_calls, name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Add to the arguments of the last call."""
        self._add_text(CallArguments(self.num_calls - 1, text))

    def end(self) -> None:
        """Let the held white space be content, unless it follows a call."""
        if self._white_space and not self._is_after_call:
            self._add_text(Content(self._white_space))
        self._white_space = ""

    def take(self) -> list[ToolEvent]:
        """Return the events since the last call of this, once."""
        events, self._events = self._events, []
        return events

    def _add_text(self, event: Content | CallArguments) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(event, Content) and isinstance(last, Content):
            self._events[-1] = Content(last.text + event.text)
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments) and last.call == event.call:
            self._events[-1] = CallArguments(last.call, last.text + event.text)
        else:
            self._events.append(event)


class Marker:
    """Finds a fixed text in text that comes in pieces."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """Return the text before the marker, and the text after it or None if it has not come.

        What may be the beginning of the marker is held back.
        """
        text = self.take() + text
        before, found, after = text.partition(self.text)
        if found:
            return before, after
        num_held = next(n for n in range(min(len(self.text) - 1, len(text)), -1, -1) if text.endswith(self.text[:n]))
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held], None

    def take(self) -> str:
        """Return what is held back and hold it no more."""
        held, self._held = self._held, ""
        return held
