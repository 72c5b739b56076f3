"""Loading: hub checkpoints bit for bit, dummy weights, and broken input refused with the name of what is wrong."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.utils import logging as hf_logging

from moesaic.errors import ModelLoadError, UnsupportedModelError
from moesaic.models.files import load_tokenizer, resolve_model_path
from moesaic.models.loader import load_model, read_config, resolve_dtype
from moesaic.models.loading_bar import counted
from moesaic.testing.models import available_families, save_tiny, tiny_config, tiny_model
from moesaic.testing.paged import PagedModel

FAMILY = "qwen3_moe"
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
TOKENS = [5, 17, 3, 99, 42, 8, 64, 120]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A tiny checkpoint of one file in the layout of the hub."""
    save_tiny(FAMILY, tmp_path)
    return tmp_path


def _rewrite(path: Path, change: Any) -> None:
    """Change the tensors of a one-file checkpoint in place (Any: a function of the dict)."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "granitemoe", "llama"])
def test_a_sharded_hub_checkpoint_loads_bit_for_bit(family: str, tmp_path: Path) -> None:
    saved = save_tiny(family, tmp_path, max_shard_size="100KB").state_dict()
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = load_model(tmp_path).hf_model.state_dict()
    assert loaded.keys() == saved.keys()
    assert [name for name in saved if not torch.equal(saved[name], loaded[name])] == []


def test_a_loaded_model_gives_the_logits_of_the_one_saved(checkpoint: Path) -> None:
    model = load_model(checkpoint)
    (got,) = PagedModel(model, num_sequences=1, max_tokens=8).step([(0, TOKENS)])
    torch.testing.assert_close(got, tiny_model(FAMILY)(torch.tensor([TOKENS])).logits[0], rtol=0, atol=1e-4)
    assert not model.hf_model.training
    assert not any(p.requires_grad for p in model.hf_model.parameters())


def test_tied_embeddings_are_not_missing(tmp_path: Path) -> None:
    config = tiny_config("llama")
    config.tie_word_embeddings = True
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = load_model(tmp_path).hf_model
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_routers_that_the_family_keeps_in_float32_stay_so(tmp_path: Path) -> None:
    save_tiny("deepseek_v3", tmp_path)
    loaded = load_model(tmp_path, dtype=torch.bfloat16).hf_model
    dummy = load_model(tmp_path, dtype=torch.bfloat16, load_format="dummy").hf_model
    assert loaded.model.layers[1].mlp.gate.e_score_correction_bias.dtype == torch.float32
    assert loaded.model.layers[1].self_attn.o_proj.weight.dtype == torch.bfloat16
    for (name, a), (_, b) in zip(loaded.state_dict().items(), dummy.state_dict().items(), strict=True):
        assert a.dtype == b.dtype, name


@pytest.fixture
def new_memory_is_nan() -> Iterator[None]:
    """What ``torch.empty`` gives is NaN, not what happened to be there."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("family", available_families())
def test_a_dummy_model_is_finite_in_bfloat16_and_its_buffers_are_right(
    family: str, tmp_path: Path, new_memory_is_nan: None
) -> None:
    """Rotary frequencies are computed, not loaded: random ones would be wrong, uninitialised ones not even finite."""
    tiny_config(family).save_pretrained(tmp_path)
    model = load_model(tmp_path, load_format="dummy", dtype=torch.bfloat16)
    computed = dict(tiny_model(family).named_buffers())
    saved = model.hf_model.state_dict()
    for name, buffer in model.hf_model.named_buffers():
        assert name in saved or torch.equal(buffer, computed[name].to(buffer.dtype)), name
    (logits,) = PagedModel(model, num_sequences=1, max_tokens=8).step([(0, TOKENS)])
    assert logits.dtype == torch.float32
    assert logits.isfinite().all()


def test_dummy_weights_are_a_function_of_the_seed(tmp_path: Path) -> None:
    tiny_config(FAMILY).save_pretrained(tmp_path)
    first, again, other = (load_model(tmp_path, load_format="dummy", seed=s).hf_model.lm_head.weight for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_eos_ids_are_those_of_the_generation_configuration(tmp_path: Path) -> None:
    tiny_config(FAMILY).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert load_model(tmp_path, load_format="dummy").info.eos_token_ids == (7, 9)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="nowhere does not exist"):
        load_model(tmp_path / "nowhere")


def test_a_directory_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json does not exist"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{broken", "cannot be read"),
        ("[1, 2]", "no JSON object"),
        ("{}", "names no model_type"),
        ('{"model_type": "llama", "num_hidden_layers": "many"}', "no llama configuration"),
        ('{"model_type": "llama", "quantization_config": {"quant_method": "mxfp4"}}', "mxfp4 quantized"),
    ],
)
def test_a_bad_configuration_is_refused(text: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelLoadError, match=expected):
        load_model(tmp_path, load_format="dummy")


