"""Log probabilities of chosen and likeliest tokens, from the raw logits; ``[P, V]`` never leaves the device."""

from collections.abc import Sequence as SequenceOf

import torch

from moesaic.request import TokenLogprobs
from moesaic.sampling.draw import slabs


def packed_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> torch.Tensor:
    """Return what ``unpacked_logprobs`` needs as one fp64 tensor [P, 3 + 2 * num_top], to be copied once.

    ``logits`` fp32 [P, V], ``token_ids`` int64 [P]; ``num_top`` <= V. Token ids and ranks are exact in fp64.
    All log probabilities of a row with NaN or infinite logits are NaN.
    """
    parts = [_packed(logits[s], token_ids[s, None], num_top) for s in slabs(*logits.shape)]
    return torch.cat(parts) if parts else logits.new_zeros((0, 3 + 2 * num_top), dtype=torch.float64)


def unpacked_logprobs(packed: torch.Tensor, num_top: SequenceOf[int]) -> tuple[TokenLogprobs, ...]:
    """Return one value per row of ``packed`` with its own number of likeliest tokens; synchronises the device.

    Likeliest tokens that tie come in order of their ids; which of them is left out at the end is not defined.
    """
    return tuple(_of(row, n) for row, n in zip(packed.tolist(), num_top, strict=True))


def _packed(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> torch.Tensor:
    norm = logits.logsumexp(dim=-1, keepdim=True)
    norm = norm.masked_fill(~norm.isfinite(), torch.nan)
    chosen = logits.gather(-1, token_ids)
    rank = (logits > chosen).sum(dim=-1, keepdim=True) + 1
    top = logits.topk(num_top, dim=-1)
    return torch.cat([t.double() for t in (token_ids, chosen - norm, rank, top.indices, top.values - norm)], dim=-1)


def _of(row: list[float], num_top: int) -> TokenLogprobs:
    token_id, logprob, rank = row[:3]
    held = (len(row) - 3) // 2
    pairs = zip(map(int, row[3 : 3 + held]), row[3 + held :], strict=True)
    top = sorted(pairs, key=lambda pair: (-pair[1], pair[0]))[:num_top]
    return TokenLogprobs(token_id=int(token_id), logprob=logprob, rank=int(rank), top=tuple(top))
