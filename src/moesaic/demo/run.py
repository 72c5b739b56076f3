"""Both runs of the demonstration: one model, two engines, the same requests."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moesaic.bench.progress import without_loading_bars
from moesaic.bench.timeline import Ask, Scenario, Share, Timeline, run_scenario
from moesaic.config import EngineConfig
from moesaic.demo.scene import DemoSettings, make_scene
from moesaic.engine.core import EngineCore
from moesaic.models.base import CausalLM
from moesaic.models.files import load_tokenizer, resolve_model_path
from moesaic.models.loader import load_model

WARMUP_TOKENS = 64

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRuns:
    """The scenario and what each run of it gave."""

    settings: DemoSettings
    tokenizer: Any
    """Of transformers, which has no typed base class."""
    scenario: Scenario
    off: Timeline
    on: Timeline


def run_demo(settings: DemoSettings, progress: Progress) -> DemoRuns:
    """Build the model if need be and run both arms; blocks for a minute or two with ``smol``.

    Raises: ``ModelLoadError``, ``ConfigError``, ``RequestError``.
    """
    path = resolve_model_path(
        settings.model, progress=lambda what, share: progress(f"build {settings.model} (once): {what}", share)
    )
    tokenizer = load_tokenizer(path)
    scenario = make_scene(tokenizer, settings)
    with without_loading_bars():
        model = load_model(path, device="cpu", progress=progress)
    off, on = run_both(model, settings, scenario, progress)
    return DemoRuns(settings=settings, tokenizer=tokenizer, scenario=scenario, off=off, on=on)


def run_both(
    model: CausalLM, settings: DemoSettings, scenario: Scenario, progress: Progress
) -> tuple[Timeline, Timeline]:
    """Return the timelines with chunking off and on, after a short warm-up that is not measured."""
    progress("warm up", 0.0)
    _run(model, settings, _warm_up(scenario), is_chunked=False, share=lambda done: progress("warm up", done))
    off = _run(
        model, settings, scenario, is_chunked=False, share=lambda done: progress("run 1 of 2: chunking off", done)
    )
    on = _run(model, settings, scenario, is_chunked=True, share=lambda done: progress("run 2 of 2: chunking on", done))
    return off, on


def _warm_up(scenario: Scenario) -> Scenario:
    """Return one stream and a short prompt: the first forward pass of a process pays for what later ones find."""
    tokens = scenario.late.prompt_token_ids[:WARMUP_TOKENS]
    asks = [Ask(request_id=name, prompt_token_ids=tokens, max_tokens=3) for name in ("stream", "late")]
    return Scenario(streams=(asks[0],), late=asks[1], lead_in_tokens=1)


def _run(model: CausalLM, settings: DemoSettings, scenario: Scenario, *, is_chunked: bool, share: Share) -> Timeline:
    block_size = 16
    num_rows = len(scenario.asks)
    config = EngineConfig(
        enable_chunked_prefill=is_chunked,
        prefill_chunk_size=settings.chunk_size,
        # Room for the whole document besides the streams: off means that it runs in one step.
        max_tokens_per_step=max(2048, num_rows + max(len(ask.prompt_token_ids) for ask in scenario.asks)),
        max_batch_size=num_rows,
        block_size=block_size,
        num_kv_blocks=scenario.num_kv_blocks(block_size),
        device="cpu",
    )
    return run_scenario(EngineCore(model, config), scenario, share=share)
