from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from moesaic.models.files import load_tokenizer
from moesaic.request import TokenLogprobs
from moesaic.server.logprobs import CompletionLogprobWriter, finite
from moesaic.server.vocabulary import Vocabulary


@pytest.fixture(scope="module")
def tokenizer(tiny_dir: Path) -> Any:  # Any: transformers is untyped
    return load_tokenizer(tiny_dir)


def score(token_id: int, logprob: float = -1.0, top: tuple[tuple[int, float], ...] = ()) -> TokenLogprobs:
    return TokenLogprobs(token_id=token_id, logprob=logprob, rank=1, top=top)


def test_the_bytes_of_the_tokens_add_up_to_the_text(tokenizer: Any) -> None:
    vocabulary = Vocabulary(tokenizer)
    text = "A line\nwith é€😀, and <|im_end|>"
    parts = [vocabulary.bytes_of(i) for i in tokenizer(text)["input_ids"]]
    assert b"".join(part or b"" for part in parts) == text.encode()


def test_a_token_is_named_by_text_or_bytes_or_number(tokenizer: Any) -> None:
    vocabulary = Vocabulary(tokenizer)
    first, *_ = tokenizer("é")["input_ids"]
    assert vocabulary.text_of(72) == "H"
    assert vocabulary.text_of(first) == "bytes:\\xc3"
    assert vocabulary.text_of(259) == "<|im_end|>"
    assert vocabulary.text_of(100_000) == "token_id:100000"
    assert Vocabulary(None).text_of(72) == "token_id:72"


def test_sentencepiece_tokens_have_spaces_and_bytes() -> None:
    backend = Tokenizer(models.BPE(vocab={"▁": 0, "a": 1, "▁a": 2, "<0xE2>": 3, "<unk>": 4}, merges=[("▁", "a")]))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])

    class Wrapper:
        backend_tokenizer = backend

    vocabulary = Vocabulary(Wrapper())
    assert vocabulary.bytes_of(2) == b" a"
    assert vocabulary.bytes_of(3) == b"\xe2"


def test_offsets_count_characters_of_the_text(tokenizer: Any) -> None:
    vocabulary = Vocabulary(tokenizer)
    writer = CompletionLogprobWriter(vocabulary, vocabulary.special_ids)
    token_ids = tokenizer("a€<|im_end|>b")["input_ids"]
    whole = writer.write(token_ids, [score(i) for i in token_ids])
    assert whole.text_offset == [0, 1, 1, 1, 2, 2]
    assert writer.write([72], [score(72)]).text_offset == [3]


def test_the_chosen_token_is_among_the_top_ones(tokenizer: Any) -> None:
    writer = CompletionLogprobWriter(Vocabulary(tokenizer), frozenset())
    part = writer.write([65], [score(65, -3.0, ((66, -0.5), (67, -1.0)))])
    assert part.top_logprobs == [{"B": -0.5, "C": -1.0, "A": -3.0}]


def test_minus_infinity_is_written_as_a_number() -> None:
    assert finite(float("-inf")) == -9999.0
