"""The policy that a configuration asks for."""

from moesaic.config import EngineConfig
from moesaic.sched.chunked import ChunkedPrefill
from moesaic.sched.policy import PrefillPolicy
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
