"""What a model says of itself comes from its configuration."""

from types import SimpleNamespace
from typing import Any

import pytest

from moesaic.errors import ModelLoadError
from moesaic.models.info import eos_token_ids, max_model_len, model_info
from moesaic.testing.models import tiny_config


def _config(**rope: Any) -> Any:
    return SimpleNamespace(max_position_embeddings=1000, rope_parameters=rope)


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_type": "default"}, 1000),
        ({"rope_type": "yarn", "factor": 4.0}, 4000),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 250}, 1000),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 500}, 2000),
        ({"rope_type": "linear", "factor": 4.0}, 1000),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 500}, 1000),
        ({"rope_type": "longrope", "original_max_position_embeddings": 400}, 400),
        ({"full_attention": {"rope_type": "yarn", "factor": 2.0}, "sliding_attention": None}, 2000),
    ],
)
def test_the_context_honours_rope_scaling_as_the_configuration_states_it(rope: dict[str, Any], expected: int) -> None:
    assert max_model_len(_config(**rope)) == expected


def test_eos_ids_come_from_the_generation_configuration_first() -> None:
    model, none = SimpleNamespace(eos_token_id=2), SimpleNamespace(eos_token_id=None)
    assert eos_token_ids(model, SimpleNamespace(eos_token_id=[7, 8, 7])) == (7, 8)
    assert eos_token_ids(model, none) == (2,)
    assert eos_token_ids(none, none) == ()


def test_head_dim_is_the_configured_one() -> None:
    config = tiny_config("qwen3_moe")
    assert config.head_dim != config.hidden_size // config.num_attention_heads
    assert model_info(config).kv_shapes[0].key_dim == config.head_dim


def test_latent_attention_caches_keys_and_values_of_different_dims() -> None:
    shape = model_info(tiny_config("deepseek_v3")).kv_shapes[0]
    assert (shape.num_kv_heads, shape.key_dim, shape.value_dim) == (4, 24, 12)


def test_window_layers_of_mimo_have_twice_the_kv_heads() -> None:
    pytest.importorskip("transformers.models.mimo_v2_flash")
    heads = [shape.num_kv_heads for shape in model_info(tiny_config("mimo_v2_flash")).kv_shapes]
    assert heads == [4, 2, 4]


def test_a_configuration_with_one_number_per_layer_is_refused() -> None:
    config = tiny_config("hunyuan_v1_moe")
    config.moe_topk = [2, 2, 2]
    with pytest.raises(ModelLoadError, match="per layer"):
        model_info(config)
