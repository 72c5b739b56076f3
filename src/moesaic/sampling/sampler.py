"""From logits to tokens, all rows of a step at once.

Order of operations, the same as in vLLM: log probabilities are reported of the raw logits; then logit bias, minimum
length, repetition, presence and frequency penalties, what a grammar allows, and the likeliest token if the row is
greedy. Otherwise
temperature, top-k, min-p, top-p and one random choice. (transformers puts top-p before min-p.)
"""

from collections.abc import Sequence as SequenceOf

import numpy as np
import torch

from moesaic.errors import InvariantError, RequestError, SamplingError
from moesaic.request import SamplingParams, TokenLogprobs
from moesaic.sampling.draw import draw_tokens, slabs, uniforms
from moesaic.sampling.filters import keep_min_p, keep_top_k, keep_top_p
from moesaic.sampling.logprobs import packed_logprobs, unpacked_logprobs
from moesaic.sampling.penalties import adjusted_logits
from moesaic.sampling.pending import BROKEN, NOTHING_LEFT, KnownTokens, PendingTokens, SampledTokens
from moesaic.sampling.row import SamplingRow
from moesaic.sampling.transfer import to_device

__all__ = ["SampledTokens", "Sampler", "SamplingRow"]


class Sampler:
    """Chooses tokens. Holds no state of any request: a choice depends on its row alone."""

    def __init__(self, *, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids

    def check_params(self, params: SamplingParams) -> None:
        """Refuse token ids that this model does not have; to be called once, at admission.

        Raises: ``RequestError``. ``sample`` itself ignores such ids rather than fail a whole step.
        """
        for name, ids in (
            ("logit_bias", params.logit_bias or ()),
            ("stop_token_ids", params.stop_token_ids),
            ("allowed_token_ids", params.allowed_token_ids or ()),
        ):
            unknown = [i for i in ids if not 0 <= i < self.vocab_size]
            if unknown:
                raise RequestError(
                    f"{name} has token id {unknown[0]}; this model has ids from 0 to {self.vocab_size - 1}", param=name
                )

    def sample(self, logits: torch.Tensor, rows: SequenceOf[SamplingRow]) -> SampledTokens:
        """Return a token per row of ``logits``, fp32 [S, V] on any device, which are left as they are.

        Synchronises the device.
        Raises: ``SamplingError`` if a row has NaN or infinite logits or no token that may be chosen.
        """
        return self._pending(logits, rows).result()

    def begin(self, logits: torch.Tensor, rows: SequenceOf[SamplingRow]) -> PendingTokens | KnownTokens:
        """Return what ``sample`` will, without waiting for the device; ``logits`` may change once this is queued."""
        return self._pending(logits, rows)

    def _pending(self, logits: torch.Tensor, rows: SequenceOf[SamplingRow]) -> PendingTokens:
        self._check_shape(logits, len(rows))
        if not rows:
            return PendingTokens(torch.empty(0, dtype=torch.int64), rows, [], None)
        scores = adjusted_logits(logits, rows, self.eos_token_ids)
        best, token_ids = scores.max(dim=-1)
        token_ids = _with_random_choices(token_ids, best, scores, rows)
        if scores is not logits:
            token_ids = _marked(token_ids, best, NOTHING_LEFT)
            best = logits.amax(dim=-1)
        token_ids = _marked(token_ids, best, BROKEN)
        asking = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
        packed = self._packed(logits, token_ids, rows, asking) if asking else None
        return PendingTokens(token_ids, rows, asking, packed)

    def prompt_logprobs(
        self, logits: torch.Tensor, target_token_ids: SequenceOf[int], num_top: int
    ) -> tuple[TokenLogprobs, ...]:
        """Return the log probabilities of the token that follows each position, with the ``num_top`` likeliest.

        ``logits`` fp32 [P, V] of positions whose next tokens are ``target_token_ids`` (P of them).
        Synchronises the device once. Raises: ``SamplingError`` if a position's logits are NaN or infinite.
        """
        self._check_shape(logits, len(target_token_ids))
        num_top = min(num_top, self.vocab_size)
        targets = to_device(np.asarray(target_token_ids, dtype=np.int64), logits.device)
        result = unpacked_logprobs(packed_logprobs(logits, targets, num_top), [num_top] * len(target_token_ids))
        broken = tuple(i for i, entry in enumerate(result) if np.isnan(entry.logprob))
        if broken:
            raise SamplingError(f"prompt logits of positions {list(broken)} are NaN or infinite", rows=broken)
        return result

    def _check_shape(self, logits: torch.Tensor, num_rows: int) -> None:
        if logits.shape != (num_rows, self.vocab_size) or logits.dtype != torch.float32:
            raise InvariantError(
                f"logits are {logits.dtype} {tuple(logits.shape)}, not float32 {(num_rows, self.vocab_size)}"
            )

    def _packed(
        self, logits: torch.Tensor, token_ids: torch.Tensor, rows: SequenceOf[SamplingRow], asking: list[int]
    ) -> torch.Tensor:
        num_top = min(max(rows[i].params.logprobs or 0 for i in asking), self.vocab_size)
        if len(asking) < len(rows):
            index = to_device(np.array(asking, dtype=np.int64), logits.device)
            logits, token_ids = logits[index], token_ids[index]
        return packed_logprobs(logits, token_ids.clamp(min=0), num_top)


def _marked(token_ids: torch.Tensor, best: torch.Tensor, mark: int) -> torch.Tensor:
    """Return ``token_ids`` [S], ``mark`` where a row is unusable: its largest value is NaN or infinite exactly then."""
    return torch.where(best.abs() < torch.inf, token_ids, mark)


def _with_random_choices(
    token_ids: torch.Tensor, best: torch.Tensor, scores: torch.Tensor, rows: SequenceOf[SamplingRow]
) -> torch.Tensor:
    """Return the greedy ``token_ids`` [S] with those of the rows that are not greedy drawn at random."""
    chosen = [i for i, row in enumerate(rows) if not row.params.is_greedy]
    if not chosen:
        return token_ids
    if len(chosen) < len(rows):
        index = to_device(np.array(chosen, dtype=np.int64), scores.device)
        drawn = _random_choices(scores[index], best[index], [rows[i] for i in chosen])
        return token_ids.index_copy(0, index, drawn)
    return _random_choices(scores, best, rows)


def _random_choices(scores: torch.Tensor, best: torch.Tensor, rows: SequenceOf[SamplingRow]) -> torch.Tensor:
    """Return one drawn token [S] per row of ``scores`` [S, V], whose largest values are ``best`` [S]."""
    columns = to_device(_columns(rows, scores.shape[1]), scores.device)
    parts = [_drawn(scores[s], best[s], columns[:, s], rows[s]) for s in slabs(*scores.shape)]
    return torch.cat(parts)


def _columns(rows: SequenceOf[SamplingRow], vocab_size: int) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Return [5, S]: temperature, top_k (0 for all), min_p, top_p, uniform."""
    params = [row.params for row in rows]
    return np.stack(
        [
            # Smaller temperatures would be flushed to zero in fp32; at this one all but the likeliest vanish.
            np.maximum([p.temperature for p in params], np.finfo(np.float32).tiny),
            np.clip([p.top_k for p in params], 0, vocab_size),
            np.array([p.min_p for p in params]),
            np.array([p.top_p for p in params]),
            uniforms([row.seed for row in rows], [len(row.output_token_ids) for row in rows]),
        ]
    )


def _drawn(
    scores: torch.Tensor, best: torch.Tensor, columns: torch.Tensor, rows: SequenceOf[SamplingRow]
) -> torch.Tensor:
    temperature, top_k, min_p, top_p, uniform = columns
    largest_k = min(max(row.params.top_k for row in rows), scores.shape[1])
    if largest_k > 0:
        # Before the division, which keeps the order: rounding in it cannot make new ties.
        scores = keep_top_k(scores, top_k.long(), largest_k)
    # Relative to the likeliest before dividing, so that a small temperature cannot overflow.
    scores = (scores - best[:, None]) / temperature.float()[:, None]
    if any(row.params.min_p > 0.0 for row in rows):
        scores = keep_min_p(scores, min_p.float())
    nucleus = [i for i, row in enumerate(rows) if row.params.top_p < 1.0]
    if len(nucleus) == len(rows):
        scores = keep_top_p(scores, top_p)
    elif nucleus:
        # The sort costs more than everything else here; rows that keep all tokens do not pay for it.
        index = to_device(np.array(nucleus, dtype=np.int64), scores.device)
        scores = scores.index_copy(0, index, keep_top_p(scores[index], top_p[index]))
    return draw_tokens(scores, uniform)
