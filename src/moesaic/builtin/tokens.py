"""What both built-in tokenizers share: byte-level BPE, saved as transformers reads it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers


def byte_alphabet() -> list[str]:
    """Return the character that stands for each byte in a byte-level vocabulary, by byte value.

    Source: GPT-2's encoder: printable Latin-1 characters stand for themselves, the other bytes for the characters
    from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    moved = {byte: chr(0x100 + i) for i, byte in enumerate(others)}
    return [moved.get(byte, chr(byte)) for byte in range(256)]


def byte_level_bpe(
    vocab: Mapping[str, int],
    merges: Sequence[tuple[str, str]],
    special: Sequence[str],
    *,
    splits_words: bool = True,
    splits_digits: bool = False,
) -> Tokenizer:
    """Return a byte-level BPE tokenizer; ``special`` tokens are in ``vocab`` and are never split."""
    tokenizer = Tokenizer(models.BPE(vocab=dict(vocab), merges=list(merges)))
    steps: list[pre_tokenizers.PreTokenizer] = [pre_tokenizers.Digits(individual_digits=True)] if splits_digits else []
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splits_words))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def save_tokenizer(
    tokenizer: Tokenizer,
    directory: Path,
    *,
    chat_template: str,
    max_length_tokens: int,
    bos: str,
    eos: str,
    pad: str,
    unk: str | None = None,
) -> None:
    """Write ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja`` into ``directory``."""
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
    write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": max_length_tokens,
            "clean_up_tokenization_spaces": False,
            "bos_token": bos,
            "eos_token": eos,
            "pad_token": pad,
            "unk_token": unk,
        },
    )


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Write ``value`` as an indented JSON file."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
