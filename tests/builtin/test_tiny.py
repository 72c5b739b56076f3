import hashlib
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from moesaic.builtin import BUILTIN_NAMES, materialize
from moesaic.builtin.tiny import TINY
from moesaic.errors import ModelLoadError


def _greedy(directory: Path, prompt: str, num_tokens: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(directory)
    ids = torch.tensor([list(prompt.encode())])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False)
    tokens: list[int] = output[0, ids.shape[1] :].tolist()
    return tokens


def test_transformers_loads_a_mixture_with_every_weight(tiny_dir: Path) -> None:
    model, report = AutoModelForCausalLM.from_pretrained(tiny_dir, output_loading_info=True)
    assert not any(report.values())
    assert model.config.model_type == "qwen3_moe"
    assert model.config.num_experts == 8
    assert model.dtype == torch.float32


def test_it_takes_less_than_two_megabytes(tiny_dir: Path) -> None:
    assert sum(file.stat().st_size for file in tiny_dir.iterdir()) < 2_000_000


def test_the_hub_layout_is_complete(tiny_dir: Path) -> None:
    assert {file.name for file in tiny_dir.iterdir()} == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_the_generation_config_changes_no_choice(tiny_dir: Path) -> None:
    assert set(json.loads((tiny_dir / "generation_config.json").read_text())) == {
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    }


def test_the_greedy_output_varies(tiny_dir: Path) -> None:
    assert len(set(_greedy(tiny_dir, "Hello", 40))) > 20


def test_the_greedy_output_depends_on_the_whole_prompt(tiny_dir: Path) -> None:
    assert _greedy(tiny_dir, "a long way back", 8) != _greedy(tiny_dir, "A long way back", 8)


@pytest.mark.parametrize("text", ["plain", " spaces  and\ttabs\n", "añb 日本 🙂", "1234", ""])
def test_a_token_is_a_byte(tiny_dir: Path, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_dir)
    ids = tokenizer(text).input_ids
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_a_chat_ends_where_the_assistant_begins(tiny_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_dir)
    chat = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(text).input_ids
    assert ids.count(tokenizer.eos_token_id) == 1
    assert tokenizer.eos_token_id == 259


def test_two_builds_are_equal(tiny_dir: Path, tmp_path: Path) -> None:
    again = materialize("tiny", cache_dir=tmp_path)
    assert again != tiny_dir
    for file in tiny_dir.iterdir():
        assert file.read_bytes() == (again / file.name).read_bytes(), file.name


def test_a_changed_result_has_a_new_version(tiny_dir: Path) -> None:
    """Caches rebuild by version only. If this fails, raise ``TINY.version`` and put the new digest here."""
    built = (tiny_dir / "model.safetensors").read_bytes() + (tiny_dir / "config.json").read_bytes()
    digest = "f8f11053cdf5bf9c573fc264e61f626e81b71085b1f213f89dbfe5f06f566a4f"
    assert (TINY.version, hashlib.sha256(built).hexdigest()) == (1, digest)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ModelLoadError, match="there are: smol, smol-noisy, tiny"):
        materialize("huge")
    assert BUILTIN_NAMES == ("smol", "smol-noisy", "tiny")
