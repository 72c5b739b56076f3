"""Text in pieces equals text decoded at once, for the kinds of tokenizers that models have."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from moesaic.engine.detokenizer import IncrementalDetokenizer, TokenDecoder

CORPUS = [
    "Hello world, hello there. The quick brown fox",
    "你好世界 你好",
    "naïve café 😀👍🏽 😀",
    "a  b\n\nc  ,  d",
] * 3
SPECIAL = ["<s>", "</s>", "<|im_end|>"]


def _byte_level() -> Tokenizer:
    """As in GPT-2, Qwen and Llama 3: every byte is a token, spaces are part of the words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _byte_fallback() -> Tokenizer:
    """As in Llama 2 and Mixtral: words begin with U+2581, unknown characters are byte tokens."""
    words = ["▁", "▁Hello", "▁world", "▁▁", "llo", "he", "你", *"abcdefghijklmno,.HTW"]
    vocab = {token: i for i, token in enumerate([*SPECIAL, *(f"<0x{b:02X}>" for b in range(256)), *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def _metaspace() -> Tokenizer:
    """As in T5 and XLM: the decoder drops every U+2581 of the first token."""
    tokenizer = Tokenizer(models.BPE(unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=120, special_tokens=SPECIAL, show_progress=False)
    )
    return tokenizer


TOKENIZERS = {"byte-level": _byte_level(), "byte-fallback": _byte_fallback(), "metaspace": _metaspace()}
PROMPTS = ["", "Hello", "The quick ", "你好", "😀", "a\n"]
TEXTS = [
    "Hello world",
    " Hello  world , ,",
    "你好、世界",
    "😀👍🏽 ok 👨‍👩‍👧‍👦",
    "café\n\n",
    " ",
    "   ",
    "\N{REPLACEMENT CHARACTER} x",
    "x\N{REPLACEMENT CHARACTER}",
]

each_tokenizer = pytest.mark.parametrize("kind", TOKENIZERS)


def byte_ids(*values: int) -> list[int]:
    """The byte tokens of the byte-fallback tokenizer, which come after the special ones."""
    return [len(SPECIAL) + value for value in values]


def pieces_of(
    tokenizer: Any, prompt: list[int], output: list[int], *, skip: bool = True, sizes: tuple[int, ...] = (1,)
) -> list[str]:
    """What each push returns, cut into pushes of ``sizes`` in turn, and the flush."""
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=skip)
    pieces, at, turn = [], 0, 0
    while at < len(output):
        size = sizes[turn % len(sizes)]
        pieces.append(detokenizer.push(output[at : at + size]))
        at, turn = at + size, turn + 1
    return [*pieces, detokenizer.flush()]


def oracle(tokenizer: Tokenizer, prompt: list[int], output: list[int], *, skip: bool = True) -> str:
    """The text of prompt and output after the prompt's, all decoded at once."""
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    both: str = tokenizer.decode(prompt + output, skip_special_tokens=skip)
    assert both.startswith(before)
    return both[len(before) :]


@each_tokenizer
@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_add_up_to_the_text_after_the_prompt(kind: str, prompt: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    prompt_ids, output = [0, *tokenizer.encode(prompt).ids], tokenizer.encode(text).ids
    assert "".join(pieces_of(tokenizer, prompt_ids, output)) == oracle(tokenizer, prompt_ids, output)


@each_tokenizer
@given(st.data())
def test_any_text_in_any_pieces_is_the_same_text(kind: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]
    prompt = tokenizer.encode(data.draw(st.sampled_from(PROMPTS))).ids
    texts = st.lists(st.sampled_from(TEXTS) | st.text(max_size=6), max_size=4)
    special = st.sampled_from([[], [1], [2, 2], [10_000]])
    output = [i for text in data.draw(texts) for i in (*tokenizer.encode(text).ids, *data.draw(special))]
    skip = data.draw(st.booleans())
    sizes = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    want = oracle(tokenizer, prompt, output, skip=skip)
    assert "".join(pieces_of(tokenizer, prompt, output, skip=skip, sizes=sizes)) == want


@given(
    st.sampled_from(PROMPTS),
    st.lists(st.integers(0, 340), max_size=40),
    st.booleans(),
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
)
def test_byte_level_tokens_in_any_order_give_what_one_decode_gives(
    prompt: str, output: list[int], skip: bool, sizes: list[int]
) -> None:
    """Invalid bytes, special tokens and unknown ids included."""
    tokenizer = TOKENIZERS["byte-level"]
    prompt_ids = tokenizer.encode(prompt).ids
    want = oracle(tokenizer, prompt_ids, output, skip=skip)
    assert "".join(pieces_of(tokenizer, prompt_ids, output, skip=skip, sizes=tuple(sizes))) == want


@pytest.mark.parametrize("kind", ["byte-fallback", "metaspace"])
@given(st.data())
def test_tokens_in_any_order_give_what_one_decode_gives_if_their_bytes_are_valid(
    kind: str, data: st.DataObject
) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = st.integers(0, tokenizer.get_vocab_size() + 3) | st.sampled_from(tokenizer.encode("  é😀\n a").ids)
    output = data.draw(st.lists(ids, max_size=20))
    sizes = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    pieces = pieces_of(tokenizer, [], output, sizes=sizes)
    want = oracle(tokenizer, [], output)
    if "\N{REPLACEMENT CHARACTER}" not in want:
        assert "".join(pieces) == want
    assert "".join(pieces) == "".join(pieces_of(tokenizer, [], output)), "depends on how the tokens were cut"


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback"])
@pytest.mark.parametrize("character", ["ß", "語", "🦜"])
def test_a_character_of_several_tokens_comes_whole_with_its_last(kind: str, character: str) -> None:
    tokenizer = TOKENIZERS[kind]
    output = tokenizer.encode(character).ids[-len(character.encode()) :]
    assert len(output) > 1
    pieces = pieces_of(tokenizer, tokenizer.encode("a").ids, output)
    assert pieces == [*[""] * (len(output) - 1), character, ""]


def test_a_newline_byte_token_is_shown_at_once() -> None:
    """A stop string of a newline must not need one token more with Llama 2's tokenizer, where it is a byte."""
    tokenizer = TOKENIZERS["byte-fallback"]
    assert pieces_of(tokenizer, [], byte_ids(10, 10))[:2] == ["\n", "\n"]


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback"])
def test_a_long_run_of_invalid_bytes_is_not_held_back_for_ever(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    token = tokenizer.token_to_id("<0xFF>") or tokenizer.encode("ß").ids[-1]
    pieces = pieces_of(tokenizer, [], [token] * 50)
    shown = [len("".join(pieces[:n])) for n in range(1, 51)]
    assert all(n - size <= 3 for n, size in enumerate(shown, start=1))
    assert "".join(pieces) == "\N{REPLACEMENT CHARACTER}" * 50


def test_an_unfinished_character_comes_out_at_the_flush() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    first = tokenizer.encode("語").ids[0]
    assert pieces_of(tokenizer, [], [first]) == ["", "\N{REPLACEMENT CHARACTER}"]
    assert pieces_of(tokenizer, [], [])[-1] == ""


def test_characters_already_shown_stay_when_their_byte_run_turns_invalid() -> None:
    """The decoder would turn the whole run into U+FFFD; what a reader has seen cannot be taken back."""
    tokenizer = TOKENIZERS["byte-fallback"]
    output = [*byte_ids(*"é".encode(), 0xFF), *tokenizer.encode("a").ids[-1:]]
    text = "".join(pieces_of(tokenizer, [], output))
    assert text == "é\N{REPLACEMENT CHARACTER}a"


@each_tokenizer
def test_the_work_per_token_does_not_grow_with_the_output(kind: str) -> None:
    """Counted in tokens decoded: the worst outputs are spaces only, invalid bytes only, special tokens only."""
    tokenizer = TOKENIZERS[kind]
    for token in {tokenizer.encode(" ").ids[-1], tokenizer.encode("ß").ids[-1], 2, 10_000}:
        decoder = _CountingDecoder(tokenizer)
        IncrementalDetokenizer(decoder, [0] * 1000).push([token] * 500)
        assert decoder.num_decoded < 500 * 60


class _CountingDecoder(TokenDecoder):
    num_decoded = 0

    def decode(self, token_ids: list[int]) -> str:
        self.num_decoded += len(token_ids)
        return super().decode(token_ids)


def test_a_transformers_tokenizer_gives_the_same_text_without_cleaning_up_spaces() -> None:
    fast = TOKENIZERS["byte-level"]
    wrapped = PreTrainedTokenizerFast(tokenizer_object=fast, clean_up_tokenization_spaces=True, eos_token="</s>")
    output = [*fast.encode("a , b . 😀").ids, 1]
    assert "".join(pieces_of(wrapped, [], output)) == "a , b . 😀"
    assert "".join(pieces_of(wrapped, [], output, skip=False)) == "a , b . 😀</s>"


def test_a_tokenizer_without_a_fast_backend_works_by_its_decode_alone() -> None:
    class Spelled:
        all_special_ids = (0,)

        def decode(self, ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
            return "".join("^" if i == 0 else chr(96 + i) for i in ids)

    assert "".join(pieces_of(Spelled(), [0, 1], [2, 0, 3])) == "bc"
    assert "".join(pieces_of(Spelled(), [0, 1], [2, 0, 3], skip=False)) == "b^c"
