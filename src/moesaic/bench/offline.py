"""Offline throughput of mixed prompts: this engine and transformers' continuous batching, in turns."""

import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict, dataclass
from typing import Any

from moesaic.bench.paired import Pair, Spread, alternate, ratios
from moesaic.bench.peer import Batch, Budget, TransformersPeer
from moesaic.bench.progress import without_loading_bars
from moesaic.bench.report import Report
from moesaic.bench.workload import random_lengths, random_prompts
from moesaic.config import EngineConfig
from moesaic.engine.core import EngineCore
from moesaic.kv.geometry import blocks_for_tokens
from moesaic.models.files import resolve_model_path
from moesaic.request import SamplingParams

BLOCK_SIZE = 16

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineSettings:
    """The load of one offline comparison; the same for both arms."""

    model: str
    num_prompts: int
    max_prompt_tokens: int = 300
    """Lengths are uniform from 1 to this."""
    max_tokens: int = 64
    max_tokens_per_step: int = 512
    num_pairs: int = 5
    seed: int = 0

    @classmethod
    def for_model(cls, model: str, **changes: Any) -> "OfflineSettings":  # Any: fields, each of its own type
        """Return the usual load: less of it for ``smol``, one run of which takes half a minute on two cores."""
        usual = {"num_prompts": 64}
        if model.startswith("smol"):
            usual = {"num_prompts": 16, "max_tokens": 32, "num_pairs": 3}
        return cls(model=model, **{**usual, **changes})


def run_offline(settings: OfflineSettings, progress: Progress) -> Report:
    """Return the comparison; both models are in memory at once, in float32 on the CPU.

    Raises: ``ModelLoadError``, ``ConfigError``.
    """
    path = resolve_model_path(settings.model, progress=progress)
    lengths = random_lengths(settings.num_prompts, settings.max_prompt_tokens, settings.seed)
    budget = _budget(settings, lengths)
    with without_loading_bars():
        engine = EngineCore.from_path(path, _config(budget), progress)
        progress("load the model into transformers", 0.0)
        peer = TransformersPeer(path, engine.model.dtype, budget)
    prompts = random_prompts(lengths, engine.model.info.vocab_size, settings.seed)

    def ours(i: int) -> Batch:
        progress(f"{settings.model}: pairs, moesaic and transformers in turns", (i + 0.0) / settings.num_pairs)
        return generate(engine, prompts, settings.max_tokens)

    def theirs(i: int) -> Batch:
        progress(f"{settings.model}: pairs, moesaic and transformers in turns", (i + 0.5) / settings.num_pairs)
        return peer.generate(prompts, settings.max_tokens)

    progress(f"{settings.model}: warm up both", 0.0)
    generate(engine, prompts, settings.max_tokens // 4)
    progress(f"{settings.model}: warm up both", 0.5)
    peer.generate(prompts, settings.max_tokens // 4)
    return report(settings, budget, sum(lengths), alternate(ours, theirs, settings.num_pairs))


def generate(engine: EngineCore, prompts: SequenceOf[SequenceOf[int]], max_tokens: int) -> Batch:
    """Return ``max_tokens`` greedy tokens for each prompt (EOS is ignored) and how long they took."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    token_ids: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    started_s = time.perf_counter()
    for request_id, prompt in zip(token_ids, prompts, strict=True):
        engine.add_request(request_id, prompt, params)
    while engine.has_pending_requests():
        for output in engine.step():
            token_ids[output.request_id] += output.new_token_ids
    seconds = time.perf_counter() - started_s
    return Batch(token_ids=tuple(map(tuple, token_ids.values())), seconds=seconds)


def report(
    settings: OfflineSettings, budget: Budget, num_prompt_tokens: int, pairs: SequenceOf[Pair[Batch, Batch]]
) -> Report:
    """Return table and samples: output tokens per second of each arm, and their ratio pair by pair."""
    ours = [_tokens_per_s(pair.first) for pair in pairs]
    theirs = [_tokens_per_s(pair.second) for pair in pairs]
    num_equal = sum(a == b for pair in pairs for a, b in zip(pair.first.token_ids, pair.second.token_ids, strict=True))
    return Report(
        name="offline throughput",
        settings={**asdict(settings), **asdict(budget), "num_prompt_tokens": num_prompt_tokens, "dtype": "float32"},
        columns=("arm", "output tokens/s: median (range)"),
        rows=(
            ("moesaic", Spread.of(ours).text(1)),
            ("transformers, continuous batching, sdpa", Spread.of(theirs).text(1)),
            ("ratio, pair by pair", ratios(ours, theirs).text()),
        ),
        remarks=(f"n = {len(pairs)} pairs; {num_equal} of {len(pairs) * settings.num_prompts} outputs are equal.",),
        samples=tuple(
            {"pair": i, "arm": arm, "seconds": batch.seconds, "token_ids": batch.token_ids}
            for i, pair in enumerate(pairs)
            for arm, batch in (("moesaic", pair.first), ("transformers", pair.second))
        ),
    )


def _tokens_per_s(batch: Batch) -> float:
    return sum(map(len, batch.token_ids)) / batch.seconds


def _budget(settings: OfflineSettings, lengths: SequenceOf[int]) -> Budget:
    """Enough KV blocks that neither arm ever waits for one, with one to spare per prompt as headroom."""
    num_blocks = sum(blocks_for_tokens(n + settings.max_tokens, BLOCK_SIZE) + 1 for n in lengths)
    return Budget(
        max_tokens_per_step=settings.max_tokens_per_step,
        max_batch_size=settings.num_prompts,
        block_size=BLOCK_SIZE,
        num_kv_blocks=num_blocks,
    )


def _config(budget: Budget) -> EngineConfig:
    return EngineConfig(**asdict(budget), device="cpu", dtype="float32")
