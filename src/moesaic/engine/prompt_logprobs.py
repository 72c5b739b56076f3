"""Log probabilities of prompt tokens, gathered chunk by chunk."""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from moesaic.errors import SamplingError
from moesaic.request import StepOutput, TokenLogprobs
from moesaic.sampling.sampler import Sampler
from moesaic.sched.plan import StepPlan
from moesaic.sequence import SeqId, Sequence


class ScoredSpan(NamedTuple):
    """Query tokens of one chunk whose next prompt token is to be scored."""

    request_id: str
    flat_start: int
    """Index of the first of them among the step's query tokens."""
    position: int
    """Position of the first of them in the prompt."""
    target_token_ids: list[int]
    num_top: int


class PromptScoringError(SamplingError):
    """Prompt logits that cannot be scored; ``rows`` are positions in the chunk of ``request_id``, no sampling rows."""

    def __init__(self, message: str, *, rows: tuple[int, ...], request_id: str) -> None:
        super().__init__(message, rows=rows)
        self.request_id = request_id


class PromptLogprobs:
    """What has been scored of each unfinished prompt; handed out with its first output."""

    def __init__(self) -> None:
        self._scored: dict[str, list[TokenLogprobs]] = {}

    def spans(self, plan: StepPlan, sequences: Mapping[SeqId, Sequence]) -> list[ScoredSpan]:
        """Return what this step must score: positions not yet scored, of prompts that ask for it."""
        spans, flat = [], len(plan.decode_rows)
        for chunk in plan.chunks:
            seq = sequences[chunk.seq_id]
            span = self._span(seq, chunk.start, chunk.num_tokens, flat)
            if span is not None:
                spans.append(span)
            flat += chunk.num_tokens
        return spans

    def _span(self, seq: Sequence, start: int, num_tokens: int, flat: int) -> ScoredSpan | None:
        request = seq.request
        num_top = request.sampling_params.prompt_logprobs
        if num_top is None:
            return None
        first = max(start, len(self._scored.get(request.request_id, ())))
        last = min(start + num_tokens, seq.num_prompt_tokens - 1)
        if first >= last:
            return None
        targets = list(request.prompt_token_ids[first + 1 : last + 1])
        return ScoredSpan(request.request_id, flat + first - start, first, targets, num_top)

    @staticmethod
    def score(sampler: Sampler, logits: torch.Tensor, spans: list[ScoredSpan]) -> list[tuple[TokenLogprobs, ...]]:
        """Return the scores of each span; ``logits`` [P, V] are those of the spans' positions, in order.

        Raises: ``PromptScoringError`` if a position's logits are NaN or infinite.
        """
        scores, start = [], 0
        for span in spans:
            end = start + len(span.target_token_ids)
            try:
                scores.append(sampler.prompt_logprobs(logits[start:end], span.target_token_ids, span.num_top))
            except SamplingError as error:
                raise PromptScoringError(str(error), rows=error.rows, request_id=span.request_id) from error
            start = end
        return scores

    def record(self, spans: list[ScoredSpan], scores: list[tuple[TokenLogprobs, ...]]) -> None:
        """Keep the scores of a committed step."""
        for span, entries in zip(spans, scores, strict=True):
            self._scored.setdefault(span.request_id, []).extend(entries)

    def attach(self, outputs: list[StepOutput], sequences: Mapping[SeqId, Sequence]) -> list[StepOutput]:
        """Return ``outputs`` with the finished scores of those that ask for them, each once."""
        asking = {
            s.request.request_id: s.request
            for s in sequences.values()
            if s.request.sampling_params.prompt_logprobs is not None
        }
        return [
            o._replace(prompt_logprobs=(None, *self._scored.pop(o.request_id, ())))
            if o.request_id in asking and self._is_first(o, sequences)
            else o
            for o in outputs
        ]

    @staticmethod
    def _is_first(output: StepOutput, sequences: Mapping[SeqId, Sequence]) -> bool:
        seq = next(s for s in sequences.values() if s.request.request_id == output.request_id)
        return seq.num_output_tokens == len(output.new_token_ids)

    def forget(self, request_id: str) -> None:
        """Drop what was gathered for a request that is over."""
        self._scored.pop(request_id, None)
