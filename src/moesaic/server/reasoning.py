"""The reasoning of a model apart from its answer: ``<think>...</think>answer``."""

from typing import NamedTuple

from moesaic.server.tools.base import Marker

OPEN = "<think>"
CLOSE = "</think>"


class Parted(NamedTuple):
    """A piece of an answer; either text can be empty."""

    reasoning: str
    content: str


class ThinkSplitter:
    """Parts the text of one answer, which may come in any pieces; what comes out does not depend on the pieces.

    The tags, and white space right inside and after them, belong to neither part. A reasoning is the beginning of an
    answer, white space aside, or there is none; one that does not end takes all of the answer.
    """

    def __init__(self, *, has_begun: bool = False) -> None:
        """``has_begun``: the prompt ends with the opening tag."""
        self._close = Marker(CLOSE)
        self._state = self._reasoning if has_begun else self._start
        self._held = ""
        """What may be the opening tag, or white space that may end the reasoning."""
        self._is_trimming = has_begun

    def feed(self, text: str) -> Parted:
        """Return what ``text`` completes of either part."""
        return self._state(text)

    def finish(self) -> Parted:
        """Return what was held back; call it once, at the end."""
        held, self._held = self._held, ""
        if self._state == self._reasoning:
            return Parted(self._trimmed(held + self._close.take()), "")
        return Parted("", held)

    def _start(self, text: str) -> Parted:
        self._held += text
        begun = self._held.lstrip()
        if begun.startswith(OPEN):
            rest, self._held = begun[len(OPEN) :], ""
            self._state, self._is_trimming = self._reasoning, True
            return self._reasoning(rest)
        if OPEN.startswith(begun):
            return Parted("", "")
        rest, self._held = self._held, ""
        self._state = self._content
        return self._content(rest)

    def _reasoning(self, text: str) -> Parted:
        before, after = self._close.feed(text)
        before = self._trimmed(self._held + before)
        stripped = before.rstrip()
        if after is None:
            self._held = before[len(stripped) :]
            return Parted(stripped, "")
        self._held, self._is_trimming = "", True
        self._state = self._content
        return Parted(stripped, self._content(after).content)

    def _content(self, text: str) -> Parted:
        return Parted("", self._trimmed(text))

    def _trimmed(self, text: str) -> str:
        """Return ``text`` without white space at the beginning of a part."""
        if not self._is_trimming:
            return text
        text = text.lstrip()
        self._is_trimming = not text
        return text
