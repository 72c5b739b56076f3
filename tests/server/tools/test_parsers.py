"""Tool calls in text: the same whatever the pieces, and nothing is lost."""

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.server.tools.base import CallArguments, CallBegin, Content, ToolEvent, ToolParser
from moesaic.server.tools.hermes import HermesParser
from moesaic.server.tools.mistral import MistralParser

Calls = list[tuple[str, str]]


def events(parser: ToolParser, *pieces: str) -> list[ToolEvent]:
    return [event for part in (*map(parser.feed, pieces), parser.finish()) for event in part]


def read(parser: ToolParser, *pieces: str) -> tuple[str, Calls]:
    content, calls = "", list[list[str]]()
    for event in events(parser, *pieces):
        match event:
            case Content(text):
                content += text
            case CallBegin(index, name):
                assert index == len(calls)
                calls.append([name, ""])
            case CallArguments(index, text):
                assert index == len(calls) - 1
                calls[index][1] += text
    return content, [(name, arguments) for name, arguments in calls]


HERMES: list[tuple[str, str, Calls]] = [
    ("plain text", "plain text", []),
    ('<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>', "", [("f", '{"x": 1}')]),
    (
        'Let me see.\n<tool_call>{"name":"f","arguments":{}}</tool_call>\n'
        '<tool_call>{"name":"g","arguments":{"s":"</tool_call> \\" {"}}</tool_call>\n',
        "Let me see.",
        [("f", "{}"), ("g", '{"s":"</tool_call> \\" {"}')],
    ),
    ('<tool_call>{"arguments": {"x": [1]}, "name": "f"}</tool_call>', "", [("f", '{"x": [1]}')]),
    ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', "", [("f", '{"x": 1}')]),
    (
        '<tool_call>{"name": "f", "arguments": {"x": {"y": 2}}, "id": {"z": 3}}</tool_call>',
        "",
        [("f", '{"x": {"y": 2}}')],
    ),
    ('<tool_call>{"name": "f", "parameters": {"x": 1}}</tool_call> Done.', " Done.", [("f", '{"x": 1}')]),
    # Cut off, or not closed as it should be.
    ('<tool_call>{"name": "f", "arguments": {"x": "a', "", [("f", '{"x": "a')]),
    ('<tool_call>{"name": "f", "arguments": {"x": 1}}', "", [("f", '{"x": 1}')]),
    ('<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_', "", [("f", '{"x": 1}')]),
    ('<tool_call>{"name": "f", "arguments": {"x": 1}\n</tool_call> B', " B", [("f", '{"x": 1}')]),
    (
        '<tool_call>{"name": "f", "arguments": {}}<tool_call>{"name": "g", "arguments": {}}</tool_call>',
        "",
        [("f", "{}"), ("g", "{}")],
    ),
    # No calls: they come back as they are.
    ("<tool_call>\nf(x=1)\n</tool_call>", "<tool_call>\nf(x=1)\n</tool_call>", []),
    ("<tool_call> <tool_call>", "<tool_call> <tool_call>", []),
    ('<tool_call>{"name": 5, "arguments": {}}</tool_call>', '<tool_call>{"name": 5, "arguments": {}}</tool_call>', []),
    ('<tool_call>{"name": "f", "argu', '<tool_call>{"name": "f", "argu', []),
    ("<tool_call>{nonsense}</tool_call>!", "<tool_call>{nonsense}</tool_call>!", []),
    (
        '<tool_call>{"name": "f"</tool_call><tool_call>{"name": "g", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f"</tool_call>',
        [("g", "{}")],
    ),
    ("a <tool_ca", "a <tool_ca", []),
    ("spaces at the end  ", "spaces at the end  ", []),
]
MISTRAL: list[tuple[str, str, Calls]] = [
    ("plain text", "plain text", []),
    ('[TOOL_CALLS][{"name": "f", "arguments": {"x": [1]}}]', "", [("f", '{"x": [1]}')]),
    (
        'Well. [TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"y": "]"}, "id": "abc"}] ',
        "Well.",
        [("f", "{}"), ("g", '{"y": "]"}')],
    ),
    ('[TOOL_CALLS]f[ARGS]{"x": 1}', "", [("f", '{"x": 1}')]),
    ('[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{"x": 1}[TOOL_CALLS]g[ARGS]{}', "", [("f", '{"x": 1}'), ("g", "{}")]),
    ('[TOOL_CALLS]my.f-1{"x": 1} more', " more", [("my.f-1", '{"x": 1}')]),
    ('[TOOL_CALLS]f[ARGS]{"x": ', "", [("f", '{"x": ')]),
    ('[TOOL_CALLS][{"name": "f", "arguments": {}}, ', "", [("f", "{}")]),
    ("[TOOL_CALLS]not a call", "[TOOL_CALLS]not a call", []),
    ("[TOOL_CALLS]f[WHAT]{}", "[TOOL_CALLS]f[WHAT]{}", []),
    ("[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
    ("[TOOL_CALLS][1]", "[TOOL_CALLS][1]", []),
    ('[TOOL_CALLS][{"nam', '[TOOL_CALLS][{"nam', []),
    ('[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]["x"]', '[TOOL_CALLS]["x"]', [("f", "{}")]),
    ("a [TOOL_", "a [TOOL_", []),
]


@pytest.mark.parametrize(("text", "content", "calls"), HERMES)
def test_hermes(text: str, content: str, calls: Calls) -> None:
    assert read(HermesParser(), text) == (content, calls)
    assert read(HermesParser(), *text) == (content, calls)


@pytest.mark.parametrize(("text", "content", "calls"), MISTRAL)
def test_mistral(text: str, content: str, calls: Calls) -> None:
    assert read(MistralParser(), text) == (content, calls)
    assert read(MistralParser(), *text) == (content, calls)


WORDS = [
    *(
        "<tool_call>",
        "</tool_call>",
        "<",
        "tool_call>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "[",
        "]",
        ",",
        " ",
        "\n",
    ),
    *('{"name": "f", "arguments": {', '{"name": "f"', "{", "}", '"', "\\", '"x": 1', "f", "word", "é"),
]


@pytest.mark.parametrize("make", [HermesParser, MistralParser])
def test_the_cuts_change_nothing(make: Callable[[], ToolParser]) -> None:
    @given(st.lists(st.sampled_from(WORDS), max_size=16), st.lists(st.integers(0, 150), max_size=10))
    def run(words: list[str], cuts: list[int]) -> None:
        text = "".join(words)
        places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
        pieces = [text[start:end] for start, end in pairwise(places)]
        content, calls = read(make(), *pieces)
        assert (content, calls) == read(make(), text)
        if not calls:
            assert content == text
        assert content.count("word") + sum(arguments.count("word") for _, arguments in calls) <= text.count("word")

    run()


def test_the_name_comes_first_and_the_arguments_in_pieces() -> None:
    parser = HermesParser()
    assert parser.feed('<tool_call>{"name": "f", "arguments": {"a"') == [CallBegin(0, "f"), CallArguments(0, '{"a"')]
    assert parser.feed(": 1") == [CallArguments(0, ": 1")]
    assert parser.feed("}}\n</tool_call>") == [CallArguments(0, "}")]
    assert parser.finish() == []


def test_a_long_answer_costs_what_a_short_one_does_per_character() -> None:
    """No state is looked at again from its beginning: half a million characters pass in about a second."""
    for make, text in ((HermesParser, "<tool_call>{"), (MistralParser, "[TOOL_CALLS][{")):
        assert read(make(), text, *(['"x": {}, '] * 50_000))[1] == []
