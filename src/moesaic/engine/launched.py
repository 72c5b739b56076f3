"""A step whose work is queued on the device and whose tokens the host does not have yet."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from moesaic.batch import CarriedTokens
from moesaic.config import EngineConfig
from moesaic.engine.meters import StepStart
from moesaic.engine.prompt_logprobs import ScoredSpan
from moesaic.engine.routing import RoutedSpan
from moesaic.errors import Refused
from moesaic.request import SamplingParams
from moesaic.sampling.pending import KnownTokens, PendingTokens
from moesaic.sampling.transfer import HostCopy
from moesaic.sched.transaction import StepTransaction


@dataclass(slots=True, kw_only=True)
class LaunchedStep:
    """What the end of the step needs of its beginning."""

    tx: StepTransaction
    start: StepStart
    laps_s: list[float]
    """When its phases ended, if somebody watches: see ``StepLog``."""
    sampled: PendingTokens | KnownTokens
    spans: list[ScoredSpan]
    prompt_logits: torch.Tensor
    """float32 [P, V] of the positions of ``spans``."""
    routed_spans: list[RoutedSpan]
    routed: HostCopy | None
    """int16 [S, L, A] of the tokens of ``routed_spans``, if there are any."""

    def carried(self) -> CarriedTokens | None:
        """Return the tokens for a step launched behind this one, or None if that one must wait for this one's end.

        It must if the host has to know the tokens first: for a grammar, for penalties, for the log probabilities of a
        prompt, which are counted as steps end.
        """
        sequences, row_ids = self.tx.sequences, self.tx.plan.sampling_row_ids
        if self.spans or isinstance(self.sampled, KnownTokens):
            return None
        if any_needs_tokens(sequences[i].request.sampling_params for i in row_ids):
            return None
        return CarriedTokens(self.sampled.token_ids, {i: n for n, i in enumerate(row_ids)})


def any_needs_tokens(params: Iterable[SamplingParams]) -> bool:
    """Return whether the next token of any such request depends on what its last one was, beyond the model's input."""
    return any(
        p.structured_output is not None
        or p.repetition_penalty != 1.0
        or p.presence_penalty != 0.0
        or p.frequency_penalty != 0.0
        for p in params
    )


def overlap_refusal(config: EngineConfig, device: torch.device) -> Refused | None:
    """Return why steps are not launched behind one another, or None if they are."""
    if not config.overlap:
        return Refused("switched off")
    if config.batch_invariant:
        return Refused("batch_invariant runs and samples tokens one by one")
    if device.type != "cuda":
        return Refused(f"a step on {device.type} has ended when its launch returns")
    return None
