"""The policy and the scheduler that a configuration asks for."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from moesaic.config import EngineConfig
from moesaic.kv.pool import BlockPool
from moesaic.kv.table import PagedKVCache
from moesaic.sched.chunked import ChunkedPrefill
from moesaic.sched.decisions import DecisionLog, Header
from moesaic.sched.ordering import Ordering
from moesaic.sched.policy import PrefillPolicy
from moesaic.sched.preempt import VictimOrder, cheapest_last
from moesaic.sched.recording import RecordingScheduler
from moesaic.sched.scheduler import Scheduler
from moesaic.sched.whole import WholePrefill


def make_policy(config: EngineConfig) -> PrefillPolicy:
    """Return ``ChunkedPrefill`` if chunking is enabled, else ``WholePrefill``."""
    threshold = config.prefill_starvation_threshold_steps
    if not config.enable_chunked_prefill:
        return WholePrefill(starvation_threshold_steps=threshold)
    return ChunkedPrefill(
        chunk_size=config.prefill_chunk_size,
        starvation_threshold_steps=threshold,
        max_partial_prefills=config.max_partial_prefills,
    )


def make_scheduler(
    config: EngineConfig,
    *,
    num_blocks: int,
    max_model_len: int,
    num_swap_blocks: int = 0,
    eos_token_ids: tuple[int, ...] = (),
    victim_order: VictimOrder = cheapest_last,
    clock: Callable[[], float] = time.monotonic,
) -> Scheduler:
    """Return a scheduler over a pool of ``num_blocks``; with ``decision_log`` it records what it is told and decides.

    ``clock`` gives the log's times and decides nothing.

    Raises: ``ConfigError`` if the log cannot be written.
    """
    make: type[Scheduler] | partial[RecordingScheduler] = Scheduler
    if config.decision_log is not None:
        header = Header.of(config, num_blocks, max_model_len, num_swap_blocks)
        make = partial(RecordingScheduler, DecisionLog(Path(config.decision_log), header), clock)
    return make(
        kv=PagedKVCache(BlockPool(num_blocks), config.block_size),
        policy=make_policy(config),
        max_tokens_per_step=config.max_tokens_per_step,
        max_batch_size=config.max_batch_size,
        max_model_len=max_model_len,
        eos_token_ids=eos_token_ids,
        seed=config.seed,
        ordering=Ordering(config.scheduling_policy, config.priority_aging_steps, config.max_tokens_per_step),
        max_waiting_requests=config.max_waiting_requests,
        num_swap_blocks=num_swap_blocks,
        victim_order=victim_order,
    )
