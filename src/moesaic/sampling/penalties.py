"""Changes to logits that look at a request's own tokens: bias, minimum length, penalties and allowed tokens.

All but the last touch only the (row, token) pairs they are about; no ``[S, V]`` mask is built. Token ids outside the
vocabulary are ignored, as in transformers: a model never produces them.
"""

from collections.abc import Sequence as SequenceOf

import numpy as np
import torch
from numpy.typing import NDArray

from moesaic.sampling.draw import slabs
from moesaic.sampling.row import SamplingRow
from moesaic.sampling.transfer import to_device


def adjusted_logits(
    logits: torch.Tensor, rows: SequenceOf[SamplingRow], eos_token_ids: tuple[int, ...]
) -> torch.Tensor:
    """Return ``logits`` fp32 [S, V] after bias, minimum length, penalties and allowed tokens, in this order.

    ``logits`` itself, unchanged, if no row asks for any of them; otherwise a changed copy.
    """
    if not any(row.allowed_tokens is not None or row.params.changes_logits for row in rows):
        return logits  # the usual step, whose rows are looked at once
    biased = [i for i, row in enumerate(rows) if row.params.logit_bias]
    early = [i for i, row in enumerate(rows) if len(row.output_token_ids) < row.params.min_tokens]
    repeated = [i for i, row in enumerate(rows) if row.params.repetition_penalty != 1.0]
    counted = [i for i, row in enumerate(rows) if row.params.presence_penalty or row.params.frequency_penalty]
    limited = [i for i, row in enumerate(rows) if row.params.allowed_token_ids is not None]
    ruled = [i for i, row in enumerate(rows) if row.allowed_tokens is not None]
    if not (biased or early or repeated or counted or limited or ruled):
        return logits
    scores = logits.clone(memory_format=torch.contiguous_format)
    if biased:
        _add_bias(scores, rows, biased)
    if early:
        _forbid_the_end(scores, rows, early, eos_token_ids)
    if repeated:
        _penalise_repetition(scores, rows, repeated)
    if counted:
        _penalise_counts(scores, rows, counted)
    if limited:
        _keep_listed(scores, rows, limited)
    if ruled:
        _keep_allowed(scores, rows, ruled)
    return scores


def _add_bias(scores: torch.Tensor, rows: SequenceOf[SamplingRow], chosen: SequenceOf[int]) -> None:
    biases = [rows[i].params.logit_bias or {} for i in chosen]
    pairs = _Pairs([tuple(bias) for bias in biases], scores.shape[1])
    values = np.fromiter((v for bias in biases for v in bias.values()), dtype=np.float32)
    flat = to_device(pairs.offsets(chosen), scores.device)
    scores.view(-1).index_add_(0, flat, to_device(values[pairs.is_known], scores.device))


def _forbid_the_end(
    scores: torch.Tensor, rows: SequenceOf[SamplingRow], chosen: SequenceOf[int], eos_token_ids: tuple[int, ...]
) -> None:
    """Remove what would end the output: stop token ids, and EOS ids unless the request goes on after those."""
    ends = [(*rows[i].params.stop_token_ids, *(() if rows[i].params.ignore_eos else eos_token_ids)) for i in chosen]
    flat = to_device(_Pairs(ends, scores.shape[1]).offsets(chosen), scores.device)
    scores.view(-1).index_fill_(0, flat, -torch.inf)


def _penalise_repetition(scores: torch.Tensor, rows: SequenceOf[SamplingRow], chosen: SequenceOf[int]) -> None:
    """Divide positive and multiply negative logits of tokens in prompt or output.

    A token that occurs twice is written twice, with the same value, because all values are read first.
    Source: CTRL (Keskar et al. 2019), section 4.1, with the sign rule of transformers.
    """
    tokens = [_joined(rows[i].prompt_token_ids, rows[i].output_token_ids) for i in chosen]
    pairs = _Pairs(tokens, scores.shape[1])
    penalties = np.array([rows[i].params.repetition_penalty for i in chosen], dtype=np.float32)
    # A denormal penalty would be flushed to zero on a GPU, and 0 / 0 is no number.
    penalties = np.maximum(penalties, np.finfo(np.float32).tiny)
    penalty = to_device(penalties[pairs.owner], scores.device)
    flat = to_device(pairs.offsets(chosen), scores.device)
    seen = scores.view(-1)[flat]
    changed = torch.where(seen < 0, seen * penalty, seen / penalty)
    # Overflow must not make two tokens infinitely likely; a NaN or infinite logit is found in the raw logits.
    scores.view(-1)[flat] = changed.clamp(max=torch.finfo(torch.float32).max)


