"""What a long prompt does to running streams, with chunked prefill off and on, in turns."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict, dataclass, replace

from moesaic.bench.paired import Pair, Spread, alternate, ratios
from moesaic.bench.progress import without_loading_bars
from moesaic.bench.report import Report
from moesaic.bench.timeline import Ask, Scenario, Timeline, run_scenario
from moesaic.bench.workload import random_prompts
from moesaic.config import EngineConfig
from moesaic.engine.core import EngineCore
from moesaic.models.base import CausalLM
from moesaic.models.files import resolve_model_path
from moesaic.models.loader import load_model

STREAM_PROMPT_TOKENS = 16
WARMUP_TOKENS = 64
LEAD_IN_TOKENS = 4
TAIL_TOKENS = 8
"""Tokens that each stream still has to give once the long prompt is through."""

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StallSettings:
    """Streams, the prompt that arrives, and how it may be split."""

    model: str = "smol"
    num_streams: int = 8
    prompt_tokens: int = 4096
    chunk_size: int = 256
    max_tokens_per_step: int = 2048
    num_pairs: int = 3
    seed: int = 0

    @property
    def stream_tokens(self) -> int:
        """Output tokens per stream: enough to run from before the long prompt until after it in both arms."""
        return LEAD_IN_TOKENS + -(-self.prompt_tokens // self.chunk_size) + TAIL_TOKENS


def run_stall(settings: StallSettings, progress: Progress) -> Report:
    """Return the comparison of both arms over one model, in float32 on the CPU.

    Raises: ``ModelLoadError``, ``ConfigError``, ``RequestTooLargeError``.
    """
    path = resolve_model_path(settings.model, progress=progress)
    with without_loading_bars():
        model = load_model(path, device="cpu", progress=progress)
    scenario = make_scenario(settings, model.info.vocab_size)
    small = make_scenario(replace(settings, num_streams=1, prompt_tokens=WARMUP_TOKENS), model.info.vocab_size)

    def arm(is_chunked: bool) -> Callable[[int], Timeline]:
        def run(i: int) -> Timeline:
            stage = f"{settings.model}: pair {i + 1} of {settings.num_pairs}, chunking {'on' if is_chunked else 'off'}"
            return _run(model, settings, scenario, is_chunked, lambda done: progress(stage, done))

        return run

    for is_chunked in (False, True):
        progress(f"{settings.model}: warm up", 0.5 * is_chunked)
        _run(model, settings, small, is_chunked, lambda done: None)
    return report(settings, alternate(arm(False), arm(True), settings.num_pairs))


def make_scenario(settings: StallSettings, vocab_size: int) -> Scenario:
    """Return the streams and the late prompt, all of random token ids; EOS is ignored."""
    lengths = [STREAM_PROMPT_TOKENS] * settings.num_streams + [settings.prompt_tokens]
    *short, long = random_prompts(lengths, vocab_size, settings.seed)
    streams = tuple(
        Ask(request_id=f"stream-{i}", prompt_token_ids=p, max_tokens=settings.stream_tokens, ignore_eos=True)
        for i, p in enumerate(short)
    )
    late = Ask(request_id="long", prompt_token_ids=long, max_tokens=TAIL_TOKENS, ignore_eos=True)
    return Scenario(streams=streams, late=late, lead_in_tokens=LEAD_IN_TOKENS)


def _run(
    model: CausalLM, settings: StallSettings, scenario: Scenario, is_chunked: bool, share: Callable[[float], None]
) -> Timeline:
    block_size = 16
    config = EngineConfig(
        enable_chunked_prefill=is_chunked,
        prefill_chunk_size=settings.chunk_size,
        max_tokens_per_step=settings.max_tokens_per_step,
        max_batch_size=len(scenario.asks),
        block_size=block_size,
        num_kv_blocks=scenario.num_kv_blocks(block_size),
        device="cpu",
    )
    return run_scenario(EngineCore(model, config), scenario, share=share)


def report(settings: StallSettings, pairs: SequenceOf[Pair[Timeline, Timeline]]) -> Report:
    """Return table and samples; ``first`` of each pair is chunking off."""
    off, on = [p.first for p in pairs], [p.second for p in pairs]
    num_equal = sum(p.first.outputs == p.second.outputs for p in pairs)
    return Report(
        name="stall of running streams",
        settings={**asdict(settings), "stream_tokens": settings.stream_tokens, "dtype": "float32"},
        columns=("arm", "stall of the streams, ms", "TTFT of the prompt, ms", "chunks"),
        rows=(
            ("chunking off", *_cells(off)),
            ("chunking on", *_cells(on)),
            (
                "ratio",
                ratios((t.stall_s for t in off), (t.stall_s for t in on)).text(),
                ratios((t.ttft_s for t in on), (t.ttft_s for t in off)).text(),
                "",
            ),
        ),
        remarks=(
            f"Median (range) of n = {len(pairs)} pairs. Ratios pair by pair: stall off/on, TTFT on/off.",
            f"The tokens of both arms are equal in {num_equal} of the pairs.",
        ),
        samples=tuple(
            {"pair": i, "chunking": name, **asdict(timeline)}
            for i, pair in enumerate(pairs)
            for name, timeline in (("off", pair.first), ("on", pair.second))
        ),
    )


def _cells(timelines: SequenceOf[Timeline]) -> tuple[str, str, str]:
    stall = Spread.of(1e3 * t.stall_s for t in timelines)
    ttft = Spread.of(1e3 * t.ttft_s for t in timelines)
    return stall.text(0), ttft.text(0), str(timelines[0].num_late_chunks)
