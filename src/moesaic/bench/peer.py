"""The arm that ours is compared with: transformers' own continuous batching."""

import importlib.util
import logging
import time
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from moesaic.errors import MoesaicError

_RESULT_TIMEOUT_S = 1.0
"""How often a wait for results looks whether the peer's thread is still alive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The outputs of one batch of prompts, in their order, and the seconds from the first request to the last token."""

    token_ids: tuple[tuple[int, ...], ...]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What a step and the KV cache of either arm may use."""

    max_tokens_per_step: int
    max_batch_size: int
    block_size: int
    num_kv_blocks: int


class TransformersPeer:
    """A model of transformers with its own attention (``sdpa``) and experts, behind ``generate_batch``'s manager."""

    def __init__(self, path: Path, dtype: torch.dtype, budget: Budget) -> None:
        """Raises: ``MoesaicError`` without psutil: transformers reads the free memory with it, else it sees none."""
        if importlib.util.find_spec("psutil") is None:
            raise MoesaicError("transformers' continuous batching on a CPU needs psutil; install moesaic[bench]")
        from transformers import AutoModelForCausalLM

        self._budget = budget
        # Any: transformers is untyped
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation="sdpa", local_files_only=True
        )
        self._model.eval().requires_grad_(False)

    def generate(self, prompts: SequenceOf[SequenceOf[int]], max_tokens: int) -> Batch:
        """Return ``max_tokens`` greedy tokens for each prompt (EOS is ignored).

        Starting the thread, allocating its cache and its own warm-up are outside the time.
        Raises: ``MoesaicError`` if a request fails or the thread ends.
        """
        with self._manager(len(prompts), max_tokens) as manager:
            started_s = time.perf_counter()
            ids = manager.add_requests(inputs=[list(p) for p in prompts], max_new_tokens=max_tokens)
            results = self._collect(manager, len(ids))
            seconds = time.perf_counter() - started_s
        return Batch(token_ids=tuple(results[i] for i in ids), seconds=seconds)

    @contextmanager
    def _manager(self, num_requests: int, max_tokens: int) -> Iterator[Any]:
        from transformers import GenerationConfig

        with (
            _quiet("transformers"),
            self._model.continuous_batching_context_manager(
                generation_config=GenerationConfig(do_sample=False, max_new_tokens=max_tokens, eos_token_id=-1),
                continuous_batching_config=_batching_config(self._budget, num_requests),
            ) as manager,
        ):
            yield manager

    @staticmethod
    def _collect(manager: Any, count: int) -> dict[str, tuple[int, ...]]:
        results: dict[str, tuple[int, ...]] = {}
        while len(results) < count:
            result = manager.get_result(timeout=_RESULT_TIMEOUT_S)
            if result is None:
                if not manager.is_running():
                    raise MoesaicError(
                        f"transformers' batching thread ended after {len(results)} of {count} requests; "
                        "its log has the reason"
                    )
            elif result.error is not None:
                raise MoesaicError(f"transformers failed request {result.request_id}: {result.error}")
            elif result.is_finished():
                results[result.request_id] = tuple(result.generated_tokens)
        return results


def _batching_config(budget: Budget, num_requests: int) -> Any:
    from transformers import ContinuousBatchingConfig

    known = {f.name for f in fields(ContinuousBatchingConfig)}
    settings = {
        "page_size" if "page_size" in known else "block_size": budget.block_size,  # renamed after 5.17
        "num_blocks": budget.num_kv_blocks,
        "max_batch_tokens": budget.max_tokens_per_step,
        "max_requests_per_batch": min(num_requests, budget.max_batch_size),
        "allow_block_sharing": False,  # no prompts share a prefix, and the other arm has no prefix cache either
    }
    if "auto_switch_to_flash" in known:  # came after 5.17
        settings["auto_switch_to_flash"] = False
    return ContinuousBatchingConfig(**settings)


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Keep warnings about choices that the benchmark makes on purpose out of its output."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
