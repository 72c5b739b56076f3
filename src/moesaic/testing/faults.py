"""Engines that fail on purpose, made by functions that another process can import."""

from collections.abc import Callable
from pathlib import Path

from moesaic.config import EngineConfig
from moesaic.engine.core import EngineCore
from moesaic.engine.launched import LaunchedStep
from moesaic.request import StepOutput

NUM_STEPS = 5
"""Steps with rows before the fault."""


class LostDevice(EngineCore):
    """A core whose steps fail for good once it has made ``NUM_STEPS``."""

    def step(self) -> list[StepOutput]:
        if self.scheduler.counts.num_steps >= NUM_STEPS:
            raise RuntimeError("device lost")
        return super().step()


UNLUCKY_SEED = 13
"""Of requests whose steps fail in a ``StumblingCore``."""


class StumblingCore(EngineCore):
    """A core that fails each step with a request of ``UNLUCKY_SEED`` once its forward is done."""

    def _commit(self, step: LaunchedStep) -> list[StepOutput]:
        outputs = super()._commit(step)
        if any(seq.request.sampling_params.seed == UNLUCKY_SEED for seq in step.tx.sequences.values()):
            raise OSError("bad sector")
        return outputs


def load_stumbling(path: Path, config: EngineConfig, progress: Callable[[str, float], None]) -> EngineCore:
    """Return a ``StumblingCore`` over ``path``."""
    return StumblingCore.from_path(path, config, progress)


def load_losing_its_device(path: Path, config: EngineConfig, progress: Callable[[str, float], None]) -> EngineCore:
    """Return a ``LostDevice`` over ``path``."""
    return LostDevice.from_path(path, config, progress)


def load_nothing(path: Path, config: EngineConfig, progress: Callable[[str, float], None]) -> EngineCore:
    """Fail as a broken driver would."""
    raise OSError("driver not loaded")
