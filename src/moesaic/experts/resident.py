"""Experts that live on the compute device, computed with one grouped matrix product per projection."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.nn import functional

from moesaic.errors import InvariantError
from moesaic.kernels.few_rows import is_few_rows, linear

if TYPE_CHECKING:
    from moesaic.batch import RaggedBatch

ExpertModules = Mapping[int, torch.nn.Module] | SequenceOf[torch.nn.Module]
"""transformers' fused experts modules by layer index; a sequence numbers them from 0."""


class ResidentExperts:
    """Routed experts of transformers' fused modules, with all weights where the hidden states are.

    Token-expert pairs are sorted by expert and go through ``torch.nn.functional.grouped_mm``: no Python loop over
    experts or tokens. On a GPU in bfloat16 nothing waits for the device and a CUDA graph can hold it; in float32
    torch's own ``grouped_mm`` reads the offsets on the host (torch 2.11, H200, 2026-12-01). On a CPU it is as fast
    as a loop of products over the experts with tokens (gate and up of 4 experts, C 576, I 1536, 2 per token,
    float32, one thread, 2026-12-01: 8 tokens 5.9 and 5.2 ms, 16 tokens 5.5 and 6.0, 512 tokens 48 and 48;
    128 experts, C 256, I 128, 8 per token, 64 tokens: 6.8 and 8.7).
    There the loop is taken for few rows of large experts (``moesaic.kernels.few_rows``), as it is by a layer whose
    weights ``grouped_mm`` refuses (strides and addresses must be multiples of 16 bytes); ``stats`` names the latter.
    Weights are read from the modules in each call and may be loaded later, but not re-laid.
    Raises: ``InvariantError`` for modules that are not of the fused kind or hold a part of the experts only.
    """

    name = "resident"

    def __init__(self, modules: ExpertModules) -> None:
        items = modules.items() if isinstance(modules, Mapping) else enumerate(modules)
        self.modules: dict[int, torch.nn.Module] = dict(items)
        """By layer, for whoever computes the same weights in another way."""
        self._layers = {layer: _FusedExperts(layer, module) for layer, module in self.modules.items()}

    def begin_step(self, batch: RaggedBatch) -> None:
        """Change nothing: every expert is there already."""

    def forward(
        self, layer: int, x: torch.Tensor, top_k_ids: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of expert outputs [T, C] for ``x`` [T, C], ids and weights [T, A].

        Sums over the ids of a token in their order (no atomic additions), in the wider dtype of ``x`` and weights
        (Mixtral's router weights are float32). Result in the dtype of ``x``.
        """
        experts = self._layers[layer]
        num_tokens, num_chosen = top_k_ids.shape
        sorted_ids, order = torch.sort(top_k_ids.flatten(), stable=True)
        # int32: grouped_mm takes no other; searchsorted, as bincount would wait for the device.
        all_ids = torch.arange(experts.num_experts, device=x.device, dtype=sorted_ids.dtype)
        ends = torch.searchsorted(sorted_ids, all_ids, right=True, out_int32=True)
        out = experts.apply(x.index_select(0, order // num_chosen), sorted_ids, ends)
        unsorted = torch.empty_like(out).index_copy_(0, order, out).view(num_tokens, num_chosen, -1)
        return (unsorted * top_k_weights.unsqueeze(-1)).sum(dim=1).to(x.dtype)

    def stats(self) -> dict[str, Any]:
        """Return the kernel of the layers, why some do not use ``grouped_mm``, and the weights' size."""
        looping = {layer: e.refusal for layer, e in self._layers.items() if e.refusal is not None}
        return {
            "backend": self.name,
            "num_expert_layers": len(self._layers),
            "num_layers_by_grouped_mm": len(self._layers) - len(looping),
            "num_layers_by_loop": len(looping),
            "loop_reason": "; ".join(sorted(set(looping.values()))),
            "expert_weights_bytes": sum(e.num_bytes for e in self._layers.values()),
        }


class LoopExperts:
    """The plain loop over experts: the oracle of the others, in transformers' own order of operations."""

    name = "loop"

    def __init__(self, modules: ExpertModules) -> None:
        items = modules.items() if isinstance(modules, Mapping) else enumerate(modules)
        self._layers = {layer: _FusedExperts(layer, module) for layer, module in items}

    def begin_step(self, batch: RaggedBatch) -> None:
        """Change nothing: every expert is there already."""

    def forward(
        self, layer: int, x: torch.Tensor, top_k_ids: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of expert outputs [T, C] for ``x`` [T, C], ids and weights [T, A]."""
        experts = self._layers[layer]
        out = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, top_k_weights.dtype), device=x.device)
        for expert in sorted(set(top_k_ids.flatten().tolist())):
            tokens, choice = torch.where(top_k_ids == expert)
            one = experts.apply_one(expert, x[tokens]) * top_k_weights[tokens, choice, None]
            out.index_add_(0, tokens, one.to(out.dtype))
        return out.to(x.dtype)

    def stats(self) -> dict[str, Any]:
        return {"backend": self.name, "num_expert_layers": len(self._layers)}


class _FusedExperts:
    """One layer's experts, read through the attributes that transformers' experts decorator sets."""

    def __init__(self, layer: int, module: torch.nn.Module) -> None:
        wanted = ("num_experts", "has_gate", "has_bias", "is_transposed", "down_proj")
        missing = [name for name in wanted if not hasattr(module, name)]
        if missing:
            raise InvariantError(f"layer {layer}: {type(module).__name__} is no fused experts module: no {missing}")
        if getattr(module, "_is_expert_parallel", False):
            raise InvariantError(f"layer {layer}: {type(module).__name__} holds a part of the experts only")
        # Any: attributes of another library's module.
        self._module = cast(Any, module)
        self._up_name = "gate_up_proj" if self._module.has_gate else "up_proj"
        self.num_experts: int = self._module.num_experts
        self.num_bytes: int = sum(p.nbytes for p in module.parameters())
        self.refusal = self._grouped_mm_refusal()

    def apply(self, x: torch.Tensor, ids: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Return each row's expert output [S, C] for rows ``x`` [S, C] sorted by their expert ``ids`` [S].

        ``ends`` int32 [E]: the rows of expert ``e`` end before ``ends[e]``.
        """
        hidden = self._activate(self._linear(self._up_name, x, ids, ends))
        return self._finish(self._linear("down_proj", hidden, ids, ends))

    def apply_one(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        """Return the output [n, C] of one expert for ``x`` [n, C]."""
        hidden = self._activate(self._linear_one(self._up_name, x, expert))
        return self._finish(self._linear_one("down_proj", hidden, expert))

    def _linear(self, name: str, x: torch.Tensor, ids: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        weight = self._weight(name)
        is_few = is_few_rows(len(x) / self.num_experts, weight[0].t())
        out = (_loop_mm if is_few or self.refusal is not None else _grouped_mm)(x, weight, ends)
        return out + self._bias(name)[ids] if self._module.has_bias else out

    def _linear_one(self, name: str, x: torch.Tensor, expert: int) -> torch.Tensor:
        out = x @ self._weight(name)[expert]
        return out + self._bias(name)[expert] if self._module.has_bias else out

    def _weight(self, name: str) -> torch.Tensor:
        """Return the weights as [E, in, out], a view."""
        weight: torch.Tensor = getattr(self._module, name)
        return weight if self._module.is_transposed else weight.transpose(1, 2)

    def _bias(self, name: str) -> torch.Tensor:
        bias: torch.Tensor = getattr(self._module, f"{name}_bias")
        return bias

    def _activate(self, hidden: torch.Tensor) -> torch.Tensor:
        # The module's own gate knows whether gate and up are halves or alternate (is_concatenated).
        out: torch.Tensor = self._module._apply_gate(hidden) if self._module.has_gate else self._module.act_fn(hidden)
        return out

    def _finish(self, out: torch.Tensor) -> torch.Tensor:
        if not getattr(self._module, "has_post_expert_norm", False):  # transformers 5.17 has no such attribute
            return out
        normed: torch.Tensor = self._module.post_expert_norm(out)
        return normed

    def _grouped_mm_refusal(self) -> str | None:
        """Return why ``grouped_mm`` does not take these weights, found by trying one row, or None if it does.

        Rules differ between versions and devices; the kernel itself knows them best.
        """
        for name in (self._up_name, "down_proj"):
            weight = self._weight(name)
            ends = torch.ones(self.num_experts, dtype=torch.int32, device=weight.device)
            try:
                _grouped_mm(weight.new_zeros(1, weight.shape[1]), weight, ends)
            except (RuntimeError, ValueError) as error:
                shape = f"{name} {tuple(weight.shape)} {str(weight.dtype).removeprefix('torch.')}"
                return f"grouped_mm refuses {shape}: {str(error).splitlines()[0]}"
        return None


def _grouped_mm(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return functional.grouped_mm(x, weight, offs=ends)


def _loop_mm(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return what ``grouped_mm`` does by one product per expert with rows; waits for the device once."""
    bounds = [0, *ends.tolist()]
    spans = [(e, a, b) for e, (a, b) in enumerate(pairwise(bounds)) if b > a]
    return torch.cat([linear(x[a:b], weight[e].t()) for e, a, b in spans])