def _penalise_counts(scores: torch.Tensor, rows: SequenceOf[SamplingRow], chosen: SequenceOf[int]) -> None:
    """Subtract ``presence + frequency * count`` from the logit of each token in the output.

    Source: the OpenAI API's definition of the two penalties.
    """
    vocab_size = scores.shape[1]
    for slab in slabs(len(chosen), vocab_size):
        part = chosen[slab]
        tokens = [_joined(rows[i].output_token_ids) for i in part]
        counts = torch.zeros(len(part) * vocab_size, device=scores.device)
        pairs = _Pairs(tokens, vocab_size)
        local = to_device(pairs.offsets(range(len(part))), scores.device)
        count = counts.scatter_add_(0, local, torch.ones_like(local, dtype=counts.dtype))[local]
        both = np.array([(rows[i].params.presence_penalty, rows[i].params.frequency_penalty) for i in part])
        presence, frequency = to_device(both.astype(np.float32)[pairs.owner], scores.device).unbind(-1)
        flat = to_device(pairs.offsets(part), scores.device)
        scores.view(-1)[flat] = scores.view(-1)[flat] - (frequency * count + presence)


def _keep_listed(scores: torch.Tensor, rows: SequenceOf[SamplingRow], chosen: SequenceOf[int]) -> None:
    """Remove every token that is not in the rows' ``allowed_token_ids``."""
    pairs = _Pairs([tuple(rows[i].params.allowed_token_ids or ()) for i in chosen], scores.shape[1])
    flat = to_device(pairs.offsets(chosen), scores.device)
    kept = scores.view(-1)[flat]
    scores.index_fill_(0, to_device(np.array(chosen, dtype=np.int64), scores.device), -torch.inf)
    scores.view(-1)[flat] = kept


def _keep_allowed(scores: torch.Tensor, rows: SequenceOf[SamplingRow], chosen: SequenceOf[int]) -> None:
    """Remove the tokens that the rows' grammars do not allow; last, so that nothing else can bring one back."""
    vocab_size = scores.shape[1]
    shifts = torch.arange(8, dtype=torch.uint8, device=scores.device)
    for slab in slabs(len(chosen), vocab_size):
        packed = np.stack([allowed for i in chosen[slab] if (allowed := rows[i].allowed_tokens) is not None])
        bits = (to_device(packed, scores.device)[:, :, None] >> shifts) & 1
        index = to_device(np.array(chosen[slab], dtype=np.int64), scores.device)
        kept = bits.flatten(1)[:, :vocab_size].bool()
        scores[index] = scores[index].masked_fill(~kept, -torch.inf)


class _Pairs:
    """The (owner, token) pairs of some token lists, without tokens outside the vocabulary; no loop over tokens."""

    def __init__(self, lists: SequenceOf[SequenceOf[int] | NDArray[np.int64]], vocab_size: int) -> None:
        ids = _joined(*lists)
        self.is_known = (ids >= 0) & (ids < vocab_size)
        lengths = np.fromiter(map(len, lists), dtype=np.int64)
        self.owner = np.repeat(np.arange(len(lists)), lengths)[self.is_known]
        self._ids = ids[self.is_known]
        self._vocab_size = vocab_size

    def offsets(self, rows: SequenceOf[int]) -> NDArray[np.int64]:
        """Return where each pair is in a flat ``[S, V]`` tensor in which list ``j`` belongs to row ``rows[j]``."""
        return np.asarray(rows, dtype=np.int64)[self.owner] * self._vocab_size + self._ids


def _joined(*parts: SequenceOf[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([np.asarray(part, dtype=np.int64) for part in (*parts, ())])
