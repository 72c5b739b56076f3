"""Filters that remove unlikely tokens: what they remove gets a score of minus infinity.

Each keeps the set that the class of the same name in ``transformers.generation.logits_process`` keeps, up to
rounding where a probability meets the limit.
"""

import torch

from moesaic.sampling.draw import weights


def keep_top_k(scores: torch.Tensor, top_k: torch.Tensor, largest: int) -> torch.Tensor:
    """Return ``scores`` [S, V] with the tokens below the k-th largest score of their row removed.

    ``top_k`` int64 [S] with 0 for "keep all" and at most ``largest`` <= V. Tokens that tie with the k-th stay, so
    more than k can be left (with logits from bf16 that is common); transformers and vLLM keep them too.
    """
    kth = scores.topk(largest, dim=-1).values.gather(-1, (top_k - 1).clamp(min=0)[:, None])
    kth = kth.masked_fill((top_k <= 0)[:, None], -torch.inf)
    return scores.masked_fill(scores < kth, -torch.inf)


def keep_min_p(scores: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Return ``scores`` [S, V] without tokens less likely than ``min_p`` [S] times the likeliest.

    The largest score of each row is 0, so ``exp(score)`` is that ratio and needs no normalisation.
    """
    return scores.masked_fill(scores.exp() < min_p[:, None], -torch.inf)


def keep_top_p(scores: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return ``scores`` [S, V] with only the likeliest tokens whose probability first reaches ``top_p`` [S].

    The largest score of each row is 0; ``top_p`` is fp64. Among tokens that tie at the limit those with the larger
    ids stay: the sort is ascending and stable, as in transformers. Sums are of integer weights, see ``draw``.
    """
    ascending, order = scores.sort(dim=-1, stable=True)
    mass = weights(ascending).cumsum(dim=-1)
    removed = mass <= (1.0 - top_p)[:, None] * mass[:, -1:]
    removed[:, -1] = False
    return scores.masked_fill(torch.zeros_like(removed).scatter_(1, order, removed), -torch.inf)
