"""Products of few rows by oneDNN: the same as PyTorch's, and only where they are meant to be."""

import pytest
import torch
from torch.nn import functional
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from moesaic.experts.resident import ResidentExperts
from moesaic.kernels.few_rows import LEAST_BYTES, MOST_ROWS, is_few_rows, linear

LARGE = (2048, 512)


@pytest.mark.parametrize("num_rows", [0, 1, 7, MOST_ROWS, MOST_ROWS + 1])
@pytest.mark.parametrize("size", [LARGE, (64, 32)])
def test_products_equal_those_of_torch(num_rows, size) -> None:
    x, weight = torch.randn(num_rows, size[1]), torch.randn(size)
    torch.testing.assert_close(linear(x, weight), functional.linear(x, weight), atol=1e-4, rtol=1e-5)


def test_rows_of_a_larger_batch_need_not_be_contiguous() -> None:
    batch, weight = torch.randn(4, 2 * LARGE[1]), torch.randn(LARGE)
    x = batch[::2, LARGE[1] :]
    torch.testing.assert_close(linear(x, weight), functional.linear(x, weight), atol=1e-4, rtol=1e-5)


def test_only_few_rows_of_large_float32_weights_of_a_cpu_are_meant() -> None:
    large = torch.randn(LARGE)
    assert large.nbytes >= LEAST_BYTES
    assert is_few_rows(MOST_ROWS, large)
    assert not is_few_rows(MOST_ROWS + 0.5, large)
    assert not is_few_rows(1, large.bfloat16())
    assert not is_few_rows(1, large.t())
    assert not is_few_rows(1, large[: LARGE[0] // 2])
    assert not is_few_rows(1, large.to("meta"))


@pytest.mark.parametrize("num_tokens", [1, 5, 90])
def test_large_experts_equal_those_of_transformers_on_both_sides_of_the_line(num_tokens) -> None:
    """Five tokens are few rows for gate and up of every expert; 90 are many for all of them together."""
    config = MixtralConfig(num_local_experts=4, hidden_size=512, intermediate_size=1024, experts_implementation="eager")  # type: ignore[call-arg]
    module = MixtralExperts(config)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    module.eval().requires_grad_(False)
    scores, ids = torch.rand(num_tokens, 4).topk(2, dim=-1)
    x = torch.randn(num_tokens, 512)
    assert is_few_rows(1, module.gate_up_proj[0])
    out = ResidentExperts([module]).forward(0, x, ids, scores)
    torch.testing.assert_close(out, module(x, ids, scores), atol=1e-4, rtol=1e-4)
