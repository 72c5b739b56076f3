"""What a grammar allows, token by token."""

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from moesaic import SamplingParams, StructuredOutput
from moesaic.errors import RequestError, SamplingError
from moesaic.models.files import load_tokenizer
from moesaic.sampling.grammar import Grammars
from moesaic.sampling.row import SamplingRow
from moesaic.sampling.sampler import Sampler

EOS = 259
VOCAB = 301  # more than the 260 ids of the tokenizer, and no multiple of 8


@pytest.fixture(scope="module")
def grammars(tiny_dir: Path) -> Grammars:
    return Grammars(vocab_size=VOCAB, eos_token_ids=(EOS,), load_tokenizer=lambda: load_tokenizer(tiny_dir))


def allowed(grammars: Grammars, wanted: StructuredOutput, output: bytes | list[int]) -> set[int]:
    """Return the tokens that may follow ``output``."""
    grammars.begin("it", grammars.compile(wanted))
    row = SamplingRow(SamplingParams(), (), np.array(list(output), dtype=np.int64), 0)
    (ruled,) = grammars.restrict([row], ["it"])
    grammars.forget("it")
    assert ruled.allowed_tokens is not None
    return set(np.nonzero(np.unpackbits(ruled.allowed_tokens, bitorder="little"))[0].tolist())


YES = {"kind": "choice", "text": '["yes"]'}


def test_ids_without_a_token_and_special_tokens_are_never_allowed(grammars: Grammars) -> None:
    anything = allowed(grammars, StructuredOutput(kind="regex", text="(?s:.*)"), b"x")
    # No lone byte of two or more is the start of a character by itself, but all that can begin one are allowed.
    assert set(range(128)) | {EOS} <= anything
    assert max(anything - {EOS}) < 256


def test_only_the_end_is_allowed_when_the_grammar_is_complete(grammars: Grammars) -> None:
    wanted = StructuredOutput(**YES)
    assert allowed(grammars, wanted, b"") == {ord("y")}
    assert allowed(grammars, wanted, b"yes") == {EOS}


def test_a_reasoning_that_the_prompt_began_must_end_before_the_grammar(grammars: Grammars) -> None:
    wanted = StructuredOutput(**YES, after="</think>")
    assert {ord("y"), ord("<"), 10} < allowed(grammars, wanted, b"")
    assert EOS not in allowed(grammars, wanted, b"maybe yes")
    assert allowed(grammars, wanted, b"no: yes </think>") == {ord("y"), 32, 10}
    assert allowed(grammars, wanted, b"</think>\n\nyes") == {EOS}


def test_a_reasoning_that_the_model_begins_may_be_left_out(grammars: Grammars) -> None:
    wanted = StructuredOutput(**YES, after="</think>", opening="<think>")
    assert allowed(grammars, wanted, b"") == {ord("y"), ord("<")}
    assert allowed(grammars, wanted, b"yes") == {EOS}
    assert allowed(grammars, wanted, b"<think>no</think>") == {ord("y"), 32, 10}


def test_special_tokens_can_bound_the_reasoning(grammars: Grammars) -> None:
    wanted = StructuredOutput(**YES, after="<|begin|>", opening="<|im_start|>")
    assert allowed(grammars, wanted, [258]) >= {256, ord("y"), 10}
    assert allowed(grammars, wanted, [258, ord("?"), 256]) == {ord("y"), 32, 10}


def test_white_space_in_json_is_bounded(grammars: Grammars) -> None:
    wanted = StructuredOutput(kind="json_object")
    assert {10, 32, ord('"')} <= allowed(grammars, wanted, b"{")
    assert not {10, 32} & allowed(grammars, wanted, b"{\n" + b" " * 40)


def test_the_choice_is_among_the_allowed_whatever_the_logits(grammars: Grammars) -> None:
    sampler = Sampler(vocab_size=VOCAB, eos_token_ids=(EOS,))
    wanted = StructuredOutput(kind="regex", text="[xyz]")
    grammars.begin("ruled", grammars.compile(wanted))

    @given(st.integers(0, 2**32), st.sampled_from([0.0, 0.01, 1.0, 50.0]))
    def run(seed: int, temperature: float) -> None:
        params = SamplingParams(temperature=temperature, top_k=2, top_p=0.9, presence_penalty=2.0)
        logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(seed)) * 100
        rows = [SamplingRow(params, (1,), (), seed), SamplingRow(params, (1,), (), seed)]
        before = logits.clone()
        free, ruled = sampler.sample(logits, grammars.restrict(rows, ["free", "ruled"])).token_ids
        assert ruled in map(ord, "xyz")
        assert sampler.sample(logits[:1], rows[:1]).token_ids == (free,)
        assert torch.equal(logits, before)

    run()
    grammars.forget("ruled")


