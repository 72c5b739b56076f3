"""Stop strings over text that arrives in pieces. No torch."""

from collections.abc import Sequence as SequenceOf


class StopStrings:
    """Finds the first stop string of one output and holds back text that may turn out to be part of one.

    The text is read character by character. The first character that completes a stop string ends the output; if
    several stop strings end there, the longest counts. So the result does not depend on how the text was cut
    into pieces, and costs one table step per character and stop string (Knuth, Morris, Pratt 1977).
    """

    def __init__(self, stop: SequenceOf[str], *, include_in_output: bool = False, min_tokens: int = 0) -> None:
        """A stop string counts only if it is completed once ``min_tokens`` output tokens are there."""
        self.matched: str | None = None
        """The stop string that ended the output, or None."""
        self._matchers = tuple(_Matcher(text) for text in stop)
        self._include_in_output = include_in_output
        self._min_tokens = min_tokens
        self._held = ""

    def feed(self, text: str, num_output_tokens: int) -> str:
        """Take the ``text`` that came with output token number ``num_output_tokens``; return what can be shown.

        After a match, the text before it (with the stop string, if that is to be included) has been returned
        and nothing more is.
        """
        if self.matched is not None:
            return ""
        if not self._matchers:
            return text
        can_stop = num_output_tokens >= self._min_tokens
        pending = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            matches = [m for m in self._matchers if m.is_completed_by(character)]
            if matches and can_stop:
                return self._finish(pending[:end], max((m.pattern for m in matches), key=len))
        self._held = pending[len(pending) - max(m.num_matched for m in self._matchers) :]
        return pending[: len(pending) - len(self._held)]

    def flush(self) -> str:
        """Return the text still held back; call it when the output ends without a match."""
        held, self._held = self._held, ""
        return held

    def _finish(self, text: str, pattern: str) -> str:
        self.matched, self._held = pattern, ""
        return text if self._include_in_output else text[: -len(pattern)]


class _Matcher:
    """How much of one pattern the text read so far ends with."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.num_matched = 0
        self._borders = _borders(pattern)

    def is_completed_by(self, character: str) -> bool:
        """Read one character; return whether the text now ends with the whole pattern."""
        self.num_matched = _advance(self.pattern, self._borders, self.num_matched, character)
        if self.num_matched < len(self.pattern):
            return False
        # Only proper prefixes are held back: an occurrence that does not count is ordinary text.
        self.num_matched = self._borders[-1]
        return True


def _borders(pattern: str) -> list[int]:
    """Return for each prefix the length of its longest proper prefix that is also its suffix."""
    borders = [0]
    for character in pattern[1:]:
        borders.append(_advance(pattern, borders, borders[-1], character))
    return borders


def _advance(pattern: str, borders: list[int], num_matched: int, character: str) -> int:
    while num_matched and pattern[num_matched] != character:
        num_matched = borders[num_matched - 1]
    return num_matched + (pattern[num_matched] == character)
