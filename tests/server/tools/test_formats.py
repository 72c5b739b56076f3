"""Which format a template shows, and grammars that allow calls in it and nothing else."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

from moesaic import SamplingParams
from moesaic.errors import RequestError
from moesaic.models.files import load_tokenizer
from moesaic.sampling.grammar import Grammars
from moesaic.sampling.row import SamplingRow
from moesaic.server.settings import ToolCallParser
from moesaic.server.tools.base import CallArguments, CallBegin
from moesaic.server.tools.formats import HERMES, MISTRAL_LIST, MISTRAL_NAMED, ToolFormat, select_format
from moesaic.server.tools.protocol import Tool
from moesaic.structured import MAX_GRAMMAR_BYTES, StructuredOutput

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Łódź", 'a"b']}, "next": {"$ref": "#/$defs/n"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"n": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
}
TOOLS = [
    Tool.model_validate({"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}),
    Tool.model_validate({"type": "function", "function": {"name": "get_time"}}),
]
EOS = 259
SPECIAL = {"[TOOL_CALLS]": 256, "<tool_call>": 256, "[ARGS]": 257, "</tool_call>": 257}


@pytest.mark.parametrize(
    ("requested", "template", "expected"),
    [
        ("auto", "{% for t in tools %}<tool_call>{}", HERMES),
        ("auto", "[TOOL_CALLS] [", MISTRAL_LIST),
        ("auto", "[TOOL_CALLS]name[ARGS]", MISTRAL_NAMED),
        ("auto", "<tool_call><function=name><parameter=x>", None),
        ("auto", "<tool_call>name<arg_key>x", None),
        ("auto", "", None),
        ("none", "<tool_call>", None),
        ("hermes", "", HERMES),
        ("mistral", "", MISTRAL_LIST),
        ("mistral", "[ARGS]", MISTRAL_NAMED),
    ],
)
def test_the_template_shows_the_format(requested: ToolCallParser, template: str, expected: ToolFormat | None) -> None:
    selection = select_format(requested, template)
    assert selection.format is expected
    assert selection.reason


@pytest.fixture(scope="module")
def grammars(tiny_dir: Path) -> Grammars:
    return Grammars(vocab_size=260, eos_token_ids=(EOS,), load_tokenizer=lambda: load_tokenizer(tiny_dir))


def walk(grammars: Grammars, wanted: StructuredOutput, rng: random.Random) -> list[int]:
    """Return a random output that the grammar allows; it ends where it may."""
    grammars.begin("it", grammars.compile(wanted))
    tokens: list[int] = []
    while EOS not in tokens:
        row = SamplingRow(SamplingParams(), (), np.array(tokens, dtype=np.int64), 0)
        (ruled,) = grammars.restrict([row], ["it"])
        assert ruled.allowed_tokens is not None
        allowed = np.nonzero(np.unpackbits(ruled.allowed_tokens, bitorder="little"))[0].tolist()
        tokens.append(EOS if EOS in allowed and rng.random() < 0.5 else rng.choice(allowed))
        assert len(tokens) < 5000
    grammars.forget("it")
    return tokens[:-1]


@pytest.mark.parametrize("format", [HERMES, MISTRAL_LIST, MISTRAL_NAMED], ids=["hermes", "list", "named"])
@pytest.mark.parametrize("special", [{}, SPECIAL], ids=["text", "special"])
@pytest.mark.parametrize("is_parallel", [False, True])
def test_what_the_grammar_allows_is_what_the_parser_reads(
    grammars: Grammars, format: ToolFormat, special: dict[str, int], is_parallel: bool
) -> None:
    wanted = format.required(TOOLS, is_parallel=is_parallel, added_ids=special)
    text_of = {special[marker]: marker.encode() for marker in format.markers if marker in special}
    nums = set()
    for seed in range(6):
        tokens = walk(grammars, wanted, random.Random(seed))
        text = b"".join(text_of.get(token) or bytes([token]) for token in tokens).decode()
        parser = format.make_parser()
        events = [*parser.feed(text), *parser.finish()]
        names = [event.name for event in events if isinstance(event, CallBegin)]
        arguments = [event.text for event in events if isinstance(event, CallArguments)]
        assert len(names) == len(arguments) == len(events) / 2, text
        for name, written in zip(names, arguments, strict=True):
            value = json.loads(written)
            assert value == {} if name == "get_time" else value["city"] in SCHEMA["properties"]["city"]["enum"]
        nums.add(len(names))
    assert nums == {1} if not is_parallel else max(nums) > 1


def test_ids_have_the_form_that_the_templates_take() -> None:
    assert MISTRAL_LIST.new_id().isalnum()
    assert len(MISTRAL_LIST.new_id()) == 9
    assert HERMES.new_id().startswith("call_")
    assert HERMES.new_id() != HERMES.new_id()


def test_tools_that_make_too_long_a_grammar_are_refused() -> None:
    huge = {"type": "object", "description": "x" * MAX_GRAMMAR_BYTES}
    tool = Tool.model_validate({"type": "function", "function": {"name": "f", "parameters": huge}})
    with pytest.raises(RequestError, match="bytes") as caught:
        HERMES.required([tool], is_parallel=True, added_ids={})
    assert caught.value.param == "tools"
