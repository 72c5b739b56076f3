"""Greedy tokens of whole and of chunked prompts side by side: where they part, and by how little.

Two engines over one model differ in the order of their sums, so at a near tie they may choose otherwise. Up to the
first difference of a request both have seen the same tokens; there the margin between the two likeliest says how near
the tie was. Later tokens are not compared. Prints one JSON object.
"""

# ruff: noqa: T201  # a command line prints

import argparse
import gc
import json
import random
from typing import Any

import torch

from moesaic.config import EngineConfig
from moesaic.engine.core import EngineCore
from moesaic.models.files import resolve_model_path
from moesaic.request import SamplingParams, TokenLogprobs

Answers = dict[str, list[TokenLogprobs]]


def answers(engine: EngineCore, prompts: list[list[int]], num_tokens: int) -> Answers:
    """Return token and two likeliest tokens of each position of each output; all requests run together."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, logprobs=2)
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    got: Answers = {}
    while engine.has_pending_requests():
        for output in engine.step():
            if output.error is not None:
                raise RuntimeError(output.error)
            got.setdefault(output.request_id, []).extend(output.logprobs or ())
    return got


def margin(entry: TokenLogprobs) -> float:
    """Return how much likelier the first token is than the second, in nats."""
    return entry.top[0][1] - entry.top[1][1]


def first_difference(whole: list[TokenLogprobs], chunked: list[TokenLogprobs]) -> dict[str, Any] | None:
    """Return where the tokens part and both margins there (Any: JSON values); None if they are equal."""
    for position, (a, b) in enumerate(zip(whole, chunked, strict=True)):
        if a.token_id != b.token_id:
            return {
                "position": position,
                "tokens": [a.token_id, b.token_id],
                "margins": [round(margin(a), 5), round(margin(b), 5)],
                "is_swap_of_the_two_likeliest": {a.token_id, b.token_id} == {t for t, _ in a.top},
            }
    return None


def report(engine: EngineCore, whole: Answers, chunked: Answers) -> dict[str, Any]:
    """Return the counts, and each first difference, the widest margin first (Any: JSON values)."""
    found = [d for name in whole if (d := first_difference(whole[name], chunked[name])) is not None]
    margins = sorted(margin(entry) for entries in whole.values() for entry in entries)
    return {
        "requests": len(whole),
        "tokens": sum(map(len, whole.values())),
        "requests_that_differ": len(found),
        "margin_of_all_tokens": {"p10": margins[len(margins) // 10], "p50": margins[len(margins) // 2]},
        "differences": sorted(found, key=lambda d: -max(d["margins"])),
        "features": {name: feature["active"] for name, feature in engine.features().items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=3000)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--chunk-size", type=int, default=512)
    parser.add_argument("--num-kv-blocks", type=int, default=8000)
    args = parser.parse_args()
    shared: dict[str, Any] = {
        "load_format": args.load_format,
        "dtype": args.dtype,
        "num_kv_blocks": args.num_kv_blocks,
        "max_batch_size": 64,
    }
    path = resolve_model_path(args.model, with_weights=args.load_format != "dummy")
    engine = EngineCore.from_path(path, EngineConfig(max_tokens_per_step=args.prompt_tokens + 64, **shared))
    rng = random.Random(0)
    vocab_size = engine.model.info.vocab_size
    lengths = [rng.randint(args.prompt_tokens // 4, args.prompt_tokens) for _ in range(args.requests)]
    prompts = [[rng.randrange(vocab_size) for _ in range(n)] for n in lengths]
    whole = answers(engine, prompts, args.output_tokens)
    config = EngineConfig(
        enable_chunked_prefill=True, prefill_chunk_size=args.chunk_size,
        max_tokens_per_step=args.chunk_size + 64, **shared,
    )  # fmt: skip
    del engine  # its memory is for the next one, whose weights are the same
    gc.collect()
    torch.cuda.empty_cache()
    engine = EngineCore.from_path(path, config)
    print(json.dumps(report(engine, whole, answers(engine, prompts, args.output_tokens)), indent=1))


if __name__ == "__main__":
    main()
