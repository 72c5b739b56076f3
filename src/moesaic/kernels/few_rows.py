"""Products of few rows with large float32 weights on a CPU.

PyTorch computes float32 products with MKL, which reads weights slowly where rows are few. oneDNN, which PyTorch brings
too and uses for other dtypes, does not. Time of ``functional.linear`` over that of oneDNN on two threads of an AMD EPYC
with AVX2 (torch 2.13, 2026-12-07), for 1, 8, 32 and 128 rows: weights of 192 x 576 0.5, 0.6, 0.7, 0.9; 576 x 576 0.6,
0.9, 0.9, 0.9; 576 x 1536 1.1, 1.1, 1.0, 0.9; 3072 x 576 2.0, 1.3, 1.1, 1.0; 2048 x 2048 1.3, 1.8, 1.2, 1.0.
"""

from __future__ import annotations

import torch
from torch.nn import functional

MOST_ROWS = 32
LEAST_BYTES = 3 * 2**20
"""Rows and size of a weight between which oneDNN is the faster one."""


def is_few_rows(num_rows: float, weight: torch.Tensor) -> bool:
    """Return whether ``linear`` computes ``num_rows`` rows (of any width, a mean may be given) with oneDNN."""
    return (
        num_rows <= MOST_ROWS
        and weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.nbytes >= LEAST_BYTES
        and weight.is_contiguous()
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    )


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return what ``functional.linear`` does for ``x`` [T, in] and ``weight`` [out, in], up to rounding."""
    if not is_few_rows(len(x), weight) or len(x) == 0:
        return functional.linear(x, weight)
    # The operator that torch.compile replaces linear layers by.
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return out
