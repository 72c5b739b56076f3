import pytest

from moesaic.errors import ConfigError, RequestTooLargeError
from moesaic.kv.geometry import (
    KVGeometry,
    LayerKVShape,
    blocks_needed,
    check_servable,
    kv_tokens_needed,
    resolve_max_tokens,
)


def test_bytes_count_both_sides_of_every_layer() -> None:
    layers = (
        LayerKVShape(num_kv_heads=4, key_dim=128, value_dim=128),
        LayerKVShape(num_kv_heads=16, key_dim=24, value_dim=16),
    )
    geometry = KVGeometry(layers=layers, block_size=16, element_bytes=2)
    assert geometry.bytes_per_token == 2 * (4 * 256 + 16 * 40)
    assert geometry.bytes_per_block == 16 * geometry.bytes_per_token
    assert geometry.num_blocks_for_bytes(3 * geometry.bytes_per_block + 1) == 3


def test_memory_for_no_block_is_refused_with_both_numbers() -> None:
    geometry = KVGeometry(
        layers=(LayerKVShape(num_kv_heads=1, key_dim=8, value_dim=8),), block_size=16, element_bytes=4
    )
    with pytest.raises(ConfigError, match=r"1000 bytes .* 1024 bytes"):
        geometry.num_blocks_for_bytes(1000)


def test_the_last_sampled_token_is_never_written() -> None:
    assert kv_tokens_needed(10, 1) == 10
    assert kv_tokens_needed(10, 6) == 15
    assert kv_tokens_needed(10, 0) == 10
    assert blocks_needed(10, 7, block_size=4) == 4
    assert blocks_needed(10, 8, block_size=4) == 5


@pytest.mark.parametrize("length", range(62, 67))
def test_every_length_around_the_pool_is_admitted_exactly_if_it_fits(length: int) -> None:
    """``length`` is prompt + output; the pool of 63 positions serves 64 since the last one is never written."""
    for max_tokens in (1, 2, 20):
        if length <= 64:
            check_servable(length - max_tokens, max_tokens, block_size=7, num_blocks=9)
        else:
            with pytest.raises(RequestTooLargeError, match=r"10 KV blocks .* the pool has 9 \(63 tokens\)"):
                check_servable(length - max_tokens, max_tokens, block_size=7, num_blocks=9)


@pytest.mark.parametrize(("prompt", "max_tokens", "expected"), [(10, 6, 6), (10, None, 6), (15, None, 1), (16, 0, 0)])
def test_max_tokens_within_the_context(prompt: int, max_tokens: int | None, expected: int) -> None:
    assert resolve_max_tokens(prompt, max_tokens, 16) == expected


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "param"), [(10, 7, "max_tokens"), (16, None, "prompt"), (17, 0, "prompt")]
)
def test_more_than_the_context_is_refused_with_the_numbers(prompt: int, max_tokens: int | None, param: str) -> None:
    with pytest.raises(RequestTooLargeError, match=rf"prompt has {prompt} tokens .* context holds 16") as caught:
        resolve_max_tokens(prompt, max_tokens, 16)
    assert caught.value.param == param
