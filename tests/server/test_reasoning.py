"""Where the reasoning ends and the answer begins."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.server.reasoning import ThinkSplitter


def parted(*pieces: str, has_begun: bool = False) -> tuple[str, str]:
    splitter = ThinkSplitter(has_begun=has_begun)
    parts = [*(splitter.feed(piece) for piece in pieces), splitter.finish()]
    return "".join(part.reasoning for part in parts), "".join(part.content for part in parts)


@pytest.mark.parametrize(
    ("text", "has_begun", "expected"),
    [
        ("<think>\nWhy?\n</think>\n\nSo.", False, ("Why?", "So.")),
        ("\n<think>\n\n</think>\n\nSo. ", False, ("", "So. ")),
        ("Why? a < b\n</think>\n\nSo.", True, ("Why? a < b", "So.")),
        ("So. <think>not now</think>", False, ("", "So. <think>not now</think>")),
        ("<think>on and on </thin", False, ("on and on </thin", "")),
        ("on and on ", True, ("on and on ", "")),
        (" <thin", False, ("", " <thin")),
        ("  So.", False, ("", "  So.")),
        ("a</think>b</think>c", True, ("a", "b</think>c")),
        ("", False, ("", "")),
    ],
)
def test_parts(text: str, has_begun: bool, expected: tuple[str, str]) -> None:
    assert parted(text, has_begun=has_begun) == expected
    assert parted(*text, has_begun=has_begun) == expected


PIECES = st.lists(st.sampled_from(["<think>", "</think>", "<", "thi", "nk>", "/", " ", "\n", "word", "é"]), max_size=12)


@given(PIECES, st.lists(st.integers(0, 60), max_size=8), st.booleans())
def test_the_cuts_change_nothing_and_no_word_is_lost(words: list[str], cuts: list[int], has_begun: bool) -> None:
    text = "".join(words)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[start:end] for start, end in pairwise(places)]
    reasoning, content = parted(*pieces, has_begun=has_begun)
    assert (reasoning, content) == parted(text, has_begun=has_begun)
    without_space = str.maketrans("", "", " \n")
    kept, whole = (reasoning + content).translate(without_space), text.translate(without_space)
    for tag in ("<think>", "</think>"):  # those that part the answer are all that is left out
        kept, whole = kept.replace(tag, ""), whole.replace(tag, "")
    assert kept == whole
