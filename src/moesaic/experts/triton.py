"""Experts computed by fused Triton kernels up to a number of tokens, and by grouped products above it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from moesaic.errors import Refused
from moesaic.experts.resident import ResidentExperts
from moesaic.experts.tuning import ExpertShape, TuningTable, find_table
from moesaic.kernels.select import triton_refusal

if TYPE_CHECKING:
    from moesaic.batch import RaggedBatch
    from moesaic.kernels.experts import Scratch

_FLOAT_TYPES = (torch.bfloat16, torch.float16)
_PROBE = (-30.0, -8.0, -1.5, -0.25, 0.0, 0.5, 2.0, 25.0)  # far enough out to see a clamp (gpt-oss: at 7)


class TritonExperts:
    """Routed SwiGLU experts whose weights are found through a slot table on the device, one int32 per expert.

    The tables are the identity while all weights are resident; a kernel or a captured CUDA graph reads them anew each
    time. Steps of more tokens than the table's ``max_tokens`` and layers of another layout go to ``resident``, the
    latter named in ``stats``. Scratch memory is allocated here, so that a graph may be captured at any time; one stream
    may use a backend at a time. An id of -1 is no expert and adds nothing.
    """

    name = "triton"

    def __init__(self, resident: ResidentExperts, num_experts_per_token: int, max_tokens: int) -> None:
        """Take over the modules of ``resident`` for steps of up to ``max_tokens`` tokens, all on one CUDA device.

        Raises: ``ConfigError`` for a tuning table that cannot be read.
        """
        from moesaic.kernels.experts import fused_experts

        self._fused_experts = fused_experts
        self.resident = resident
        self.refusals = {layer: refusal for layer, m in resident.modules.items() if (refusal := layer_refusal(m))}
        shapes = {
            layer: shape_of(module, num_experts_per_token)
            for layer, module in resident.modules.items()
            if layer not in self.refusals
        }
        device = _device(resident)
        self._overlaps = torch.cuda.get_device_capability(device) >= (9, 0)
        plans = {shape: _Plan.of(shape, max_tokens, device) for shape in set(shapes.values())}
        self.slots = {
            layer: torch.arange(shape.num_experts, dtype=torch.int32, device=device) for layer, shape in shapes.items()
        }
        """By layer: where the weights of each expert lie."""
        self._layers = {
            layer: _Layer(cast(Any, resident.modules[layer]), self.slots[layer], plans[shape])
            for layer, shape in shapes.items()
        }
        self.plans = tuple(plans.values())

    @property
    def max_tokens(self) -> int:
        """Most tokens of a step that every fused layer computes by itself."""
        return min(plan.max_tokens for plan in self.plans)

    def begin_step(self, batch: RaggedBatch) -> None:
        """Change nothing: every expert is there already."""

    def forward(
        self, layer: int, x: torch.Tensor, top_k_ids: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of expert outputs [T, C] for ``x`` [T, C], ids and weights [T, A].

        Expert outputs are rounded to the dtype of ``x``, then weighted and summed in float32 in the order of the ids.
        """
        own = self._layers.get(layer)
        if own is None or len(x) > own.plan.max_tokens:
            return self.resident.forward(layer, x, top_k_ids, top_k_weights)
        return self._fused_experts(
            x, own.module.gate_up_proj, own.module.down_proj, top_k_ids.contiguous(), top_k_weights.contiguous(),
            own.slots, own.plan.table.tiles(len(x)), own.plan.scratch, self._overlaps,
        )  # fmt: skip

    def stats(self) -> dict[str, Any]:
        """Return which layers are fused, up to how many tokens, from which table, and why others are not."""
        return self.resident.stats() | {
            "backend": self.name,
            "num_layers_by_triton": len(self._layers),
            "triton_max_tokens": self.max_tokens,
            "triton_tables": "; ".join(sorted({plan.table.source for plan in self.plans})),
            "triton_refusals": "; ".join(sorted({str(refusal) for refusal in self.refusals.values()})),
            "triton_scratch_bytes": sum(plan.num_bytes for plan in self.plans),
        }


