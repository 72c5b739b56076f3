"""Stop strings over text in pieces, against an oracle that sees the whole text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.sampling.stopping import StopStrings

# Few letters, so that stop strings overlap, repeat and contain each other.
WORD = st.text("ab", min_size=1, max_size=4)
PIECES = st.lists(st.text("abc", max_size=5), max_size=8)


def oracle(pieces: list[str], stops: list[str], include: bool, min_tokens: int) -> tuple[str, str | None]:
    """The text and stop string if each piece is the text of one token: the first end counts, then the longest."""
    text = "".join(pieces)
    ends = [n for n, piece in enumerate(pieces, start=1) for _ in piece]
    for end in range(1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found and ends[end - 1] >= min_tokens:
            longest = max(found, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


@given(PIECES, st.lists(WORD, max_size=4), st.booleans(), st.integers(0, 5))
def test_pieces_add_up_to_what_the_whole_text_gives(
    pieces: list[str], stops: list[str], include: bool, min_tokens: int
) -> None:
    matcher = StopStrings(stops, include_in_output=include, min_tokens=min_tokens)
    want, matched = oracle(pieces, stops, include, min_tokens)
    shown = ""
    for number, piece in enumerate(pieces, start=1):
        shown += matcher.feed(piece, number)
        assert want.startswith(shown), "text was shown that had to be held back"
    shown += matcher.flush()
    assert (shown, matcher.matched) == (want, matched)


@given(PIECES, st.lists(WORD, min_size=1, max_size=4))
def test_only_what_may_begin_a_stop_string_is_held_back(pieces: list[str], stops: list[str]) -> None:
    matcher = StopStrings(stops)
    text = shown = ""
    for number, piece in enumerate(pieces):
        text += piece
        shown += matcher.feed(piece, number)
        if matcher.matched is not None:
            return
        held = text[len(shown) :]
        assert not held or any(s.startswith(held) and s != held for s in stops)


@pytest.mark.parametrize(("include", "text"), [(False, "Hello"), (True, "Hello\n\n")])
def test_a_match_ends_the_text_before_or_after_the_stop_string(include: bool, text: str) -> None:
    matcher = StopStrings(["\n\n"], include_in_output=include)
    assert matcher.feed("Hello\n", 1) == "Hello"
    assert "Hello" + matcher.feed("\nWorld", 2) == text
    assert matcher.matched == "\n\n"
    assert matcher.feed("more", 3) + matcher.flush() == ""


def test_a_match_within_min_tokens_is_ordinary_text_but_may_begin_a_later_one() -> None:
    matcher = StopStrings(["abab"], min_tokens=2)
    assert matcher.feed("abab", 1) == "ab"
    assert matcher.feed("ab", 2) == ""
    assert matcher.matched == "abab"


def test_the_stop_string_that_ends_first_wins() -> None:
    matcher = StopStrings(["abcd", "bc"])
    assert matcher.feed("xabcd", 1) == "xa"
    assert matcher.matched == "bc"


def test_without_stop_strings_text_passes_through() -> None:
    matcher = StopStrings([])
    assert matcher.feed("anything", 1) == "anything"
    assert matcher.flush() == ""
