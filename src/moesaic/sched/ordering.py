"""Who comes first: a rank that is fixed when a request arrives, so that nobody is overtaken for ever."""

from typing import NamedTuple

from moesaic.config import SchedulingPolicy
from moesaic.sequence import Rank, SeqId


class Ordering(NamedTuple):
    """How requests are ranked; the lower rank goes first and, when KV blocks run out, stays longest.

    The key grows with the step of arrival, so waiting counts: a class of ``priority`` is worth ``aging_steps`` steps,
    and so are ``max_tokens_per_step`` prompt tokens under ``shortest-prefill-first``. A request is overtaken only by
    those that arrive within that many steps after it, whatever keeps arriving.
    """

    policy: SchedulingPolicy = "fcfs"
    aging_steps: int = 128
    max_tokens_per_step: int = 2048

    def rank(self, seq_id: SeqId, *, priority: int, num_prompt_tokens: int, step: int) -> Rank:
        """Return the rank of a request that arrives before step number ``step``."""
        if self.policy == "priority":
            return Rank(priority * self.aging_steps + step, seq_id)
        if self.policy == "shortest-prefill-first":
            return Rank(num_prompt_tokens * self.aging_steps // self.max_tokens_per_step + step, seq_id)
        return Rank(0, seq_id)
