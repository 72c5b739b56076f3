"""Fused operations of one layer: torch references, Triton kernels, and the choice between them."""
