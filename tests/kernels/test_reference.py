"""The torch references against transformers' own layers in float32: they are the oracle of the Triton kernels."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeExperts,
    Qwen3MoeRMSNorm,
    Qwen3MoeRotaryEmbedding,
    Qwen3MoeTopKRouter,
    apply_rotary_pos_emb,
)

from moesaic.kernels.reference import fused_experts, norm_rope_write, rms_norm, route

HEADS, KV_HEADS, DIM = 4, 2, 16
CONFIG = Qwen3MoeConfig(
    hidden_size=32,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    head_dim=DIM,
    num_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=24,
    max_position_embeddings=64,
    experts_implementation="eager",
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_is_that_of_transformers_and_the_residual_comes_first(dtype) -> None:
    norm = Qwen3MoeRMSNorm(32).to(dtype)
    norm.weight.data.normal_()
    x, residual = torch.randn(5, 32).to(dtype), torch.randn(5, 32).to(dtype)
    normed, total = rms_norm(x, norm.weight, 1e-6, residual)
    assert torch.equal(total, residual + x)
    assert torch.equal(normed, norm(residual + x))
    assert torch.equal(rms_norm(x, norm.weight, 1e-6)[0], norm(x))


@pytest.mark.parametrize("has_norm", [True, False])
def test_queries_and_keys_are_normed_and_rotated_as_by_transformers(has_norm) -> None:
    num_tokens, positions = 7, torch.tensor([3, 4, 5, 0, 63, 17, 2])
    qkv = torch.randn(num_tokens, (HEADS + 2 * KV_HEADS) * DIM)
    norms = [Qwen3MoeRMSNorm(DIM).requires_grad_(False) for _ in range(2)]
    for norm in norms:
        norm.weight.data.normal_()
    q_norm, k_norm = norms if has_norm else (torch.nn.Identity(), torch.nn.Identity())
    query, key, value = (
        part.view(1, num_tokens, -1, DIM).transpose(1, 2)
        for part in qkv.split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], dim=1)
    )
    rotary = Qwen3MoeRotaryEmbedding(CONFIG)
    want_q, want_k = apply_rotary_pos_emb(q_norm(query), k_norm(key), *rotary(qkv, positions[None]))

    slots = torch.tensor([9, 1, 30, 0, 31, 12, 5])
    pages = torch.zeros(2, 8, 4, KV_HEADS, DIM)
    weights = [norm.weight if has_norm else None for norm in norms]
    got_q = norm_rope_write(
        qkv, *weights, _cos_sin(rotary), positions, slots, pages[0], pages[1], 1e-6, HEADS, KV_HEADS
    )

    torch.testing.assert_close(got_q, want_q[0].transpose(0, 1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(pages[0].flatten(0, 1)[slots], want_k[0].transpose(0, 1), atol=1e-5, rtol=1e-5)
    assert torch.equal(pages[1].flatten(0, 1)[slots], value[0].transpose(0, 1))


def test_padded_rows_are_written_nowhere() -> None:
    qkv, pages = torch.randn(3, (HEADS + 2 * KV_HEADS) * DIM), torch.zeros(2, 2, 4, KV_HEADS, DIM)
    slots, positions = torch.tensor([-1, 6, -1]), torch.tensor([0, 3, 0])
    table = torch.randn(64, DIM)
    norm_rope_write(qkv, None, None, table, positions, slots, pages[0], pages[1], 1e-6, HEADS, KV_HEADS)
    assert torch.nonzero(pages.flatten(1, 2).abs().sum((2, 3))).tolist() == [[0, 6], [1, 6]]


@pytest.mark.parametrize("renormalise", [True, False])
def test_routing_is_that_of_transformers(renormalise) -> None:
    router = Qwen3MoeTopKRouter(CONFIG)
    router.norm_topk_prob = renormalise
    router.weight.data.normal_()
    logits, want_weights, want_ids = router(torch.randn(9, 32))
    weights, ids = route(logits, 3, renormalise)
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)
    assert torch.equal(ids.long(), want_ids)
    torch.testing.assert_close(weights, want_weights)


def test_of_equally_likely_experts_the_lowest_ids_are_chosen() -> None:
    assert route(torch.zeros(2, 40), 5, True)[1].tolist() == [[0, 1, 2, 3, 4]] * 2


def test_rows_of_padding_choose_no_expert() -> None:
    weights, ids = route(torch.randn(4, 8), 2, True, torch.tensor([3], dtype=torch.int32))
    assert ids[3].tolist() == [-1, -1]
    assert weights[3].tolist() == [0.0, 0.0]
    assert int(ids[:3].min()) >= 0


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**20), num_tokens=st.integers(1, 12))
def test_experts_equal_those_of_transformers_wherever_their_weights_lie(seed, num_tokens) -> None:
    random = torch.Generator().manual_seed(seed)
    module = Qwen3MoeExperts(CONFIG).requires_grad_(False)
    for parameter in module.parameters():
        parameter.normal_(0.0, 0.2, generator=random)
    x = torch.randn(num_tokens, 32, generator=random)
    chosen = torch.rand(num_tokens, 8, generator=random).topk(3, dim=-1)
    slots = torch.randperm(8, generator=random)
    gate_up, down = torch.empty_like(module.gate_up_proj), torch.empty_like(module.down_proj)
    gate_up[slots], down[slots] = module.gate_up_proj, module.down_proj
    out = fused_experts(x, gate_up, down, chosen.indices.int(), chosen.values, slots.int())
    torch.testing.assert_close(out, module(x, chosen.indices, chosen.values), atol=1e-5, rtol=1e-5)


def test_no_expert_adds_nothing() -> None:
    x, ids = torch.randn(2, 4), torch.tensor([[-1, -1], [0, -1]], dtype=torch.int32)
    gate_up, down, slots = torch.randn(1, 6, 4), torch.randn(1, 4, 3), torch.zeros(1, dtype=torch.int32)
    out = fused_experts(x, gate_up, down, ids, torch.ones(2, 2), slots)
    assert out[0].tolist() == [0.0] * 4
    alone = fused_experts(x[1:], gate_up, down, ids[1:, :1], torch.ones(1, 1), slots)
    assert torch.equal(out[1:], alone)


def _cos_sin(rotary: Qwen3MoeRotaryEmbedding) -> torch.Tensor:
    """Return the table [64, D]: half the cosines, then half the sines (each half of a head turns by the same)."""
    cos, sin = rotary(torch.zeros(1), torch.arange(64)[None])
    return torch.cat((cos[0, :, : DIM // 2], sin[0, :, : DIM // 2]), dim=-1)
