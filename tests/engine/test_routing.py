"""The experts that a request reports are those that unmodified transformers routes its tokens to."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from moesaic.config import EngineConfig
from moesaic.engine.core import EngineCore
from moesaic.engine.outputs import OutputProcessor
from moesaic.models.hf import HFCausalLM
from moesaic.request import RoutedTokens, SamplingParams
from moesaic.testing.models import tiny_causal_lm, tiny_model

FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "glm4_moe")
PROMPTS = [tuple((13 * i + n) % 150 + 3 for i in range(n)) for n in (1, 9, 21)]
PARAMS = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True, routed_experts=True)
SILENT = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)


@cache
def oracle_of(family: str) -> Any:  # Any: transformers is untyped
    return tiny_model(family)


@cache
def model_of(family: str) -> HFCausalLM:
    return tiny_causal_lm(oracle_of(family))


def create_core(family: str, **settings: Any) -> EngineCore:  # Any: of many types
    defaults = {
        "enable_chunked_prefill": True,
        "prefill_chunk_size": 3,
        "max_batch_size": 8,
        "max_tokens_per_step": 32,
        "block_size": 4,
        "num_kv_blocks": 64,
    }
    return EngineCore(model_of(family), EngineConfig(**(defaults | settings)))


def run(
    core: EngineCore, before_step: Any = lambda step: None
) -> dict[str, tuple[list[int], NDArray[np.int16] | None]]:
    """Return tokens and routed experts of every request."""
    tokens: dict[str, list[int]] = {}
    parts: dict[str, list[RoutedTokens]] = {}
    step = 0
    while core.has_pending_requests():
        before_step(step)
        step += 1
        for output in core.step():
            assert output.error is None
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.routed_experts is not None:
                parts.setdefault(output.request_id, []).append(output.routed_experts)
    assert len(core._routing) == 0
    return {n: (t, RoutedTokens.joined(parts[n]).array() if n in parts else None) for n, t in tokens.items()}


def transformers_routing(family: str, token_ids: list[int]) -> NDArray[np.int16]:
    """Return the experts [T, L, A] that the unmodified model takes for ``token_ids``."""
    model, seen = oracle_of(family), []
    experts = [m for m in model.modules() if getattr(m, "_apply_gate", None) is not None and hasattr(m, "has_gate")]
    hooks = [
        m.register_forward_pre_hook(lambda m, args, kw: seen.append(_ids(args, kw)), with_kwargs=True) for m in experts
    ]
    try:
        with torch.no_grad():
            model(torch.tensor([token_ids]))
    finally:
        for hook in hooks:
            hook.remove()
    return np.stack(seen, axis=1).astype(np.int16)


def _ids(args: tuple[Any, ...], kwargs: dict[str, Any]) -> NDArray[Any]:
    ids = kwargs["top_k_index"] if "top_k_index" in kwargs else args[1]
    return ids.numpy()


def assert_same_experts(got: NDArray[np.int16] | None, wanted: NDArray[np.int16]) -> None:
    """Routers do not promise an order among the experts of one token."""
    assert got is not None
    assert got.shape == wanted.shape
    assert np.array_equal(np.sort(got, axis=-1), np.sort(wanted, axis=-1))


@pytest.mark.parametrize("settings", [{}, {"enable_chunked_prefill": False}, {"batch_invariant": True}], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_routing_is_that_of_transformers(family: str, settings: dict[str, Any]) -> None:
    core = create_core(family, **settings)
    for i, prompt in enumerate(PROMPTS):
        core.add_request(f"r{i}", prompt, PARAMS)
    core.add_request("silent", PROMPTS[1], SILENT)
    answers = run(core)
    assert answers["silent"][1] is None
    for i, prompt in enumerate(PROMPTS):
        tokens, routed = answers[f"r{i}"]
        assert_same_experts(routed, transformers_routing(family, [*prompt, *tokens[:-1]]))


@pytest.mark.parametrize("step", range(8))
def test_what_preemption_computes_again_is_told_once(step: int) -> None:
    core = create_core("qwen3_moe")
    core.add_request("r", PROMPTS[2], PARAMS)
    core.add_request("other", PROMPTS[1], PARAMS)
    tokens, routed = run(core, lambda now: core.scheduler.preempt("r") if now == step else None)["r"]
    assert_same_experts(routed, transformers_routing("qwen3_moe", [*PROMPTS[2], *tokens[:-1]]))


def test_choices_report_the_prompt_too_and_an_abort_leaves_nothing() -> None:
    core = create_core("qwen3_moe")
    core.add_request("c0", PROMPTS[2], PARAMS)
    core.add_sibling("c1", "c0", PARAMS)
    core.add_sibling("c2", "c0", PARAMS)
    answers = run(core, lambda step: core.abort_request("c2") if step == 5 else None)
    assert np.array_equal(answers["c0"][1], answers["c1"][1])  # type: ignore[arg-type]  # neither is None
    assert core.stats()["num_shared_tokens"] == 0


def test_an_answer_has_the_rows_of_the_tokens_that_were_read() -> None:
    core, processor = create_core("qwen3_moe"), OutputProcessor(None)
    core.add_request("r", PROMPTS[1], PARAMS)
    processor.add("r", None, PROMPTS[1], PARAMS, 0.0)
    outputs = []
    while core.has_pending_requests():
        outputs += [d.output for d in processor.process(core.step(), 1.0).deltas if d.output is not None]
    (output,) = outputs
    assert output.routed_experts is not None
    assert output.routed_experts.array().shape == (len(PROMPTS[1]) + len(output.token_ids) - 1, 3, 2)