def triton_experts(resident: ResidentExperts, num_experts_per_token: int, max_tokens: int) -> TritonExperts | Refused:
    """Return the fused backend over the modules of ``resident``, or why no layer of them can use it."""
    refusal = triton_refusal(_device(resident))
    if refusal is None and all(refusals := [layer_refusal(module) for module in resident.modules.values()]):
        refusal = refusals[0]
    return refusal or TritonExperts(resident, num_experts_per_token, max_tokens)


def layer_refusal(module: torch.nn.Module) -> Refused | None:
    """Return why the fused kernels do not compute this experts module, or None if they do."""
    experts = cast(Any, module)  # attributes of another library's module
    if not experts.has_gate or experts.has_bias or experts.is_transposed:
        return Refused("the fused kernels take gated experts without bias, weights stored [E, out, in]")
    if getattr(experts, "has_post_expert_norm", False):
        return Refused("the fused kernels have no norm after an expert")
    if not _is_swiglu(experts):
        return Refused("the fused kernels compute silu(gate) * up with gate and up as halves, this family does not")
    for weight in (experts.gate_up_proj, experts.down_proj):
        if weight.dtype not in _FLOAT_TYPES:
            return Refused(f"the fused kernels take bfloat16 and float16, the weights are {weight.dtype}")
        if not weight.is_contiguous() or weight.shape[2] % 8:
            return Refused(f"the fused kernels read rows of a multiple of 8 numbers, not {tuple(weight.shape)}")
    return None


def shape_of(module: torch.nn.Module, num_experts_per_token: int) -> ExpertShape:
    """Return what tables are looked up by."""
    num_experts, width, inner = cast(torch.Tensor, module.down_proj).shape
    dtype = str(cast(torch.Tensor, module.down_proj).dtype).removeprefix("torch.")
    return ExpertShape(
        num_experts=num_experts,
        num_experts_per_token=num_experts_per_token,
        width=width,
        inner=inner,
        dtype=dtype,
    )


def _device(resident: ResidentExperts) -> torch.device:
    return cast(torch.Tensor, next(iter(resident.modules.values())).down_proj).device


def _is_swiglu(experts: Any) -> bool:
    """Return if the module's own gate is silu(first half) * second half, found by trying it."""
    probe = torch.tensor(_PROBE)
    gate, up = probe.repeat(len(_PROBE)), probe.repeat_interleave(len(_PROBE))
    try:
        out = experts._apply_gate(torch.cat((gate, up)).unsqueeze(0))
    except RuntimeError:  # a gate with parameters of its own, of another size or on another device
        return False
    return out.shape == (1, gate.numel()) and torch.allclose(out[0], torch.nn.functional.silu(gate) * up, rtol=1e-3)


@dataclass(frozen=True, slots=True)
class _Plan:
    """What the layers of one shape share: tiles, and scratch memory for as many tokens as they take."""

    table: TuningTable
    max_tokens: int
    scratch: Scratch
    num_bytes: int

    @classmethod
    def of(cls, shape: ExpertShape, max_tokens: int, device: torch.device) -> _Plan:
        from moesaic.kernels.experts import Scratch

        table = find_table(shape, torch.cuda.get_device_name(device))
        most = min(max_tokens, table.max_tokens)
        pairs = most * shape.num_experts_per_token
        scratch = Scratch.empty(pairs, shape.width, shape.inner, getattr(torch, shape.dtype), device)
        return cls(table, most, scratch, scratch.hidden.nbytes + scratch.outputs.nbytes)


@dataclass(frozen=True, slots=True)
class _Layer:
    module: Any
    """transformers' experts module; weights are read from it in each call."""
    slots: torch.Tensor
    plan: _Plan
