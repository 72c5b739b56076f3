"""The fused operations in plain torch: used where there is no GPU, and the oracle of the Triton kernels.

Roundings are those of transformers' layers: a norm is rounded to the type of its input before its weight multiplies.
"""

from __future__ import annotations

from itertools import pairwise

import torch


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``x + residual`` normalised and scaled, and that sum before the norm, both [T, C] in the dtype of ``x``.

    Shapes: ``x`` and ``residual`` [T, C], ``weight`` [C]. Without ``residual`` the second result is ``x`` itself.
    """
    total = x if residual is None else x + residual
    return _normed(total, weight, eps), total


def norm_rope_write(
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
) -> torch.Tensor:
    """Return the rotated queries [T, H, D]; write the rotated keys, and the values, to their slots.

    Shapes: ``qkv`` [T, (H + 2 K) * D], norm weights [D] or None for no norm, ``cos_sin`` float32 [max position, D]
    (cosines in the first half, sines in the second), ``positions`` and ``slot_mapping`` int64 [T], pages
    [N, B, K, D]. A slot of -1 is a padded row: its key and value are written nowhere (its position must still be in
    the table). The rotation is by halves, as Llama's and Qwen's.
    """
    num_tokens = qkv.shape[0]
    heads = qkv.view(num_tokens, num_heads + 2 * num_kv_heads, -1)
    query, key, value = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    query = _rotated(_head_normed(query, q_weight, eps), cos, sin)
    key = _rotated(_head_normed(key, k_weight, eps), cos, sin)
    is_real = slot_mapping >= 0
    slots, block_size = slot_mapping[is_real], key_pages.shape[1]
    for pages, new in ((key_pages, key), (value_pages, value)):
        pages[slots // block_size, slots % block_size] = new[is_real].to(pages.dtype)
    return query


def route(
    logits: torch.Tensor, top_k: int, renormalise: bool, num_valid: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights (float32) and ids (int32) of the ``top_k`` likeliest experts of each token, both [T, A].

    ``logits`` [T, E]. Softmax over all experts, then the choice, the likeliest first and of equals the lowest id;
    ``renormalise`` makes the weights of a token sum to one. Rows from ``num_valid`` (int32 [1], on the device) on are
    padding: id -1 and weight 0.
    """
    probabilities = torch.softmax(logits.float(), dim=-1)
    weights, ids = torch.sort(probabilities, dim=-1, descending=True, stable=True)
    weights, ids = weights[:, :top_k], ids[:, :top_k].to(torch.int32)
    if renormalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    if num_valid is not None:
        is_padding = torch.arange(len(ids), device=ids.device).unsqueeze(1) >= num_valid
        weights, ids = weights.masked_fill(is_padding, 0.0), ids.masked_fill(is_padding, -1)
    return weights, ids


def fused_experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Return the weighted sum [T, C] of the SwiGLU experts of each token, in the dtype of ``x``.

    Shapes: ``x`` [T, C], ``gate_up`` [slots, 2 I, C] (gate rows first), ``down`` [slots, C, I], ``ids`` and
    ``weights`` [T, A], ``slots`` int32 [E]: where the weights of each expert lie. An id of -1 adds nothing.
    Expert outputs are rounded to the dtype of ``x`` and summed in float32 in the order of a token's ids.
    Waits for the device once.
    """
    total = x.new_zeros(x.shape, dtype=torch.float32)
    outputs = x.new_zeros(*ids.shape, x.shape[1])
    for expert in sorted(set(ids.flatten().tolist()) - {-1}):
        tokens, choice = torch.where(ids == expert)
        slot = int(slots[expert])
        gate, up = (x[tokens].float() @ gate_up[slot].float().T).chunk(2, dim=-1)
        hidden = (torch.nn.functional.silu(gate) * up).to(x.dtype).float()
        outputs[tokens, choice] = (hidden @ down[slot].float().T).to(x.dtype)
    for i in range(ids.shape[1]):
        total += weights[:, i, None].float() * outputs[:, i].float()
    return total.to(x.dtype)


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def _head_normed(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    return x if weight is None else _normed(x, weight, eps)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return ``x`` [T, heads, D] rotated by angles whose cosines and sines are [T, 1, D / 2], computed in float32."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def gather_pages(
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    page_indices: torch.Tensor,
    page_starts: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Write the first tokens of pages to ``keys`` and ``values`` [N, K, D], one page after the other.

    Pages are ``[P, B, K, D]``; ``page_indices`` int32 [M] names them and ``page_starts`` int32 [M + 1] says at which
    token of the output each begins, so that each gives ``page_starts[i + 1] - page_starts[i]`` of its tokens, 1 to B.
    """
    for index, (start, end) in enumerate(pairwise(page_starts.tolist())):
        keys[start:end] = key_pages[page_indices[index], : end - start]
        values[start:end] = value_pages[page_indices[index], : end - start]