@pytest.mark.parametrize(("family", "reason"), [("jamba", "recurrent"), ("nonesuch", "not proven")])
def test_an_unsupported_family_is_refused_before_its_weights_are_looked_at(
    family: str, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    with pytest.raises(UnsupportedModelError, match=rf"{family}.*{reason}.*mixtral"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("family", "option", "value"),
    [
        ("gemma", "use_bidirectional_attention", True),
        ("llama", "rope_parameters", {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
    ],
)
def test_an_option_that_makes_another_model_of_it_is_refused(
    family: str, option: str, value: Any, tmp_path: Path
) -> None:
    config = tiny_config(family).to_dict() | {option: value}
    (tmp_path / "config.json").write_text(json.dumps(config, default=str))
    with pytest.raises(UnsupportedModelError, match=option if value is True else "dynamic"):
        load_model(tmp_path, load_format="dummy")


def test_missing_weights_are_named(tmp_path: Path) -> None:
    tiny_config(FAMILY).save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors does not exist"):
        load_model(tmp_path)


@pytest.mark.parametrize("name", [EXPERT, "model.layers.0.self_attn.q_norm.weight", "lm_head.weight"])
def test_a_missing_tensor_is_named_and_never_made_up(name: str, checkpoint: Path) -> None:
    _rewrite(checkpoint, lambda tensors: tensors.pop(name))
    with pytest.raises(ModelLoadError, match=f"missing.*{name}"):
        load_model(checkpoint)


def test_a_missing_layer_of_experts_is_named(checkpoint: Path) -> None:
    def drop(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if "layers.2.mlp.experts" in n]:
            tensors.pop(name)

    _rewrite(checkpoint, drop)
    with pytest.raises(ModelLoadError, match=r"missing.*layers\.2\.mlp\.experts"):
        load_model(checkpoint)


@pytest.mark.parametrize(
    ("name", "shown"), [("lm_head.weight", "lm_head"), (EXPERT, EXPERT), ("model.norm.weight", "model.norm.weight")]
)
def test_a_tensor_of_another_shape_is_named(name: str, shown: str, checkpoint: Path) -> None:
    _rewrite(checkpoint, lambda tensors: tensors.update({name: tensors[name][..., :-4].contiguous()}))
    with pytest.raises(ModelLoadError, match=shown):
        load_model(checkpoint)


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_a_truncated_file_is_named(keep: int, checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors is truncated or corrupt"):
        load_model(checkpoint)


def test_a_corrupt_header_is_named(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    file.write_bytes(b"\xff" * 64 + file.read_bytes()[64:])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors is truncated or corrupt"):
        load_model(checkpoint)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save_tiny(FAMILY, tmp_path, max_shard_size="100KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelLoadError, match=f"{shard.name} does not exist"):
        load_model(tmp_path)


def test_an_index_that_names_the_wrong_shard_is_refused(tmp_path: Path) -> None:
    save_tiny(FAMILY, tmp_path, max_shard_size="100KB")
    index = tmp_path / "model.safetensors.index.json"
    fields = json.loads(index.read_text())
    fields["weight_map"]["made.up"] = min(fields["weight_map"].values())
    index.write_text(json.dumps(fields))
    with pytest.raises(ModelLoadError, match=r"made\.up is not in"):
        load_model(tmp_path)


def test_progress_goes_from_zero_to_one_in_place_of_the_bar_of_transformers(
    checkpoint: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[str, float]] = []
    load_model(checkpoint, progress=lambda what, fraction: seen.append((what, fraction)))
    fractions = [fraction for _, fraction in seen]
    assert {what for what, _ in seen} == {"loading weights"}
    assert (fractions[0], fractions[-1]) == (0.0, 1.0)
    assert fractions == sorted(fractions)
    if hasattr(hf_logging, "set_tqdm_hook"):
        assert len(set(fractions)) > 3
        assert capfd.readouterr().err == ""


def test_a_fraction_is_told_for_each_percent_at_most() -> None:
    seen: list[float] = []
    assert list(counted(range(1000), seen.append)) == list(range(1000))
    assert (len(seen), seen[0], seen[-1]) == (100, 0.01, 1.0)
    assert list(counted([], seen.append)) == []


def test_dtype_follows_the_configuration_but_not_on_a_cpu(checkpoint: Path) -> None:
    config = read_config(checkpoint)
    config.dtype = torch.bfloat16
    assert resolve_dtype(config, None, torch.device("cuda")) == torch.bfloat16
    assert resolve_dtype(config, None, torch.device("cpu")) == torch.float32
    assert resolve_dtype(config, torch.float16, torch.device("cpu")) == torch.float16


def test_a_built_in_name_a_directory_and_a_tokenizer_resolve(tiny_dir: Path) -> None:
    assert resolve_model_path(str(tiny_dir)) == tiny_dir
    tokenizer = load_tokenizer(tiny_dir)
    assert tokenizer is not None
    model = load_model(resolve_model_path(str(tiny_dir)))
    assert model.info.vocab_size >= len(tokenizer)


def test_a_directory_without_a_tokenizer_has_none(checkpoint: Path) -> None:
    assert load_tokenizer(checkpoint) is None


def test_a_broken_tokenizer_is_named(checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").write_text("{broken")
    with pytest.raises(ModelLoadError, match=r"tokenizer in .* cannot be read"):
        load_tokenizer(checkpoint)


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "nowhere", "a/b/c"])
def test_a_name_that_is_nothing_is_refused_with_what_it_could_be(name: str) -> None:
    with pytest.raises(ModelLoadError, match=r"no directory.*smol.*hub id"):
        resolve_model_path(name)


def test_a_hub_model_that_cannot_be_fetched_is_refused_with_a_remedy() -> None:
    with pytest.raises(ModelLoadError, match="pass a local directory"):
        resolve_model_path("no-such-owner/no-such-model")
