"""How many prompt tokens a step may have: less for a while after the device ran out of memory."""

from moesaic.config import EngineConfig

RECOVERY_STEPS = 64
"""Steps that must succeed at a lowered budget before it is doubled.

Our choice: where memory stays short, about one step in 64 is lost to finding that out again; after one halving the
full budget is back within seconds.
"""


def least_chunk_tokens(config: EngineConfig) -> int:
    """Return the prompt tokens that a step needs at least: one block, or what the lanes need to have their turns.

    None of them waits longer than ``prefill_starvation_threshold_steps`` with ``(max_partial_prefills + 1) /
    (threshold + 1)``.
    """
    num_members, threshold = config.max_partial_prefills + 1, config.prefill_starvation_threshold_steps
    return max(config.block_size, -(-num_members // (threshold + 1)))


class ChunkBudget:
    """Prompt tokens that a step may have beside its decode rows: halved by ``shrink``, doubled back by ``grow``.

    The floor is ``least_chunk_tokens``.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.full_tokens = config.max_tokens_per_step
        self.floor_tokens = least_chunk_tokens(config)
        self.tokens = self.full_tokens
        self._num_good_steps = 0

    def shrink(self, num_chunk_tokens: int) -> bool:
        """Halve the budget, or the ``num_chunk_tokens`` of the failed step if that is less (0: it had none).

        Returns False, and nothing changes, at the floor.
        """
        if self.tokens == self.floor_tokens:
            return False
        self._num_good_steps = 0
        self.tokens = max(self.floor_tokens, min(self.tokens, num_chunk_tokens or self.tokens) // 2)
        return True

    def grow(self) -> None:
        """Count a step that succeeded; every ``RECOVERY_STEPS`` of them double the budget until it is full."""
        if self.tokens == self.full_tokens:
            return
        self._num_good_steps += 1
        if self._num_good_steps == RECOVERY_STEPS:
            self._num_good_steps = 0
            self.tokens = min(self.full_tokens, 2 * self.tokens)

    def step_limit(self, num_decode_rows: int) -> int:
        """Return the ``max_tokens_per_step`` for a step with up to ``num_decode_rows`` decode rows."""
        return min(self.full_tokens, num_decode_rows + self.tokens)