def test_a_tokenizer_with_more_ids_than_the_logits_is_refused(tiny_dir: Path) -> None:
    narrow = Grammars(vocab_size=200, eos_token_ids=(3,), load_tokenizer=lambda: load_tokenizer(tiny_dir))
    with pytest.raises(RequestError, match="can have no grammar: vocab size too small"):
        narrow.compile(StructuredOutput(**YES))


def test_a_model_without_an_end_token_is_refused(tiny_dir: Path) -> None:
    endless = Grammars(vocab_size=VOCAB, eos_token_ids=(), load_tokenizer=lambda: load_tokenizer(tiny_dir))
    with pytest.raises(RequestError, match="no end token"):
        endless.compile(StructuredOutput(**YES))


def test_few_compiled_grammars_are_kept(grammars: Grammars) -> None:
    for i in range(40):
        grammars.compile(StructuredOutput(kind="regex", text=f"a{{{i + 1}}}"))
    assert len(grammars._compiled) == 32


def test_an_added_token_that_is_not_special_can_end_the_reasoning(tiny_dir: Path, tmp_path: Path) -> None:
    """llguidance takes added tokens in angle brackets for special ones, whatever the tokenizer says: Qwen3 has such."""
    fields = json.loads((tiny_dir / "tokenizer.json").read_text(encoding="utf-8"))
    (begin,) = (token for token in fields["added_tokens"] if token["id"] == 256)
    begin |= {"content": "</think>", "special": False}
    del fields["model"]["vocab"]["<|begin|>"]
    fields["model"]["vocab"]["</think>"] = 256
    (tmp_path / "tokenizer.json").write_text(json.dumps(fields), encoding="utf-8")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    grammars = Grammars(vocab_size=VOCAB, eos_token_ids=(EOS,), load_tokenizer=lambda: tokenizer)
    wanted = StructuredOutput(**YES, after="</think>")
    assert 256 in allowed(grammars, wanted, b"Hm")
    assert allowed(grammars, wanted, [*b"Hm", 256]) == {ord("y"), 32, 10}


def test_what_cannot_be_prepared_stops_nothing() -> None:
    Grammars(vocab_size=VOCAB, eos_token_ids=(EOS,), load_tokenizer=lambda: None).prepare()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
KEYWORDS = st.sampled_from(
    [
        *("type", "enum", "const", "properties", "items", "anyOf", "allOf", "oneOf", "$ref", "$defs", "pattern"),
        *("minimum", "maximum", "multipleOf", "maxLength", "format", "minItems", "required", "additionalProperties"),
        *("prefixItems", "patternProperties", "x-guidance"),
    ]
)
VALUES = JSON | st.sampled_from(["object", "string", "number", "array", "#", "#/$defs/a", "(", "a{9}", "date"])
SCHEMAS = st.recursive(
    st.dictionaries(KEYWORDS, VALUES, max_size=4),
    lambda inner: st.dictionaries(KEYWORDS, inner | st.lists(inner, max_size=2) | VALUES, max_size=4),
    max_leaves=6,
)


@given(SCHEMAS)
def test_any_schema_is_compiled_or_refused(grammars: Grammars, schema: dict[str, object]) -> None:
    with contextlib.suppress(RequestError, SamplingError):
        allowed(grammars, StructuredOutput(kind="json_schema", text=json.dumps(schema)), b"")


@pytest.mark.parametrize("text", ['{"const": NaN}', '{"a":' * 900 + "1" + "}" * 900, '{"minimum": 1e999}'])
def test_what_json_should_not_be_is_compiled_or_refused(grammars: Grammars, text: str) -> None:
    with contextlib.suppress(RequestError):
        grammars.compile(StructuredOutput(kind="json_schema", text=text))
