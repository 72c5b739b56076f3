"""Sizes to compile for; and that compiling touches every kernel of a layer without writing to pages."""

import dataclasses
from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from moesaic.models import compile as compile_module
from moesaic.models.compile import compile_kernels, step_sizes
from moesaic.models.native import NativeCausalLM
from moesaic.testing.models import tiny_causal_lm, tiny_model
from moesaic.testing.paged import PagedModel


@pytest.mark.parametrize(("most", "sizes"), [(1, (1,)), (2, (1, 2)), (8, (1, 2, 4, 8)), (9, (1, 2, 4, 8, 9))])
def test_sizes_double_up_to_the_largest_step(most: int, sizes: tuple[int, ...]) -> None:
    assert step_sizes(most) == sizes


def test_every_kernel_is_called_for_each_size_and_no_page_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_module, "compiled_only", nullcontext)  # no Triton on a CPU: the references run
    model = NativeCausalLM(tiny_causal_lm(tiny_model("qwen3_moe")))
    calls: Counter[tuple[str, int]] = Counter()

    def counted(name: str) -> Any:
        kernel = getattr(model.kernels, name)

        def call(first: torch.Tensor, *rest: Any) -> Any:
            calls[name, len(first)] += 1
            return kernel(first, *rest)

        return call

    names = ("rms_norm", "norm_rope_write", "route")
    model.kernels = dataclasses.replace(model.kernels, **{name: counted(name) for name in names})
    paged = PagedModel(model, num_sequences=1, max_tokens=8)
    compile_kernels(model, paged.attention, paged.store, (1, 4))
    assert {key for key in calls if key[1] == 4} == {(name, 4) for name in names}
    assert calls["route", 4] == 2  # with padding and without
    assert all(not pages.any() for layer in range(model.info.num_layers) for pages in paged.store.pages(layer))
