"""What may be asked of the shape of an output."""

import pickle
from typing import Any

import pytest

from moesaic import SamplingParams, StructuredOutput
from moesaic.errors import RequestError
from moesaic.structured import MAX_GRAMMAR_BYTES


def test_it_is_a_plain_value() -> None:
    params = SamplingParams(structured_output=StructuredOutput(kind="regex", text="a+"))
    assert pickle.loads(pickle.dumps(params)) == params
    assert hash(params.structured_output) == hash(StructuredOutput(kind="regex", text="a+"))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kind": "xml", "text": "a"}, "kinds are json_object"),
        ({"kind": "regex"}, "give one"),
        ({"kind": "json_object", "text": "{}"}, "leave it out"),
        ({"kind": "json_schema", "text": "{"}, "is no JSON"),
        ({"kind": "json_schema", "text": "[" * 100_000}, "is no JSON"),
        ({"kind": "json_schema", "text": "3"}, "a schema is an object"),
        ({"kind": "choice", "text": "[]"}, "at least one"),
        ({"kind": "choice", "text": '["a", ""]'}, "no empty one"),
        ({"kind": "choice", "text": '["a", 1]'}, "list of texts"),
        ({"kind": "regex", "text": "\ud800"}, "no Unicode"),
        ({"kind": "regex", "text": "a" * (MAX_GRAMMAR_BYTES + 1)}, str(MAX_GRAMMAR_BYTES)),
        ({"kind": "regex", "text": "a", "opening": "<think>"}, "set after"),
    ],
)
def test_what_cannot_be_a_grammar_is_refused_by_name(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        StructuredOutput(**fields)
    assert caught.value.param == "structured_output"


@pytest.mark.parametrize("fields", [{"min_tokens": 2}, {"ignore_eos": True}])
def test_a_grammar_alone_says_where_the_output_ends(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="says where it ends") as caught:
        SamplingParams(structured_output=StructuredOutput(kind="json_object"), **fields)
    assert caught.value.param == next(iter(fields))


def test_a_grammar_is_a_value_of_ours() -> None:
    with pytest.raises(RequestError, match="pass StructuredOutput"):
        SamplingParams(structured_output={"kind": "json_object"})  # type: ignore[arg-type]  # what is tested
