"""The Triton kernels on a GPU against the torch references, with dirty memory, odd sizes and captured graphs."""

import math
from typing import Any

import pytest
import torch

from moesaic.experts.resident import ResidentExperts
from moesaic.experts.select import select_experts
from moesaic.experts.triton import TritonExperts
from moesaic.experts.tuner import tune
from moesaic.experts.tuning import ExpertShape, read_table
from moesaic.kernels import reference
from moesaic.kernels.select import kernels_for

pytestmark = pytest.mark.gpu

SHAPES = [(128, 8, 2048, 768), (8, 2, 1024, 1408), (60, 4, 2048, 1408), (16, 2, 576, 96), (4, 4, 72, 40)]
"""Experts, experts per token, width, expert width: Qwen3-30B-A3B's, and ones that tiles do not divide."""


def _relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


def _random(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*size, device="cuda", dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("num_tokens", "width"), [(1, 2048), (37, 2048), (5, 2880), (300, 576), (2, 5120)])
def test_norm_equals_the_reference(num_tokens, width, dtype) -> None:
    kernels = kernels_for("cuda")
    wide = _random(num_tokens, width + 64, dtype=dtype)  # rows that do not lie side by side
    x, residual, weight = wide[:, :width], _random(num_tokens, width, dtype=dtype), _random(width, dtype=dtype)
    for added in (None, residual):
        got, want = kernels.rms_norm(x, weight, 1e-6, added), reference.rms_norm(x, weight, 1e-6, added)
        assert _relative_error(got[0], want[0]) < 4e-3
        assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 33])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(32, 4, 128), (9, 3, 64), (64, 8, 64), (16, 16, 128), (4, 2, 80)]
)
def test_queries_pages_and_padding_equal_the_reference(heads, kv_heads, dim, num_tokens, has_norm) -> None:
    qkv = _random(num_tokens, (heads + 2 * kv_heads) * dim)
    weights = [_random(dim) if has_norm else None for _ in range(2)]
    angles = torch.rand(4096, dim // 2, device="cuda") * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    positions = torch.randint(0, 4096, (num_tokens,), device="cuda")
    slots = torch.randperm(40 * 16, device="cuda")[:num_tokens]
    slots[num_tokens // 2 :: 5] = -1
    pages = torch.full((2, 2, 40, 16, kv_heads, dim), 7.0, device="cuda", dtype=torch.bfloat16)
    got, want = (
        operation(qkv, *weights, table, positions, slots, *own, 1e-6, heads, kv_heads)
        for operation, own in ((kernels_for("cuda").norm_rope_write, pages[0]), (reference.norm_rope_write, pages[1]))
    )
    assert _relative_error(got, want) < 4e-3
    assert _relative_error(pages[0, 0], pages[1, 0]) < 4e-3
    assert torch.equal(pages[0, 1], pages[1, 1])
    untouched = torch.ones(40 * 16, dtype=torch.bool, device="cuda").index_fill(0, slots[slots >= 0], False)
    assert bool((pages[0].flatten(1, 2)[:, untouched] == 7.0).all())


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize(("num_experts", "chosen"), [(128, 8), (8, 2), (60, 4), (256, 8), (64, 6)])
def test_routing_equals_the_reference(num_experts, chosen, renormalise) -> None:
    for num_tokens in (1, 129):
        logits = _random(num_tokens, num_experts)
        logits[-1] = 0.5  # ties
        for num_valid in (None, torch.tensor([num_tokens // 2 + 1], dtype=torch.int32, device="cuda")):
            got = kernels_for("cuda").route(logits, chosen, renormalise, num_valid)
            want = reference.route(logits, chosen, renormalise, num_valid)
            assert torch.equal(got[1], want[1])
            torch.testing.assert_close(got[0], want[0], atol=1e-6, rtol=1e-5)


def test_logits_that_are_no_numbers_choose_experts_that_exist() -> None:
    ids = kernels_for("cuda").route(torch.full((3, 60), math.nan, device="cuda"), 4, True)[1]
    assert 0 <= int(ids.min()) <= int(ids.max()) < 60


def _backend(shape: tuple[int, int, int, int], max_tokens: int, dtype: torch.dtype) -> tuple[Any, TritonExperts]:
    """Return one layer's module (Any: attributes of transformers') and the fused backend over it, scratch dirty."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    num_experts, chosen, width, inner = shape
    config = Qwen3MoeConfig(
        num_experts=num_experts, moe_intermediate_size=inner, hidden_size=width, experts_implementation="eager"
    )
    with torch.device("cuda"):
        module = Qwen3MoeExperts(config).to(dtype).requires_grad_(False)
    for parameter in module.parameters():
        parameter.normal_(0.0, 0.05)
    backend = select_experts("triton", ResidentExperts([module]), chosen, max_tokens, strict=True).backend
    assert isinstance(backend, TritonExperts)
    for memory in (backend.plans[0].scratch.hidden, backend.plans[0].scratch.outputs):
        memory.fill_(math.nan)
    return module, backend


def _routing(num_tokens: int, shape: tuple[int, int, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    chosen = torch.rand(num_tokens, shape[0], device="cuda").topk(shape[1], dim=-1)
    return chosen.indices.int(), chosen.values


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_experts_equal_the_reference_for_every_kind_of_tile_and_twice_the_same(shape, dtype) -> None:
    module, backend = _backend(shape, 600, dtype)
    plan = backend.plans[0]
    steps = sorted({1, 2, 3, 7, 16, 33, 64, 129, min(300, plan.max_tokens), plan.max_tokens})
    for num_tokens in (n for n in steps if n <= plan.max_tokens):
        x = _random(num_tokens, shape[2], dtype=dtype)
        ids, weights = _routing(num_tokens, shape)
        if num_tokens > 2:
            ids[num_tokens // 2] = -1
        out = backend.forward(0, x, ids, weights)
        want = reference.fused_experts(x, module.gate_up_proj, module.down_proj, ids, weights, backend.slots[0])
        assert _relative_error(out, want) < 8e-3, num_tokens
        assert torch.equal(out, backend.forward(0, x, ids, weights)), num_tokens


@pytest.mark.parametrize("num_tokens", [1, 24])
def test_weights_are_found_through_the_slot_table_and_a_graph_reads_it_anew(num_tokens) -> None:
    """What a cache of experts will do: move weights and rewrite the table, captured graphs unchanged."""
    shape = (16, 2, 576, 96)
    module, backend = _backend(shape, 64, torch.bfloat16)
    x = _random(num_tokens, shape[2])
    ids, weights = _routing(num_tokens, shape)
    want = backend.forward(0, x, ids, weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.forward(0, x, ids, weights)
    moved = torch.randperm(shape[0], device="cuda")
    for weight in (module.gate_up_proj, module.down_proj):
        weight[moved] = weight.clone()
    backend.slots[0].copy_(moved)
    graph.replay()
    assert torch.equal(out, want)


@pytest.mark.parametrize("num_tokens", [1, 2, 8, 128])
def test_a_captured_graph_equals_eager_for_other_tokens_and_other_routing(num_tokens) -> None:
    shape = SHAPES[0]
    _, backend = _backend(shape, 128, torch.bfloat16)
    x = _random(num_tokens, shape[2])
    ids, weights = _routing(num_tokens, shape)
    backend.forward(0, x, ids, weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):  # layers one after another overlap: none may disturb the next
            out = backend.forward(0, x, ids, weights)
    for num_padded in (0, num_tokens // 2, num_tokens):
        x.normal_()
        new_ids, new_weights = _routing(num_tokens, shape)
        new_ids[num_tokens - num_padded :] = -1
        ids.copy_(new_ids)
        weights.copy_(new_weights)
        graph.replay()
        assert torch.equal(out, backend.forward(0, x, ids, weights))
        assert not out[num_tokens - num_padded :].any()


def test_more_tokens_than_the_table_says_go_through_grouped_products() -> None:
    shape = SHAPES[3]
    module, backend = _backend(shape, 8, torch.bfloat16)
    x = _random(9, shape[2])
    ids, weights = _routing(9, shape)
    assert torch.equal(backend.forward(0, x, ids, weights), ResidentExperts([module]).forward(0, x, ids, weights))
    assert backend.stats()["triton_max_tokens"] == 8


def test_outputs_stay_near_those_of_grouped_products() -> None:
    module, backend = _backend(SHAPES[0], 256, torch.bfloat16)
    x = _random(64, SHAPES[0][2])
    ids, weights = _routing(64, SHAPES[0])
    grouped = ResidentExperts([module]).forward(0, x, ids, weights)
    assert _relative_error(backend.forward(0, x, ids, weights), grouped) < 8e-3


def test_layers_of_another_layout_are_served_by_the_resident_backend_and_named() -> None:
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    module, _ = _backend(SHAPES[3], 8, torch.bfloat16)
    config = GptOssConfig(num_local_experts=4, intermediate_size=64, hidden_size=576, experts_implementation="eager")
    other = GptOssExperts(config).to("cuda", torch.bfloat16).requires_grad_(False)
    for parameter in other.parameters():
        parameter.normal_(0.0, 0.05)
    selection = select_experts("auto", ResidentExperts([module, other]), 2, 8)
    assert selection.active == "triton"
    assert "triton refused 1 layers, which are resident" in selection.reason
    x, ids = _random(3, 576), torch.tensor([[0, 1]] * 3, device="cuda")
    weights = torch.rand(3, 2, device="cuda")
    assert selection.backend is not None
    assert torch.equal(
        selection.backend.forward(1, x, ids, weights), ResidentExperts([other]).forward(0, x, ids, weights)
    )


def test_what_the_tuner_finds_is_a_table_that_serves(tmp_path) -> None:
    shape = ExpertShape(num_experts=16, num_experts_per_token=2, width=576, inner=96, dtype="bfloat16")
    tuning = tune(shape, torch.device("cuda"), tokens=(1, 8, 64))
    table = read_table(tuning.write(tmp_path))
    assert [n for n, _ in table.by_tokens] == [1, 8, 64]
    assert all(math.isfinite(entry.time_us) and entry.floor_us > 0 for entry in tuning.entries)


@pytest.mark.parametrize("block_size", [1, 16, 32])
@pytest.mark.parametrize(("kv_heads", "dim"), [(1, 64), (4, 128), (3, 80)])
def test_gathered_pages_equal_the_reference(block_size, kv_heads, dim) -> None:
    from moesaic.kernels.gather import gather_pages

    keys, values = (_random(40, block_size, kv_heads, dim) for _ in range(2))
    pages = torch.randperm(40, device="cuda")[:23].int()
    counts = torch.full((23,), block_size)
    counts[[6, 7, 22]] = torch.tensor([1, (block_size + 1) // 2, block_size])
    starts = torch.cat([torch.zeros(1), counts.cumsum(0)]).int().cuda()
    outs = [
        [torch.full((int(starts[-1]) + 5, kv_heads, dim), 7.0, device="cuda").bfloat16() for _ in "kv"] for _ in "ab"
    ]
    gather_pages(keys, values, pages, starts, *outs[0])
    reference.gather_pages(keys, values, pages, starts, *outs[1])
    assert all(torch.equal(got, want) for got, want in zip(*outs, strict=True))
