"""Where the time of a start goes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

logger = logging.getLogger(__name__)


class StageClock:
    """Seconds by stage, in the order of the stages; logs each as it ends."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._last = clock()
        self.seconds: dict[str, float] = {}

    def lap(self, stage: str) -> None:
        """End a stage that began when the last one ended; waits for the device."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch leaves it untyped
            torch.cuda.synchronize()
        now = self._clock()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._last
        logger.info("start-up: stage=%s seconds=%.2f", stage, now - self._last)
        self._last = now
