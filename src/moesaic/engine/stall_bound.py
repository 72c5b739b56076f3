"""How many prompt tokens a step may have beside running streams, so that none of them waits longer than was asked."""

import logging
import math
from dataclasses import asdict
from typing import Any

from moesaic.config import EngineConfig
from moesaic.engine.chunk_budget import least_chunk_tokens
from moesaic.engine.step_time import StepSizes, StepTimeModel
from moesaic.sched.scheduler import Scheduler

logger = logging.getLogger(__name__)

WARM_UP_STEPS = 16
"""Steps with decode rows and chunks that the model is fitted to before its errors count."""
GROWTH = 2
"""Times the largest chunk tokens seen so far that a step may have: the model is not asked for what is far from it."""
MISSES = 0.01
"""Share of steps that may take longer than predicted times margin: the bound is for the 99th percentile."""
_MARGIN_RATE = 0.1
_MARGINS = (1.05, 4.0)
_FIRST_MARGIN = 1.15
_OUTLIER = 1.5
"""A step is fitted with at most so many times its prediction: a rare pause is the margin's to cover, not the fit's."""


class DecodeStallBound:
    """Sizes chunks for a bound on the time of a step with decode rows.

    Steps that were seen give a model of the time. The margin on its predictions is raised by each step that took
    longer and lowered a little by every other one, so that in the long run ``MISSES`` of the steps exceed it whatever
    their distribution (the quantile tracking of adaptive conformal inference: Gibbs and Candes, NeurIPS 2021). Chunks
    start at the least size and at most double what was seen before.

    ``chunk_tokens`` and ``observe`` do the same for the same calls: there is no clock here.
    """

    def __init__(self, bound_s: float, *, least_tokens: int, full_tokens: int) -> None:
        """``least_tokens`` is what the policy needs to advance prompts, whatever the bound; ``full_tokens`` a step."""
        self.bound_s = bound_s
        self.tokens = self._least = least_tokens
        """The last answer of ``chunk_tokens``."""
        self._full = full_tokens
        self._model = StepTimeModel()
        self._log_margin = math.log(_FIRST_MARGIN)
        self._largest_seen = 0
        self._num_fitted = 0
        self._num_exceeded = 0
        self._num_unmet = 0

    @classmethod
    def of(cls, config: EngineConfig) -> "DecodeStallBound | None":
        """Return the bound of a configuration, or None if it asks for none."""
        if config.max_decode_stall_ms is None:
            return None
        least, full = least_chunk_tokens(config), config.max_tokens_per_step
        return cls(config.max_decode_stall_ms / 1e3, least_tokens=least, full_tokens=full)

    def limit(self, scheduler: Scheduler) -> None:
        """Set what the next step of ``scheduler`` may have beside its decode rows; O(running), without prompts O(1)."""
        running = scheduler.running
        if not running.decoding or not (running.lanes or scheduler.waiting):
            return
        scheduler.max_tokens_beside_decode = self.chunk_tokens(
            num_decode_rows=len(running.decoding),
            num_decode_kv_tokens=sum(s.committed_kv_tokens for s in running.decoding.values()),
            context_tokens=max((s.committed_kv_tokens for s in running.lanes.values()), default=0),
        )

    def chunk_tokens(self, num_decode_rows: int, num_decode_kv_tokens: int, context_tokens: int) -> int:
        """Return the prompt tokens that a step with these decode rows may have.

        ``context_tokens`` is the largest context of the prompts that are part-way: all are taken to cost as much.
        """
        costs = self._model.costs
        decode = StepSizes(
            num_decode_rows=num_decode_rows,
            num_decode_kv_tokens=num_decode_kv_tokens,
            num_chunk_tokens=0,
            num_chunk_pairs=0.0,
        )
        spare_s = self.bound_s / math.exp(self._log_margin) - costs.seconds(decode)
        within = min(costs.most_chunk_tokens(spare_s, context_tokens), GROWTH * self._largest_seen, self._full)
        self.tokens = max(self._least, int(within))
        return self.tokens

    def observe(self, sizes: StepSizes, seconds: float) -> None:
        """Learn that a step of these sizes took ``seconds``, as the streams in it saw it; any step may be told."""
        if not sizes.num_decode_rows:
            return
        self._num_exceeded += seconds > self.bound_s
        if not sizes.num_chunk_tokens:
            return
        if self._num_fitted >= WARM_UP_STEPS:
            seconds = self._judge(sizes, seconds)
        self._model.observe(sizes, seconds)
        self._num_fitted += 1
        self._largest_seen = max(self._largest_seen, sizes.num_chunk_tokens)

    def _judge(self, sizes: StepSizes, seconds: float) -> float:
        """Move the margin by how well the step was predicted; return the seconds to fit."""
        predicted_s = self._model.costs.seconds(sizes)
        allowed_s = predicted_s * math.exp(self._log_margin)
        if allowed_s > self.bound_s and sizes.num_chunk_tokens <= self._least:
            self._count_unmet(allowed_s)
        step = _MARGIN_RATE * ((seconds > allowed_s) - MISSES)
        low, high = map(math.log, _MARGINS)
        self._log_margin = min(max(self._log_margin + step, low), high)
        return min(seconds, _OUTLIER * predicted_s) if predicted_s > 0 else seconds

    def _count_unmet(self, expected_s: float) -> None:
        if not self._num_unmet:
            logger.warning(
                "decode stall bound not met: bound_ms=%.1f expected_ms=%.1f chunk_tokens=%d (the least); "
                "raise --max-decode-stall-ms or lower --max-batch-size",
                1e3 * self.bound_s,
                1e3 * expected_s,
                self._least,
            )
        self._num_unmet += 1

    def stats(self) -> dict[str, Any]:
        """Return the bound, what it allows now, how it was kept, and the model (Any: JSON values)."""
        return {
            "decode_stall_bound_seconds": self.bound_s,
            "decode_stall_chunk_tokens": self.tokens,
            "num_decode_stall_exceeded_steps": self._num_exceeded,
            "num_decode_stall_unmet_steps": self._num_unmet,
            "decode_stall_margin": math.exp(self._log_margin),
            "decode_stall_model": asdict(self._model.costs),
        }


def bound_stats(bound: DecodeStallBound | None) -> dict[str, Any]:
    """Return the stats of ``bound``; without one they are all 0 (Any: JSON values)."""
    if bound is not None:
        return bound.stats()
    return dict.fromkeys(
        (
            "decode_stall_bound_seconds",
            "decode_stall_chunk_tokens",
            "num_decode_stall_exceeded_steps",
            "num_decode_stall_unmet_steps",
        ),
        0,
    )
