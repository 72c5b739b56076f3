"""An engine whose forward takes a set time and computes nothing: what is left to measure is everything around it."""

import time
from collections.abc import Callable
from pathlib import Path

import torch

from moesaic.batch import RaggedBatch
from moesaic.config import EngineConfig
from moesaic.engine.core import EngineCore
from moesaic.runner import ModelRunner

FIRST_TOKEN_ID, NUM_TOKEN_IDS = ord("a"), 26
"""Of the model ``tiny``, whose token ids below 256 are bytes: every token is a letter, so each has text of its own."""


class PacedRunner(ModelRunner):
    """Sleeps in place of a forward, as a host that waits for its GPU; the letters of a row follow its positions."""

    step_s = 0.0
    """Seconds each step takes."""

    def run(self, batch: RaggedBatch) -> torch.Tensor:
        """Return float32 logits [S, V] for ``batch.logit_indices``."""
        end_s = time.perf_counter() + self.step_s
        token_ids = FIRST_TOKEN_ID + batch.positions[batch.logit_indices] % NUM_TOKEN_IDS
        logits = torch.zeros(len(token_ids), self.model.info.vocab_size).scatter_(1, token_ids[:, None], 1.0)
        time.sleep(max(0.0, end_s - time.perf_counter()))
        return logits


def load_paced(
    path: Path, config: EngineConfig, progress: Callable[[str, float], None], *, step_s: float
) -> EngineCore:
    """Return an engine over the model in ``path``, each step of which takes ``step_s`` seconds.

    A ``CoreFactory`` once ``step_s`` is bound. Torch gets one thread, as the host of a GPU needs: more would wait for
    each other busily after every small operator, on CPUs that the server should have.
    """
    torch.set_num_threads(1)
    core = EngineCore.from_path(path, config, progress)
    core.runner = PacedRunner(core.model, core.attention.backend, core.runner.store)
    core.runner.step_s = step_s
    return core
