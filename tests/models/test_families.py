"""Every proven family equals the unmodified transformers model, whatever the chunks and neighbours."""

import logging
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from moesaic.errors import UnsupportedModelError
from moesaic.models.families import PROVEN, REFUSED, family_of
from moesaic.models.hf import HFCausalLM
from moesaic.testing.models import available_families, tiny_causal_lm, tiny_model
from moesaic.testing.paged import PagedModel

logger = logging.getLogger(__name__)

FAMILIES = available_families()
TOLERANCE = 1e-4  # float32, logits of about unit size; docs/models.md lists what was seen
LENGTHS = (23, 14, 9)  # longer than the tiny models' windows of 6 tokens
TOKENS = [np.random.default_rng(seq).integers(3, 160, n).tolist() for seq, n in enumerate(LENGTHS)]
# Steps of (sequence, first, last): two first chunks; a decode row with a second and a new chunk; two decode rows
# with a third; decode rows with the last chunk.
STEPS = (
    ((0, 0, 7), (1, 0, 11)),
    ((1, 11, 12), (0, 7, 16), (2, 0, 5)),
    ((1, 12, 13), (2, 5, 6), (0, 16, 22)),
    ((0, 22, 23), (1, 13, 14), (2, 6, 9)),
)


@cache
def _oracle(family: str) -> Any:
    return tiny_model(family)


@cache
def _ours(family: str) -> HFCausalLM:
    return tiny_causal_lm(_oracle(family))


def _run_steps(model: HFCausalLM, *, split_at: int = 0) -> list[torch.Tensor]:
    """The logits [tokens, V] of each sequence."""
    paged = PagedModel(model, num_sequences=len(TOKENS), max_tokens=max(LENGTHS))
    seen: list[list[torch.Tensor]] = [[] for _ in TOKENS]
    for step in STEPS:
        logits = paged.step([(seq, TOKENS[seq][first:last]) for seq, first, last in step], split_at=split_at)
        for (seq, _, _), part in zip(step, logits, strict=True):
            seen[seq].append(part)
    return [torch.cat(parts) for parts in seen]


@cache
def _whole(family: str) -> list[torch.Tensor]:
    return _run_steps(_ours(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_and_decode_rows_give_the_logits_of_the_unmodified_model(family: str) -> None:
    oracle = _oracle(family)
    expected = [oracle(torch.tensor([tokens])).logits[0].float() for tokens in TOKENS]
    worst = max((got - want).abs().max().item() for got, want in zip(_whole(family), expected, strict=True))
    logger.info("%s: max difference %.1e", family, worst)
    assert worst <= TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_running_layers_in_two_groups_changes_nothing(family: str) -> None:
    for whole, split in zip(_whole(family), _run_steps(_ours(family), split_at=1), strict=True):
        torch.testing.assert_close(split, whole, rtol=0, atol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_go_through_the_backend_exactly_where_the_table_says(family: str) -> None:
    model = _ours(family)
    assert bool(model.expert_modules) == (PROVEN[family].experts == "backend")
    assert (model.info.num_experts > 0) == (PROVEN[family].experts != "none")


def test_the_oracle_keeps_its_own_attention() -> None:
    """The implementation names live on the configuration object: ours must not be the caller's."""
    _ours("qwen3_moe")
    assert _oracle("qwen3_moe").config._attn_implementation == "eager"
    assert _oracle("qwen3_moe").config._experts_implementation == "eager"


def test_two_models_in_one_process_do_not_interfere() -> None:
    models = [tiny_causal_lm(tiny_model("mixtral", seed=seed)) for seed in (1, 2)]
    alone = [_run_steps(model) for model in models]
    paged = [PagedModel(model, num_sequences=len(TOKENS), max_tokens=max(LENGTHS)) for model in models]
    for step in STEPS:
        for engine, expected in zip(paged, alone, strict=True):
            logits = engine.step([(seq, TOKENS[seq][first:last]) for seq, first, last in step])
            for (seq, first, last), part in zip(step, logits, strict=True):
                torch.testing.assert_close(part, expected[seq][first:last], rtol=0, atol=0)


@pytest.mark.parametrize("family", sorted(REFUSED))
def test_a_refused_family_is_refused_with_its_reason(family: str) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        family_of(family)
    assert family in str(error.value)
    assert REFUSED[family] in str(error.value)
    assert "qwen3_moe" in str(error.value), "the families that load are listed"


def test_an_unknown_family_is_refused_as_not_proven() -> None:
    with pytest.raises(UnsupportedModelError, match=r"nonesuch.*not proven"):
        family_of("nonesuch")


def test_no_family_is_both_proven_and_refused() -> None:
    assert not PROVEN.keys() & REFUSED.keys()
